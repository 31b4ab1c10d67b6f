"""ReplayLake: record episodes, query them, learn from them, serve what was learned.

The public names are loaded from their homes on first use, so `import replaylake` costs nothing and
`replaylake.open` never loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from replaylake.datastore.version import VERSION as __version__

__all__ = [
    "AsyncPolicyClient",
    "Batch",
    "Box",
    "Callbacks",
    "Dataset",
    "Dict",
    "Discrete",
    "EngineModel",
    "Episode",
    "EpisodeWriter",
    "Episodes",
    "EvaluationConfig",
    "FallbackPolicy",
    "FunctionScorer",
    "Hindsight",
    "ImportOptions",
    "JudgeConfig",
    "JudgeScorer",
    "Lake",
    "LanguageConfig",
    "LanguageRecorder",
    "LanguageRolloutConfig",
    "LocalModel",
    "MultiBinary",
    "MultiDiscrete",
    "OnlineConfig",
    "OnlineLanguageConfig",
    "PolicyClient",
    "QueryLimits",
    "ReadOptions",
    "ReplayIterable",
    "ReplayLakeError",
    "ReplayView",
    "Retention",
    "RewardModel",
    "RolloutConfig",
    "Sequences",
    "Snapshot",
    "Text",
    "Tokenizer",
    "TorchSampler",
    "TrainConfig",
    "Transitions",
    "TuneConfig",
    "Tuple",
    "__version__",
    "annotate",
    "compact",
    "compare_scores",
    "concatenate",
    "copy",
    "delete",
    "diff",
    "evaluate",
    "export",
    "fsck",
    "import_policy",
    "ingest",
    "join_feedback",
    "load_policy",
    "maintain",
    "mixture",
    "open",
    "prefetch",
    "purge",
    "read_role_table",
    "readmit",
    "record",
    "record_language",
    "resume",
    "resume_language",
    "resume_language_online",
    "resume_online",
    "resume_sweep",
    "rollout",
    "rollout_language",
    "score",
    "set_retention",
    "to_ray",
    "to_torch",
    "train",
    "train_language",
    "train_language_online",
    "train_online",
    "trim",
    "tune",
    "vacuum",
]

if TYPE_CHECKING:
    from replaylake.datastore.episodes.batch import Batch
    from replaylake.datastore.episodes.episode import Episode
    from replaylake.datastore.episodes.spaces import (
        Box,
        Dict,
        Discrete,
        MultiBinary,
        MultiDiscrete,
        Text,
        Tuple,
    )
    from replaylake.datastore.episodes.tokenizer import Tokenizer
    from replaylake.datastore.errors import ReplayLakeError
    from replaylake.datastore.feedback.join import join_feedback
    from replaylake.datastore.interchange.export.export import export
    from replaylake.datastore.interchange.formats.format import ReadOptions
    from replaylake.datastore.interchange.ingest.ingest import ingest
    from replaylake.datastore.lake.dataset import Dataset
    from replaylake.datastore.lake.episode_writer import EpisodeWriter
    from replaylake.datastore.lake.lake import Lake
    from replaylake.datastore.lake.lake import open_lake as open
    from replaylake.datastore.lake.policies.package import load_policy
    from replaylake.datastore.lake.roles import read_role_table
    from replaylake.datastore.lake.snapshot import Snapshot
    from replaylake.datastore.lake.versions.diff import diff
    from replaylake.datastore.maintenance.compact import compact
    from replaylake.datastore.maintenance.copy.copy import copy
    from replaylake.datastore.maintenance.delete import delete, readmit
    from replaylake.datastore.maintenance.fsck.fsck import fsck
    from replaylake.datastore.maintenance.labels.annotate import annotate
    from replaylake.datastore.maintenance.maintain import maintain
    from replaylake.datastore.maintenance.purge.purge import purge
    from replaylake.datastore.maintenance.retention import Retention, set_retention
    from replaylake.datastore.maintenance.scoring.compare import compare_scores
    from replaylake.datastore.maintenance.scoring.function_scorer import FunctionScorer
    from replaylake.datastore.maintenance.scoring.judge import JudgeConfig, JudgeScorer
    from replaylake.datastore.maintenance.scoring.score import score
    from replaylake.datastore.maintenance.trim import trim
    from replaylake.datastore.maintenance.vacuum import vacuum
    from replaylake.datastore.query.untrusted import QueryLimits
    from replaylake.datastore.replay.data_loader import ReplayIterable
    from replaylake.datastore.replay.items.episodes import Episodes
    from replaylake.datastore.replay.items.hindsight import Hindsight
    from replaylake.datastore.replay.items.sequences import Sequences
    from replaylake.datastore.replay.items.transitions import Transitions
    from replaylake.datastore.replay.mixture import mixture
    from replaylake.datastore.replay.prefetch import prefetch
    from replaylake.datastore.replay.to_torch import TorchSampler, to_torch
    from replaylake.datastore.replay.view import ReplayView, concatenate
    from replaylake.offline.callbacks import Callbacks
    from replaylake.offline.environments.recording_wrapper import record
    from replaylake.offline.evaluation.evaluate import EvaluationConfig, evaluate
    from replaylake.offline.evaluation.reward_model import RewardModel
    from replaylake.offline.importing.import_policy import ImportOptions, import_policy
    from replaylake.offline.language.local_model import LocalModel
    from replaylake.offline.running.train import resume, train
    from replaylake.offline.running.train_language import (
        LanguageConfig,
        resume_language,
        train_language,
    )
    from replaylake.offline.running.training.config import TrainConfig
    from replaylake.offline.running.tune import resume_sweep, tune
    from replaylake.offline.running.tuning.config import TuneConfig
    from replaylake.online.collecting.worker import RolloutConfig
    from replaylake.online.ray_data import to_ray
    from replaylake.online.recorders.language_recorder import LanguageRecorder, record_language
    from replaylake.online.rollout import rollout
    from replaylake.online.rollout_language import LanguageRolloutConfig, rollout_language
    from replaylake.online.train import resume_online, train_online
    from replaylake.online.train_language_online import (
        OnlineLanguageConfig,
        resume_language_online,
        train_language_online,
    )
    from replaylake.online.training.config import OnlineConfig
    from replaylake.serve.client import AsyncPolicyClient, PolicyClient
    from replaylake.serve.fallback import FallbackPolicy
    from replaylake.serve.gateway.engine_model import EngineModel

# Where each public name lives: (module, name there).
_LOCATIONS = {
    "AsyncPolicyClient": ("serve.client", "AsyncPolicyClient"),
    "Batch": ("datastore.episodes.batch", "Batch"),
    "Box": ("datastore.episodes.spaces", "Box"),
    "Callbacks": ("offline.callbacks", "Callbacks"),
    "Dataset": ("datastore.lake.dataset", "Dataset"),
    "Dict": ("datastore.episodes.spaces", "Dict"),
    "Discrete": ("datastore.episodes.spaces", "Discrete"),
    "Episode": ("datastore.episodes.episode", "Episode"),
    "EpisodeWriter": ("datastore.lake.episode_writer", "EpisodeWriter"),
    "Episodes": ("datastore.replay.items.episodes", "Episodes"),
    "EngineModel": ("serve.gateway.engine_model", "EngineModel"),
    "EvaluationConfig": ("offline.evaluation.evaluate", "EvaluationConfig"),
    "FallbackPolicy": ("serve.fallback", "FallbackPolicy"),
    "FunctionScorer": ("datastore.maintenance.scoring.function_scorer", "FunctionScorer"),
    "Hindsight": ("datastore.replay.items.hindsight", "Hindsight"),
    "ImportOptions": ("offline.importing.import_policy", "ImportOptions"),
    "JudgeConfig": ("datastore.maintenance.scoring.judge", "JudgeConfig"),
    "JudgeScorer": ("datastore.maintenance.scoring.judge", "JudgeScorer"),
    "Lake": ("datastore.lake.lake", "Lake"),
    "LanguageConfig": ("offline.running.train_language", "LanguageConfig"),
    "LanguageRecorder": ("online.recorders.language_recorder", "LanguageRecorder"),
    "LanguageRolloutConfig": ("online.rollout_language", "LanguageRolloutConfig"),
    "LocalModel": ("offline.language.local_model", "LocalModel"),
    "MultiBinary": ("datastore.episodes.spaces", "MultiBinary"),
    "MultiDiscrete": ("datastore.episodes.spaces", "MultiDiscrete"),
    "OnlineConfig": ("online.training.config", "OnlineConfig"),
    "OnlineLanguageConfig": ("online.train_language_online", "OnlineLanguageConfig"),
    "PolicyClient": ("serve.client", "PolicyClient"),
    "QueryLimits": ("datastore.query.untrusted", "QueryLimits"),
    "ReadOptions": ("datastore.interchange.formats.format", "ReadOptions"),
    "ReplayIterable": ("datastore.replay.data_loader", "ReplayIterable"),
    "ReplayLakeError": ("datastore.errors", "ReplayLakeError"),
    "ReplayView": ("datastore.replay.view", "ReplayView"),
    "Retention": ("datastore.maintenance.retention", "Retention"),
    "RewardModel": ("offline.evaluation.reward_model", "RewardModel"),
    "RolloutConfig": ("online.collecting.worker", "RolloutConfig"),
    "Sequences": ("datastore.replay.items.sequences", "Sequences"),
    "Snapshot": ("datastore.lake.snapshot", "Snapshot"),
    "Text": ("datastore.episodes.spaces", "Text"),
    "Tokenizer": ("datastore.episodes.tokenizer", "Tokenizer"),
    "TorchSampler": ("datastore.replay.to_torch", "TorchSampler"),
    "TrainConfig": ("offline.running.training.config", "TrainConfig"),
    "Transitions": ("datastore.replay.items.transitions", "Transitions"),
    "TuneConfig": ("offline.running.tuning.config", "TuneConfig"),
    "Tuple": ("datastore.episodes.spaces", "Tuple"),
    "annotate": ("datastore.maintenance.labels.annotate", "annotate"),
    "compact": ("datastore.maintenance.compact", "compact"),
    "compare_scores": ("datastore.maintenance.scoring.compare", "compare_scores"),
    "concatenate": ("datastore.replay.view", "concatenate"),
    "copy": ("datastore.maintenance.copy.copy", "copy"),
    "delete": ("datastore.maintenance.delete", "delete"),
    "diff": ("datastore.lake.versions.diff", "diff"),
    "evaluate": ("offline.evaluation.evaluate", "evaluate"),
    "export": ("datastore.interchange.export.export", "export"),
    "fsck": ("datastore.maintenance.fsck.fsck", "fsck"),
    "import_policy": ("offline.importing.import_policy", "import_policy"),
    "ingest": ("datastore.interchange.ingest.ingest", "ingest"),
    "join_feedback": ("datastore.feedback.join", "join_feedback"),
    "load_policy": ("datastore.lake.policies.package", "load_policy"),
    "maintain": ("datastore.maintenance.maintain", "maintain"),
    "mixture": ("datastore.replay.mixture", "mixture"),
    "open": ("datastore.lake.lake", "open_lake"),
    "prefetch": ("datastore.replay.prefetch", "prefetch"),
    "readmit": ("datastore.maintenance.delete", "readmit"),
    "purge": ("datastore.maintenance.purge.purge", "purge"),
    "read_role_table": ("datastore.lake.roles", "read_role_table"),
    "record": ("offline.environments.recording_wrapper", "record"),
    "record_language": ("online.recorders.language_recorder", "record_language"),
    "resume": ("offline.running.train", "resume"),
    "resume_language": ("offline.running.train_language", "resume_language"),
    "resume_language_online": ("online.train_language_online", "resume_language_online"),
    "resume_online": ("online.train", "resume_online"),
    "resume_sweep": ("offline.running.tune", "resume_sweep"),
    "rollout": ("online.rollout", "rollout"),
    "rollout_language": ("online.rollout_language", "rollout_language"),
    "score": ("datastore.maintenance.scoring.score", "score"),
    "set_retention": ("datastore.maintenance.retention", "set_retention"),
    "to_ray": ("online.ray_data", "to_ray"),
    "to_torch": ("datastore.replay.to_torch", "to_torch"),
    "train": ("offline.running.train", "train"),
    "train_language": ("offline.running.train_language", "train_language"),
    "train_language_online": ("online.train_language_online", "train_language_online"),
    "train_online": ("online.train", "train_online"),
    "trim": ("datastore.maintenance.trim", "trim"),
    "tune": ("offline.running.tune", "tune"),
    "vacuum": ("datastore.maintenance.vacuum", "vacuum"),
}

# Hidden from type checkers, which accept any name of a module that has a __getattr__.
if not TYPE_CHECKING:

    def __getattr__(name):
        if name not in _LOCATIONS:
            raise AttributeError(f"module 'replaylake' has no attribute {name!r}")
        module, attribute = _LOCATIONS[name]
        value = getattr(import_module(f"replaylake.{module}"), attribute)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
