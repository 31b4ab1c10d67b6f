"""Earlier ingests: what a dataset's history says of a source, by the sha256 of its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.sources.source import Source

# Hex digits of a sha256 that stand for it in ids and in the log.
DIGITS: Final = 16


def is_complete(last: Mapping[str, Any]) -> bool:
    """Whether an ingest whose last commit this is came to its end."""
    return bool(last["num_through"] == last["num_of"])


def source_producer(source: Source) -> str:
    """Return the producer of all commits of this content."""
    return f"ingest/{source.content_hash[:32]}"


def note_changed_files(
    source: Source, history: Sequence[Mapping[str, Any]], *, is_unique: bool
) -> list[str]:
    """Note the files that came before under the same name with other content.

    Such a file may be a log that has grown: its earlier episodes are then there twice, because
    nothing but the source's content tells one ingest from another (docs/LOG.md). In a dataset with
    a unique key they are not, and there is nothing to note.
    """
    if is_unique:
        return []
    names = {file.name for file in source.files}
    for commit in reversed(history):
        shared = sorted(names.intersection(commit.get("source_names", ())))
        if shared and commit.get("producer") != source_producer(source):
            return [
                f"{', '.join(shared[:5])}: the dataset has another content of that name since "
                f"version {commit['version']}; if the file has grown, its earlier episodes are now "
                "there twice: ingest only what is new, or all into a new dataset"
            ]
    return []


def find_containing_commit(
    source: Source, history: Sequence[Mapping[str, Any]], dataset: str, *, is_unique: bool
) -> Mapping[str, Any] | None:
    """Return the commit of another ingest that brought in all these files, or None if none did.

    Raises: SourceInvalidError naming them if it brought in only some: their episodes would be there
    twice; not in a dataset with a unique key.
    """
    names = {file.sha256[:DIGITS]: file.name for file in source.files}
    for commit in history:
        if commit.get("producer") == source_producer(source):
            continue
        known = [names[d] for d in commit.get("source_files", ()) if d in names]
        new = [name for name in names.values() if name not in known]
        if known and not new:
            if is_unique and not is_complete(_last_commit(commit, history)):
                continue
            return _check_complete(commit, history, dataset)
        if known and not is_unique:
            raise SourceInvalidError(
                f"{known[0]}: {len(known)} of {len(names)} files are in dataset {dataset!r} "
                f"already, from another ingest (version {commit['version']}), and would be stored "
                f"twice. Ingest only the new ones ({', '.join(new[:5])}), or ingest all into a new "
                "dataset."
            )
    return None


def _check_complete(
    commit: Mapping[str, Any], history: Sequence[Mapping[str, Any]], dataset: str
) -> Mapping[str, Any]:
    last = _last_commit(commit, history)
    if not is_complete(last):
        raise SourceInvalidError(
            f"these files are part of an ingest into {dataset!r} that did not finish (version "
            f"{last['version']}), expected all of them. Run that ingest again with all its files."
        )
    return last


def _last_commit(
    commit: Mapping[str, Any], history: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
    return [other for other in history if other.get("producer") == commit["producer"]][-1]
