"""The project's own rules: layout, links, import contracts, constraints, the public names."""

import ast
import os
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import replaylake

ROOT = Path(__file__).parent.parent
STAGES = ["cli", "datastore", "offline", "online", "serve"]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_only_replaylake_claims_the_import_name() -> None:
    assert set(packages_distributions()["replaylake"]) == {"replaylake"}


def test_the_import_name_holds_links_to_the_stages_and_nothing_else() -> None:
    package = ROOT / "src" / "replaylake"
    entries = {entry.name for entry in package.iterdir()} - {"__pycache__"}
    assert entries == {"__init__.py", "py.typed", *STAGES}
    for stage in STAGES:
        assert (package / stage).readlink() == Path("..", "..", stage)
        assert (package / stage / "__init__.py").is_file()


def test_a_package_init_holds_one_docstring() -> None:
    inits = [init for stage in STAGES for init in (ROOT / stage).rglob("__init__.py")]
    assert len(inits) >= len(STAGES)
    for init in inits:
        tree = ast.parse(init.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), init
        assert len(tree.body) == 1, init


def test_every_folder_with_modules_is_a_package() -> None:
    for stage in STAGES:
        for module in (ROOT / stage).rglob("*.py"):
            assert (module.parent / "__init__.py").is_file(), module


def test_constraints_pin_every_direct_dependency() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    assert versions["torch"] == "2.13.0"
    assert versions["ray"] == "2.60.0"
    project = PYPROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    for requirement in map(Requirement, chain.from_iterable(groups)):
        if requirement.name != "replaylake":
            version = versions[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), requirement


def test_only_the_extra_offline_bounds_versions_from_above() -> None:
    project = PYPROJECT["project"]
    groups = {"base": project["dependencies"], **project["optional-dependencies"]}
    assert project["requires-python"] == ">=3.11"
    for group, requirements in groups.items():
        for requirement in map(Requirement, requirements):
            if group != "offline":
                assert {clause.operator for clause in requirement.specifier} <= {">="}, requirement


def test_tests_import_torch_from_the_modules_that_need_it_alone() -> None:
    """What .ci/pythons leaves out, where there is no torch, is found by its imports at the top."""
    for path in (ROOT / "tests" / "datastore").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if "torch" not in text:
            continue
        nested = [
            node
            for function in ast.parse(text).body
            if isinstance(function, ast.FunctionDef | ast.ClassDef)
            for node in ast.walk(function)
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert not any("torch" in ast.unparse(node) for node in nested), path


def test_importing_replaylake_imports_nothing_heavy() -> None:
    code = "import sys; old = set(sys.modules); import replaylake; print(*set(sys.modules) - old)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    loaded = {name.partition(".")[0] for name in result.stdout.split()}
    assert loaded <= {"replaylake", *sys.stdlib_module_names}


@pytest.mark.parametrize("name", replaylake.__all__)
def test_a_public_name_resolves(name: str) -> None:
    assert getattr(replaylake, name) is not None
    assert name in dir(replaylake)


def test_a_misspelled_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'opne'"):
        replaylake.opne  # noqa: B018 - reading the attribute is the test
