"""What `imagenet_ddp --survive` must come to, by the history of its members: nobody is lost.

    python -m benchmarks.imagenet_replay runs/imagenet_ddp/result.json  # prints the parameter hash

The loop of the example's train.py, in as many processes as there have ever been members at once. In
each generation, the first of them play its ranks; rank 0 gives the others what it has.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import CrossEntropyLoss
from torch.nn.parallel import DistributedDataParallel as DDP

from common.data.samplers import GlobalBatchSampler
from common.images.folder import ImageFolder
from common.images.loader import train_loader
from common.images.sets import synthetic_images
from common.launch.args import parse
from common.launch.collectives import broadcast_buffers
from common.train.amp import MixedPrecision
from common.train.checks import parameter_hash
from common.train.ddp import warm_up_buckets
from examples.imagenet_ddp.args import Args
from examples.imagenet_ddp.recipe import build_model, make_ema, make_optimizer, make_scheduler

CPU = torch.device("cpu")


class Replay:
    """One process of it.

    Args:
        rank: in each generation that has so many ranks.
        found: the content of result.json.
    """

    def __init__(self, rank: int, found: Mapping[str, Any]) -> None:
        torch.set_num_threads(found["threads"])
        self.rank, self.args = rank, parse(Args, found["argv"][1:])
        args, recipe, images = self.args, self.args.recipe, self.args.images
        self.amp, classes = MixedPrecision(args.amp, CPU), len(found["class_names"])
        if images.dummy:
            self.data: Any = synthetic_images(images.dummy_images, images.size, args.seed).train
        else:
            folder = images.directory or next((args.out / "images").glob("shapes-*"))
            self.data = ImageFolder(folder / "train", images.size, training=True, seed=args.seed)
        torch.manual_seed(args.seed)
        self.network = self.amp.move(build_model(recipe, classes, images.size, CPU))
        self.ema = make_ema(recipe, self.network)
        self.optimizer = make_optimizer(recipe, self.network, args.learning_rate, self.amp.scaler)
        for parameter in self.network.parameters():
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        sampler = GlobalBatchSampler(len(self.data), args.global_batch, args.seed, 0, 1)
        self.steps_per_epoch = len(sampler)
        schedule = make_scheduler(recipe, self.optimizer, len(sampler), args.num_epochs)
        self.lr = [
            args.learning_rate * schedule.lr_lambdas[0](step) for step in range(found["steps"])
        ]

    def generation(self, size: int, begin: int, end: int, meeting: str) -> None:
        """Train from one step to before another. The ranks of the generation call this."""
        dist.init_process_group("gloo", init_method=meeting, rank=self.rank, world_size=size)
        self.optimizer.zero_grad()
        model = DDP(self.network, gradient_as_bucket_view=True)  # broadcasts parameters and buffers
        warm_up_buckets(model)
        for state in self.optimizer.state.values():
            dist.broadcast(state["momentum_buffer"], 0)
        for tensor in self.ema.state_dict().values() if self.ema else ():
            dist.broadcast(tensor, 0)
        args = self.args
        loader = train_loader(self.data, args.global_batch, self.amp, args.seed, workers=0)
        criterion = CrossEntropyLoss(reduction="sum", label_smoothing=args.recipe.label_smoothing)
        while begin < end:
            epoch, batch = divmod(begin, self.steps_per_epoch)
            loader.batch_sampler.set_epoch(epoch)
            loader.batch_sampler.skip(batch)
            for number, (images, labels, _) in enumerate(loader, batch):
                if begin == end:
                    break
                left = len(self.data) - number * args.global_batch
                samples = min(args.global_batch, left)
                labels[len(range(self.rank, samples, size)) :] = -100
                unit = epoch * (self.steps_per_epoch + 1) + number
                torch.manual_seed(hash((args.seed, unit, self.rank)))
                self.optimizer.zero_grad()
                with self.amp.autocast():
                    logits = model(images).float()
                (criterion(logits, labels) * size / samples).backward()
                self.optimizer.param_groups[0]["lr"] = self.lr[begin]
                self.optimizer.step()
                if self.ema:
                    self.ema.update_parameters(self.network)
                begin += 1
        broadcast_buffers(self.network)
        dist.destroy_process_group()


def worker(rank: int, found: Mapping[str, Any], folder: str) -> None:
    """Play a rank in all generations that have it; rank 0 writes what came out."""
    replay, generations = Replay(rank, found), found["generations"]
    begins = [*(each["steps_done"] for each in generations), found["steps"]]
    sizes = [len(each["members"]) for each in generations]
    for number, (size, (begin, end)) in enumerate(zip(sizes, pairwise(begins), strict=True)):
        if begin < end and rank < size:
            replay.generation(size, begin, end, f"file://{folder}/{number}")
    if rank == 0:
        model = replay.ema.module if replay.ema else replay.network
        Path(folder, "hash").write_text(parameter_hash(model))


def replayed(found: Mapping[str, Any]) -> str:
    """The hash of the parameters after the same history.

    Args:
        found: the content of result.json.
    """
    most = max(len(each["members"]) for each in found["generations"])
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(worker, (found, folder), most, start_method="forkserver")
        return Path(folder, "hash").read_text()


if __name__ == "__main__":
    print(replayed(json.loads(Path(sys.argv[1]).read_text())))
