"""Packages of language models: registered whole, checked file by file, refused where others act."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from replaylake.datastore.errors import NotFoundError, PackageInvalidError, PolicyKindError
from replaylake.datastore.lake.lake import Lake, open_lake
from replaylake.datastore.lake.policies.manifest import (
    MANIFEST,
    LanguageSpec,
    describe_model,
    read_manifest,
)
from replaylake.datastore.lake.policies.package import check_package, find_package, load_policy
from replaylake.datastore.lake.policies.registry import PolicyRef
from replaylake.datastore.maintenance.fsck.fsck import fsck
from replaylake.datastore.maintenance.vacuum import vacuum

FILES = {
    "config.json": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 24,
        "max_position_embeddings": 32,
    },
    "generation_config.json": {"eos_token_id": 3, "temperature": 0.5},
    "tokenizer.json": {"model": {}},
    "tokenizer_config.json": {},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "additional_chat_templates").mkdir(parents=True)
    for name, body in FILES.items():
        (folder / name).write_text(json.dumps(body))
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    return folder


def sha256s(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def register(lake: Lake, folder: Path, name: str = "agent") -> PolicyRef:
    manifest = describe_model(folder, sha256s(folder), {"algorithm": "sft"})
    lineage = {"algorithm": "sft"}
    return lake.registry.register_model(name, folder, manifest, run_id="", lineage=lineage)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake", create=True)


def test_a_registered_model_has_all_of_its_files(lake: Lake, model: Path) -> None:
    ref = register(lake, model)
    manifest = check_package(ref.path, ref.manifest_sha256)
    assert manifest.is_language
    assert manifest.language == LanguageSpec(
        "LlamaForCausalLM", 24, 32, True, {"eos_token_id": 3, "temperature": 0.5}
    )
    assert manifest.body["format_version"] == 3
    assert manifest.body["kind"] == "language"
    assert (manifest.body["name"], manifest.body["version"]) == ("agent", 1)
    stored = sha256s(ref.path)
    del stored[MANIFEST]
    assert stored == sha256s(model) == {n: f["sha256"] for n, f in manifest.body["files"].items()}
    assert lake.registry.show(ref)["kind"] == "language"
    assert str(register(lake, model)) == "agent:2"
    assert not (model / MANIFEST).exists()
    assert fsck(lake).is_clean


def test_what_acts_refuses_it_by_name(lake: Lake, model: Path) -> None:
    ref = register(lake, model)
    with pytest.raises(PolicyKindError, match=r"policy agent:1: found a language model \(Llama"):
        load_policy(ref.path)
    with pytest.raises(PolicyKindError, match="expected a policy that maps observations to act"):
        _ = find_package(ref.path)[1].spec
    # How it is evaluated and promoted instead.
    with pytest.raises(PolicyKindError, match=r"on a dataset of them.* with a `measure` such as"):
        _ = find_package(ref.path)[1].spec


def test_an_unknown_policy_names_the_command_that_registers_one(lake: Lake) -> None:
    with pytest.raises(NotFoundError, match="of a language model, `replaylake policies register`"):
        lake.registry.resolve("nosuch:1")


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "chat_template.jinja"])
def test_an_altered_file_is_found(lake: Lake, model: Path, file: str) -> None:
    ref = register(lake, model)
    with (ref.path / file).open("ab") as opened:
        opened.write(b" ")
    with pytest.raises(PackageInvalidError, match=f"{file}: found sha256"):
        check_package(ref.path, ref.manifest_sha256)
    assert not fsck(lake).is_clean


def test_an_added_file_is_found(lake: Lake, model: Path) -> None:
    """transformers would load an adapter that somebody laid beside the weights."""
    ref = register(lake, model)
    (ref.path / "adapter_config.json").write_text("{}")
    with pytest.raises(PackageInvalidError, match=r"\['adapter_config.json'\] that the manifest"):
        check_package(ref.path, ref.manifest_sha256)


def test_vacuum_takes_all_files_of_a_deleted_version(lake: Lake, model: Path) -> None:
    first, second = register(lake, model), register(lake, model)
    lake.registry.marks.delete("agent", first.version)
    vacuum(lake, delete=True, now_ms=time.time_ns() // 1_000_000 + 8 * 86_400_000)
    assert not list(lake.storage.files(first.folder))
    assert len(sha256s(second.path)) == len(sha256s(model)) + 1
    check_package(second.path, second.manifest_sha256)


def test_a_file_that_changes_while_it_is_registered_is_refused(lake: Lake, model: Path) -> None:
    manifest = describe_model(model, sha256s(model), {})
    (model / "model.safetensors").write_bytes(b"others")
    with pytest.raises(PackageInvalidError, match=r"model.safetensors: found sha256"):
        lake.registry.register_model("agent", model, manifest, run_id="", lineage={})
    with pytest.raises(NotFoundError):
        lake.registry.resolve("agent")
    assert not list(lake.storage.files("_lake/policies"))


def rewritten(lake: Lake, model: Path, tmp_path: Path, change: Any) -> Path:
    """Return a copy of a package whose manifest was changed."""
    copy = tmp_path / "copy"
    shutil.copytree(register(lake, model).path, copy)
    body = json.loads((copy / MANIFEST).read_text())
    change(body)
    (copy / MANIFEST).write_text(json.dumps(body))
    return copy


@pytest.mark.parametrize(
    "name", ["../secret.json", "/etc/x.json", "pytorch_model.bin", "a.py", "./a.json", MANIFEST]
)
def test_no_other_files_can_be_listed(lake: Lake, model: Path, tmp_path: Path, name: str) -> None:
    copy = rewritten(
        lake, model, tmp_path, lambda body: body["files"].update({name: {"sha256": "0"}})
    )
    with pytest.raises(PackageInvalidError, match="expected names in the package's own folder"):
        read_manifest(copy)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_no_file_of_a_model_may_be_missing(
    lake: Lake, model: Path, tmp_path: Path, name: str
) -> None:
    copy = rewritten(lake, model, tmp_path, lambda body: body["files"].pop(name))
    with pytest.raises(PackageInvalidError, match=r"expected .* among them"):
        read_manifest(copy)


def test_a_later_field_is_ignored(lake: Lake, model: Path, tmp_path: Path) -> None:
    copy = rewritten(lake, model, tmp_path, lambda body: body["policy"].update(later=1))
    assert read_manifest(copy).language.vocabulary_size == 24


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"vocab_size": 8}, None),
        ({"vocab_size": 8, "n_positions": 64}, 64),
        ({"text_config": {"vocab_size": 8, "max_position_embeddings": 48}}, 48),
    ],
)
def test_the_context_is_found_under_each_of_its_names(
    model: Path, config: dict[str, Any], expected: int | None
) -> None:
    (model / "config.json").write_text(json.dumps({"architectures": ["A"], **config}))
    contents = describe_model(model, sha256s(model), {}).language
    assert (contents.context_tokens, contents.vocabulary_size) == (expected, 8)


def test_a_config_of_another_kind_is_refused(model: Path) -> None:
    (model / "config.json").write_text('{"architectures": ["ResNet"]}')
    with pytest.raises(PackageInvalidError, match="no `architectures` or no `vocab_size`"):
        describe_model(model, sha256s(model), {})
