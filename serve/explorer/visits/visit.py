"""Visit: one request for a page: its parameters, its links, and its queries of the lake."""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote, urlencode

from replaylake.datastore.errors import QueryError
from replaylake.datastore.lake.lake import Lake
from replaylake.datastore.lake.snapshot import Snapshot
from replaylake.datastore.query.statements import Cancellation, literal
from replaylake.datastore.query.untrusted import UntrustedResult
from replaylake.serve.explorer.visits.profiles import ProfileMemory
from replaylake.serve.explorer.visits.promotions import Promotions
from replaylake.serve.explorer.visits.token_texts import TokenTexts

_PARAMETER: Final = re.compile(r"\$(\w+)")
# Of all that is remembered; one result may take an eighth of it.
_MAX_REMEMBERED_BYTES: Final = 64 << 20
# Results of a version that was purged are forgotten after this time at the latest.
_REMEMBERED_S: Final = 120.0
_MAX_REMEMBERED: Final = 256
_MAX_REMEMBERED_ROWS: Final = 5000


@dataclass(frozen=True)
class Query:
    """SQL of a page, as it ran: at: the versions that it read, by dataset."""

    text: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    at: Mapping[str, int | str] = field(default_factory=dict)

    @property
    def standalone(self) -> str:
        """The text with the values of its parameters."""
        return _PARAMETER.sub(
            lambda found: (
                _to_literal(self.parameters[found[1]]) if found[1] in self.parameters else found[0]
            ),
            self.text,
        )


class QueryMemory:
    """Results of queries of fixed versions: these do not change. Safe from several threads.

    They take 64 MiB at most, by their size in Arrow and an estimate of what Python adds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: OrderedDict[Any, tuple[float, int, Any]] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: Any) -> Any:
        """Return what is remembered; None if nothing is."""
        with self._lock:
            at, num_bytes, result = self._results.get(key, (0.0, 0, None))
            if result is not None and time.monotonic() - at > _REMEMBERED_S:
                del self._results[key]
                self._num_bytes -= num_bytes
                return None
            return result

    def put(self, key: Any, result: Any, num_bytes: int) -> None:
        """Remember a result of that size unless it is too large, and forget the oldest ones."""
        if num_bytes > _MAX_REMEMBERED_BYTES // 8:
            return
        with self._lock:
            self._num_bytes += num_bytes - self._results.pop(key, (0.0, 0, None))[1]
            self._results[key] = (time.monotonic(), num_bytes, result)
            while len(self._results) > _MAX_REMEMBERED or self._num_bytes > _MAX_REMEMBERED_BYTES:
                _, (_, forgotten, _) = self._results.popitem(last=False)
                self._num_bytes -= forgotten


class Links:
    """Addresses of pages, below the prefix of a proxy."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix

    def __call__(self, *segments: str, **query: object) -> str:
        """Return the address of a page. A query's None is left out, a list is repeated."""
        path = "/".join(quote(segment, safe="@:~") for segment in segments)
        pairs = [
            (name, str(one))
            for name, value in query.items()
            for one in (value if isinstance(value, list) else [value])
            if one is not None and one != ""
        ]
        return f"{self._prefix}/{path}" + (f"?{urlencode(pairs)}" if pairs else "")

    def console(self, query: Query) -> str:
        """Return the address of the SQL console with a query."""
        at = [f"{name}={version}" for name, version in query.at.items()]
        return self("sql", q=query.standalone, at=at)


