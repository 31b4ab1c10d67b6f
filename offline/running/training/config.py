"""Training configuration: what a run learns from, how, and the name it registers its policy by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, date, datetime
from typing import Any, Final, Literal, get_args

from replaylake.datastore.errors import ConfigInvalidError
from replaylake.datastore.lake.holdout import Holdout
from replaylake.datastore.lake.lake import Lake
from replaylake.offline.learning.normalization import REWARD_NORMALIZATIONS, RewardNormalization
from replaylake.offline.learning.options import expect, from_options

Select = Literal["auto", "environment", "fqe", "loss", "last"]
_FROM_ONE: Final = (
    "updates",
    "threads",
    "learners",
    "frame_stack",
    "batch_size",
    "log_updates",
    "checkpoint_updates",
    "keep_checkpoints",
    "evaluate_updates",
    "selection_episodes",
    "selection_fqe_updates",
    "patience",
    "evaluation_episodes",
)
_TEXTS: Final = ("policy", "where", "where_steps", "reward", "weight", "env")
# Fields of the configuration that a run's record has beside it, by their names there.
_STORED_NAMES: Final = {
    "policy_name": "policy",
    "where": "where",
    "where_steps": "where_steps",
    "reward": "reward",
    "weight": "weight",
    "env_id": "env",
    "env_args": "env_args",
}


@dataclass(frozen=True)
class TrainConfig:
    """Options of a training run; the lake and its datasets are arguments of `train`."""

    algorithm: str = "bc"
    # What the policy is registered as; a run needs one.
    policy: str = ""
    # SQL conditions: over `episodes`, which whole ones to learn from; over `steps`, which of their
    # steps.
    where: str | None = None
    where_steps: str | None = None
    # SQL expression over `steps` in place of the logged reward.
    reward: str | None = None
    # SQL expression over the columns of a step and its episode: steps are drawn in proportion to
    # it, instead of all alike.
    weight: str | None = None
    # Environment to choose and evaluate the policy in, kept in the package: a Gymnasium id or
    # `module:function`, see docs/ENVIRONMENTS.md. env_args: what it is made with; JSON values.
    env: str | None = None
    env_args: Mapping[str, Any] = field(default_factory=dict)
    # Enough for cloning: RLlib's CartPole log of 4,137 steps gives 477 to 497 after 1,000 updates
    # and 477 to 490 after 2,000 (5 seeds each, 20 episodes, 2026-11), in seconds. Value learning on
    # larger logs wants more.
    updates: int = 2000
    batch_size: int = 256
    seed: int = 0
    discount: float = 0.99
    device: str = "cpu"
    # More than one pays on networks wider than 256 and an idle machine; beside other work threads
    # wait for each other: BC at 256x256 made 382 updates/s with one and 37 with two on 2 busy cores
    # (2026-11).
    threads: int = 1
    # Processes that make each update together, each on its part of the batch; `threads` is of each.
    learners: int = 1
    # How many consecutive observations are learned from as one; the policy still acts on single
    # ones, and remembers the others.
    frame_stack: int = 1
    # Fitted on the training steps and kept in the package; see learning/normalization.py.
    normalize_observations: bool = False
    normalize_rewards: RewardNormalization = "none"
    # Draw what surprised the learner more often (Schaul et al. 2016): the priorities' exponent, and
    # how much of the bias the weights correct at first; it rises to 1 over the run.
    prioritized: bool = False
    priority_alpha: float = 0.6
    priority_beta: float = 0.4
    # Episodes that are not learned from: this share of them, or those that began at an ISO time or
    # later.
    holdout: float | None = None
    holdout_after: str | None = None
    # Updates that one point of the metrics is the mean of.
    log_updates: int = 100
    # None: as often as the policy is measured.
    checkpoint_updates: int | None = None
    # The newest so many stay, and the best one.
    keep_checkpoints: int = 2
    # By which measure the policy that is registered is chosen; see policy_selection.py.
    select: Select = "auto"
    # None: ten times in all, or with fitted Q evaluation as often as selection_fqe_updates allow.
    evaluate_updates: int | None = None
    # Episodes of each measurement in an environment; the seeds are not the closing evaluation's.
    selection_episodes: int = 10
    # Updates of each fitted Q evaluation. It only has to put policies in order, and at most as many
    # are made in all as the training makes, unless evaluate_updates says otherwise.
    selection_fqe_updates: int = 1000
    # Stop after so many measurements in a row that were not better than the best.
    patience: int | None = None
    # Episodes of the closing evaluation, where an environment is named.
    evaluation_episodes: int = 20
    # The algorithm's own, by key; see `replaylake algorithms`.
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _FROM_ONE:
            value = getattr(self, name)
            expect(value is None or value >= 1, f"training: {name}", value, "1 or more")
        for name in ("discount", "priority_alpha", "priority_beta"):
            value = getattr(self, name)
            expect(0 <= value <= 1, f"training: {name}", value, "0 to 1")
        for name, known in (
            ("select", get_args(Select)),
            ("normalize_rewards", REWARD_NORMALIZATIONS),
        ):
            value = getattr(self, name)
            expect(value in known, f"training: {name}", value, f"one of {', '.join(known)}")
        expect(0 <= self.seed < 2**63, "training: seed", self.seed, "0 to 2^63 - 1")
        divides = self.batch_size % self.learners == 0
        expected = f"a multiple of learners, which are {self.learners}"
        expect(divides, "training: batch_size", self.batch_size, expected)
        for name in _TEXTS:
            value = getattr(self, name)
            expect(value is None or isinstance(value, str), f"training: {name}", value, "a text")
        is_table = isinstance(self.env_args, Mapping)
        expect(is_table, "training: env_args", self.env_args, "a table")
        if self.prioritized and self.weight is not None:
            raise ConfigInvalidError(
                f"training: found prioritized beside the weight {self.weight!r}, expected one of "
                "them, because both determine how often a step is drawn. Leave one out."
            )
        if self.env_args and self.env is None:
            raise ConfigInvalidError(
                f"training: found arguments of an environment ({', '.join(self.env_args)}) and no "
                "environment, expected one. Name it with `env`, or leave the arguments out.",
                parameter="env_args",
            )
        self.split()

    def split(self) -> Holdout | None:
        """Return which episodes are held out, or None. Raises: ConfigInvalidError."""
        if self.holdout is None and self.holdout_after is None:
            return None
        after = None if self.holdout_after is None else _time(self.holdout_after)
        return Holdout(fraction=self.holdout, after=after)

    def measure_interval_updates(self, measure: str) -> int:
        """Return the updates from one measurement of the policy to the next.

        measure: what the policy is judged by, as `select` calls it.
        """
        tenth = max(1, self.updates // 10)
        # An update of fitted Q evaluation costs about what one of training does.
        default = max(tenth, self.num_fqe_updates) if measure == "fqe" else tenth
        return self.evaluate_updates or default

    @property
    def num_fqe_updates(self) -> int:
        """Updates of each fitted Q evaluation of a policy."""
        return min(self.selection_fqe_updates, self.updates)

    @property
    def save_interval_updates(self) -> int:
        """Updates from one checkpoint to the next."""
        return self.checkpoint_updates or self.evaluate_updates or max(1, self.updates // 10)


TRAIN_OPTIONS: Final = tuple(f.name for f in fields(TrainConfig) if f.name != "options")


def train_config(options: Mapping[str, Any]) -> TrainConfig:
    """Sort flat options into the training's own and the algorithm's, which are checked later.

    The algorithm's may stand beside the training's, or in a table `options`. Raises:
    ConfigInvalidError.
    """
    own = set(TRAIN_OPTIONS)
    nested = options.get("options", {})
    if not isinstance(nested, dict):
        raise ConfigInvalidError(
            f"training: options: found {nested!r}, expected a table of options."
        )
    theirs = {key: value for key, value in options.items() if key not in own | {"options"}}
    ours = {key: value for key, value in options.items() if key in own}
    if isinstance(ours.get("holdout_after"), date):
        # TOML has times of its own: without quotes it is one.
        ours["holdout_after"] = ours["holdout_after"].isoformat()
    config = from_options(TrainConfig, ours, "training")
    return replace(config, options={**nested, **theirs})


@dataclass(frozen=True)
class TrainRequest:
    """The arguments of `train`: enough to start the same run in another process.

    datasets: `NAME`, `NAME@VERSION` or `NAME@TAG`; once pinned, each at a version, and `named` as
    they were given.
    """

    datasets: tuple[str, ...]
    config: TrainConfig
    named: tuple[str, ...] = ()

    @staticmethod
    def of(datasets: str | Sequence[str], config: TrainConfig) -> TrainRequest:
        """Return the request for one dataset or several. Raises: ConfigInvalidError for none."""
        texts = (datasets,) if isinstance(datasets, str) else tuple(datasets)
        if not texts:
            raise ConfigInvalidError("training: datasets: found no dataset, expected one or more.")
        return TrainRequest(texts, config)

    def pin(self, lake: Lake) -> TrainRequest:
        """Return it with the versions that the names mean now.

        Raises: NotFoundError, InvalidNameError.
        """
        if self.named:
            return self
        snapshots = map(lake.snapshot, self.datasets)
        datasets = tuple(f"{snapshot.dataset}@{snapshot.version}" for snapshot in snapshots)
        return replace(self, datasets=datasets, named=self.datasets)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        config = asdict(self.config)
        beside = {key: config.pop(name) for key, name in _STORED_NAMES.items()}
        datasets = {"datasets": list(self.datasets), "named": list(self.named)}
        return {**datasets, **beside, "config": config}

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> TrainRequest:
        """Return what to_json wrote down. Raises: ConfigInvalidError."""
        try:
            options = dict(body["config"])
            fields = {name: body[key] for key, name in _STORED_NAMES.items() if key in body}
            fields["options"] = options.pop("options")
            config = replace(from_options(TrainConfig, options, "training"), **fields)
            return TrainRequest(tuple(body["datasets"]), config, tuple(body["named"]))
        except (KeyError, TypeError) as error:
            raise ConfigInvalidError(
                f"run: found an incomplete request ({type(error).__name__}: {error}), "
                "expected the arguments of `train`. It was written by another version of "
                "ReplayLake: train again."
            ) from error


def _time(text: str) -> datetime:
    """Return an ISO time; one without a zone is UTC."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigInvalidError(
            f"training: holdout_after: found {text!r}, expected an ISO time such as 2026-11-01 or "
            "2026-11-01T12:00:00+01:00.",
            parameter="holdout_after",
        ) from error
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
