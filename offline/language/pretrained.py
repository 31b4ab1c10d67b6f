"""Pretrained models: check, load and write directories in the format of transformers.

A folder has config.json, weights in safetensors and tokenizer.json. Nothing is downloaded, and no
code in the folder is executed. Its version is the sha256 of its files.
"""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors import SafetensorError

from replaylake.datastore.errors import (
    ConfigInvalidError,
    ExtraMissingError,
    NotFoundError,
    SourceInvalidError,
)
from replaylake.datastore.lake.policies.manifest import MANIFEST

Task = Literal["sequence classifier", "causal language model"]
TOKENIZER: Final = "tokenizer.json"
_CONFIG: Final = "config.json"
_IMAGE_PROCESSOR: Final = "preprocessor_config.json"
_ADAPTER_CONFIG: Final = "adapter_config.json"
_AUTO_CLASSES: Final = {
    "sequence classifier": "AutoModelForSequenceClassification",
    "causal language model": "AutoModelForCausalLM",
}
# The file of a folder with the origin of its model.
ORIGIN: Final = "replaylake.json"
# Files that determine the outputs; a folder may have others, such as a README.
_PATTERNS: Final = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")


@dataclass(frozen=True)
class ModelFolder:
    """A folder with a model. files: sha256 by file name; sha256: one over all of these."""

    path: Path
    sha256: str
    files: dict[str, str]


def check_model_folder(path: str | Path) -> ModelFolder:
    """Check that a folder has a complete model and no code, and hash its files.

    Raises: NotFoundError for a missing file; SourceInvalidError for code, damaged JSON, or an
    adapter without its model.
    """
    folder = Path(path)
    if (folder / _ADAPTER_CONFIG).is_file() and not (folder / _CONFIG).is_file():
        raise SourceInvalidError(
            f"model: {folder} is an adapter of peft ({_ADAPTER_CONFIG}), expected a folder with a "
            "whole model. Merge the adapter into its model; training with lora_merge = true "
            "writes the merged model.",
            parameter="model",
        )
    for needed in (_CONFIG, TOKENIZER):
        if not (folder / needed).is_file():
            raise NotFoundError(
                f"model: {folder} has no {needed}, expected a folder that transformers wrote, "
                "with config.json, *.safetensors and tokenizer.json.",
                parameter="model",
            )
    if not list(folder.glob("*.safetensors")):
        raise NotFoundError(
            f"model: {folder} has no *.safetensors, expected weights in this format: others "
            "may contain code. Save the model again with safe serialization.",
            parameter="model",
        )
    _refuse_code(folder)
    return hash_model_folder(folder)


def hash_model_folder(folder: Path) -> ModelFolder:
    """Hash the files of a folder with a model or an adapter."""
    files = {}
    found = {path for pattern in _PATTERNS for path in folder.rglob(pattern)}
    for file_path in sorted(found - {folder / ORIGIN, folder / MANIFEST}):
        with file_path.open("rb") as file:
            files[file_path.relative_to(folder).as_posix()] = hashlib.file_digest(
                file, "sha256"
            ).hexdigest()
    sha256 = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return ModelFolder(folder.resolve(), sha256, files)