class Visit:
    """A request for a page, below the explorer's prefix.

    path: the parameters in its path; values: those after the question mark, the first of each name,
    or the fields of a form. is_cross_site: whether a link on another site led to it. form_token:
    what a form has to send; None where nothing may be written. reader: the name that the reader
    gave, empty before. token_name: that of the reader's token in the role table; None for others.
    promotions: None where no alias may be moved.
    """

    def __init__(
        self,
        lake: Lake,
        links: Links,
        memory: QueryMemory,
        profiles: ProfileMemory,
        path: Mapping[str, str],
        values: Mapping[str, str],
        lists: Mapping[str, Sequence[str]] | None = None,
        *,
        is_cross_site: bool = False,
        form_token: str | None = None,
        reader: str = "",
        token_texts: TokenTexts | None = None,
        promotions: Promotions | None = None,
        token_name: str | None = None,
    ) -> None:
        self.lake = lake
        self.link = links
        self.memory = memory
        self.profiles = profiles
        self.path = path
        self.values = values
        self.lists = lists or {}
        self.is_cross_site = is_cross_site
        self.form_token = form_token
        self.reader = reader
        self.token_texts = token_texts or TokenTexts()
        self.promotions = promotions
        self.token_name = token_name
        # Cancelled when the reader has left: ends the running query, and prevents further ones.
        self.cancellation = Cancellation()
        self.queries: list[Query] = []
        # The address of the page whose form this is, once that is known.
        self.back: str | None = None

    def describe_writer(self, by: str) -> str:
        """Return who writes, for the record: the name that a reader gives, and that of its token.

        Whoever has a token may give any name; the token's name is known.
        """
        by = by.strip()
        if self.token_name is None:
            return by
        return f"{by} (token {self.token_name})" if by else f"token {self.token_name}"

    def take_queries(self) -> tuple[Query, ...]:
        """Return the queries since the last call."""
        taken = tuple(self.queries)
        self.queries.clear()
        return taken

    def note_query(self, text: str, at: Snapshot | None = None, **parameters: object) -> None:
        """Add a query that returns what a panel read without SQL. It is not run."""
        versions = {} if at is None else {at.dataset: at.version}
        self.queries.append(Query(" ".join(text.split()), parameters, versions))

    def sql(
        self, text: str, at: Snapshot | Sequence[Snapshot] = (), **parameters: object
    ) -> list[dict[str, Any]]:
        """Run a query of ours, whose text has nothing from a request, and return its rows.

        at: the snapshots that it reads; of a query that reads nothing else, the result is
        remembered. Raises: NotFoundError, QueryError, also where the reader has left.
        """
        self._check_reader()
        snapshots = [at] if isinstance(at, Snapshot) else list(at)
        versions = {one.dataset: one.version for one in snapshots}
        query = Query(" ".join(text.split()), parameters, versions)
        self.queries.append(query)
        key = (query.text, tuple(parameters.items()), tuple(versions.items()))
        if versions and (known := self.memory.get(key)) is not None:
            rows: list[dict[str, Any]] = known
            return rows
        found = self._run(query)
        rows = found.to_pylist()
        if versions and len(rows) <= _MAX_REMEMBERED_ROWS:
            # A number of 8 bytes is an object of 32 with its place in a list; a row is a dict.
            num_bytes = 5 * found.nbytes + 100 * len(rows) * (2 + found.num_columns)
            self.memory.put(key, rows, num_bytes)
        return rows

    def sql_of_reader(self, query: Query) -> UntrustedResult:
        """Run a query with text of the reader's in the sandbox.

        A page that does so is in READERS_SQL, and so has its turn among those that do.
        Raises: QueryRefusedError, QueryError, NotFoundError, InvalidNameError.
        """
        return self.lake.sql_untrusted(
            query.text,
            query.parameters,
            at=dict(query.at),
            cancellation=self.cancellation,
        )

    def table(self, text: str, at: Snapshot, **parameters: object) -> Any:
        """Run a query of ours as `sql` does, and return Arrow, which is not remembered."""
        self._check_reader()
        versions = {at.dataset: at.version}
        query = Query(" ".join(text.split()), parameters, versions)
        self.queries.append(query)
        return self._run(query)

    def _run(self, query: Query) -> Any:
        return self.lake.sql(
            query.text, query.parameters, at=dict(query.at), cancellation=self.cancellation
        )

    def _check_reader(self) -> None:
        if self.cancellation.is_cancelled:
            raise QueryError("the query was cancelled: nobody waits for its page.")


def _to_literal(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool | int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if value - value == 0 else f"'{value}'::DOUBLE"
    return literal(str(value))
