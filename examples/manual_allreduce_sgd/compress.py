"""Gradients sent in part, with error feedback: what was not sent is added to the next ones.

| `--compress` | what a rank sends of n gradients, an [a, b] matrix among them | sums by |
|---|---|---|
| top-k | the k of largest magnitude, and where they are | an all-gather |
| powersgd | the matrices as products of [a, r] and [r, b]; the rest in full | two rings |

Both lose most of a step's gradient, and neither loses any of it for good: after any number of
steps, the sum of the means that were applied, plus the mean of what the ranks still hold back, is
the sum of the true means. (Karimireddy et al., 2019, https://arxiv.org/abs/1901.09847.)
"""

from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.manual_allreduce_sgd.allreduce import all_reduce, ring
from examples.manual_allreduce_sgd.averaging import Averaging
from examples.manual_allreduce_sgd.per_rank import gather_rows, own_row


class ErrorFeedback(Averaging):
    """Averages what `exchange` makes of the gradients, and remembers what that has left out.

    Args:
        model: the same on all ranks.

    Attributes:
        error: [n], what this rank has not sent yet.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.error = torch.zeros(sum(self.sizes), device=self.parameters[0].device)
        self._rows = torch.zeros(0)

    @abstractmethod
    def exchange(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Send a part of a gradient. Every rank calls this.

        Args:
            wanted: [n], what this rank would have to send.

        Returns:
            The mean over the ranks of what was sent, and what of `wanted` that accounts for: both
            [n], and the mean of the second over the ranks is the first.
        """

    def average(self) -> None:
        """Make the gradients about the means over the ranks. Every rank calls this."""
        for parameter in self.parameters:
            if parameter.grad is None:  # not used in this forward, but maybe on another rank
                parameter.grad = torch.zeros_like(parameter)
        own = torch.cat([p.grad.flatten() for p in self.parameters if p.grad is not None])
        wanted = own + self.error
        mean, sent = self.exchange(wanted)
        self.error = wanted - sent
        for parameter, part in zip(self.parameters, mean.split(self.sizes), strict=True):
            # in the memory layout of the parameter, which the fused SGD takes for granted
            parameter.grad = torch.empty_like(parameter).copy_(part.view_as(parameter))

    def gather_state(self) -> None:
        """Bring what all ranks hold back to rank 0, which writes it. Every rank calls this."""
        self._rows = gather_rows(self.error)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: the errors of all ranks, [W, n]."""
        return {"errors": self._rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the errors of a checkpoint."""
        self.error.copy_(own_row(state["errors"]))


class TopK(ErrorFeedback):
    """Sends the gradients of largest magnitude only.

    Source: Aji and Heafield, 2017, Sparse communication for distributed gradient descent
    (https://arxiv.org/abs/1704.05021).

    Args:
        model: the same on all ranks.
        share: of the gradients that are sent: k = share * n, at least one.
    """

    def __init__(self, model: nn.Module, share: float) -> None:
        super().__init__(model)
        self.k = max(1, round(share * sum(self.sizes)))

    def exchange(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Send the k largest, and where they are. Every rank calls this."""
        where = wanted.abs().topk(self.k, sorted=False).indices  # [k]
        values = wanted[where]
        # A sum of sparse vectors is less sparse with each rank, so there is nothing to reduce on
        # the way: all ranks send all that they have to all others.
        everywhere = [torch.empty_like(where, dtype=torch.int32) for _ in range(self.world_size)]
        everything = [torch.empty_like(values) for _ in range(self.world_size)]
        dist.all_gather(everywhere, where.to(torch.int32))
        dist.all_gather(everything, values)
        self.bytes_sent += (self.world_size - 1) * self.k * (4 + values.itemsize)
        mean = torch.zeros_like(wanted)
        for indices, others in zip(everywhere, everything, strict=True):  # in rank order: same bits
            mean.index_add_(0, indices, others / self.world_size)
        sent = torch.zeros_like(wanted).index_copy_(0, where, values)
        return mean, sent


class PowerSgd(ErrorFeedback):
    """Sends each matrix as the product of two thin ones, found by one step of power iteration.

    Source: Vogels, Karimireddy and Jaggi, 2019, PowerSGD (https://arxiv.org/abs/1905.13727).

    Args:
        model: the same on all ranks.
        rank: r, columns of the thin matrices.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        super().__init__(model)
        self.shapes = [
            (len(p), p[0].numel()) if p.ndim > 1 else (1, len(p)) for p in self.parameters
        ]
        self.thin = [rank * (a + b) < a * b for a, b in self.shapes]
        same = torch.Generator().manual_seed(0)  # on all ranks
        device = self.error.device
        self.q = [  # [b, r] of each matrix; the next step begins with what this one has found
            torch.randn(b, rank, generator=same).to(device)
            for (_, b), thin in zip(self.shapes, self.thin, strict=True)
            if thin
        ]

    def exchange(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Send p = M q, then q = M^T p, and the rest in full. Every rank calls this."""
        parts = [
            part.view(shape)
            for part, shape in zip(wanted.split(self.sizes), self.shapes, strict=True)
        ]
        matrices = [part for part, thin in zip(parts, self.thin, strict=True) if thin]
        others = [part for part, thin in zip(parts, self.thin, strict=True) if not thin]
        first = [m @ q for m, q in zip(matrices, self.q, strict=True)]  # [a, r] each
        p = self._means([*first, *others])
        whole = iter(p[len(matrices) :])
        p = [torch.linalg.qr(one).Q for one in p[: len(matrices)]]
        self.q = self._means([m.T @ one for m, one in zip(matrices, p, strict=True)])  # [b, r] each
        products = iter([one @ q.T for one, q in zip(p, self.q, strict=True)])
        mean = torch.cat([next(products if thin else whole).flatten() for thin in self.thin])
        # What is sent in full leaves no error; of a matrix, all ranks have applied the product.
        sent = [
            one.flatten() if thin else part.flatten()
            for one, part, thin in zip(mean.split(self.sizes), parts, self.thin, strict=True)
        ]
        return mean, torch.cat(sent)

    def _means(self, tensors: list[Tensor]) -> list[Tensor]:
        """The means over the ranks, in one message to each neighbour. Every rank calls this."""
        if not tensors:
            return []
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        self.bytes_sent += all_reduce(flat, ring)
        flat /= self.world_size
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """The errors of all ranks, and the matrices with which the next step begins."""
        return super().state_dict() | {"q": self.q}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with them."""
        super().load_state_dict(state)
        for own, q in zip(self.q, state["q"], strict=True):
            own.copy_(q)
