"""ReplayLake: record episodes, query them, learn from them, serve what was learned.

The public names are loaded from their homes on first use, so `import replaylake` costs nothing and
`replaylake.open` never loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from replaylake.datastore.version import VERSION as __version__

__all__ = [
    "Batch",
    "Box",
    "Dataset",
    "Dict",
    "Discrete",
    "Episode",
    "EpisodeWriter",
    "Lake",
    "MultiBinary",
    "MultiDiscrete",
    "ReplayLakeError",
    "Snapshot",
    "Text",
    "TrainConfig",
    "Tuple",
    "__version__",
    "evaluate",
    "ingest",
    "load_policy",
    "open",
    "record",
    "sessionise",
    "train",
]

if TYPE_CHECKING:
    from replaylake.datastore.batch import Batch
    from replaylake.datastore.dataset import Dataset, EpisodeWriter
    from replaylake.datastore.episode import Episode
    from replaylake.datastore.errors import ReplayLakeError
    from replaylake.datastore.ingest.ingest import ingest
    from replaylake.datastore.lake import Lake
    from replaylake.datastore.lake import open_lake as open
    from replaylake.datastore.policies.package import load_policy
    from replaylake.datastore.sessions.sessionise import sessionise
    from replaylake.datastore.snapshot import Snapshot
    from replaylake.datastore.spaces import (
        Box,
        Dict,
        Discrete,
        MultiBinary,
        MultiDiscrete,
        Text,
        Tuple,
    )
    from replaylake.offline.environments import record
    from replaylake.offline.evaluate import evaluate
    from replaylake.offline.train import TrainConfig, train

# Where each public name lives: (module, name there).
_HOMES = {
    "Batch": ("datastore.batch", "Batch"),
    "Box": ("datastore.spaces", "Box"),
    "Dataset": ("datastore.dataset", "Dataset"),
    "Dict": ("datastore.spaces", "Dict"),
    "Discrete": ("datastore.spaces", "Discrete"),
    "Episode": ("datastore.episode", "Episode"),
    "EpisodeWriter": ("datastore.dataset", "EpisodeWriter"),
    "Lake": ("datastore.lake", "Lake"),
    "MultiBinary": ("datastore.spaces", "MultiBinary"),
    "MultiDiscrete": ("datastore.spaces", "MultiDiscrete"),
    "ReplayLakeError": ("datastore.errors", "ReplayLakeError"),
    "Snapshot": ("datastore.snapshot", "Snapshot"),
    "Text": ("datastore.spaces", "Text"),
    "TrainConfig": ("offline.train", "TrainConfig"),
    "Tuple": ("datastore.spaces", "Tuple"),
    "evaluate": ("offline.evaluate", "evaluate"),
    "ingest": ("datastore.ingest.ingest", "ingest"),
    "load_policy": ("datastore.policies.package", "load_policy"),
    "open": ("datastore.lake", "open_lake"),
    "record": ("offline.environments", "record"),
    "sessionise": ("datastore.sessions.sessionise", "sessionise"),
    "train": ("offline.train", "train"),
}

# Hidden from type checkers: seeing a module-level __getattr__, they would accept any misspelt name.
if not TYPE_CHECKING:

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module 'replaylake' has no attribute {name!r}")
        module, attribute = _HOMES[name]
        value = getattr(import_module(f"replaylake.{module}"), attribute)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
