"""The lock names exactly what is installed here and serving needs."""

from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from replaylake.datastore.errors import ExtraMissingError, ServeError
from replaylake.serve.package import lock as lock_module
from replaylake.serve.package.lock import NOT_SERVED, Pin, lock, lock_text


@pytest.fixture(scope="module")
def pins():
    return lock(["serve"])


def test_it_is_closed_and_of_the_versions_installed_here(pins):
    names = [pin.name for pin in pins]
    assert names == sorted(set(names))
    for pin in pins:
        found = metadata.distribution(pin.name)
        assert found.version == pin.version
        for needed in map(Requirement, found.requires or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                assert canonicalize_name(needed.name) in names, (pin, needed)


def test_it_holds_what_serving_needs_and_nothing_of_training(pins):
    sizes = {pin.name: pin.num_bytes for pin in pins}
    assert {"bentoml", "starlette", "uvicorn", "onnxruntime", "duckdb", "pyarrow"} <= set(sizes)
    assert not {*NOT_SERVED, "replaylake", "numba", "obstore", "safetensors", "pytest"} & set(sizes)
    assert sizes["pyarrow"] > 50_000_000
    assert sum(sizes.values()) < 600_000_000


def test_an_extra_adds_its_own(pins):
    assert {pin.name for pin in lock(["serve", "remote"])} == {pin.name for pin in pins} | {
        "obstore"
    }


def test_as_text(pins):
    text = lock_text([Pin("a", "1.0", 5), Pin("b", "2.0rc1", 7)], "./wheels/w.whl")
    head, *lines = text.splitlines()
    assert head.startswith("# ")
    assert "Python 3." in head
    assert lines == ["./wheels/w.whl", "a==1.0", "b==2.0rc1"]


class World:
    """Distributions that a test installs: metadata files, read by importlib as any others."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        monkeypatch.setattr(lock_module.metadata, "distribution", self.distribution)
        own = lambda: self.distribution("replaylake")  # noqa: E731
        monkeypatch.setattr(lock_module, "own_distribution", own)
        monkeypatch.setattr(lock_module, "code_folder", lambda: folder / "src" / "replaylake")

    def install(self, name, version, *requires, url=None):
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = [f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}"]
        lines += [f"Requires-Dist: {text}" for text in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        if url:
            (info / "direct_url.json").write_text(f'{{"url": "{url}"}}')

    def distribution(self, name):
        for found in metadata.distributions(name=name, path=[str(self.folder)]):
            return found
        raise metadata.PackageNotFoundError(name)


@pytest.fixture
def world(tmp_path, monkeypatch):
    return World(tmp_path, monkeypatch)


def test_markers_extras_and_circles_are_followed(world):
    world.install(
        "replaylake", "1",
        'a[Fast_Way]>=1; extra == "serve"',
        'absent; sys_platform == "win32"',
        'absent; extra == "offline"',
    )  # fmt: skip
    world.install("a", "1.5", "b", 'c; extra == "fast-way"', 'absent; extra == "slow"')
    world.install("b", "2", "a", "Under_Score")
    world.install("c", "3.0rc1", "c>=2.0")
    world.install("under-score", "4")
    assert [str(pin) for pin in lock(["serve"])] == [
        "a==1.5",
        "b==2",
        "c==3.0rc1",
        "under-score==4",
    ]
    assert lock([]) == ()


def test_an_extra_asked_for_later_is_followed_too(world):
    # `a` is met without its extra first.
    world.install("replaylake", "1", "a", "b")
    world.install("a", "1", 'c; extra == "more"')
    world.install("b", "1", "a[more]")
    world.install("c", "1")
    assert [pin.name for pin in lock([])] == ["a", "b", "c"]


def test_what_is_not_installed_is_named_with_who_needs_it(world):
    world.install("replaylake", "1", "a")
    world.install("a", "1", "gone>=2")
    with pytest.raises(
        ExtraMissingError, match="found no gone, expected gone>=2, which a requires"
    ):
        lock([])


def test_what_nobody_else_could_install_is_refused(world):
    world.install("replaylake", "1", "a")
    world.install("a", "1", "b<2")
    world.install("b", "2")
    with pytest.raises(ServeError, match="found b 2, expected b<2, which a requires"):
        lock([])


def test_a_library_of_training_is_refused(world):
    world.install("replaylake", "1", "a")
    world.install("a", "1", "Torch")
    world.install("torch", "2.13.0+cpu")
    with pytest.raises(ServeError, match=r"found torch==2\.13\.0\+cpu"):
        lock([])


def test_what_no_index_may_have_is_told_apart(world):
    world.install("replaylake", "1", "a", "b")
    world.install("a", "1", url="file:///home/ada/a")
    world.install("b", "1")
    assert [pin.from_index for pin in lock([])] == [False, True]


def test_a_checkout_that_asks_for_more_than_was_installed_is_refused(world):
    pyproject = world.folder / "pyproject.toml"
    text = """
        [project]
        name = "replaylake"
        dependencies = ["a>=1", "Winged; sys_platform == 'win32'"]
        [project.optional-dependencies]
        serve = ["B_b>=2"{}]
        offline = ["torch"]
    """
    pyproject.write_text(text.format(""))
    world.install(
        "replaylake", "1",
        "a>=1",
        'winged; sys_platform == "win32"',
        'b-b>=2; extra == "serve"',
        'torch; extra == "offline"',
    )  # fmt: skip
    world.install("a", "1")
    world.install("b-b", "2")
    assert [str(pin) for pin in lock(["serve"])] == ["a==1", "b-b==2"]
    pyproject.write_text(text.format(', "msgpack>=1.1"'))
    with pytest.raises(ServeError, match=r"found msgpack>=1\.1 in only one of .*pyproject\.toml"):
        lock(["serve"])
    # A virtual environment may lie in another project's folder.
    pyproject.write_text('[project]\nname = "other"\n')
    assert lock(["serve"])
