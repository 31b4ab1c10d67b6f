"""Token columns: further columns of `steps` for generations of a language model, and their rules.

A call of a language model is a step. Its observation is what came before the model since its last
generation, its action what the model generated. A dataset has tokens where it has `action_tokens`;
in any other, columns of these names are further columns like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.episodes.tokenizer import Tokenizer
from replaylake.datastore.errors import EpisodeInvalidError, SchemaMismatchError
from replaylake.datastore.storage.arrow_values import is_list, numbers

OBSERVATION_TOKENS: Final = "observation_tokens"
ACTION_TOKENS: Final = "action_tokens"
FINAL_OBSERVATION_TOKENS: Final = "final_observation_tokens"
ACTION_LOG_PROBS: Final = "action_log_probs"
ACTION_LOSS_MASK: Final = "action_loss_mask"
PROXIMAL_LOG_PROBS: Final = "proximal_log_probs"
REFERENCE_LOG_PROBS: Final = "reference_log_probs"
ACTION_VERSIONS: Final = "action_versions"
PARENT_AGENT_ID: Final = "parent_agent_id"
PARENT_STEP: Final = "parent_step"
IS_CONTINUATION: Final = "is_continuation"
IS_TRAINABLE: Final = "is_trainable"


def _list_of(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind))


VERSION_RUN: Final = pa.struct([("start", pa.int32()), ("version", pa.int64())])
TOKEN_TYPES: Final[Mapping[str, pa.DataType]] = {
    OBSERVATION_TOKENS: _list_of(pa.int32()),
    ACTION_TOKENS: _list_of(pa.int32()),
    FINAL_OBSERVATION_TOKENS: _list_of(pa.int32()),
    ACTION_LOG_PROBS: _list_of(pa.float32()),
    ACTION_LOSS_MASK: _list_of(pa.bool_()),
    PROXIMAL_LOG_PROBS: _list_of(pa.float32()),
    REFERENCE_LOG_PROBS: _list_of(pa.float32()),
    ACTION_VERSIONS: _list_of(VERSION_RUN),
    PARENT_AGENT_ID: pa.string(),
    PARENT_STEP: pa.int32(),
    IS_CONTINUATION: pa.bool_(),
    IS_TRAINABLE: pa.bool_(),
}
TOKEN_IDS: Final = (OBSERVATION_TOKENS, ACTION_TOKENS, FINAL_OBSERVATION_TOKENS)
_LOG_PROBS: Final = (ACTION_LOG_PROBS, PROXIMAL_LOG_PROBS, REFERENCE_LOG_PROBS)
# One value for each token of the action.
_PER_ACTION_TOKEN: Final = (*_LOG_PROBS, ACTION_LOSS_MASK)
# Lists of numbers or flags whose names begin with this prefix also have one value for each token
# of the action, such as `action_advantages` and `action_entropies`.
_PER_TOKEN_PREFIX: Final = "action_"
# Columns in which the log describes the tokens that were read and sampled; labels cannot set them.
TOKEN_FACTS: Final = (
    *TOKEN_IDS,
    ACTION_LOG_PROBS,
    ACTION_VERSIONS,
    PARENT_AGENT_ID,
    PARENT_STEP,
    IS_CONTINUATION,
)

# A softmax in bfloat16 or float16 gives a sure token a little more than 1.
TOKEN_LOG_PROB_TOLERANCE: Final = 1e-4
# How far a stated behavior_log_prob may be from the sum of the tokens' log-probs: sums of float32
# differ by their order.
_SUM_TOLERANCE: Final = 1e-4
_SUM_RELATIVE_TOLERANCE: Final = 1e-6
# Number of tokens whose values fit into the processor's cache.
_SUMMED_AT_ONCE: Final = 1 << 15


def has_tokens(columns: Collection[str]) -> bool:
    """Whether these columns hold generations as token ids."""
    return ACTION_TOKENS in columns


def token_type(name: str, kind: pa.DataType) -> pa.DataType | None:
    """Return the type in which a token column is kept; None for one of another kind or name.

    A column of nulls takes the type of its name.
    """
    own = TOKEN_TYPES.get(name)
    return own if own is not None and _is_of_kind(kind, own) else None


def is_per_token(name: str, kind: pa.DataType) -> bool:
    """Whether a column of a dataset with tokens has one value for each token of a step's action.

    Besides the log-probs and the loss mask, these are lists of numbers or flags of any other name
    that begins with `action_`.
    """
    if name in TOKEN_TYPES:
        return name in _PER_ACTION_TOKEN
    is_list_of_flags = is_list(kind) and pa.types.is_boolean(kind.value_type)
    return name.startswith(_PER_TOKEN_PREFIX) and (is_list_of_flags or _is_number_list(kind))


def cast_decimals(name: str, array: pa.Array) -> pa.Array:
    """Return a per-token column of decimals (SQL's type of `[0.5]`) as doubles, others as is."""
    kind = array.type
    if (
        name.startswith(_PER_TOKEN_PREFIX)
        and is_list(kind)
        and pa.types.is_decimal(kind.value_type)
    ):
        return array.cast(pa.list_(pa.field("element", pa.float64())))
    return array


def cast_to_token_type(name: str, array: pa.Array) -> pa.Array:
    """Return a column whose name is in `TOKEN_TYPES` in the type of its name.

    Decimals count as floats. Flags may be the numbers 0 and 1, alone or in lists.

    Raises: SchemaMismatchError for values of another kind, for numbers that are not flags, and for
    values that the type does not hold.
    """
    own = TOKEN_TYPES[name]
    try:
        if is_list(array.type) and pa.types.is_decimal(array.type.value_type):
            array = array.cast(_list_of(pa.float64()))
        if token_type(name, array.type) is not None:
            return array.cast(own)
        if pa.types.is_boolean(own) and _is_number(array.type):
            return _to_flags(array)
        if own.equals(TOKEN_TYPES[ACTION_LOSS_MASK]) and _is_number_list(array.type):
            return _with_values(array, _to_flags(array.flatten()), own)
    except pa.ArrowException as error:
        raise SchemaMismatchError(f"{error}, expected values that {own} holds") from error
    raise SchemaMismatchError(f"found {array.type}, expected {own}")


def _to_flags(array: pa.Array) -> pa.Array:
    flags = pa.array([0, 1, None]).cast(array.type)
    others = array.filter(pc.invert(pc.is_in(array, flags)))
    if len(others):
        raise SchemaMismatchError(f"found {others[0]}, expected true and false, or 1 and 0")
    return pc.equal(array, pa.scalar(1).cast(array.type))


def _with_values(array: pa.Array, values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return lists of a type that have the lengths of those in an array, with other values."""
    lengths = numbers(pc.fill_null(pc.list_value_length(array), 0))
    offsets = pa.array(
        np.append(0, np.cumsum(lengths)).astype(np.int32),
        mask=np.append(~numbers(array.is_valid()), False),
    )
    return pa.ListArray.from_arrays(offsets, values, type=kind)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))


def _is_number_list(kind: pa.DataType) -> bool:
    return is_list(kind) and _is_number(kind.value_type)


def _is_of_kind(kind: pa.DataType, own: pa.DataType) -> bool:
    types = pa.types
    if types.is_null(kind):
        return True
    if types.is_list(own):
        return is_list(kind) and _is_of_kind(kind.value_type, own.value_type)
    if types.is_struct(own):
        return types.is_struct(kind) and {f.name for f in kind} == {f.name for f in own}
    if types.is_dictionary(kind):
        return _is_of_kind(kind.value_type, own)
    if types.is_floating(own):
        return bool(types.is_floating(kind) or types.is_integer(kind))
    if types.is_string(own):
        return bool(
            types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
        )
    tests = (types.is_integer, types.is_boolean)
    return any(test(kind) and test(own) for test in tests)


@dataclass(frozen=True)
class TokenColumns:
    """The token columns of T steps in their stored types, and the steps' behavior log-probs.

    behavior_log_probs float32 [T]: None if there is none, NaN where it is unknown.
    """

    arrays: Mapping[str, pa.Array]
    behavior_log_probs: Array | None


@dataclass(frozen=True)
class _Lists:
    """A column of lists: `values` are those of all rows in order; rows int64 names each one's."""

    known: NDArray[np.bool_]
    lengths: Array
    values: pa.Array

    @property
    def rows(self) -> Array:
        rows: Array = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return rows

    @property
    def places(self) -> Array:
        """The place of each value within its row."""
        starts = np.cumsum(self.lengths) - self.lengths
        places: Array = np.arange(len(self.values)) - np.repeat(starts, self.lengths)
        return places


def validate_tokens(
    arrays: Mapping[str, pa.Array], behavior_log_probs: Array | None, tokenizer: Tokenizer | None
) -> TokenColumns:
    """Return the token columns of some steps as they are stored, or refuse them.

    arrays: the steps' further columns as Arrow arrays of length T; the result has only token
    columns. Other per-token columns are checked, and are not in the result. Where a step has
    action_log_probs and no behavior log-prob, it gets their sum.

    Checked: types; that ids are not negative and, if `tokenizer` states its size, inside its
    vocabulary; one log-prob, one flag of the loss mask and one finite value of each other per-token
    column for each token of the action; log-probs that are finite and not above 0; that the runs of
    action_versions begin at 0 and ascend within the action; and that a stated behavior log-prob is
    the sum of action_log_probs, within 1e-6 of the sum of their magnitudes plus 1e-4. Whether
    parents exist is checked by `parents.find_orphans`.

    Raises: EpisodeInvalidError with the column, the step's place among these, what was found and
    what was expected; SchemaMismatchError for a column of another type.
    """
    own = {name: _to_token_type(name, arrays[name]) for name in TOKEN_TYPES if name in arrays}
    if OBSERVATION_TOKENS not in own:
        raise SchemaMismatchError(
            f"{ACTION_TOKENS}: found no column {OBSERVATION_TOKENS}, expected it: the ids that "
            "came before each generation and after the one before it."
        )
    per_token = {
        name: array
        for name, array in arrays.items()
        if name not in TOKEN_TYPES and is_per_token(name, array.type)
    }
    lists = {
        name: _read_lists(array)
        for name, array in {**own, **per_token}.items()
        if is_list(array.type)
    }
    action = lists[ACTION_TOKENS]
    _check_presence(lists)
    for name in TOKEN_IDS:
        if name in lists:
            _check_ids(name, lists[name], tokenizer)
    for name in (*_PER_ACTION_TOKEN, *per_token):
        if name in lists:
            _check_per_token(name, lists[name], action, _name_step)
    if ACTION_VERSIONS in lists:
        _check_versions(lists[ACTION_VERSIONS], action)
    if PARENT_AGENT_ID in own or PARENT_STEP in own:
        _check_parent_pairs(own, len(action.known))
    if (log_probs := lists.get(ACTION_LOG_PROBS)) is None:
        return TokenColumns(own, behavior_log_probs)
    return TokenColumns(own, _fill_behavior_log_probs(behavior_log_probs, log_probs))


NameRow = Callable[[int], str]


def check_per_token(
    name: str, values: pa.Array, action_tokens: pa.Array, name_row: NameRow
) -> None:
    """Refuse lists that do not have one value for each token of the action of their step.

    values: lists, in a type for which `is_per_token` holds; NULL where there is nothing to check.
    action_tokens: those of the same steps. name_row: describes the step in a row, for messages.

    Raises: EpisodeInvalidError with what was found and what was expected.
    """
    lists, action = _read_lists(values), _read_lists(action_tokens)
    _check_presence({name: lists, ACTION_TOKENS: action}, name_row)
    _check_per_token(name, lists, action, name_row)


def _name_step(row: int) -> str:
    return f"at step {row}"


def to_arrow_columns(extras: Mapping[str, Any]) -> dict[str, pa.Array]:
    """Return the token columns and per-token columns among some further columns as Arrow arrays.

    Raises: EpisodeInvalidError for values that are of several types.
    """
    arrays = {name: _to_arrow(name, extras[name]) for name in TOKEN_TYPES if name in extras}
    for name in extras:
        if name.startswith(_PER_TOKEN_PREFIX) and name not in TOKEN_TYPES:
            array = _to_arrow(name, extras[name])
            if is_per_token(name, array.type):
                arrays[name] = array
    return arrays


def _to_arrow(name: str, column: Any) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    if isinstance(column, pa.ChunkedArray):
        return column.combine_chunks()
    try:
        # Rows of numpy's two dimensions are lists that happen to have one length.
        is_matrix = isinstance(column, np.ndarray) and column.ndim > 1
        return pa.array(list(column) if is_matrix else column)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise EpisodeInvalidError(
            f"{name}: {error}, expected {TOKEN_TYPES.get(name, 'one type')} in each step."
        ) from error


def count_positive_log_probs(extras: Mapping[str, Any]) -> int:
    """Return how many action_log_probs of some steps are above 0, and are stored as 0."""
    if not has_tokens(extras) or ACTION_LOG_PROBS not in extras:
        return 0
    array = _to_arrow(ACTION_LOG_PROBS, extras[ACTION_LOG_PROBS])
    if pa.types.is_null(array.type):  # a Python list of None
        return 0
    values = array.flatten()
    return int(pc.sum(pc.greater(values, 0)).as_py() or 0)


def clip_log_probs(array: pa.Array) -> pa.Array:
    """Return valid action_log_probs with those up to 1e-4 above 0 as 0, as they are stored."""
    values = array.flatten()
    if not pc.any(pc.greater(values, 0)).as_py():
        return array
    return _with_values(array, pa.array(np.minimum(numbers(values), np.float32(0))), array.type)


def _to_token_type(name: str, array: pa.Array) -> pa.Array:
    kind = token_type(name, array.type)
    if kind is None:
        raise SchemaMismatchError(
            f"column {name!r}: found {array.type}, expected {TOKEN_TYPES[name]} beside "
            f"{ACTION_TOKENS}. Convert or rename it."
        )
    try:
        return array if array.type.equals(kind) else array.cast(kind)
    except pa.ArrowException as error:
        raise EpisodeInvalidError(f"{name}: {error}, expected values that {kind} holds.") from error


def _read_lists(array: pa.Array) -> _Lists:
    known = numbers(array.is_valid())
    lengths = numbers(pc.fill_null(pc.list_value_length(array), 0)).astype(np.int64)
    return _Lists(known, lengths, array.flatten())


def _check_presence(lists: Mapping[str, _Lists], name_row: NameRow = _name_step) -> None:
    """Refuse a step with a part of what belongs together, and lists with nulls in them."""
    action = lists[ACTION_TOKENS]
    for name, one in lists.items():
        if one.values.null_count:
            row = int(one.rows[np.argmin(numbers(one.values.is_valid()))])
            raise EpisodeInvalidError(
                f"{name} {name_row(row)}: found NULL within it, expected a value for each token."
            )
        lone = np.flatnonzero(one.known & ~action.known)
        if len(lone):
            raise EpisodeInvalidError(
                f"{ACTION_TOKENS} {name_row(int(lone[0]))}: found NULL beside {name}, expected the "
                "ids that were generated, or NULL in both."
            )
    if OBSERVATION_TOKENS not in lists:
        return
    lone = np.flatnonzero(action.known & ~lists[OBSERVATION_TOKENS].known)
    if len(lone):
        raise EpisodeInvalidError(
            f"{OBSERVATION_TOKENS} at step {lone[0]}: found NULL beside {ACTION_TOKENS}, expected "
            "the ids that came before the generation; [] if there are none."
        )


def _check_ids(name: str, lists: _Lists, tokenizer: Tokenizer | None) -> None:
    ids = numbers(lists.values)
    size = None if tokenizer is None else tokenizer.vocabulary_size
    outside = ids < 0
    if size is not None:
        outside |= ids >= size
    if outside.any():
        at = int(np.argmax(outside))
        expected = "an id of 0 or more"
        if size is not None and tokenizer is not None:
            expected = f"0..{size - 1}, the vocabulary of {tokenizer.describe()}"
        raise EpisodeInvalidError(
            f"{name} at step {lists.rows[at]}: found {ids[at]} as token {lists.places[at]}, "
            f"expected {expected}."
        )


def _check_per_token(name: str, lists: _Lists, action: _Lists, name_row: NameRow) -> None:
    """Refuse lists whose length is not the action's, and values that are out of range."""
    uneven = np.flatnonzero(lists.known & (lists.lengths != action.lengths))
    if len(uneven):
        row = int(uneven[0])
        raise EpisodeInvalidError(
            f"{name} {name_row(row)}: found {lists.lengths[row]} values, expected "
            f"{action.lengths[row]}, one for each of its {ACTION_TOKENS}."
        )
    if name == ACTION_LOSS_MASK:
        return
    values = numbers(lists.values)
    if name not in _LOG_PROBS:
        wrong, expected = ~np.isfinite(values), "a finite number."
    else:
        # Under policies other than the one that sampled, a token may have probability 0.
        wrong = ~(values <= TOKEN_LOG_PROB_TOLERANCE)
        if name == ACTION_LOG_PROBS:
            wrong |= np.isneginf(values)
        expected = (
            "at most 0, the natural logarithm of the probability of a token that was sampled. "
            "Leave the whole list out (NULL) where it is not known."
        )
    if wrong.any():
        at = int(np.argmax(wrong))
        raise EpisodeInvalidError(
            f"{name} {name_row(int(lists.rows[at]))}: found {values[at]:g} for token "
            f"{lists.places[at]}, expected {expected}"
        )


def _check_versions(lists: _Lists, action: _Lists) -> None:
    starts = numbers(pc.struct_field(lists.values, "start"))
    if (
        pc.struct_field(lists.values, "version").null_count
        or pc.struct_field(lists.values, "start").null_count
    ):
        raise EpisodeInvalidError(
            f"{ACTION_VERSIONS}: found NULL as a start or version, expected both of each run."
        )
    rows, places = lists.rows, lists.places
    is_first = places == 0
    before = np.append(0, starts[:-1])
    wrong = np.where(is_first, starts != 0, starts <= before) | (starts >= action.lengths[rows])
    bad_rows = rows[wrong]
    lacking = np.flatnonzero(lists.known & (lists.lengths == 0) & (action.lengths > 0))
    if len(bad_rows) or len(lacking):
        row = int(min([*bad_rows[:1].tolist(), *lacking[:1].tolist()]))
        found = starts[rows == row].tolist()
        raise EpisodeInvalidError(
            f"{ACTION_VERSIONS} at step {row}: found starts {found}, expected them to begin at 0, "
            f"to ascend, and to be below {action.lengths[row]}, the number of its {ACTION_TOKENS}."
        )


def _check_parent_pairs(own: Mapping[str, pa.Array], num: int) -> None:
    def is_known(name: str) -> NDArray[np.bool_]:
        if name not in own:
            return np.zeros(num, np.bool_)
        return numbers(own[name].is_valid())

    lone = np.flatnonzero(is_known(PARENT_AGENT_ID) & ~is_known(PARENT_STEP))
    if len(lone):
        raise EpisodeInvalidError(
            f"{PARENT_STEP} at step {lone[0]}: found NULL beside {PARENT_AGENT_ID}, expected the "
            "number of the parent's step."
        )
    if PARENT_STEP in own:
        steps = numbers(pc.fill_null(own[PARENT_STEP], 0))
        if (steps < 0).any():
            row = int(np.argmax(steps < 0))
            raise EpisodeInvalidError(
                f"{PARENT_STEP} at step {row}: found {steps[row]}, expected the number of a step, "
                "or NULL."
            )


def _fill_behavior_log_probs(stated: Array | None, lists: _Lists) -> Array:
    """Return the stated log-probs, and where there is none the sums of those of the tokens."""
    sums = _sum_rows(lists, lambda log_probs: np.minimum(log_probs, 0))
    if stated is None:
        return np.where(lists.known, sums, np.nan).astype(np.float32)
    magnitudes = _sum_rows(lists, np.abs)
    unknown = np.isnan(stated)
    # Whoever summed them may have summed what is above 0 too.
    raw = _sum_rows(lists, lambda log_probs: log_probs)
    tolerance = _SUM_RELATIVE_TOLERANCE * magnitudes + _SUM_TOLERANCE
    off = np.minimum(np.abs(stated - sums), np.abs(stated - raw)) > tolerance
    wrong = np.flatnonzero(off & lists.known & ~unknown)
    if len(wrong):
        row = wrong[0]
        raise EpisodeInvalidError(
            f"behavior_log_prob at step {row}: found {stated[row]:g}, expected {sums[row]:g}, the "
            f"sum of its {ACTION_LOG_PROBS}. Leave it out, and it is computed."
        )
    return np.where(unknown & lists.known, sums, stated).astype(np.float32)


def _sum_rows(lists: _Lists, function: Callable[[Array], Array]) -> Array:
    """Return the sum of a function of each row's values, added in order, float64 [T]."""
    values, lengths = numbers(lists.values), lists.lengths
    offsets = np.append(0, np.cumsum(lengths))
    sums = np.zeros(len(lengths))
    start = 0
    while start < len(lengths):
        end = int(np.searchsorted(offsets, offsets[start] + _SUMMED_AT_ONCE, side="right")) - 1
        end = max(end, start + 1)
        some = values[offsets[start] : offsets[end]].astype(np.float64)
        rows = np.repeat(np.arange(end - start), lengths[start:end])
        sums[start:end] = np.bincount(rows, function(some), end - start)
        start = end
    return sums
