"""Every error that ReplayLake raises on purpose.

    ReplayLakeError
    ├── NotFound               a lake, dataset, version, policy, run, column or file
    ├── AlreadyExists          a name that is taken
    ├── NameRefused            a dataset, policy or alias name outside its pattern
    ├── FormatTooNew           written by a newer ReplayLake than this one
    ├── SchemaMismatch         columns or spaces differ from those the dataset was created with
    ├── EpisodeInvalid         an episode that breaks the row rule or its spaces
    ├── SourceInvalid          a foreign file that cannot be read as episodes
    ├── ShardCorrupt           bytes on disk differ from the recorded sha256, or do not parse
    ├── LogCorrupt             the commit log does not parse or has a hole
    ├── CommitConflict         a commit lost its race for good: what it builds on has changed
    ├── QueryRefused           SQL that is not one SELECT, or not reproducible where it must be
    ├── QueryFailed            SQL that DuckDB could not run
    ├── EmptyReplay            a selection that holds no step to sample
    ├── SpaceUnsupported       an algorithm, head or sampler that cannot take this space
    ├── ConfigInvalid          an option with a wrong name, type or range
    ├── TrainingFailed         a loss or parameter that is no longer finite
    ├── RolloutFailed          an environment that raised, or a rollout worker that died
    ├── PackageInvalid         a policy package with missing, altered or unreadable files
    ├── StorageFailed          the disk or object store said no
    │   └── FailedInPassing    for now: a full disk, a store out of reach
    ├── ServeFailed            the server could not start
    └── ExtraMissing           an optional dependency that is not installed

A message says, in this order: what failed, what was found, what was expected, what to do now.
"""


class ReplayLakeError(Exception):
    """Root of the tree: catch this to catch whatever ReplayLake refuses."""


class NotFound(ReplayLakeError):
    """Something named by the caller does not exist."""


class AlreadyExists(ReplayLakeError):
    """A name that is already taken."""


class NameRefused(ReplayLakeError):
    """A name outside the pattern for its kind."""


class FormatTooNew(ReplayLakeError):
    """Written by a newer ReplayLake; the message names the version needed."""


class SchemaMismatch(ReplayLakeError):
    """Columns or spaces differ from the dataset's."""


class EpisodeInvalid(ReplayLakeError):
    """An episode that breaks the row rule or does not fit its spaces."""


class SourceInvalid(ReplayLakeError):
    """A foreign file that cannot be read as episodes."""


class ShardCorrupt(ReplayLakeError):
    """A shard whose bytes are not the ones that were committed."""


class LogCorrupt(ReplayLakeError):
    """A commit log that does not parse."""


class CommitConflict(ReplayLakeError):
    """A commit that cannot be replayed onto the newest version."""


class QueryRefused(ReplayLakeError):
    """SQL that we do not run."""


class QueryFailed(ReplayLakeError):
    """SQL that DuckDB could not run."""


class EmptyReplay(ReplayLakeError):
    """A selection that holds no step to sample."""


class SpaceUnsupported(ReplayLakeError):
    """A space that this algorithm, head or sampler cannot take."""


class ConfigInvalid(ReplayLakeError):
    """An option with a wrong name, type or range."""


class TrainingFailed(ReplayLakeError):
    """A run that cannot go on, such as one with a loss that is not finite."""


class RolloutFailed(ReplayLakeError):
    """An environment that raised, or a rollout worker that died."""


class PackageInvalid(ReplayLakeError):
    """A policy package that is not whole."""


class StorageFailed(ReplayLakeError):
    """The disk or the object store refused an operation."""


class FailedInPassing(StorageFailed):
    """A refusal after which the same may work, once there is room or the store answers again.

    It may have been carried out already.
    """


class ServeFailed(ReplayLakeError):
    """The policy server could not start."""


class ExtraMissing(ReplayLakeError):
    """An optional dependency is not installed; the message names the extra."""
