"""Weights: the tensors of files that other programs wrote. Nothing in a file is executed.

A file of torch.save is a pickle in a zip archive. It is loaded with `weights_only`, which builds
tensors, numbers, texts and containers of them, and refuses everything else.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from replaylake.datastore.errors import NotFoundError, SourceInvalidError

# A policy network of 100 million float32 weights, with its critics and its optimizer's moments.
MAX_BYTES: Final = 2 << 30
# torch.load executed planted code in spite of `weights_only` before 2.6 (CVE-2025-32434).
_MIN_TORCH: Final = (2, 6)
_TORCH_ERRORS: Final = (
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OSError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zlib.error,
)
_MAX_REASON: Final = 300


def read_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return a file's bytes. Raises: NotFoundError; SourceInvalidError if it is too large."""
    try:
        num_bytes = path.stat().st_size
        if path.is_file() and num_bytes <= max_bytes:
            return path.read_bytes()
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: no such file. Give the file of the policy.") from error
    except OSError as error:
        raise SourceInvalidError(f"{path}: cannot be read: {error.strerror}.") from error
    if not path.is_file():
        raise SourceInvalidError(f"{path}: is not a file. Give the file of the policy.")
    raise SourceInvalidError(
        f"{path}: found {num_bytes:,} bytes, expected at most {max_bytes:,}. Save the policy "
        "without its replay buffer and its optimizer."
    )


