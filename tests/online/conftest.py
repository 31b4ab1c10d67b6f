import errno
import importlib
import os
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from replaylake.datastore.episodes.spaces import Box, Discrete
from replaylake.datastore.lake.lake import open_lake
from replaylake.datastore.lake.policies.package import save_package
from replaylake.datastore.lake.policies.policy import PolicySpec

_ENVIRONMENTS = str(Path(__file__).parent / "environments")


@pytest.fixture
def toys(monkeypatch):
    """The module of the toy environments, found here and in child processes."""
    monkeypatch.syspath_prepend(_ENVIRONMENTS)
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, [_ENVIRONMENTS, inherited]))
    monkeypatch.setenv("PYTHONPATH", path)
    return "replaylake_toys"


@pytest.fixture(scope="module")
def toys_imported():
    """The same for tests of many examples, in this process alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(_ENVIRONMENTS)
        yield "replaylake_toys"


@pytest.fixture
def lake(tmp_path):
    return open_lake(tmp_path / "lake", create=True)


@pytest.fixture
def nearly_full_disk():
    """A context in which the disk has room for files of so many bytes and for no larger ones."""

    @contextmanager
    def limited(num_bytes):
        def write(descriptor, data, write=os.write):
            if len(data) > num_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(descriptor, data)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "write", write)
            yield

    return limited


@pytest.fixture
def loaded_die(tmp_path):
    """A package for the toy environments: actions 0, 1, 2 with probabilities 1/2, 1/4, 1/4."""
    observations = helper.make_tensor_value_info("observations", TensorProto.FLOAT, ["N", 2])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 3])
    weights = numpy_helper.from_array(np.zeros((2, 3), np.float32), "weights")
    bias = numpy_helper.from_array(np.log(np.array([0.5, 0.25, 0.25], np.float32)), "bias")
    nodes = [helper.make_node("Gemm", ["observations", "weights", "bias"], ["logits"])]
    graph = helper.make_graph(nodes, "die", [observations], [logits], [weights, bias])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    package = tmp_path / "die"
    save_package(
        package,
        onnx=model.SerializeToString(),
        spec=PolicySpec(Box((2,)), Discrete(3), "categorical"),
        manifest={"algorithm": "test"},
        learner_weights=None,
    )
    return package


@pytest.fixture
def scripted(monkeypatch):
    """The class of a language model whose reply is a function of the messages."""
    monkeypatch.syspath_prepend(_ENVIRONMENTS)
    return importlib.import_module("replaylake_scripted").Scripted
