"""The average of weights against torch's own."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from examples.imagenet_ddp.recipe import ExponentialAverage


def models() -> list[nn.Module]:
    """The same network, with integers among its buffers, after each of six steps."""
    torch.manual_seed(0)
    network, found = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), []
    for _ in range(6):
        network(torch.randn(2, 3, 5, 5))
        with torch.no_grad():
            for parameter in network.parameters():
                parameter += torch.randn_like(parameter)
        found.append(copy.deepcopy(network))
    return found


def test_it_is_torchs_average_to_the_bit() -> None:
    network, *steps = models()
    theirs = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    ours = ExponentialAverage(network, 0.9)
    for step in steps:
        theirs.update_parameters(step)
        ours.update_parameters(step)
    for (name, value), own in zip(theirs.state_dict().items(), ours.state_dict().values(), strict=True):
        assert torch.equal(value, own), name
    restored = ExponentialAverage(network, 0.9)
    restored.load_state_dict(theirs.state_dict())
    for average in (restored, ours):
        average.update_parameters(steps[0])
    assert all(map(torch.equal, restored.state_dict().values(), ours.state_dict().values()))


def test_no_update_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's copies its count to the device in each; the control shows that this is seen."""
    copies = []
    to: Any = torch.Tensor.to

    def counted(tensor: torch.Tensor, *args: object, **kwargs: object) -> Any:
        copies.append(tensor)
        return to(tensor, *args, **kwargs)

    network, first, second, *_ = models()
    averages = {
        "theirs": AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
        "ours": ExponentialAverage(network, 0.9),
    }
    seen = {}
    for name, average in averages.items():
        average.update_parameters(first)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to", counted)
            average.update_parameters(second)
        seen[name] = any(tensor is average.n_averaged for tensor in copies)
        copies.clear()
    assert seen == {"theirs": True, "ours": False}
