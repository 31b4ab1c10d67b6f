"""The wheel is whole, valid, and the same bytes each time."""

import base64
import csv
import hashlib
import io
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

from replaylake.datastore.errors import ServeError
from replaylake.datastore.version import VERSION
from replaylake.serve.package import wheel as wheel_module
from replaylake.serve.package.wheel import PACKAGE_DATA, own_distribution, write_wheel

ROOT = Path(__file__).parents[3]
STAGES = ("cli", "datastore", "offline", "online", "serve")


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    wheel = write_wheel(tmp_path_factory.mktemp("wheel"))
    with zipfile.ZipFile(wheel.path) as archive:
        yield archive


def test_two_are_the_same_bytes(tmp_path):
    wheels = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        wheels.append(write_wheel(tmp_path / name))
    first, second = wheels
    assert first.path.read_bytes() == second.path.read_bytes()
    assert first.sha256 == second.sha256 == hashlib.sha256(first.path.read_bytes()).hexdigest()
    assert first.num_bytes == first.path.stat().st_size < 3_000_000 < first.installed_bytes
    name, version, _, tags = parse_wheel_filename(first.path.name)
    assert (name, str(version), [str(tag) for tag in tags]) == (
        "replaylake",
        VERSION,
        ["py3-none-any"],
    )


def test_it_holds_every_module_and_what_belongs_to_the_package(archive):
    expected = {"replaylake/__init__.py", "replaylake/py.typed"}
    for stage in STAGES:
        modules = (path.relative_to(ROOT) for path in (ROOT / stage).rglob("*.py"))
        expected |= {f"replaylake/{path.as_posix()}" for path in modules}
    data = (path for one in PACKAGE_DATA[1:] for path in ROOT.glob(one))
    expected |= {f"replaylake/{path.relative_to(ROOT).as_posix()}" for path in data}
    assert {
        "replaylake/serve/explorer/static/explorer.js",
        "replaylake/serve/pages/page.css",
    } <= expected
    code = {name for name in archive.namelist() if name.startswith("replaylake/")}
    assert code == expected
    module = "serve/package/wheel.py"
    assert archive.read(f"replaylake/{module}") == (ROOT / module).read_bytes()


def test_what_pyproject_calls_package_data_is_what_the_wheel_takes_along():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    named = project["tool"]["setuptools"]["package-data"]
    folders = {name: "/".join(name.split(".")[1:]) for name in named}
    patterns = [f"{folders[name]}/{one}".lstrip("/") for name in named for one in named[name]]
    assert patterns == [*PACKAGE_DATA]


def test_its_metadata_is_that_of_the_installation(archive):
    info = f"replaylake-{VERSION}.dist-info"
    installed = own_distribution()
    assert archive.read(f"{info}/METADATA").decode() == installed.read_text("METADATA")
    assert "replaylake.cli.main:run" in archive.read(f"{info}/entry_points.txt").decode()
    assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()
    assert b"Root-Is-Purelib: true\nTag: py3-none-any\n" in archive.read(f"{info}/WHEEL")
    # Where it was installed from is nobody's business.
    assert not {f"{info}/direct_url.json", f"{info}/INSTALLER"} & set(archive.namelist())


def test_its_record_names_the_hash_and_size_of_every_other_file(archive):
    record = f"replaylake-{VERSION}.dist-info/RECORD"
    rows = list(csv.reader(io.StringIO(archive.read(record).decode())))
    assert [row[0] for row in rows] == archive.namelist()
    assert rows[-1] == [record, "", ""]
    for name, digest, size in rows[:-1]:
        data = archive.read(name)
        hashed = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={hashed}", len(data)), name


def install_metadata(folder, version):
    info = folder / f"replaylake-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: replaylake\nVersion: {version}\n")


def test_metadata_of_another_version_or_none_at_all_is_refused(tmp_path, monkeypatch):
    found = metadata.distributions

    def only_in(folder):
        return lambda name: found(name=name, path=[str(folder)])

    install_metadata(tmp_path / "old", "0.0.1")
    monkeypatch.setattr(wheel_module.metadata, "distributions", only_in(tmp_path / "old"))
    with pytest.raises(
        ServeError, match=rf"found replaylake installed as version 0\.0\.1.*{VERSION}"
    ):
        write_wheel(tmp_path)
    monkeypatch.setattr(wheel_module.metadata, "distributions", only_in(tmp_path / "none"))
    with pytest.raises(ServeError, match="but no installed distribution"):
        write_wheel(tmp_path)
    assert not list(tmp_path.glob("*.whl"))


def test_an_egg_info_beside_the_code_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "replaylake.egg-info").mkdir()
    (tmp_path / "replaylake.egg-info" / "PKG-INFO").write_text("Name: replaylake\nVersion: 0.0.1\n")
    install_metadata(tmp_path, VERSION)
    found = metadata.distributions
    monkeypatch.setattr(
        wheel_module.metadata, "distributions", lambda name: found(name=name, path=[str(tmp_path)])
    )
    assert own_distribution().read_text("METADATA") is not None
