"""Time two layers on two devices, and who waits for whom: model parallelism in its smallest form.

The first layer is on one device, the second on another. The input goes to the first, the
activations move to the second, and the labels must be where the output is. (Data parallelism, the
other way to use two devices, puts the whole model on each.) On a machine without two GPUs both
"devices" are the CPU, and the program is the same.

    python -m examples.resnet_pipeline.toy
    python -m examples.resnet_pipeline.toy --devices cuda:0 cuda:1
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from common.launch.args import fail, parse
from common.launch.errors import UserError
from common.launch.flags import at_least


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    devices: tuple[str, str] | None = None
    """Devices of the two layers (default: two GPUs if there are, else the CPU twice)."""
    steps: int = 20
    """Optimizer steps."""

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps)


class ToyModel(nn.Module):
    """Linear, ReLU, linear: 10 -> 10 on the first device, 10 -> 5 on the second."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.layer1 = nn.Linear(10, 10).to(first)
        self.layer2 = nn.Linear(10, 5).to(second)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 10] from anywhere to [B, 5] on the second device."""
        x = torch.relu(self.layer1(x.to(self.first)))
        return self.layer2(x.to(self.second))  # autograd moves the gradient back the same way


def two_devices(names: tuple[str, str] | None) -> tuple[torch.device, torch.device]:
    """The devices to use.

    Args:
        names: by default two GPUs, or the only one twice, or the CPU twice.

    Raises:
        UserError: a device that this machine does not have.
    """
    if names is None:
        count = torch.cuda.device_count()
        names = ("cuda:0", f"cuda:{min(count, 2) - 1}") if count else ("cpu", "cpu")
    try:
        first, second = (torch.empty(0, device=name).device for name in names)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--devices {' '.join(names)}: {reason}") from None
    return first, second


def main(args: Args) -> None:
    """Train the toy and say where everything is."""
    first, second = two_devices(args.devices)
    torch.manual_seed(0)
    model = ToyModel(first, second)
    optimizer = SGD(model.parameters(), lr=0.05)  # takes parameters on several devices
    x, target = torch.randn(20, 10), torch.randn(20, 5).to(second)  # labels where the output is
    losses = []
    for _ in range(args.steps):
        output = model(x)
        loss = F.mse_loss(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"layer1 on {model.layer1.weight.device}, layer2, output and labels on {output.device}")
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} after {args.steps} steps")
    unsplit = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    unsplit.load_state_dict(
        dict(zip(unsplit.state_dict(), model.state_dict().values(), strict=True))
    )
    torch.testing.assert_close(model(x).cpu(), unsplit(x))
    print("the un-split model with these parameters gives the same output")


if __name__ == "__main__":
    try:
        main(parse(Args, description=__doc__))
    except UserError as mistake:
        fail(mistake)
