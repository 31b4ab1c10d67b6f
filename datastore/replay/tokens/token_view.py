"""TokenSequences: the token sequences of a snapshot, decoded once, from which samplers draw."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.episodes.token_sequences import NO_VERSION, TokenSequence
from replaylake.datastore.errors import (
    ConfigInvalidError,
    EmptyReplayError,
    NotFoundError,
    QueryRefusedError,
    SchemaMismatchError,
)
from replaylake.datastore.query.expressions import canonical_expression
from replaylake.datastore.query.group_views import GROUP_ID
from replaylake.datastore.query.query import run_table_query
from replaylake.datastore.replay.arguments import check_batch_size, check_int
from replaylake.datastore.replay.cache.cache_writer import CacheWriter
from replaylake.datastore.replay.cache.cached_sequences import (
    EPISODE_RETURNS,
    GROUPS,
    LOG_PROBS,
    LOSS_MASK,
    OFFSETS,
    OLDEST_VERSIONS,
    RETURNS,
    TOKEN_IDS,
    VERSION_ENDS,
    VERSION_OFFSETS,
    VERSION_STARTS,
    VERSIONS,
    CheckedArray,
    SequenceFiles,
    column_file,
    open_sequence_files,
)
from replaylake.datastore.replay.kernels.kernels import copy_ranges
from replaylake.datastore.replay.tokens.token_batch import BatchMemory, TokenBatch
from replaylake.datastore.replay.tokens.token_sampler import (
    PackedPlanner,
    PaddedPlanner,
    Planner,
    TokenSampler,
    Units,
    check_budget,
)
from replaylake.datastore.replay.view_query import explain_sql_errors
from replaylake.datastore.storage.arrow_values import numbers

_SEQUENCES: Final = "sequences"


class TokenSequences:
    """The token sequences of a snapshot: the rows of its view `sequences`, as arrays.

    It never changes, whatever happens to the dataset. It can be pickled: another process on this
    machine maps the cached files.
    """

    def __init__(
        self,
        dataset: str,
        version: int,
        key: str,
        files: SequenceFiles,
        place: CacheWriter | Path | None,
        failure: str = "",
    ) -> None:
        """Take the mapped arrays, what they were made from, and where they are kept, or why not."""
        self.dataset, self.version = dataset, version
        self._key, self._files, self._place = key, files, place
        self._failure = failure

    def __repr__(self) -> str:
        return f"TokenSequences('{self.name}': {len(self)} sequences, {self.num_tokens} tokens)"

    def __len__(self) -> int:
        return self._files.num_sequences

    @property
    def name(self) -> str:
        """The name of the snapshot, for example `math@3`."""
        return f"{self.dataset}@{self.version}"

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return self._files.num_tokens

    @property
    def columns(self) -> tuple[str, ...]:
        """The further columns, with a value for each token."""
        return tuple(self._files.metadata.columns)

    @property
    def has_log_probs(self) -> bool:
        """Whether the dataset has log-probs of the behavior policy."""
        return LOG_PROBS in self._files.arrays

    @cached_property
    def table(self) -> pa.Table:
        """One row for each sequence: what `where_sequences` and `weight` may name.

        episode_id, agent_id, root_agent_id, first_step, last_step, num_turns, group_id, num_tokens,
        num_loss_tokens, "return", episode_return, min_policy_version and max_policy_version (the
        first is NULL if the version of a sampled token is unknown); see docs/SQL.md.
        Raises: ShardCorruptError.
        """
        return self._files.read_table()

    def wait_cached(self) -> Path | None:
        """Wait until the sequences are in the cache; None if they are not cached."""
        return self._place if isinstance(self._place, Path | None) else self._place.wait_folder()

    @property
    def cache_failure(self) -> str:
        """The reason why they could not be cached; empty if there was no failure."""
        return self._place.failure if isinstance(self._place, CacheWriter) else self._failure

    def __reduce__(self) -> tuple[Any, ...]:
        if (folder := self.wait_cached()) is None:
            raise ConfigInvalidError(
                f"token sequences of {self.name}: found sequences that are not in the cache, "
                "expected some that another process can map. Open them with cache=True in a lake "
                "that can be written to."
            )
        return _reopen, (self.dataset, self.version, self._key, folder)

    def read(self, index: int) -> TokenSequence:
        """Return one sequence: row `index` of `table`. Raises: ConfigInvalidError."""
        what = f"token sequences of {self.name}: index"
        index = check_int(what, index, maximum=max(0, len(self) - 1))
        batch = self.gather(np.array([index]), is_packed=True, versions=True)
        return TokenSequence(batch.token_ids, batch.loss_mask, batch.log_probs, batch.versions)

    def padded(
        self,
        batch_size: int,
        *,
        seed: int,
        max_tokens: int | None = None,
        bucket_batches: int = 1,
        groups: bool = False,
        where_sequences: str | None = None,
        weight: str | None = None,
        max_staleness: int | None = None,
        policy_version: int | None = None,
        versions: bool = False,
        reuse: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> TokenSampler:
        """Return a sampler of batches [B, T], where T is the longest sequence of the batch.

        Args:
            batch_size: number of sequences in a batch, or with `groups` of groups.
            seed: the same seed draws the same batches.
            max_tokens: a batch has fewer sequences where B times T would be more.
            bucket_batches: sequences are sorted by length within so many batches, which lie in a
                random order then: larger buckets need less padding and mix less.
            groups: whether whole groups are drawn: all sequences of a group_id here, in one batch.
                A group of which one sequence is not selected is left out. Episodes that the view's
                `where` leaves out, or that have no ids, are not missed.
            where_sequences: SQL condition over the columns of `table`. Tokens that several branches
                share count in the first of them: a condition that leaves it out leaves them out of
                the loss. Conditions over episode_return, episode_id or group_id select trees whole.
            weight: SQL expression over the columns of `table`: sequences are drawn with replacement
                in proportion to it, groups in proportion to its sum over the group.
            max_staleness: largest difference between `policy_version` and the oldest version that
                sampled tokens of a sequence. Later versions than `policy_version` are selected.
            policy_version: the learner's version; only with `max_staleness`.
            versions: whether batches have the policy version of each token.
            reuse: 0 gives each batch memory of its own. With n > 0 memory is written again: the
                arrays with a value a token are valid until n more batches were drawn.
            rank: of `num_ranks` processes that learn together, with the same seed, each draws every
                num_ranks-th batch.
            num_ranks: the number of these processes.

        Raises: ConfigInvalidError; QueryRefusedError, QueryError; EmptyReplayError if nothing is
        selected; SchemaMismatchError for weights that are NULL, NaN, negative or infinite, and for
        sequences without the group or the version that is asked for; ShardCorruptError.
        """
        batch_size = check_batch_size("token sampler", batch_size)
        if max_tokens is not None:
            max_tokens = check_budget("max_tokens", max_tokens)
        buckets = check_int("token sampler: bucket_batches", bucket_batches, minimum=1)
        return self._sampler(
            PaddedPlanner(batch_size, max_tokens, buckets),
            max_tokens,
            seed=seed,
            groups=groups,
            where_sequences=where_sequences,
            weight=weight,
            max_staleness=max_staleness,
            policy_version=policy_version,
            versions=versions,
            reuse=reuse,
            rank=rank,
            num_ranks=num_ranks,
        )

    def packed(
        self,
        max_tokens: int,
        *,
        seed: int,
        groups: bool = False,
        where_sequences: str | None = None,
        weight: str | None = None,
        max_staleness: int | None = None,
        policy_version: int | None = None,
        versions: bool = False,
        reuse: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> TokenSampler:
        """Return a sampler of batches [N] of whole sequences one after another, N <= `max_tokens`.

        Of 1,024 sequences, or groups, of the epoch at a time, batches are filled by first-fit
        decreasing. The other arguments are those of `padded`. Raises: as `padded`;
        ConfigInvalidError also if a sequence, or a group, has more than `max_tokens`.
        """
        max_tokens = check_budget("max_tokens", max_tokens)
        return self._sampler(
            PackedPlanner(max_tokens),
            max_tokens,
            seed=seed,
            groups=groups,
            where_sequences=where_sequences,
            weight=weight,
            max_staleness=max_staleness,
            policy_version=policy_version,
            versions=versions,
            reuse=reuse,
            rank=rank,
            num_ranks=num_ranks,
        )

    def _sampler(
        self,
        planner: Planner,
        max_tokens: int | None,
        *,
        seed: int,
        groups: bool,
        where_sequences: str | None,
        weight: str | None,
        max_staleness: int | None,
        policy_version: int | None,
        versions: bool,
        reuse: int,
        rank: int,
        num_ranks: int,
    ) -> TokenSampler:
        for name, flag in (("groups", groups), ("versions", versions)):
            if not isinstance(flag, bool | np.bool_):
                raise ConfigInvalidError(
                    f"token sampler: found {name} {flag!r}, expected True or False. Pass a flag.",
                    parameter=name,
                )
        if max_staleness is not None:
            max_staleness = check_int("token sampler: max_staleness", max_staleness)
        if policy_version is not None:
            policy_version = check_int(
                "token sampler: policy_version", policy_version, maximum=sys.maxsize
            )
        where = self._canonical("where_sequences", where_sequences)
        weight = self._canonical("weight", weight)
        is_selected = self._select(where, max_staleness, policy_version)
        units = self._group(is_selected) if groups else _make_units(is_selected, len(self))
        if not units.num:
            raise EmptyReplayError(
                f"token sequences of {self.name}: found {len(self)} sequences, none of which is "
                "selected, expected at least one. Widen `where_sequences` or `max_staleness`; with "
                "`groups`, each sequence of a group has to be selected."
            )
        if max_tokens is not None:
            self._check_sizes(units, max_tokens, is_padded=isinstance(planner, PaddedPlanner))
        if weight is not None:
            units = self._weigh(units, weight)
        about = {
            "selector": "token sequences",
            "view": self._key,
            "groups": bool(groups),
            "where_sequences": where,
            "weight": weight,
            "max_staleness": max_staleness,
            "policy_version": policy_version,
        }
        return TokenSampler(
            self,
            units,
            planner,
            seed=seed,
            versions=versions,
            reuse=reuse,
            rank=rank,
            num_ranks=num_ranks,
            about=about,
        )

    def _canonical(self, argument: str, expression: str | None) -> str | None:
        if expression is None:
            return None
        if not isinstance(expression, str):
            raise ConfigInvalidError(
                f"token sampler: found {argument} {expression!r}, expected SQL in a string, or "
                "None. Write it as in where_sequences='num_tokens < 4096'."
            )
        with explain_sql_errors(argument, expression, _SEQUENCES):
            return canonical_expression(expression)

    def _evaluate(self, argument: str, expression: str, kind: str) -> pa.Array:
        """Return the value of an expression for each sequence."""
        with explain_sql_errors(argument, expression, _SEQUENCES):
            table = run_table_query(
                f"SELECT CAST(({expression}\n) AS {kind}) AS value FROM {_SEQUENCES}",
                {_SEQUENCES: self.table},
            )
        if len(table) != len(self):
            raise QueryRefusedError(
                f"{argument} {expression!r}: found {len(table)} values of {len(self)} sequences, "
                "expected one of each: no aggregates."
            )
        return table["value"].combine_chunks()

    def _select(
        self, where: str | None, max_staleness: int | None, policy_version: int | None
    ) -> NDArray[np.bool_] | None:
        """Return which sequences are selected; None for all."""
        selected: NDArray[np.bool_] | None = None
        if where is not None:
            selected = numbers(self._evaluate("where_sequences", where, "BOOLEAN"))
        if max_staleness is None:
            if policy_version is not None:
                raise ConfigInvalidError(
                    f"token sampler: found policy_version {policy_version} without max_staleness, "
                    "expected both: how many versions behind it tokens may be."
                )
            return selected
        if policy_version is None:
            raise ConfigInvalidError(
                f"token sampler: found max_staleness {max_staleness} without policy_version, "
                "expected both. Pass the learner's version."
            )
        oldest = self._array(OLDEST_VERSIONS)
        is_unknown = oldest == NO_VERSION
        if selected is not None:
            is_unknown &= selected
        if is_unknown.any():
            raise SchemaMismatchError(
                f"token sequences of {self.name}: found max_staleness {max_staleness} and "
                f"{int(is_unknown.sum())} of {len(self)} sequences without policy versions, such "
                f"as that of {self._describe(int(is_unknown.argmax()))}, expected a version of "
                "each. Leave max_staleness out, or these sequences: where_sequences="
                "'min_policy_version is not null'."
            )
        is_recent = oldest >= policy_version - max_staleness
        return is_recent if selected is None else selected & is_recent

    def _group(self, is_selected: NDArray[np.bool_] | None) -> Units:
        """Return the whole groups that are selected."""
        numbers_of = self._array(GROUPS)
        is_without = numbers_of < 0
        if is_selected is not None:
            is_without &= is_selected
        if is_without.any():
            raise SchemaMismatchError(
                f"token sequences of {self.name}: found {int(is_without.sum())} of {len(self)} "
                f"sequences without group_id, such as that of "
                f"{self._describe(int(is_without.argmax()))}, expected a group of each. Leave "
                "`groups` out, or these sequences: where_sequences='group_id is not null'."
            )
        num = int(numbers_of.max(initial=-1)) + 1
        is_whole = np.ones(num, np.bool_)
        if is_selected is not None:
            is_whole[numbers_of[~is_selected & (numbers_of >= 0)]] = False
        members = np.flatnonzero(numbers_of >= 0)
        members = members[is_whole[numbers_of[members]]]
        members = members[np.argsort(numbers_of[members], kind="stable")]
        counts = np.bincount(numbers_of[members], minlength=num)
        counts = counts[counts > 0]
        return Units(len(counts), members, np.append(0, np.cumsum(counts)))

    def _check_sizes(self, units: Units, max_tokens: int, *, is_padded: bool) -> None:
        members, nums = units.find_members(np.arange(units.num))
        lengths = self.read_lengths(members)
        starts = np.cumsum(nums) - nums
        sizes = np.add.reduceat(lengths, starts)
        if is_padded:
            sizes = np.maximum.reduceat(lengths, starts) * nums
        largest = int(sizes.argmax())
        if sizes[largest] > max_tokens:
            first = int(members[starts[largest]])
            what = f"a sequence of {sizes[largest]} tokens, that of {self._describe(first)}"
            other = f"leave out long sequences: where_sequences='num_tokens <= {max_tokens}'"
            if nums[largest] > 1:
                group = self.table[GROUP_ID][first].as_py()
                what = f"group {group!r}, of {nums[largest]} sequences and {sizes[largest]} tokens"
                other = "leave the group out with where_sequences"
                what += " with padding" if is_padded else ""
            raise ConfigInvalidError(
                f"token sampler: found max_tokens {max_tokens} and {what}, expected room for the "
                f"largest. Raise max_tokens, or {other}.",
                parameter="max_tokens",
            )

    def _weigh(self, units: Units, weight: str) -> Units:
        members, nums = units.find_members(np.arange(units.num))
        values = self._evaluate("weight", weight, "DOUBLE")
        weights = numbers(values)[members]
        wrong = ~((weights >= 0.0) & (weights < np.inf))
        if wrong.any():
            first = int(members[wrong.argmax()])
            value = values[first].as_py()
            raise SchemaMismatchError(
                f"weight {weight}: found {'NULL' if value is None else value} for the sequence of "
                f"{self._describe(first)}, the first of {int(wrong.sum())} of {len(weights)}, "
                "expected finite numbers of at least 0. Say what they count as, as in "
                "coalesce(greatest(x, 0), 0), or leave them out with `where_sequences`."
            )
        if not weights.any():
            raise SchemaMismatchError(
                f"weight {weight}: found 0 for all of {len(weights)} sequences, expected some that "
                "may be drawn. Widen the condition in it."
            )
        summed = np.add.reduceat(weights, np.cumsum(nums) - nums)
        return Units(units.num, units.members, units.offsets, summed)

    def _describe(self, sequence: int) -> str:
        row = self.table.slice(sequence, 1).to_pylist()[0]
        agent = f" agent {row['agent_id']!r}" if row["agent_id"] else ""
        return f"episode {row['episode_id']!r}{agent}"

    def _array(self, name: str) -> Array:
        return self._files.arrays[name].read()

    def read_lengths(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens of some sequences, int64 [B]. Raises: ShardCorruptError."""
        starts, ends = self._find_ranges(OFFSETS, sequences)
        lengths: NDArray[np.int64] = ends - starts
        return lengths

    def _find_ranges(self, name: str, sequences: NDArray[np.int64]) -> tuple[Array, Array]:
        offsets = self._files.arrays[name]
        offsets.check(sequences, sequences + 2)
        return offsets.array[sequences], offsets.array[sequences + 1]

    def gather(
        self,
        sequences: NDArray[np.int64],
        *,
        is_packed: bool,
        versions: bool,
        memory: BatchMemory | None = None,
    ) -> TokenBatch[Array]:
        """Copy some sequences into a batch; see `padded` and `packed`. Raises: ShardCorruptError.

        sequences int64 [B]: rows of `table`. memory: where the tokens are written. Raises also:
        ConfigInvalidError.
        """
        if len(sequences) and not 0 <= sequences.min() <= sequences.max() < len(self):
            raise ConfigInvalidError(
                f"token sequences of {self.name}: found sequences {sequences.min()} to "
                f"{sequences.max()}, expected rows of `table`, 0 to {len(self) - 1}."
            )
        starts, ends = self._find_ranges(OFFSETS, sequences)
        lengths = ends - starts
        width = int(lengths.max(initial=0))
        places = np.cumsum(lengths) - lengths if is_packed else np.arange(len(sequences)) * width
        shape = (int(lengths.sum()),) if is_packed else (len(sequences), width)
        widths = lengths if is_packed else np.full(len(sequences), width)
        spans = _Spans(starts, ends, places, widths, shape, memory or BatchMemory())
        arrays = self._files.arrays
        values = {
            name: _take(arrays[name], sequences)
            for name in (RETURNS, EPISODE_RETURNS, GROUPS, OLDEST_VERSIONS)
        }
        own: dict[str, Array] = {}
        if is_packed:
            own = {
                "position_ids": _number_within(lengths).astype(np.int32),
                "sequence_ids": np.repeat(np.arange(len(sequences), dtype=np.int32), lengths),
                "cu_seqlens": np.append(0, np.cumsum(lengths)).astype(np.int32),
            }
        return TokenBatch(
            token_ids=spans.copy(TOKEN_IDS, arrays[TOKEN_IDS]),
            loss_mask=spans.copy(LOSS_MASK, arrays[LOSS_MASK]),
            log_probs=spans.copy(LOG_PROBS, arrays[LOG_PROBS]) if self.has_log_probs else None,
            columns={
                name: spans.copy(f"column {name}", arrays[column_file(number)])
                for number, name in enumerate(self.columns)
            },
            versions=self._spread_versions(sequences, spans) if versions else None,
            lengths=lengths,
            returns=values[RETURNS].astype(np.float32),
            episode_returns=values[EPISODE_RETURNS].astype(np.float32),
            groups=values[GROUPS],
            oldest_versions=values[OLDEST_VERSIONS],
            indices=sequences,
            **own,
        )

    def _spread_versions(self, sequences: NDArray[np.int64], spans: _Spans) -> Array:
        """Return the version of each token that a policy sampled, -1 elsewhere."""
        versions = np.full(spans.shape, NO_VERSION, np.int64)
        first, last = self._find_ranges(VERSION_OFFSETS, sequences)
        nums = last - first
        runs = np.repeat(first, nums) + _number_within(nums)
        starts, ends, values = (
            _take(self._files.arrays[name], runs)
            for name in (VERSION_STARTS, VERSION_ENDS, VERSIONS)
        )
        lengths = ends.astype(np.int64) - starts
        places = np.repeat(np.repeat(spans.places, nums) + starts, lengths) + _number_within(
            lengths
        )
        versions.reshape(-1)[places] = np.repeat(values, lengths)
        return versions


