"""Images as inputs of a language model: decoded and preprocessed as the model's folder states.

Models whose image processor returns the same keys for each image are supported, such as LLaVA
and Qwen-VL: the inputs of several images are concatenated.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from replaylake.datastore.errors import SchemaMismatchError, SourceInvalidError
from replaylake.datastore.interchange.formats.images import decode_rgb
from replaylake.offline.language.pretrained import ModelFolder, load_image_processor

# Of preprocessed images: an epoch draws each again.
_CACHE_BYTES: Final = 256 << 20

_Inputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ImageInputs:
    """The preprocessed images of some sequences: the inputs of each image, in their order."""

    rows: Sequence[Sequence[_Inputs]]

    def select(self, rows: slice | torch.Tensor) -> ImageInputs:
        """Return those of some of the sequences."""
        if isinstance(rows, slice):
            return ImageInputs(self.rows[rows])
        return ImageInputs([self.rows[row] for row in rows.tolist()])

    def concatenate(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        """Return the model's arguments, each over all images; empty without images.

        Raises: SchemaMismatchError if the shapes of two images differ.
        """
        images = [image for row in self.rows for image in row]
        if not images:
            return {}
        try:
            return {
                name: torch.cat([image[name] for image in images]).to(device) for name in images[0]
            }
        except RuntimeError as error:
            raise SchemaMismatchError(
                f"images: found inputs of different shapes ({error}), expected an image processor "
                "whose images have one shape. Set its size in preprocessor_config.json.",
                parameter="model",
            ) from error


class ImageProcessor:
    """The image processor of a model's folder, with a cache of what it made."""

    def __init__(self, folder: ModelFolder) -> None:
        """Load it. Raises: NotFoundError, SourceInvalidError, ExtraMissingError."""
        self._processor = load_image_processor(folder)
        self._cache: OrderedDict[str, dict[str, torch.Tensor]] = OrderedDict()
        self._num_bytes = 0

    def prepare(self, images: Sequence[Sequence[bytes]]) -> ImageInputs:
        """Return the inputs of the images of some sequences.

        images: for each sequence its files, PNG, JPEG, GIF or WebP. Raises: SourceInvalidError
        for other bytes, with their sha256.
        """
        return ImageInputs([[self._prepare(content) for content in row] for row in images])

    def save(self, folder: Any) -> None:
        """Write its configuration beside a model. Raises: OSError."""
        self._processor.save_pretrained(folder)

    def _prepare(self, content: bytes) -> _Inputs:
        digest = hashlib.sha256(content).hexdigest()
        if (found := self._cache.get(digest)) is not None:
            self._cache.move_to_end(digest)
            return found
        where = f"image with the sha256 {digest}"
        pixels = decode_rgb(content, where)
        try:
            found = dict(self._processor(images=[pixels], return_tensors="pt"))
        except ValueError as error:
            raise SourceInvalidError(
                f"{where}: {error}, expected an image that the model's image processor takes. "
                "Leave its episode out by `where`."
            ) from error
        self._cache[digest] = found
        self._num_bytes += _size(found)
        while self._num_bytes > _CACHE_BYTES and len(self._cache) > 1:
            self._num_bytes -= _size(self._cache.popitem(last=False)[1])
        return found


def image_arguments(model: Any, ids: torch.Tensor, images: ImageInputs) -> dict[str, torch.Tensor]:
    """Return the arguments of a model's forward pass for the images of token ids [B, T].

    Raises: SchemaMismatchError unless each image has as many image tokens as the model has features
    of it.
    """
    token = getattr(model.config, "image_token_id", None)
    is_image = torch.eq(ids, -1 if token is None else token)
    for row, own in zip(is_image.cpu(), images.rows, strict=True):
        if (expected := _count_tokens(model, own)) is None:
            is_right = bool(row.any()) == bool(own)
        else:
            is_right = _find_runs(row) == expected
        if not is_right:
            raise SchemaMismatchError(
                f"images: found a sequence with {len(own)} images and {int(row.sum())} image "
                f"tokens (id {token}), expected the tokens that the model's processor puts in the "
                f"place of each image{'' if expected is None else f', {expected}'}. Record the ids "
                "that the engine was given, and messages with their images.",
                parameter="model",
            )
    arguments = images.concatenate(ids.device)
    # A model of peft takes any argument and passes it on to the model that it wraps.
    wrapped = model.get_base_model() if hasattr(model, "get_base_model") else model
    if arguments and "mm_token_type_ids" in inspect.signature(wrapped.forward).parameters:
        arguments["mm_token_type_ids"] = is_image.long()
    return arguments


def _count_tokens(model: Any, images: Sequence[_Inputs]) -> list[int] | None:
    """Return the tokens of each image, if they follow from its size; None if only the model knows.

    A model with `image_grid_thw`, such as Qwen-VL, has one token for each square of merged patches.
    """
    if images and "image_grid_thw" not in images[0]:
        return None
    merged = getattr(model.config.vision_config, "spatial_merge_size", None)
    if merged is None:
        return None
    return [int(one["image_grid_thw"].prod()) // merged**2 for one in images]


def _find_runs(row: torch.Tensor) -> list[int]:
    """Return the lengths of the runs of true values."""
    edges = torch.diff(row.int(), prepend=row.new_zeros(1).int(), append=row.new_zeros(1).int())
    starts, ends = torch.nonzero(edges == 1)[:, 0], torch.nonzero(edges == -1)[:, 0]
    lengths: list[int] = (ends - starts).tolist()
    return lengths


@contextmanager
def naming_images(images: ImageInputs | None) -> Iterator[None]:
    """Raise what a model says of its images as SchemaMismatchError."""
    try:
        yield
    except ValueError as error:
        if images is None:
            raise
        text = " ".join(str(error).split())[:300]
        raise SchemaMismatchError(
            f"images: {text}, expected the image tokens that the model's processor puts in the "
            "place of each image. Record the ids that the engine was given.",
            parameter="model",
        ) from error


def _size(inputs: _Inputs) -> int:
    return sum(one.numel() * one.element_size() for one in inputs.values())
