"""Continue when a rank is killed, with torchft: the others repeat the step without it.

    pip install torchft
    python -m examples.manual_allreduce_sgd.further.fault_tolerant

Before each step, the replicas that are alive form a quorum at a small server, the lighthouse. They
average their gradients, and apply the step only if that worked. A replica that joins first receives
the state of another replica. The global batch is divided among the replicas of the quorum, so that
a lost replica costs time but no samples.

Here the last replica kills itself in step --kill-at and is started again.
"""

import importlib
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import tyro
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from common.data import DigitNet, image_data
from common.ddp import parameter_hash

BATCH_SIZE = 128
Events = dict[int, Callable[[], object]]

os.environ.setdefault("RUST_LOG", "error")  # otherwise torchft prints several lines per step
torchft: Any = importlib.import_module("torchft") if importlib.util.find_spec("torchft") else None


def serve_lighthouse(connection: Connection) -> None:
    """Send the port of a lighthouse, and serve until this process is killed."""
    server_class = importlib.import_module("torchft.coordination").LighthouseServer
    server = server_class("127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=1000)
    connection.send(int(server.address().rpartition(":")[2]))
    signal.pause()


def make_manager(number: int, port: int, store: dist.TCPStore, parts: dict[str, Any]) -> Any:
    """Return the manager of a replica, which talks to the lighthouse and to other replicas."""

    def load_state_dict(state: dict[str, Any]) -> None:
        for name, part in parts.items():
            part.load_state_dict(state[name])

    return torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load_state_dict,
        state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
        min_replica_size=1,
        use_async_quorum=False,  # a replica that joins computes in the same step
        replica_id=f"replica_{number}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,  # of this process in its replica
        world_size=1,
        lighthouse_addr=f"http://127.0.0.1:{port}",
        hostname="127.0.0.1",
    )


def train(
    number: int, port: int, meeting: Barrier, parts: dict[str, Any], steps: int, events: Events
) -> None:
    """Train one replica, in a process of its own.

    `events` are called between quorum and all-reduce of their steps: the fault of this example.
    """
    torch.set_num_threads(1)
    logging.disable()  # torchft logs a traceback for a lost replica
    images, labels = image_data("digits", Path()).train.tensors
    meeting.wait()  # replicas that have a manager are expected in the quorum
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager, model = make_manager(number, port, store, parts), parts["model"]
    optimizer = torchft.Optimizer(manager, parts["optimizer"])
    meeting.wait()
    while manager.current_step() < steps:
        optimizer.zero_grad()  # forms a quorum; a replica that joins receives the state here
        step, replicas = manager.current_step(), manager.num_participants()
        events.pop(step, lambda: None)()
        epoch, batch = divmod(step, -(-len(labels) // BATCH_SIZE))
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        samples = order.split(BATCH_SIZE)[batch]
        part = samples[manager.participating_rank() :: replicas]
        loss_sum = F.cross_entropy(model(images[part]), labels[part], reduction="sum")
        (loss_sum * replicas / len(samples)).backward()
        gradients = [p.grad for p in model.parameters()]
        flat = parameters_to_vector(gradients)
        manager.allreduce(flat).wait()  # the mean; it also returns after an error
        vector_to_parameters(flat, gradients)
        optimizer.step()  # does nothing after an error: the step is repeated
        result = "done" if manager.current_step() > step else "failed"
        print(f"replica {number}: step {step} with {replicas} replica(s) {result}", flush=True)
    print(f"replica {number}: parameters {parameter_hash(model)[:12]}", flush=True)
    manager.shutdown()


def main(replicas: int = 2, steps: int = 30, kill_at: int = 10) -> None:
    """Train; the last replica kills itself in step `kill_at` and is started again."""
    if torchft is None:
        print("error: torchft is not installed; run `pip install torchft`", file=sys.stderr)
        sys.exit(2)
    context = mp.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    lighthouse = context.Process(target=serve_lighthouse, args=(send,))
    lighthouse.start()
    port, meeting, last = receive.recv(), context.Barrier(replicas), replicas - 1
    model = DigitNet(size=8, classes=10)
    parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.01, 0.5)}

    def start(number: int, events: Events) -> Any:
        process = context.Process(target=train, args=(number, port, meeting, parts, steps, events))
        process.start()
        return process

    # The other replicas wait in a later step for the new one, because it takes long to start.
    wait = {kill_at + 5: lambda: (meeting.wait(), meeting.wait())}
    processes = [start(number, dict(wait)) for number in range(last)]
    killed = start(last, {kill_at: lambda: os.kill(os.getpid(), signal.SIGKILL)})
    killed.join()
    print(f"replica {last} exited with code {killed.exitcode}; starting it again", flush=True)
    processes.append(start(last, {}))
    for process in processes:
        process.join()
    lighthouse.kill()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    tyro.cli(main)
