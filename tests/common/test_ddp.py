"""DistributedDataParallel as it is with a GPU, of which none is here: torch's own code for devices, on the CPU."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.launch.errors import UserError
from common.train import seed
from common.train.ddp import check_gradients, warm_up_buckets


@pytest.mark.usefixtures("alone")
def test_buckets_are_laid_out_where_ddp_moves_its_inputs() -> None:
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    ddp.device_ids = [0]  # as DDP(model, device_ids=[0]), which refuses a CPU
    warm_up_buckets(ddp)
    assert ddp(torch.ones(4, 3)).shape == (4, 2)


@pytest.mark.usefixtures("alone")
def test_parameters_without_gradient_are_named_and_what_to_do_if_none_has_one() -> None:
    """Without `backward`, or with `zero_grad` after the step."""
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
    ddp(torch.ones(4, 3)).sum().backward()
    check_gradients(ddp)
    ddp.module[1].bias.grad = None
    with pytest.raises(UserError, match=r"^no gradient reaches 1\.bias: use them in forward, freeze them, or give"):
        check_gradients(ddp)
    ddp.zero_grad()
    with pytest.raises(UserError, match=r"^no parameter has a gradient .*zero_grad\(\) before it, not after the step"):
        check_gradients(ddp)


@pytest.mark.parametrize(("saved", "there"), [(1, 1), (2, 2), (8, 8), (8, 2), (2, 8), (2, 0)])
def test_the_random_states_of_all_gpus_are_kept(monkeypatch: pytest.MonkeyPatch, saved: int, there: int) -> None:
    """Also of those that only replicas use, on a machine with as many devices or another number."""
    devices = dict[int, torch.Tensor]()
    for name, value in {
        "is_available": lambda: there > 0,
        "is_initialized": lambda: True,
        "device_count": lambda: there,
        "current_device": lambda: 0,
        "get_rng_state_all": lambda: [torch.tensor([7 + device]) for device in range(saved)],
        "set_rng_state": lambda state, device: devices.update({device: state}),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    with monkeypatch.context() as before:
        before.setattr(torch.cuda, "is_available", lambda: True)
        state = seed.random_state()
    seed.restore_random_state(state)
    assert devices == {device: torch.tensor([7 + device]) for device in range(min(saved, there))}
    if there:  # a rank on device 1 goes on where only one device is visible, or on another by --gpu
        seed.restore_random_state(state | {"device": saved - 1})
        assert devices[0] == torch.tensor([7 + saved - 1])
