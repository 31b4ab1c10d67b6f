"""RecordLayout: where in a packed record each value of a step lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replaylake.datastore.episodes import schema
from replaylake.datastore.episodes.schema import DatasetSpec
from replaylake.datastore.episodes.spaces import (
    Array,
    Box,
    Dict,
    Space,
    Text,
    Tuple,
    Values,
    leaves,
    value_dtype,
    value_shape,
)
from replaylake.datastore.errors import ConfigInvalidError, NotFoundError, SpaceUnsupportedError
from replaylake.datastore.replay.arguments import check_int

# Steps from this one to the end of its run, itself included; 0 marks a tail.
STEPS_LEFT: Final = "steps_left"
# The step's row key. A tail has none: its first half is 1 + the position where its episode goes on,
# or 0 where it does not.
KEY: Final = "key"
# Whether the step has a successor or is a termination.
BOOTSTRAPPABLE: Final = "bootstrappable"
_COLUMN_PREFIX: Final = "column."
# A run of one step takes as many records.
MAX_FRAMES: Final = 1024


@dataclass(frozen=True)
class RecordLayout:
    """How one step is packed; decided by the dataset's spaces and by what a view asked for.

    columns: further columns kept with each step, by name, in their Arrow types (numbers, flags and
    fixed-size lists of them). float64: keep observations, actions and columns that are so stored,
    instead of decoding them to float32. frame_stack: how many consecutive observations are stacked
    when sampled; each is stored once, and `frame_stack - 1` records before each run hold what came
    before it.
    """

    spec: DatasetSpec
    columns: Mapping[str, pa.DataType]
    float64: bool = False
    frame_stack: int = 1

    def __post_init__(self) -> None:
        check_int(
            "replay: frame_stack",
            self.frame_stack,
            minimum=1,
            maximum=MAX_FRAMES,
            advice="1 is none.",
        )
        if self.frame_stack > 1 and not isinstance(self.spec.observation_space, Box):
            raise SpaceUnsupportedError(
                f"replay: found frame_stack {self.frame_stack} over a "
                f"{type(self.spec.observation_space).__name__} space, expected a Box. Stack the "
                "parts of it in the environment instead."
            )

    @cached_property
    def dtype(self) -> np.dtype[np.void]:
        """The structured dtype of one record, a multiple of 8 bytes.

        Raises: SpaceUnsupportedError for Text, which has no fixed width, and for such columns.
        """
        fields: list[Any] = [(KEY, np.uint64, (2,))]
        for column, space in (
            (schema.OBSERVATION, self.spec.observation_space),
            (schema.ACTION, self.spec.action_space),
        ):
            for name, leaf in leaves(space, column):
                if isinstance(leaf, Text):
                    raise SpaceUnsupportedError(
                        f"{name}: found a Text space, expected numbers. "
                        "Replay packs fixed-width records; read transcripts with SQL."
                    )
                fields.append((name, self._record_dtype(value_dtype(leaf)), value_shape(leaf)))
        for name, kind in self.columns.items():
            fields.append((_COLUMN_PREFIX + name, *self._column(name, kind)))
        fields += [
            (schema.REWARD, np.float32),
            (schema.BEHAVIOR_LOG_PROB, np.float32),
            (STEPS_LEFT, np.int32),
            (schema.TERMINATED, np.bool_),
            (BOOTSTRAPPABLE, np.bool_),
        ]
        if self.spec.mask_size is not None:
            fields.append((schema.ACTION_MASK, np.bool_, (self.spec.mask_size,)))
        return np.dtype(fields, align=True)

    @cached_property
    def items_dtype(self) -> np.dtype[np.void]:
        """The same record with each field one item of bytes, to be copied as such."""
        fields: Any = self.dtype.fields
        described: Any = {
            "names": list(fields),
            "formats": [f"V{kind.itemsize}" for kind, _ in fields.values()],
            "offsets": [offset for _, offset in fields.values()],
            "itemsize": self.dtype.itemsize,
        }
        items: np.dtype[np.void] = np.dtype(described)
        return items

    @property
    def num_words(self) -> int:
        """64-bit words in a record."""
        return self.dtype.itemsize // 8

    def rows(self, words: NDArray[np.uint64]) -> NDArray[np.void]:
        """View words [M, length * num_words] as records [M, length], without a copy."""
        return words.view(self.dtype)

    def observations(self, rows: NDArray[np.void]) -> Values:
        """Return the observations of records [...]: views [..., *obs], nested as the space is."""
        return _nest(rows, schema.OBSERVATION, self.spec.observation_space)

    def actions(self, rows: NDArray[np.void]) -> Values:
        """Return the actions of records [...]: views [..., *act], nested as the space is."""
        return _nest(rows, schema.ACTION, self.spec.action_space)

    def column_values(self, rows: NDArray[np.void]) -> dict[str, Array] | None:
        """Return the further columns of records [...] as views, or None where there are none."""
        if not self.columns:
            return None
        return {name: rows[_COLUMN_PREFIX + name] for name in self.columns}

    def column_field(self, name: str) -> str:
        """Return the record's field that holds a further column.

        Raises: ConfigInvalidError if the view was made without it.
        """
        if name not in self.columns:
            raise ConfigInvalidError(
                f"column {name!r}: found {', '.join(self.columns) or 'none'} in this replay view, "
                f"expected it. Make the view with columns=[{name!r}]."
            )
        return _COLUMN_PREFIX + name

    def _record_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return np.dtype(np.float32) if dtype == np.float64 and not self.float64 else dtype

    def _column(self, name: str, kind: pa.DataType) -> tuple[np.dtype[Any], tuple[int, ...]]:
        shape: tuple[int, ...] = ()
        if pa.types.is_fixed_size_list(kind):
            kind, shape = kind.value_type, (kind.list_size,)
        types = pa.types
        if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
            return self._record_dtype(np.dtype(kind.to_pandas_dtype())), shape
        raise SpaceUnsupportedError(
            f"column {name!r}: found {kind}, expected numbers, flags or fixed-size lists of them. "
            "Read it with SQL."
        )


def make_layout(
    spec: DatasetSpec,
    table: pa.Schema,
    columns: tuple[str, ...] = (),
    *,
    float64: bool = False,
    frame_stack: int = 1,
) -> RecordLayout:
    """Return the layout of a table's steps with some further columns.

    Raises: NotFoundError for a column that the table lacks; ConfigInvalidError;
    SpaceUnsupportedError.
    """
    if missing := [name for name in columns if name not in table.names]:
        raise NotFoundError(
            f"replay: found no column {', '.join(missing)}, expected some of "
            f"{', '.join(table.names)}. Name columns as the dataset does."
        )
    kinds = {name: table.field(name).type for name in columns}
    layout = RecordLayout(spec, kinds, float64=float64, frame_stack=frame_stack)
    # Refuses what has no fixed width before anything is read.
    _ = layout.dtype
    return layout


def _nest(rows: NDArray[np.void], column: str, space: Space) -> Values:
    if not isinstance(space, Dict | Tuple):
        return rows[column]
    nested: dict[str, Any] = {}
    for name, _ in leaves(space, column):
        *parents, key = name.split(".")[1:]
        target: Any = nested
        for parent in parents:
            target = target.setdefault(parent, {})
        target[key] = rows[name]
    return nested
