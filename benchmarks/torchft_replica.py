"""One replica of a training that torchft keeps alive: what lost_ranks.py compares with.

    PYTHON -m benchmarks.torchft_replica ADDRESS NUMBER SAMPLES ddp|allreduce

PYTHON has torchft, which is not one of this project's dependencies. ADDRESS is that of torchft's
lighthouse, NUMBER the replica's, SAMPLES its part of a batch. Gradients are averaged by torchft's
DistributedDataParallel, or side by side in one call of its `Manager.allreduce`. It trains without
end what `survive` trains, and prints a line after each step: the time, the step, and how many
replicas have taken part in it.
"""

import importlib
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim import SGD

from common.data.idx import digits
from common.data.models import DigitNet


def main(address: str, number: int, samples: int, way: str) -> None:
    """Train until somebody ends this process."""
    torchft: Any = importlib.import_module("torchft")
    torch.set_num_threads(1)
    torch.manual_seed(number)
    data = digits()
    model = DigitNet(data.size, data.classes)
    optimizer = SGD(model.parameters(), 0.01, 0.5)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"replica_{number}",
        timeout=timedelta(seconds=30),
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=address,
        hostname="127.0.0.1",
    )
    wrapped = way == "ddp"
    trained = torchft.DistributedDataParallel(manager, model) if wrapped else model
    stepper = torchft.Optimizer(manager, optimizer)
    while True:
        chosen = torch.randint(len(data.train), (samples,)).tolist()
        images, labels, _ = data.collate(data.train.__getitems__(chosen))
        stepper.zero_grad()  # asks the lighthouse who takes part
        F.cross_entropy(trained(images), labels).backward()
        if not wrapped:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            manager.allreduce(flat).wait()
            sizes = [gradient.numel() for gradient in gradients]
            for gradient, mean in zip(gradients, flat.split(sizes), strict=True):
                gradient.copy_(mean.view_as(gradient))
        before = manager.current_step()
        stepper.step()
        if manager.current_step() > before:
            line = f"{time.time():.6f} {manager.current_step()} {manager.num_participants()}"
            print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