def load_pretrained(
    folder: ModelFolder,
    task: Task,
    *,
    num_outputs: int | None = None,
    new_head: bool = False,
    device: str = "cpu",
) -> tuple[Any, Any]:
    """Return the model, in float32 and in evaluation mode, and its tokenizer.

    num_outputs: number of outputs that a classifier must have. new_head: whether a language model
    is accepted as a classifier, whose head of num_outputs outputs then begins with zeros.

    Raises: SourceInvalidError for another architecture or missing weights; ExtraMissingError
    without transformers.
    """
    transformers = _import_transformers(f"a {task}")
    path = folder.path
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        with _without_messages():
            config = transformers.AutoConfig.from_pretrained(path, **options)
            is_given = num_outputs is not None and not new_head
            if is_given and config.num_labels != num_outputs:
                raise SourceInvalidError(
                    f"model: {path} has {config.num_labels} outputs, expected {num_outputs}. Give "
                    "a reward model.",
                    parameter="model",
                )
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, **options)
            auto_class = _AUTO_CLASSES[task]
            if task == "causal language model" and has_images(config):
                auto_class = "AutoModelForImageTextToText"
            head = {"num_labels": num_outputs} if new_head else {}
            model, loading = getattr(transformers, auto_class).from_pretrained(
                path,
                use_safetensors=True,
                dtype=torch.float32,
                output_loading_info=True,
                **options,
                **head,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        text = " ".join(str(error).split())[:300]
        raise SourceInvalidError(
            f"model: {path}: {text}, expected a {task} of transformers.", parameter="model"
        ) from error
    missing = set(loading["missing_keys"])
    if new_head:
        missing -= _reset_head(model, missing, tokenizer)
    if absent := sorted(map(str, (*missing, *loading["mismatched_keys"]))):
        # transformers would fill them with random numbers.
        raise SourceInvalidError(
            f"model: {path} has no weights {', '.join(absent[:3])}, expected those of a "
            f"{type(model).__name__}. Save the model with this architecture.",
            parameter="model",
        )
    return model.to(device).eval(), tokenizer


def _reset_head(model: Any, missing: set[str], tokenizer: Any) -> set[str]:
    """Set weights of a classifier's head that were not loaded to zeros; return their names."""
    body = f"{model.base_model_prefix}."
    names = {name for name in missing if not name.startswith(body)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.zero_()
    # Where sequences are padded, it shows the model the last token of each.
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return names


def add_adapter(
    model: Any, task: Task, *, rank: int, alpha: float, targets: Sequence[str] | None, seed: int
) -> Any:
    """Return a model of peft whose trainable weights are those of a LoRA adapter alone.

    Args:
        model: from load_pretrained; its modules are replaced in place, and its weights frozen.
        task: of the model; the head of a sequence classifier is trained as a whole.
        rank: of the added matrices.
        alpha: the adapter's output is scaled by alpha / rank.
        targets: names, or ends of names, of the modules that get one; None: all linear layers but
            the output.
        seed: of the initial weights. The adapter's output is 0 at first.

    Raises: ExtraMissingError without peft; ConfigInvalidError for targets that the model does not
    have.

    Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
    """
    try:
        import peft
    except ImportError:
        raise ExtraMissingError(
            "lora_rank needs peft, which is not installed. Install it with: "
            "pip install 'replaylake[language]'"
        ) from None
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules="all-linear" if targets is None else list(targets),
        task_type="SEQ_CLS" if task == "sequence classifier" else "CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft 0.21 reads a property that transformers 5.24 has renamed.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        torch.manual_seed(seed)
        try:
            adapted = peft.get_peft_model(model, config)
        except ValueError as error:
            text = " ".join(str(error).split())[:300]
            raise ConfigInvalidError(
                f"lora_targets: found {targets}: {text}. Name linear modules of the model.",
                parameter="lora_targets",
            ) from error
    return adapted.eval()


def merge_adapter(model: Any) -> Any:
    """Return a copy of a model of peft with its adapter merged into the weights."""
    return copy.deepcopy(model).merge_and_unload()


def save_pretrained(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model and its tokenizer as a folder that load_pretrained reads.

    Of a model of peft, the adapter alone is written, as peft writes it. Raises: OSError.
    """
    try:
        with _without_messages():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        if (path := folder / _ADAPTER_CONFIG).is_file():
            # peft writes sets in an order that differs between processes.
            body = json.loads(path.read_bytes())
            for value in body.values():
                if isinstance(value, list):
                    value.sort()
            path.write_text(json.dumps(body, indent=2, sort_keys=True))
    except SafetensorError as error:  # such as a full disk
        raise OSError(" ".join(str(error).split())) from error


def has_images(config: Any) -> bool:
    """Whether a model with this configuration of transformers takes images."""
    return getattr(config, "vision_config", None) is not None


def load_image_processor(folder: ModelFolder) -> Any:
    """Return the image processor of a model that takes images.

    Raises: NotFoundError, SourceInvalidError, ExtraMissingError.
    """
    transformers = _import_transformers("a model with images")
    path = folder.path / _IMAGE_PROCESSOR
    if not path.is_file():
        raise NotFoundError(
            f"model: {folder.path} has no {path.name}, expected the image processor of this model. "
            "Save it there with its save_pretrained.",
            parameter="model",
        )
    try:
        with _without_messages():
            return transformers.AutoImageProcessor.from_pretrained(
                folder.path, local_files_only=True, trust_remote_code=False
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        text = " ".join(str(error).split())[:300]
        raise SourceInvalidError(
            f"model: {path}: {text}, expected an image processor of transformers.",
            parameter="model",
        ) from error


def _import_transformers(what: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise ExtraMissingError(
            f"{what} needs transformers, which is not installed. Install it with: "
            "pip install 'replaylake[language]'"
        ) from None
    return transformers


@contextmanager
def _without_messages() -> Iterator[None]:
    """Keep transformers from logging and drawing progress: errors are raised instead."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()


def _refuse_code(folder: Path) -> None:
    """Refuse a folder whose files name classes of its own. Raises: SourceInvalidError."""
    for path in sorted(folder.glob("*.json")):
        if not path.name.endswith("config.json"):
            continue
        try:
            body = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise SourceInvalidError(
                f"model: {path}: {error}, expected a JSON file. Copy the model again.",
                parameter="model",
            ) from error
        if isinstance(body, dict) and "auto_map" in body:
            raise SourceInvalidError(
                f"model: {path} refers to its own code (auto_map), expected an architecture of "
                "transformers: code in a model's folder is never executed.",
                parameter="model",
            )
