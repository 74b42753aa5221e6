"""What "every rank calls this" means: a rank that calls such a function alone does not get past it.

`main(folder, *names)` tries each function with two processes, twice: both call it, then rank 1 alone. It prints what
came of it as JSON: `{"evaluate": ["returned", "waits"], ...}`.
"""

import json
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from common.data.download import mnist_folder
from common.data.idx import digits, image_data, mnist
from common.data.samplers import GlobalBatchSampler
from common.doctor import job
from common.images.args import ImageArgs
from common.images.loader import warn_of_broken
from common.images.predict import Trained, probabilities
from common.images.sets import load_images
from common.images.shapes import drawn_images
from common.launch import attempts, collectives
from common.launch.args import parse
from common.launch.flags import Launch
from common.launch.rendezvous import JOB
from common.launch.resolve import resolve
from common.train.checkpoint import Checkpoints
from common.train.checks import check_replicas, check_seen_once
from common.train.ddp import warm_up_buckets
from common.train.evaluate import evaluate, ordered_predictions
from common.train.greet import greet
from common.train.log import Log
from common.train.membership import Membership
from common.train.meters import Meters
from common.train.profile import WARM_UP, Profile, meet
from common.train.run import Run
from common.train.seen import Sums
from common.train.stop import Stop
from common.train.summary import record_evaluation, show_epoch, show_evaluation, write_result
from common.train.weights import init_model, load_model
from examples.mnist_ddp_spawn.args import Args

WATCHED = float(os.environ.get("WATCHED_SECONDS", 2.0))  # how long the rank that calls alone is given to come back
LONGEST = 60.0
AT_ONCE = 8  # pairs: half of them only wait

# The processes are forked from one that has imported torch and has no thread. This one has those of the stores: a fork
# copies the locks that they hold, and not them.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([__name__])


