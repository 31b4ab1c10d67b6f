"""Every error that ReplayLake raises on purpose.

    ReplayLakeError
    ├── NotFoundError               a lake, dataset, version, policy, run, column or file
    ├── AlreadyExistsError          a name that is taken
    ├── InvalidNameError            a dataset, policy or alias name outside its pattern
    ├── FormatTooNewError           written by a newer ReplayLake than this one
    ├── SchemaMismatchError         columns or spaces differ from those the dataset was created with
    ├── EpisodeInvalidError         an episode that breaks the row rule or its spaces
    ├── SourceInvalidError          a foreign file that cannot be read as episodes or as a policy
    ├── ShardCorruptError           bytes on disk differ from the recorded sha256, or do not parse
    ├── LogCorruptError             the commit log does not parse or has a hole
    ├── CommitConflictError         a commit lost its race for good: what it builds on has changed
    │   └── ProducerEndedError       another process took over the producer of a commit
    ├── QueryRefusedError           SQL that is not one SELECT, or not reproducible where it must be
    ├── QueryError                  SQL that DuckDB could not run
    ├── EmptyReplayError            a selection that holds no step to sample
    ├── SpaceUnsupportedError       an algorithm, head or sampler that cannot take this space
    ├── ConfigInvalidError          an option with a wrong name, type or range
    ├── TrainingError               a loss or parameter that is no longer finite
    ├── RolloutError                an environment that raised, or a rollout worker that died
    ├── PackageInvalidError         a policy package with missing, altered or unreadable files
    ├── PolicyKindError             a language model where actions are needed, or the reverse
    ├── StorageError                the disk or object store said no
    │   └── TransientStorageError    for now: a full disk, a store out of reach
    ├── ServeError                  the server could not start
    └── ExtraMissingError           an optional dependency that is not installed

A message says, in this order: what failed, what was found, what was expected, what to do now. It
names parameters as Python has them, in backticks, and never a flag of the command line; cli words
them for its users.
"""


class ReplayLakeError(Exception):
    """Base class of all errors of ReplayLake.

    parameter: the argument or config field whose value is refused; None if no single one is at
    fault. The message then begins with its name.
    """

    def __init__(self, *arguments: object, parameter: str | None = None) -> None:
        super().__init__(*arguments)
        self.parameter = parameter


class NotFoundError(ReplayLakeError):
    """Something named by the caller does not exist."""


class AlreadyExistsError(ReplayLakeError):
    """A name that is already taken."""


class InvalidNameError(ReplayLakeError):
    """A name outside the pattern for its kind."""


class FormatTooNewError(ReplayLakeError):
    """Written by a newer ReplayLake; the message names the version needed."""


class SchemaMismatchError(ReplayLakeError):
    """Columns or spaces differ from the dataset's."""


class EpisodeInvalidError(ReplayLakeError):
    """An episode that breaks the row rule or does not fit its spaces."""


class SourceInvalidError(ReplayLakeError):
    """A foreign file that cannot be read as episodes or as a policy."""


class ShardCorruptError(ReplayLakeError):
    """A shard whose bytes are not the ones that were committed."""


class LogCorruptError(ReplayLakeError):
    """A commit log that does not parse."""


class CommitConflictError(ReplayLakeError):
    """A commit that cannot be replayed onto the newest version."""


class ProducerEndedError(CommitConflictError):
    """A commit of a producer that another process has ended."""


class QueryRefusedError(ReplayLakeError):
    """SQL that we do not run."""


class QueryError(ReplayLakeError):
    """SQL that DuckDB could not run.

    details: `excerpt`, where it is known, is the line of the query that is at fault, and below it
    carets under the place.
    """

    def __init__(self, *arguments: object, parameter: str | None = None) -> None:
        super().__init__(*arguments, parameter=parameter)
        self.details: dict[str, str] = {}


class EmptyReplayError(ReplayLakeError):
    """A selection that holds no step to sample."""


class SpaceUnsupportedError(ReplayLakeError):
    """A space that this algorithm, head or sampler cannot take."""


class ConfigInvalidError(ReplayLakeError):
    """An option with a wrong name, type or range."""


class TrainingError(ReplayLakeError):
    """A run that cannot go on, such as one with a loss that is not finite."""


class RolloutError(ReplayLakeError):
    """An environment that raised, or a rollout worker that died."""


class PackageInvalidError(ReplayLakeError):
    """A policy package that is not whole."""


class PolicyKindError(ReplayLakeError):
    """A language model where a policy of actions is needed, or the other way around."""


class StorageError(ReplayLakeError):
    """The disk or the object store refused an operation."""


class TransientStorageError(StorageError):
    """A refusal after which the same may work, once there is room or the store answers again.

    It may have been carried out already.
    """


class ServeError(ReplayLakeError):
    """The policy server could not start."""


class ExtraMissingError(ReplayLakeError):
    """An optional dependency is not installed; the message names the extra."""
