import subprocess
import sys

import pytest
import torch

from replaylake.offline.learning.rmsprop import RMSProp, rmsprop


def test_its_numbers_are_those_of_torchs_own():
    torch.manual_seed(0)
    ours, still = (torch.nn.Parameter(torch.randn(7)) for _ in range(2))
    theirs = torch.nn.Parameter(ours.detach().clone())
    before = still.detach().clone()
    groups = [{"name": "a", "params": [ours]}, {"name": "b", "params": [still]}]
    optimizers = (
        RMSProp(groups, 0.01, decay=0.9, eps=0.1),
        torch.optim.RMSprop([theirs], lr=0.01, alpha=0.9, eps=0.1),
    )
    for _ in range(10):
        ours.grad = theirs.grad = torch.randn(7)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert torch.equal(still, before)


def test_two_steps_by_hand():
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = rmsprop(0.1, decay=0.75, eps=0.5, max_gradient_norm=2.0)(
        [{"name": "a", "params": [parameter]}]
    )
    parameter.grad = torch.tensor([20.0])  # clipped to 2
    optimizer.step()
    # The mean square is 0.25 * 4 = 1: 1 - 0.1 * 2 / (1 + 0.5).
    assert parameter.item() == pytest.approx(1 - 0.2 / 1.5, rel=1e-5)
    parameter.grad = torch.tensor([1.0])
    optimizer.step()
    # 0.75 * 1 + 0.25 * 1 = 1 again.
    assert parameter.item() == pytest.approx(1 - 0.3 / 1.5, rel=1e-5)


def test_it_goes_on_from_a_saved_state():
    whole, half = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    make = rmsprop(0.1)
    optimizer = make([{"name": "a", "params": [whole]}])
    for step in range(4):
        if step == 2:
            saved, half.data = optimizer.state_dict(), whole.data.clone()
            resumed = make([{"name": "a", "params": [half]}])
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
        "from replaylake.offline.learning.rmsprop import rmsprop\n"
        "p = torch.nn.Parameter(torch.ones(2))\n"
        "o = rmsprop(0.1)([{'name': 'a', 'params': [p]}])\n"
        "p.grad = torch.ones(2)\n"
        "o.step()\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
