from __future__ import annotations

import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest

from replaylake.datastore.errors import SourceInvalidError
from replaylake.datastore.interchange.formats.detect import find_format
from replaylake.datastore.interchange.sources.source import find_source


def _hdf5(path: Path, *names: str) -> Path:
    with h5py.File(path, "w") as file:
        for name in names:
            file[name] = np.zeros(3)
    return path


def _npz(path: Path) -> Path:
    np.savez(path, image=np.zeros(3), is_first=np.zeros(3))
    return path


def _pickle(path: Path) -> Path:
    path.write_bytes(pickle.dumps([{"observations": np.zeros(3)}]))
    return path


def _message(path: Path) -> str:
    with pytest.raises(SourceInvalidError) as error:
        find_format("auto", find_source([path]).files)
    return str(error.value)


def test_a_stranger_is_refused_with_what_it_holds_and_what_to_do(tmp_path: Path) -> None:
    said = _message(_hdf5(tmp_path / "a.hdf5", "obs", "acts"))
    assert said.startswith("a.hdf5: found HDF5 with the datasets acts, obs. ")
    assert "`format` d4rl, `mapping` observation=NAME" in said
    said = _message(_npz(tmp_path / "a.npz"))
    assert said.startswith("a.npz: found npz with the arrays image, is_first. ")
    assert "`format` npz, `mapping`" in said


def test_layouts_that_are_known_and_not_read_are_named(tmp_path: Path) -> None:
    demos = _hdf5(tmp_path / "demo.hdf5", "data/demo_0/actions", "data/demo_0/obs/object")
    assert "robomimic" in _message(demos)
    episode = _hdf5(tmp_path / "episode_0.hdf5", "action", "observations/qpos")
    assert "ACT (ALOHA)" in _message(episode)


def test_a_pickle_is_named_and_not_read(tmp_path: Path) -> None:
    said = _message(_pickle(tmp_path / "a.pkl"))
    assert said.startswith("a.pkl: found a pickle. Reading a pickle runs what is in it")
