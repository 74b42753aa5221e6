"""Sum without messages: the ranks of one machine add in memory that all of them can read.

    python -m examples.manual_allreduce_sgd.further.shared_memory --nproc 2

Each rank has a row of n numbers in the shared memory, and its gradients live in it. To sum, rank r
adds part r of all rows into one more row: a reduce-scatter. Then each rank reads that row where it
is: an all-gather that copies nothing. (Jia et al., 2018, https://arxiv.org/abs/1807.11205, sum in
this way within a node, and with a ring between nodes.)
"""

import mmap
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from common.data import DigitNet, image_data

from ..allreduce import milliseconds
from ..run import launch
from ..train import partition_dataset, ring_all_reduce

TIMEOUT = 60.0  # seconds: longest wait for another rank


class SharedMemory:
    """Memory for a float tensor [n] of each rank, and for their sum.

    Create it before the ranks are forked. The memory has no name in a file system: it vanishes with
    the last process, and the small /dev/shm of a container does not limit it.

    Args:
        world_size: number of ranks, at least 2.
        length: n.
    """

    def __init__(self, world_size: int, length: int) -> None:
        memory = mmap.mmap(-1, (world_size + 1) * length * 4)  # forked processes share it
        self.rows = torch.frombuffer(memory, dtype=torch.float32).view(world_size + 1, length)
        self.barrier = mp.get_context("fork").Barrier(world_size)

    @property
    def own(self) -> Tensor:
        """The tensor [n] that this rank adds to the sum."""
        return self.rows[dist.get_rank()]

    def sum(self) -> Tensor:
        """Return the sum [n] of what all ranks wrote to `own`. Every rank calls this.

        The result is shared: only read it, and only until this rank calls `sum` again.

        Raises:
            BrokenBarrierError: a rank has exited or is silent.
        """
        self.barrier.wait(TIMEOUT)  # all rows are written, and the last sum has been read
        *rows, total = self.rows.tensor_split(dist.get_world_size(), dim=1)[dist.get_rank()]
        torch.add(rows[0], rows[1], out=total)
        for row in rows[2:]:
            total += row
        self.barrier.wait(TIMEOUT)  # all parts are added
        return self.rows[-1]


def set_gradients(model: nn.Module, flat: Tensor) -> None:
    """Let the gradients of a model be views of a tensor [n]."""
    parameters = list(model.parameters())
    for parameter, part in zip(
        parameters, flat.split([p.numel() for p in parameters]), strict=True
    ):
        parameter.grad = part.view_as(parameter)


def train(model: nn.Module, memory: SharedMemory, epochs: int) -> float:
    """Train on the digits; return the accuracy on the test set. Every rank calls this."""
    data = image_data("digits", Path())
    (images, labels), (test_images, test_labels) = data.train.tensors, data.test.tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(labels), generator=generator) for _ in range(epochs)]
    for part, size in partition_dataset(torch.cat(orders), batch_size=64):
        set_gradients(model, memory.own.zero_())
        loss_sum = F.cross_entropy(model(images[part]), labels[part], reduction="sum")
        (loss_sum / size).backward()  # adds to the gradients in place: in the shared memory
        set_gradients(model, memory.sum())  # of the whole batch
        optimizer.step()
    return (model(test_images).argmax(dim=1) == test_labels).float().mean().item()


def compare(model: nn.Module, small: SharedMemory, large: SharedMemory, epochs: int) -> None:
    """Train, and compare with messages. Every rank calls this."""
    accuracy = train(model, small, epochs)
    times = []
    for function in (dist.all_reduce, ring_all_reduce):
        message = torch.zeros(large.rows.shape[1])
        times.append(f"{function.__name__} {milliseconds(function, message):.2f} ms")
    times.append(f"shared memory {milliseconds(large.sum):.2f} ms")
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.1%}\nsum of {large.own.nbytes:,} bytes: {', '.join(times)}")


def main(nproc: int = 2, epochs: int = 4, megabytes: int = 16) -> None:
    """Train on the digits, and compare the time of a sum of `megabytes` with messages."""
    torch.manual_seed(0)
    model = DigitNet(size=8, classes=10)
    small = SharedMemory(nproc, sum(p.numel() for p in model.parameters()))
    launch(compare, nproc, model, small, SharedMemory(nproc, megabytes << 18), epochs)


if __name__ == "__main__":
    tyro.cli(main)