def read_entry(data: bytes, name: str, what: str, *, max_bytes: int = MAX_BYTES) -> bytes | None:
    """Return an entry of a zip archive, None if there is none of that name.

    Raises: SourceInvalidError if the archive is damaged, or the entry too large.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if name not in archive.namelist():
                return None
            num_bytes = archive.getinfo(name).file_size
            if num_bytes <= max_bytes:
                return archive.read(name)
    except _TORCH_ERRORS as error:
        raise SourceInvalidError(
            f"{what}: its entry {name} cannot be read ({_shorten(error)}): the archive is damaged "
            "or incomplete. Copy it again."
        ) from error
    raise SourceInvalidError(
        f"{what}: its entry {name} has {num_bytes:,} bytes, expected at most {max_bytes:,}."
    )


def load_tensors(data: bytes, what: str) -> Any:
    """Return what torch.save wrote, with tensors on the CPU.

    Raises: SourceInvalidError if it is damaged, too large, or has any object besides tensors,
    numbers, texts and containers of these; nothing of it is executed.
    """
    _check_torch()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
            num_bytes = sum(info.file_size for info in archive.infolist())
        if any(name.endswith("constants.pkl") for name in names):
            raise SourceInvalidError(
                f"{what}: found a TorchScript module, expected the weights that torch.save writes. "
                "Name its format."
            )
        if num_bytes <= MAX_BYTES:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except _TORCH_ERRORS as error:
        raise SourceInvalidError(
            f"{what}: torch.load with weights_only refused it ({_shorten(error)}). Nothing in it "
            "was executed: the file is damaged, or has objects besides tensors, numbers and texts. "
            "Save the network's state_dict() alone."
        ) from error
    raise SourceInvalidError(
        f"{what}: found {num_bytes:,} bytes, expected at most {MAX_BYTES:,}. Save the policy's "
        "state_dict() alone."
    )


@dataclass(frozen=True)
class Layer:
    """A Linear (weight [out, in]) or a Conv2d (weight [out, in, height, width]) with its bias."""

    name: str
    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def is_convolution(self) -> bool:
        return self.weight.dim() == 4

    def to_linear(self) -> nn.Linear:
        """Return the layer as a module."""
        out, num_inputs = self.weight.shape
        module = nn.Linear(num_inputs, out, bias=self.bias is not None)
        self._copy_to(module)
        return module

    def to_convolution(self, stride: int) -> nn.Conv2d:
        """Return the layer as a module, without padding."""
        out, channels, height, width = self.weight.shape
        module = nn.Conv2d(channels, out, (height, width), stride, bias=self.bias is not None)
        self._copy_to(module)
        return module

    def _copy_to(self, module: nn.Linear | nn.Conv2d) -> None:
        with torch.no_grad():
            module.weight.copy_(self.weight)
            if self.bias is not None:
                assert module.bias is not None  # made for it
                module.bias.copy_(self.bias)


class Weights:
    """Named tensors, float32. Tensors that nothing takes are of an unknown architecture."""

    def __init__(self, tensors: Any, what: str) -> None:
        """Check the tensors.

        Raises: SourceInvalidError if it is no mapping of names to tensors, or one is not finite.
        """
        if not isinstance(tensors, Mapping) or not tensors:
            raise SourceInvalidError(
                f"{what}: found {type(tensors).__name__}, expected a state_dict: tensors by name."
            )
        self._what = what
        self._tensors = {str(name): _check_tensor(what, name, t) for name, t in tensors.items()}
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def has(self, prefix: str) -> bool:
        """Whether a name begins with a prefix."""
        return any(name.startswith(prefix) for name in self._tensors)

    def take(self, name: str) -> torch.Tensor:
        """Return a tensor. Raises: SourceInvalidError if there is none of that name."""
        if name not in self._tensors:
            raise SourceInvalidError(
                f"{self._what}: found no tensor {name!r}, expected one beside {self._describe()}."
            )
        self._taken.add(name)
        return self._tensors[name]

    def take_layer(self, name: str) -> Layer:
        """Return the Linear or Conv2d of a name. Raises: SourceInvalidError for another kind."""
        weight = self.take(f"{name}.weight")
        bias = self.take(f"{name}.bias") if f"{name}.bias" in self else None
        sizes = (weight.shape[0],) if weight.dim() else ()
        if weight.dim() not in (2, 4) or (bias is not None and tuple(bias.shape) != sizes):
            raise SourceInvalidError(
                f"{self._what}: found {name!r} with a weight {list(weight.shape)}, expected a "
                "Linear or a Conv2d: other layers are not converted. Export the policy to ONNX."
            )
        return Layer(name, weight, bias)

    def take_layers(self, prefix: str) -> list[Layer]:
        """Return the layers of a Sequential, such as `prefix.0`, `prefix.2`, in their order."""
        pattern = re.compile(re.escape(prefix) + r"\.(\d{1,9})\.weight")
        numbers = sorted(int(m[1]) for name in self if (m := pattern.fullmatch(name)))
        return [self.take_layer(f"{prefix}.{number}") for number in numbers]

    def ignore(self, *prefixes: str) -> None:
        """Take tensors that do not act, such as those of critics."""
        self._taken.update(name for name in self._tensors if name.startswith(prefixes))

    def check_all_taken(self) -> None:
        """Refuse a network with further tensors. Raises: SourceInvalidError, naming them."""
        left = [name for name in self._tensors if name not in self._taken]
        if left:
            shown = ", ".join(left[:6]) + (", ..." if len(left) > 6 else "")
            raise SourceInvalidError(
                f"{self._what}: found the tensors {shown}, which the standard networks do not "
                "have. A network of one's own is imported as ONNX."
            )

    def _describe(self) -> str:
        names = list(self._tensors)
        return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


def _check_tensor(what: str, name: object, tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        raise SourceInvalidError(
            f"{what}: found {type(tensor).__name__} as {name!r}, expected a dense tensor."
        )
    if tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_complex():
        raise SourceInvalidError(
            f"{what}: found {name!r} of {tensor.dtype} on {tensor.device}, expected real numbers, "
            "not quantized, on the CPU. Save the network's state_dict() from there."
        )
    # A view may claim more numbers than it has, and copying it takes the memory that it claims.
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise SourceInvalidError(
            f"{what}: found {name!r} of {list(tensor.shape)} numbers in "
            f"{tensor.untyped_storage().nbytes():,} bytes, expected as many as it has."
        )
    try:
        values = tensor.detach().float()
    except (RuntimeError, TypeError) as error:  # packed dtypes, of less than a byte
        raise SourceInvalidError(
            f"{what}: found {name!r} of {tensor.dtype}, which torch {torch.__version__} cannot "
            f"convert to float32 ({_shorten(error)}). Save the network's state_dict() as floats."
        ) from error
    if not bool(torch.isfinite(values).all()):
        raise SourceInvalidError(
            f"{what}: found numbers in {name!r} that are not finite. The training diverged: import "
            "an earlier checkpoint."
        )
    return values


def _check_torch() -> None:
    release = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if release < _MIN_TORCH:
        raise SourceInvalidError(
            f"torch {torch.__version__}: its torch.load can execute code of a file in spite of "
            "weights_only (CVE-2025-32434). Install torch 2.6 or newer."
        )


def _shorten(error: BaseException) -> str:
    return " ".join(str(error).split())[:_MAX_REASON]
