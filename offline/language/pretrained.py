"""Pretrained models: check, load and write directories in the format of transformers.

A folder has config.json, weights in safetensors and tokenizer.json. Nothing is downloaded, and no
code in the folder is executed. Its version is the sha256 of its files.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors import SafetensorError

from replaylake.datastore.errors import ExtraMissingError, NotFoundError, SourceInvalidError
from replaylake.datastore.lake.policies.manifest import MANIFEST

Task = Literal["sequence classifier", "causal language model"]
TOKENIZER: Final = "tokenizer.json"
_CONFIG: Final = "config.json"
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

    Raises: NotFoundError for a missing file; SourceInvalidError for code or damaged JSON.
    """
    folder = Path(path)
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
    folder: ModelFolder, task: Task, *, num_outputs: int | None = None, device: str = "cpu"
) -> tuple[Any, Any]:
    """Return the model, in float32 and in evaluation mode, and its tokenizer.

    num_outputs: number of outputs that a classifier must have. Raises: SourceInvalidError for
    another architecture or missing weights; ExtraMissingError without transformers.
    """
    try:
        import transformers
        from transformers.utils import logging
    except ImportError:
        raise ExtraMissingError(
            f"a {task} needs transformers, which is not installed. Install it with: "
            "pip install 'replaylake[language]'"
        ) from None
    path = folder.path
    options = {"local_files_only": True, "trust_remote_code": False}
    # Errors are raised below instead of logged.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        if num_outputs is not None:
            found = transformers.AutoConfig.from_pretrained(path, **options).num_labels
            if found != num_outputs:
                raise SourceInvalidError(
                    f"model: {path} has {found} outputs, expected {num_outputs}. Give a reward "
                    "model.",
                    parameter="model",
                )
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **options)
        model, loading = getattr(transformers, _AUTO_CLASSES[task]).from_pretrained(
            path, use_safetensors=True, dtype=torch.float32, output_loading_info=True, **options
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        text = " ".join(str(error).split())[:300]
        raise SourceInvalidError(
            f"model: {path}: {text}, expected a {task} of transformers.", parameter="model"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
    if absent := sorted(map(str, (*loading["missing_keys"], *loading["mismatched_keys"]))):
        # transformers would fill them with random numbers.
        raise SourceInvalidError(
            f"model: {path} has no weights {', '.join(absent[:3])}, expected those of a "
            f"{type(model).__name__}. Save the model with this architecture.",
            parameter="model",
        )
    return model.to(device).eval(), tokenizer


def save_pretrained(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model and its tokenizer as a folder that load_pretrained reads. Raises: OSError."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except SafetensorError as error:  # such as a full disk
        raise OSError(" ".join(str(error).split())) from error
    finally:
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