class Here:
    """What the calls need. Both ranks make one; then both, or rank 1 alone, make the call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))
        for parameter in self.model.parameters():
            nn.init.ones_(parameter)
        self.args: Any = parse(Args, ["--out", str(folder / "out"), "--precision", "fp32"])
        self.doctor: Any = SimpleNamespace(args=SimpleNamespace(out=folder), device=torch.device("cpu"), backend="gloo")
        self.predict: Any = SimpleNamespace(batch_size=1)
        self.data = digits()
        self.checkpoints = Checkpoints(folder / "checkpoints", {"model": self.model}, {})
        self.meters = Meters(Log(folder, active=False), "images")
        self.meters.loss(torch.zeros(()))
        self.sampler = GlobalBatchSampler(len(self.data.train), 120, 0)
        self.loader = DataLoader(self.data.train, batch_sampler=self.sampler, collate_fn=self.data.collate)
        self.run = Run(self.args, torch.device("cpu"), self.data)

    def resumed(self) -> Run:
        self.run.resume(model=self.model)
        self.run.label = "epoch"
        self.run._unchecked = None  # nothing is trained
        return self.run


def local_rank0_first(_: Here) -> Callable[[], Any]:
    def call() -> None:
        with collectives.local_rank0_first("the test"):
            pass

    return call


def agreed(_: Here) -> Callable[[], Any]:
    stop = Stop().__enter__()
    return lambda: [stop.agreed() for _ in range(3)]  # each reads the answer to the one before


def bring_up_to_date(_: Here) -> Callable[[], Any]:
    membership = Membership(dist.HashStore(), dist.get_rank(), 2, timedelta(seconds=60))
    membership.members = {0: 1, 1: 0}  # rank 0 has done a step more
    return lambda: membership.bring_up_to_date(torch.zeros(1))


def go_on(_: Here) -> Callable[[], Any]:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    return attempts.go_on


def steps(here: Here) -> Callable[[], Any]:
    run = here.resumed()
    return lambda: list(run.steps(here.loader))


def end_epoch(here: Here) -> Callable[[], Any]:
    run = here.resumed()
    return lambda: run.end_epoch({"accuracy": 1.0})


def end_step(here: Here) -> Callable[[], Any]:
    profile = Profile(1, Log(here.folder, active=False), torch.device("cpu"))
    return lambda: [profile.end_step() for _ in range(WARM_UP)]


def finish(here: Here) -> Callable[[], Any]:
    run = here.resumed()
    run.end_epoch({"accuracy": 1.0})
    return run.finish


def ddp(here: Here) -> Callable[[], Any]:
    model = DistributedDataParallel(here.model)
    return lambda: warm_up_buckets(model)


def seen_once(_: Here) -> Callable[[], Any]:
    counts = torch.eye(2, dtype=torch.int32)[dist.get_rank()]
    return lambda: check_seen_once(counts)


def plain_autocast() -> torch.autocast:
    return torch.autocast("cpu", enabled=False)


CALLS: dict[str, Callable[[Here], Callable[[], Any]]] = {
    "agreed": agreed,
    "all_reduce_mean": lambda _: lambda: collectives.all_reduce_mean([torch.zeros(1)]),
    "assert_same_on_all_ranks": lambda _: lambda: collectives.assert_same_on_all_ranks(1, "a number"),
    "bring_up_to_date": bring_up_to_date,
    "broadcast_buffers": lambda here: lambda: collectives.broadcast_buffers(here.model),
    "broadcast_object": lambda _: lambda: collectives.broadcast_object(int),
    "check": lambda _: lambda: Sums(0).check(True),
    "check_replicas": lambda here: lambda: check_replicas(here.model),
    "check_seen_once": seen_once,
    "clocks": lambda here: lambda: list(job.clocks(here.doctor)),
    "drawn_images": lambda here: lambda: drawn_images(here.folder, 10, 10, 16),
    "end_epoch": end_epoch,
    "end_step": end_step,
    "evaluate": lambda here: lambda: evaluate(here.model, here.data.eval_loader(), 10, plain_autocast),
    "finish": finish,
    "gather_losses": lambda here: lambda: here.meters.gather_losses(1),
    "gather_objects": lambda _: lambda: collectives.gather_objects(1),
    "go_on": go_on,
    "greet": lambda here: lambda: greet(here.run),
    "image_data": lambda here: lambda: image_data("mnist", here.folder.parent),
    "init_model": lambda here: lambda: init_model(here.folder.parent / "w.safetensors", here.model),
    "load": lambda here: lambda: here.checkpoints.load("auto"),
    "load_images": lambda here: lambda: load_images(ImageArgs(), 0, here.folder),
    "load_model": lambda here: lambda: load_model(str(here.folder.parent / "w.safetensors"), here.folder, here.model),
    "local_rank0_first": local_rank0_first,
    "meet": lambda _: meet,
    "mnist": lambda here: lambda: mnist(here.folder.parent),
    "mnist_folder": lambda here: lambda: mnist_folder(here.folder.parent, "mnist"),
    "ordered_predictions": lambda _: lambda: ordered_predictions(torch.zeros(1, 1), 2),
    "output": lambda here: lambda: list(job.output(here.doctor)),
    "probabilities": lambda here: (
        lambda: probabilities(here.predict, [], Trained(["0", "1"], {}, {}), here.model, here.run.amp)
    ),
    "progress": lambda here: lambda: here.meters.progress("epoch", 1),
    "record_evaluation": lambda here: lambda: record_evaluation(here.run, "epoch 1", {"accuracy": 1.0}),
    "resume": lambda here: here.resumed,
    "round_trip": lambda here: lambda: list(job.round_trip(here.doctor)),
    "same_versions": lambda here: lambda: list(job.same_versions(here.doctor)),
    "save": lambda here: lambda: here.checkpoints.save({"step": 1}),
    "show_epoch": lambda here: lambda: show_epoch(here.resumed(), {"accuracy": 1.0}, "accuracy", False),
    "show_evaluation": lambda here: lambda: show_evaluation(here.run, "epoch 1", {"accuracy": 1.0}),
    "so_far": lambda _: lambda: Sums(0).so_far(True),
    "steps": steps,
    "nothing": lambda _: int,  # does not communicate: what the test must see of such a function
    "warm_up_buckets": ddp,
    "warn_of_broken": lambda here: lambda: warn_of_broken(here.run),
    "write_result": lambda here: lambda: write_result(here.resumed(), {"metrics": {}, "parameter_hash": ""}),
}


def rank(number: int, port: int, folder: Path, name: str, alone: bool, answer: Connection) -> None:
    """One of the two processes: prepares, calls or does not, and says what came of it."""
    names = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in names.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    said = os.open(folder / f"rank-{number}.txt", os.O_WRONLY | os.O_CREAT)  # for whoever has to mend a call
    os.dup2(said, 1)
    os.dup2(said, 2)
    resolve(Launch(threads=1), os.environ, int).export(number)
    dist.init_process_group("gloo", init_method=JOB)
    call = CALLS[name](Here(folder))
    dist.barrier()
    if alone and number == 0:
        threading.Event().wait()  # until it is killed
    if alone:
        threading.Timer(WATCHED, answer.send, ["waits"]).start()
    call()
    answer.send("returned")
    threading.Event().wait()  # a pair or a store that closes first would be an error for the other


class Pair:
    """Two processes that try one function."""

    def __init__(self, name: str, folder: Path, alone: bool) -> None:
        folder.mkdir()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
        port = self.store.port
        self.ranks = [
            SERVER.Process(target=rank, args=(number, port, folder, name, alone, pipes[number][1]))
            for number in range(2)
        ]
        for process in self.ranks:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        self.answers = [reading for reading, _ in pipes[alone:]]

    def outcome(self) -> str:
        """What those that call say first; the processes end."""
        said = set()
        for answer in self.answers:
            try:
                said.add(answer.recv() if answer.poll(LONGEST) else "silent")
            except EOFError:
                said.add("raised")
        for process in self.ranks:
            process.kill()
            process.join()
        return " and ".join(sorted(said))


def main(folder: Path, *names: str) -> None:
    pixels = {"train-images-idx3-ubyte": (2, 28, 28), "t10k-images-idx3-ubyte": (2, 28, 28)}
    labels = {"train-labels-idx1-ubyte": (2,), "t10k-labels-idx1-ubyte": (2,)}
    for file, shape in {**pixels, **labels}.items():
        head = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes()
        (folder / file).write_bytes(head + bytes(int(np.prod(shape))))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))
    save_file(model.state_dict(), folder / "w.safetensors")
    tries = [(name, alone) for name in names or CALLS for alone in (False, True)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        said = pool.map(
            lambda name, alone: Pair(name, folder / f"{name}-{alone}", alone).outcome(), *zip(*tries, strict=True)
        )
    found: dict[str, list[str]] = {}
    for (name, _), outcome in zip(tries, said, strict=True):
        found.setdefault(name, []).append(outcome)
    print(json.dumps(found))
