"""TorchScript: programs that compute are exported, others are refused before they are loaded."""

import io
import warnings
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

from replaylake.datastore.episodes.spaces import Box, Dict, Discrete
from replaylake.datastore.errors import (
    ConfigInvalidError,
    SourceInvalidError,
    SpaceUnsupportedError,
)
from replaylake.datastore.lake.policies.package import graph_policy
from replaylake.offline.importing.torchscript import convert_torchscript

_VECTOR, _ACTIONS = Box((4,), "float32"), Discrete(3)


class _Network(nn.Module):
    """A scripted network with a branch, as one of torch's own layers has."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))

    def forward(self, x):
        if x.dim() == 1:
            x = x[None]
        return self.layers(x / 2.0).clamp(-5, 5)


def _save(module, how=torch.jit.script):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        buffer = io.BytesIO()
        torch.jit.save(how(module.eval()), buffer)
    return buffer.getvalue()


def _convert(data, observations=_VECTOR, actions=_ACTIONS, head="q_values"):
    conversion = convert_torchscript(data, "net.pt", observations, actions, head=head)
    return graph_policy(conversion.onnx, conversion.spec)


def _trace(module):
    return torch.jit.trace(module, torch.zeros(2, 4))


@pytest.mark.parametrize("how", [torch.jit.script, _trace])
def test_a_module_acts_as_in_torch(how):
    module = _Network()
    observations = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
    expected = module.eval()(torch.from_numpy(observations)).detach()
    found = _convert(_save(module, how)).act(observations).q_values
    np.testing.assert_allclose(found, expected, atol=1e-5)


class _Calling(nn.Module):
    """Calls an operator that is none of the known ones."""

    def forward(self, x):
        return x + torch.rand_like(x)


class _Looping(nn.Module):
    def forward(self, x):
        while bool(x.sum() < 1):
            x = x + 1
        return x


class _Restoring(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x):
        return x * self.count

    @torch.jit.export
    def __getstate__(self):
        return (self.count, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[int, bool]):
        self.count = state[0]
        self.training = state[1]


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (_Calling(), r"found 'torch\.rand_like'"),
        (_Looping(), "a statement 'while'"),
        (_Restoring(), "__getstate__ in its program|__setstate__ in its program"),
    ],
)
def test_programs_that_do_more_than_compute_are_refused(module, reason):
    with pytest.raises(SourceInvalidError, match=reason):
        _convert(_save(module))


@pytest.mark.parametrize(
    "line",
    [
        "_9 = torch.from_file('/etc/passwd', False, 9)",
        "_9 = torch.save",
        "_9 = ops.aten.from_file",
        "print(x)",
        "_9 = __torch__.torch.classes.planted.Runner",
        "import os",
        "for i in range(9): pass",
    ],
)
def test_a_planted_program_is_refused_before_it_is_loaded(line, monkeypatch):
    source = _save(_Network())
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(source)) as archive, zipfile.ZipFile(buffer, "w") as target:
        for name in archive.namelist():
            data = archive.read(name)
            if b"    if torch.eq" in data and name.endswith(".py"):
                before, mark, after = data.decode().partition("    if torch.eq")
                data = f"{before}    {line}\n{mark}{after}".encode()
            target.writestr(name, data)
    monkeypatch.setattr(torch.jit, "load", None)
    with pytest.raises(SourceInvalidError, match="in its program"):
        _convert(buffer.getvalue())


def test_a_damaged_archive_is_refused():
    data = _save(_Network())
    for size in range(0, len(data), 1511):
        with pytest.raises(SourceInvalidError):
            _convert(data[:size])


def test_modules_that_do_not_fit_are_refused():
    data = _save(_Network())
    with pytest.raises(SpaceUnsupportedError, match="cannot take the dataset's observations"):
        _convert(data, Box((5,), "float32"))
    with pytest.raises(SpaceUnsupportedError, match="expected a Box"):
        _convert(data, Dict({"a": _VECTOR}))
    with pytest.raises(ConfigInvalidError, match="head: found None"):
        _convert(data, head=None)
    module = _Network()
    with torch.no_grad():
        module.layers[0].weight[0, 0] = torch.nan
    with pytest.raises(SourceInvalidError, match="not finite"):
        _convert(_save(module))