@dataclass(frozen=True)
class _Spans:
    """Where tokens are, and where they go: [starts, ends) of an array to `places` of the output.

    widths: number of tokens of each with padding. scaled: starts, lengths, places and widths in
    bytes, by the size of a value in bytes.
    """

    starts: Array
    ends: Array
    places: Array
    widths: Array
    shape: tuple[int, ...]
    memory: BatchMemory
    scaled: dict[int, tuple[Array, Array, Array, Array]] = field(default_factory=dict)

    def copy(self, name: str, source: CheckedArray) -> Array:
        """Return the tokens' values, 0 past the end of each. Raises: ShardCorruptError."""
        source.check(self.starts, self.ends)
        size = source.array.dtype.itemsize
        out = self.memory.allocate(name, math.prod(self.shape) * size)
        starts, lengths, places, widths = self.scaled.get(size) or self._scale(size)
        copy_ranges(source.bytes, starts, lengths, out, places, widths)
        values: Array = out.view(source.array.dtype).reshape(self.shape)
        return values

    def _scale(self, size: int) -> tuple[Array, Array, Array, Array]:
        lengths = self.ends - self.starts
        # Several arrays have values of one size.
        self.scaled[size] = (
            self.starts * size,
            lengths * size,
            self.places * size,
            self.widths * size,
        )
        return self.scaled[size]


def _reopen(dataset: str, version: int, key: str, folder: Path) -> TokenSequences:
    """Map sequences that another process sent. Raises: NotFoundError if they left the cache."""
    if (files := open_sequence_files(folder)) is None:
        raise NotFoundError(
            f"token sequences {folder}: were removed from the cache after they were sent here. "
            "Open the snapshot's token_sequences again."
        )
    return TokenSequences(dataset, version, key, files, folder)


def _number_within(lengths: Array) -> Array:
    """Return 0.. for each of some lengths, one after another."""
    numbered: Array = np.arange(int(lengths.sum())) - np.repeat(
        np.cumsum(lengths) - lengths, lengths
    )
    return numbered


def _take(source: CheckedArray, places: Array) -> Array:
    source.check(places, places + 1)
    taken: Array = source.array[places]
    return taken


def _make_units(is_selected: NDArray[np.bool_] | None, num: int) -> Units:
    if is_selected is None:
        return Units(num)
    members = np.flatnonzero(is_selected)
    return Units(len(members), members)
