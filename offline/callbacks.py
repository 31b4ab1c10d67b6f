"""Callbacks: what a caller is told while a run goes on, and how it asks the run to end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from replaylake.datastore.episodes.spaces import Array


@dataclass(frozen=True)
class RunStart:
    """A training run that begins to learn, or resumes.

    update: of the checkpoint it resumes from, 0 at the beginning. resumed: whether it had begun
    before. remarks: what a person should know of the data, a sentence each.
    """

    run_id: str
    update: int
    resumed: bool
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class EpisodeProgress:
    """Episodes that have ended, of those requested. In games of several agents, games."""

    num_episodes: int
    episodes: int


OnReading = Callable[[int, int], None]
OnMetrics = Callable[[int, Mapping[str, float]], None]
OnFrame = Callable[[int, Array], None]


@dataclass(frozen=True)
class Callbacks:
    """Functions that a run calls in the process and thread that started it. All are optional.

    An exception raised by a callback ends the run. Each callback is called by the functions listed
    here:

    - `on_reading(shards decoded, shards)`: `train`, `train_language`, `train_language_online` and
      their `resume` functions, while the episodes are read.
    - `on_start(start)`: once before the first update or step. It receives a `RunStart` from
      `train`, `train_online`, `train_language`, `train_language_online`, their `resume`
      functions and `rollout_language`, and a `SweepStart` from `tune` and `resume_sweep`.
    - `on_progress(progress)`: about four times a second, and at the end. It receives a
      `TrainProgress` from `train`, `train_language` and their `resume` functions, and from
      `train_language_online` for the training of each round; an `OnlineProgress` from
      `train_online` and `resume_online`; a `TrialProgress` from `tune` and
      `resume_sweep`, at each measurement and end of a trial; an `EpisodeProgress` from `evaluate`,
      `compare` and `rollout`, when episodes end; a `LanguageRolloutProgress` from
      `rollout_language`.
    - `on_metrics(update, values)`: the training functions, for each point of a run's metrics, and
      `rollout_language`, where the update is the number of rollouts.
    - `on_remark(text)`: `train_online`, `train_language_online`, their `resume` functions and
      `rollout`, for events that a person should know of, for example a lost worker or a full disk.
    - `on_frame(episode, frame)`: `evaluate`, for each reset and step of the episodes that it
      renders. frame: uint8 [height, width, 3].
    - `should_end()`: the training functions, between updates. If it returns True, a checkpoint
      is saved and RunInterrupted is raised. `rollout_language` asks ten times a second.

    The types of the arguments of on_start and on_progress depend on the function, so they are
    annotated as Any (docs/decisions/078).
    """

    on_reading: OnReading | None = None
    on_start: Callable[[Any], None] | None = None
    on_progress: Callable[[Any], None] | None = None
    on_metrics: OnMetrics | None = None
    on_remark: Callable[[str], None] | None = None
    on_frame: OnFrame | None = None
    should_end: Callable[[], bool] | None = None

    @property
    def is_end_requested(self) -> bool:
        """Return whether `should_end` requests the end of the run."""
        return self.should_end is not None and self.should_end()

    def report_remark(self, text: str) -> None:
        """Report a sentence for the person who started the run."""
        if self.on_remark is not None:
            self.on_remark(text)
