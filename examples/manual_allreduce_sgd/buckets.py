"""Gradients averaged bucket by bucket, while backward still computes the others."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.manual_allreduce_sgd.averaging import Averaging


class Bucketed(Averaging):
    """A message for each bucket, started from hooks as soon as the bucket's gradients are complete.

    A gradient as large as a bucket is sent from where it is; smaller ones are first copied into one
    tensor. No gradient has to be read again to be divided: the gradient of the model's output is
    divided, and with it everything that backward computes from it.

    Source: Li et al., 2020, PyTorch Distributed, section 3.2 (https://arxiv.org/abs/2006.15704).

    Args:
        model: the same on all ranks; its output is a tensor.
        wire: the dtype of the messages, as in `FlatGradients`.
        megabytes: size of a bucket.
    """

    def __init__(self, model: nn.Module, wire: torch.dtype, megabytes: float) -> None:
        super().__init__(model)
        self.wire = wire
        self._buckets: list[list[nn.Parameter]] = []
        small: list[nn.Parameter] = []
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.collect)
            if parameter.numel() * wire.itemsize >= megabytes * 1e6:
                self._buckets.append([parameter])
                continue
            small.append(parameter)
            if sum(each.numel() for each in small) * wire.itemsize >= megabytes * 1e6:
                self._buckets.append(small)
                small = []
        self._buckets += [small] if small else []
        self._bucket_of = {
            parameter: number for number, bucket in enumerate(self._buckets) for parameter in bucket
        }
        model.register_forward_hook(self._divide)
        self._start_step()

    def _start_step(self) -> None:
        self._awaited = [len(bucket) for bucket in self._buckets]
        self._messages: list[Tensor] = []
        self._works: list[dist.Work] = []

    def _divide(self, _: nn.Module, __: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient / self.world_size)

    def collect(self, parameter: nn.Parameter) -> None:
        """A hook: the gradient of this parameter is complete.

        Buckets are sent in their order, not when they happen to be complete: all ranks must post
        the same messages in the same order.
        """
        self._awaited[self._bucket_of[parameter]] -= 1
        while len(self._works) < len(self._buckets) and self._awaited[len(self._works)] == 0:
            self._send_next_bucket()

    def _send_next_bucket(self) -> None:
        flat: list[Tensor] = []
        for parameter in self._buckets[len(self._works)]:
            if parameter.grad is None:  # not used in this forward, but maybe on another rank
                parameter.grad = torch.zeros_like(parameter)
            # The memory itself, in any layout.
            flat.append(parameter.grad.as_strided((parameter.numel(),), (1,)))
        message = (flat[0] if len(flat) == 1 else torch.cat(flat)).to(self.wire)
        work = dist.all_reduce(message, async_op=True)
        assert work is not None
        self._messages.append(message)
        self._works.append(work)

    def average(self) -> None:
        """Send what waits for gradients that never came; make each gradient a view of a message."""
        while len(self._works) < len(self._buckets):
            self._send_next_bucket()
        for bucket, message, work in zip(self._buckets, self._messages, self._works, strict=True):
            work.wait()
            means = message.to(torch.float32).split([parameter.numel() for parameter in bucket])
            for p, mean in zip(bucket, means, strict=True):
                p.grad = mean.as_strided(p.shape, p.stride(), mean.storage_offset())
        self._start_step()
