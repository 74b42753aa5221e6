"""Use torchft to continue training when a rank is killed: the remaining ranks repeat the step.

    pip install torchft
    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000 --bind 127.0.0.1:29510
    python -m examples.manual_allreduce_sgd.further.fault_tolerant --replica 0
    python -m examples.manual_allreduce_sgd.further.fault_tolerant --replica 1

Start each command in its own terminal, kill a replica, and start it again. Before each step, the
running replicas form a quorum through a small server, the lighthouse. They average their gradients,
and apply the step only if the averaging succeeded. A joining replica first receives another
replica's state. The global batch is divided among the replicas in the quorum, so a lost replica
costs time but no samples.
"""

import logging
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from common.data import DigitNet, image_data
from common.ddp import parameter_hash

os.environ.setdefault("RUST_LOG", "error")  # otherwise torchft prints several lines per step
import torchft  # ty: ignore[import-not-found]

BATCH_SIZE = 128


def main(replica: int, steps: int = 1000, lighthouse: str = "http://127.0.0.1:29510") -> None:
    """Train one replica on the digits."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.disable()  # torchft logs a traceback for a lost replica
    images, labels = image_data("digits", Path()).train.tensors
    model = DigitNet(size=8, classes=10)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=None,  # registered below
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,  # a joining replica contributes in the same step
        replica_id=f"replica_{replica}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,  # rank of this process within its replica
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
    )
    manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
    manager.register_state_dict_fn("optimizer", sgd.load_state_dict, sgd.state_dict)
    optimizer = torchft.Optimizer(manager, sgd)
    while manager.current_step() < steps:
        optimizer.zero_grad()  # forms a quorum; a joining replica receives the state here
        step, replicas = manager.current_step(), manager.num_participants()
        epoch, batch = divmod(step, -(-len(labels) // BATCH_SIZE))
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        samples = order.split(BATCH_SIZE)[batch]
        part = samples[manager.participating_rank() :: replicas]
        loss_sum = F.cross_entropy(model(images[part]), labels[part], reduction="sum")
        (loss_sum * replicas / len(samples)).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = parameters_to_vector(gradients)
        manager.allreduce(flat).wait()  # averages; also returns after an error
        vector_to_parameters(flat, gradients)
        optimizer.step()  # does nothing after an error: the step is repeated
        result = "done" if manager.current_step() > step else "failed"
        print(f"step {step} with {replicas} replica(s) {result}", flush=True)
    print(f"parameters {parameter_hash(model)[:12]}", flush=True)
    manager.shutdown()


if __name__ == "__main__":
    tyro.cli(main)
