import subprocess
import sys

import pytest
import torch

from replaylake.offline.learning.adam import FusedAdam, adam, clip_gradients


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


def test_a_rate_that_falls_is_torchs_own():
    ours, theirs = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = FusedAdam([{"name": "a", "params": [ours]}], 0.1)
    reference = torch.optim.Adam([theirs], lr=0.1, fused=True)
    for rate in (0.1, 0.05, 0.01):
        optimizer.set_learning_rate(rate)
        reference.param_groups[0]["lr"] = rate
        ours.grad = theirs.grad = torch.arange(3.0)
        optimizer.step()
        reference.step()
    assert torch.equal(ours, theirs)


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


@pytest.mark.slow
def test_a_process_that_learns_imports_no_compiler():
    program = (
        "import sys, torch\n"
        "from replaylake.offline.learning.adam import adam\n"
        "p = torch.nn.Parameter(torch.ones(2))\n"
        "o = adam(0.1)([{'name': 'a', 'params': [p]}])\n"
        "p.grad = torch.ones(2)\n"
        "o.step()\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_gradients_are_clipped_together():
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    first.grad, second.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    without = torch.nn.Parameter(torch.zeros(1))
    clip_gradients([first, second, without], 10.0)
    assert first.grad.tolist() == [3.0, 0.0]
    clip_gradients([first, second, without], None)
    assert second.grad.tolist() == [0.0, 4.0]
    # The norm is 5.
    clip_gradients([first, second, without], 0.5)
    assert first.grad.tolist() == pytest.approx([0.3, 0.0])
    assert second.grad.tolist() == pytest.approx([0.0, 0.4])


def test_adam_steps_down_clipped_gradients():
    # A step is as long as the learning rate, but for eps, which is large against what is clipped.
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = adam(1.0, eps=0.5, max_gradient_norm=0.5)([{"name": "a", "params": [parameter]}])
    parameter.grad = torch.tensor([100.0])
    optimizer.step()
    assert parameter.item() == pytest.approx(-0.5)
