import subprocess
import sys

import pytest
import torch

from replaylake.offline.adam import FusedAdam


def two_groups(optimizer):
    """Ten steps of two parameters, one of which has a gradient in every other step."""
    torch.manual_seed(0)
    first, second = (torch.nn.Parameter(torch.randn(7)) for _ in range(2))
    made = optimizer(
        [{"name": "a", "params": [first]}, {"name": "b", "params": [second], "lr": 0.5}]
    )
    for step in range(10):
        first.grad = torch.randn(7)
        second.grad = torch.randn(7) if step % 2 else None
        made.step()
    return first.detach(), second.detach()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_its_numbers_are_those_of_torchs_own(decay):
    ours = two_groups(lambda groups: FusedAdam(groups, 0.01, weight_decay=decay))
    theirs = two_groups(
        lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=decay, fused=True)
    )
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_it_goes_on_from_a_saved_state():
    whole, half = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = FusedAdam([{"name": "a", "params": [whole]}], 0.1)
    for step in range(4):
        if step == 2:
            saved, half.data = optimizer.state_dict(), whole.data.clone()
            resumed = FusedAdam([{"name": "a", "params": [half]}], 0.1)
            resumed.load_state_dict(saved)
        whole.grad = torch.arange(3.0)
        optimizer.step()
        if step >= 2:
            half.grad = torch.arange(3.0)
            resumed.step()
    assert torch.equal(whole, half)


def test_a_process_that_learns_imports_no_compiler():
    program = (
        "import sys, torch\n"
        "from replaylake.offline.adam import adam\n"
        "p = torch.nn.Parameter(torch.ones(2))\n"
        "o = adam(0.1)([{'name': 'a', 'params': [p]}])\n"
        "p.grad = torch.ones(2)\n"
        "o.step()\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
