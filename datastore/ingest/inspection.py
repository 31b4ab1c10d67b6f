"""Inspection: the first reading of a source, in which every episode is checked, nothing written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from replaylake.datastore.delta_schema import to_delta
from replaylake.datastore.episode import Episode
from replaylake.datastore.errors import EpisodeInvalid
from replaylake.datastore.formats.format import Reading, Rejected
from replaylake.datastore.ingest.door import Door
from replaylake.datastore.ingest.receipt import Tally
from replaylake.datastore.schema import DatasetSpec, arrow_schema

ABORT: Final = "abort"
REJECT: Final = "reject"

# Episodes are kept for the second reading up to this size.
_KEEP_BYTES: Final = 128 << 20
# Steps that are checked at once: enough that numpy and not Python does the work on short episodes.
_CHECK_STEPS: Final = 65_536


@dataclass(frozen=True)
class Progress:
    """How far an ingest is: `version` is the last commit that was acknowledged, if any."""

    stage: str
    num_episodes: int
    num_steps: int
    total_steps: int | None = None
    version: int | None = None


OnProgress = Callable[[Progress], None]


class Inspection:
    """Which episodes of a source are accepted, and the spaces they need."""

    def __init__(
        self, reading: Reading, door: Door, on_invalid: str, on_progress: OnProgress | None
    ) -> None:
        self._reading = reading
        self._door = door
        self._aborts = on_invalid == ABORT
        self._on_progress = on_progress
        self._refused: set[tuple[str, str]] = set()
        self._kept: list[Episode] | None = []
        self._kept_bytes = 0
        self.tally = Tally()
        self.num_episodes = 0
        self.num_steps = 0

    def run(self) -> None:
        """Read to the end. Raises: EpisodeInvalid at the first invalid episode, when aborting."""
        batch: list[Episode] = []
        num_steps = 0
        for found in self._reading:
            if isinstance(found, Rejected):
                self._reject(found)
                continue
            batch.append(found)
            num_steps += len(found)
            if num_steps >= _CHECK_STEPS:
                self._check(batch)
                batch, num_steps = [], 0
        self._check(batch)

    def spec(self) -> DatasetSpec:
        """Return what the dataset has to hold, its further columns too.

        Raises: SourceInvalid if no episode was accepted; SchemaMismatch if no table can hold it.
        """
        spec = self._door.spec(self._reading.num_actions)
        spec = replace(spec, extras={**self._reading.extras, **spec.extras})
        to_delta(arrow_schema(spec))
        return spec

    def episodes(self) -> Iterator[Episode]:
        """Return the accepted episodes: those kept, or a second reading."""
        if self._kept is not None:
            yield from self._kept
            return
        for found in self._reading:
            if (
                isinstance(found, Episode)
                and (found.episode_id, found.agent_id) not in self._refused
            ):
                yield self._door.fitted(found)

    def _check(self, batch: list[Episode]) -> None:
        accepted, rejected = self._door.check(batch)
        for one, episode in rejected:
            self._refused.add((episode.episode_id, episode.agent_id))
            self._reject(one)
        self.num_episodes += len(accepted)
        self.num_steps += sum(map(len, accepted))
        self._keep(accepted)
        if self._on_progress is not None:
            self._on_progress(Progress("read", self.num_episodes, self.num_steps))

    def _reject(self, rejected: Rejected) -> None:
        self.tally.add(rejected)
        if self._aborts:
            reasons = "; ".join(finding.message.rstrip(".") for finding in rejected.findings[:3])
            wrong = "--env or the log" if self._door.has_environment else "the log"
            raise EpisodeInvalid(
                f"episode {rejected.source_episode_id}: {reasons}. Nothing was ingested. Correct "
                f"{wrong}, or leave such episodes out with --on-invalid reject."
            )

    def _keep(self, episodes: Sequence[Episode]) -> None:
        if self._kept is None:
            return
        self._kept += episodes
        self._kept_bytes += sum(map(num_bytes, episodes))
        if self._kept_bytes > _KEEP_BYTES:
            self._kept = None


def num_bytes(episode: Episode) -> int:
    """Return the bytes of an episode's observations, actions, rewards and further columns."""
    arrays = [episode.observations, episode.actions, episode.rewards, *episode.extras.values()]
    return sum(_nbytes(array) for array in arrays)


def _nbytes(values: Any) -> int:
    if isinstance(values, Mapping):
        return sum(_nbytes(sub) for sub in values.values())
    return int(values.nbytes)
