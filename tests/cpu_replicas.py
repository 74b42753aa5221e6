"""torch's `nn.DataParallel` with several replicas on one CPU, where it is the bare module and does not say so.

Constructor, chunks and threads are written here, because torch's need an accelerator. `forward` and the making of
replicas are torch's: replicas without parameters of their own, whose gradients autograd adds up in the model.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


def copies(tensors: Sequence[Tensor], devices: Sequence[int], detach: bool = False) -> list[list[Tensor]]:
    """A copy of each tensor for each device; with gradients, they flow back to the original."""
    return [[tensor.detach().clone() if detach else tensor.clone() for tensor in tensors] for _ in devices]


class OnCpus(nn.DataParallel):
    """DataParallel over as many "devices" as there are numbers, all of them the CPU."""

    def __init__(self, module: nn.Module, device_ids: Sequence[int]) -> None:
        nn.Module.__init__(self)
        self.module, self.device_ids, self.output_device, self.dim = module, list(device_ids), device_ids[0], 0
        self.src_device_obj = torch.device("cpu")

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]) -> Any:
        """Chunks as torch cuts them: of 5 samples 2 devices get 3 and 2."""
        assert not kwargs
        cut = list(zip(*(each.chunk(len(device_ids)) for each in inputs), strict=True))
        return cut, [{}] * len(cut)

    def replicate(self, module: Any, device_ids: Sequence[Any]) -> Any:
        """Torch's, with copies on the CPU."""
        with mock.patch.object(import_module("torch.nn.parallel.replicate"), "_broadcast_coalesced_reshape", copies):
            return super().replicate(module, device_ids)

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Each replica in a thread of its own, which of the caller's modes knows only that of gradients."""
        enabled = torch.is_grad_enabled()

        def work(replica: nn.Module, arguments: Sequence[Tensor]) -> Tensor:
            with torch.set_grad_enabled(enabled):
                return replica(*arguments)

        with ThreadPoolExecutor(len(replicas)) as threads:
            return list(threads.map(work, replicas, inputs))

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """The replicas' outputs, one after the other."""
        return torch.cat(list(outputs))
