"""Fewer messages: the ranks train apart for a number of steps, and then make one model of theirs.

| `--algorithm` | every H steps | with one rank |
|---|---|---|
| local-sgd | the model is the mean of the ranks' models | plain SGD |
| diloco | the ranks' mean move is a gradient for an outer SGD, with momentum | SGD of SGD |

Between two meetings nothing is sent, and a rank that is slow for a while makes nobody wait. The
price: gradients are those of models that drift apart, so that the training is another one.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from examples.manual_allreduce_sgd.allreduce import all_reduce, ring
from examples.manual_allreduce_sgd.averaging import Averaging
from examples.manual_allreduce_sgd.per_rank import gather_rows, own_row


class LocalSgd(Averaging):
    """Averages the models every H steps, and at the end of an epoch; never the gradients.

    Source: Stich, 2019, Local SGD converges fast and communicates little
    (https://arxiv.org/abs/1805.09767).

    Args:
        model: the same on all ranks.
        optimizer: the one that trains it; its momentum stays each rank's own.
        every: H, steps between two meetings.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, every: int) -> None:
        super().__init__(model)
        self.optimizer, self.every, self.steps = optimizer, every, 0
        self._rows = torch.zeros(0)

    def average(self) -> None:
        """Nothing: each rank steps by its own gradients."""

    def after_step(self) -> None:
        """Meet if this was the last of H steps. Every rank calls this."""
        self.steps += 1
        if self.steps == self.every:
            self.meet()

    def end_epoch(self) -> None:
        """Meet, so that all ranks evaluate one model. Every rank calls this."""
        if self.steps:
            self.meet()

    @torch.no_grad()
    def meet(self) -> None:
        """Make the mean of the ranks' models that of each. Every rank calls this."""
        self.steps = 0
        flat = torch.cat([parameter.flatten() for parameter in self.parameters])
        self.put(self._mean(flat))

    def put(self, flat: Tensor) -> None:
        """Set the parameters, from [n]."""
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, part in zip(self.parameters, flat.split(sizes), strict=True):
            parameter.copy_(part.view_as(parameter))

    def _mean(self, flat: Tensor) -> Tensor:
        self.bytes_sent += all_reduce(flat, ring)
        flat /= self.world_size
        return flat

    def _momentum(self) -> list[Tensor]:
        """What the optimizer remembers of each parameter, which is zero before the first step."""
        states = [self.optimizer.state[parameter] for parameter in self.parameters]
        for state, parameter in zip(states, self.parameters, strict=True):
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)
        return [state["momentum_buffer"] for state in states]

    def gather_state(self) -> None:
        """Bring the models and the momenta of all ranks to rank 0. Every rank calls this."""
        tensors = [*(p.detach() for p in self.parameters), *self._momentum()]
        self._rows = gather_rows(torch.cat([tensor.flatten() for tensor in tensors]))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: models and momenta of all ranks, [W, 2 n], and the steps."""
        return {"ranks": self._rows, "steps": self.steps}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with this rank's model, in the middle of H steps."""
        self.steps = state["steps"]
        own = own_row(state["ranks"]).to(self.parameters[0].device)
        model, momentum = own.chunk(2)
        self.put(model)
        sizes = [parameter.numel() for parameter in self.parameters]
        for buffer, part in zip(self._momentum(), momentum.split(sizes), strict=True):
            buffer.copy_(part.view_as(buffer))


class DiLoCo(LocalSgd):
    """Takes the ranks' mean move since the last meeting for a gradient, and a large step along it.

    Source: Douillard et al., 2023, DiLoCo (https://arxiv.org/abs/2311.08105), whose inner optimizer
    is AdamW.

    Args:
        model: the same on all ranks.
        optimizer: the inner one, as in `LocalSgd`.
        every: H, steps between two meetings.
        lr: of the outer optimizer. 1, without momentum, is local SGD.
        momentum: of the outer optimizer, Nesterov's.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, every: int, lr: float, momentum: float
    ) -> None:
        super().__init__(model, optimizer, every)
        flat = torch.cat([parameter.detach().flatten() for parameter in self.parameters])
        self.common = nn.Parameter(flat)  # [n], the model of the last meeting
        self.outer = SGD([self.common], lr, momentum, nesterov=momentum > 0)

    @torch.no_grad()
    def average(self) -> None:
        """Before the first of H steps, note the common model, which --init may have changed."""
        if self.steps == 0:
            self.common.copy_(torch.cat([parameter.flatten() for parameter in self.parameters]))

    @torch.no_grad()
    def meet(self) -> None:
        """Move the common model, and begin again from there. Every rank calls this."""
        self.steps = 0
        flat = torch.cat([parameter.flatten() for parameter in self.parameters])
        self.common.grad = self._mean(self.common - flat)
        self.outer.step()
        self.put(self.common)

    def state_dict(self) -> dict[str, Any]:
        """Beside what the ranks have: the model of the last meeting, and the outer momentum."""
        outer = self.outer.state_dict()
        return super().state_dict() | {"common": self.common.detach(), "outer": outer}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with them."""
        super().load_state_dict(state)
        self.common.copy_(state["common"])
        self.outer.load_state_dict(state["outer"])
