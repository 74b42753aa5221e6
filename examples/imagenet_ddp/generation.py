"""What the members of `--survive` do together: steps, evaluations, and the end."""

import json
import platform
import sys
import time
from collections.abc import Generator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import CrossEntropyLoss
from torch.nn.parallel import DistributedDataParallel as DDP

from common.images.loader import eval_loader, train_loader
from common.launch.config import all_flags
from common.launch.place import current
from common.train import machine
from common.train.checks import parameter_hash
from common.train.curves import draw_curves
from common.train.ddp import check_gradients, warm_up_buckets
from common.train.evaluate import evaluate
from common.train.files import write_atomically
from common.train.lines import epoch_line
from common.train.loader import local_samples
from common.train.log import Log
from common.train.membership import Membership, communication
from common.train.summary import about, utc
from common.train.weights import save_model
from examples.imagenet_ddp.replica import Replica

PADDING = -100  # a label that CrossEntropyLoss ignores
Batches = Generator[tuple[Tensor, Tensor, Tensor]]


class Generation:
    """The same members, in one process group. Every rank makes one, and calls its methods.

    Args:
        replica: of this process; all have the same state.
        membership: of this process.
        unit: with which it begins.

    Raises:
        Lost: somebody was lost meanwhile, as in all methods.
    """

    def __init__(self, replica: Replica, membership: Membership, unit: int) -> None:
        args = replica.args
        self.args, self.replica, self.membership = args, replica, membership
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.log, self.first = Log(args.out, active=self.rank == 0), unit
        # Lines are written at the end of an epoch: those of this one are not there yet.
        epoch, _ = replica.position(unit)
        self.log.start(epoch * replica.steps_per_epoch, resumed=membership.generation > 0)
        share = -(-args.global_batch // self.size)
        self.test_loader = eval_loader(
            replica.data.val, 2 * share, replica.amp, args.images.workers
        )
        self.batches = self._batches(unit)
        self.criterion = CrossEntropyLoss(
            reduction="sum", label_smoothing=args.recipe.label_smoothing
        )
        replica.network.train()
        replica.optimizer.zero_grad()
        with communication(computing=True):
            self.model = DDP(
                replica.network,
                find_unused_parameters=args.find_unused_parameters,
                static_graph=args.static_graph,
                gradient_as_bucket_view=True,
            )
            warm_up_buckets(self.model)  # the order of additions is that of a replay
        members = ", ".join(map(str, membership.members))
        self.log.print0(f"after step {replica.steps_before(unit)}: members {members}")

    def _batches(self, unit: int) -> Batches:
        """This rank's part of the batches, from a unit on; the rest of its epoch first."""
        args, replica = self.args, self.replica
        loader = train_loader(
            replica.data.train, args.global_batch, replica.amp, args.seed, args.images.workers
        )
        epoch, step = replica.position(unit)
        while True:
            loader.batch_sampler.set_epoch(epoch)
            loader.batch_sampler.skip(step)
            yield from loader
            epoch, step = epoch + 1, 0

    def do(self, unit: int) -> bool:
        """Do a unit of the training: a step, or an evaluation.

        Returns:
            Whether somebody wants to become a member.
        """
        _, step = self.replica.position(unit)
        done = self._step if step < self.replica.steps_per_epoch else self._evaluate
        return done(unit)

    def _step(self, unit: int) -> bool:
        replica = self.replica
        batch, (images, labels, indices) = replica.batch(unit), next(self.batches)
        local = local_samples(len(batch), self.rank, self.size)
        labels[local:] = PADDING
        torch.manual_seed(hash((self.args.seed, unit, self.rank)))  # done again, it draws the same
        replica.optimizer.zero_grad()
        with communication(computing=True):
            with replica.amp.autocast():
                logits = self.model(images).float()
            # The average over the ranks is the mean over the global batch.
            loss = self.criterion(logits, labels) * self.size / len(batch)
            loss.backward()
        if unit == 0:
            check_gradients(self.model)
        seen = torch.isin(batch, indices[:local]).float()
        # BatchNorm's statistics are those of rank 0, as in DDP: to them the others add nothing.
        buffers = replica.buffers() * (self.rank == 0)
        seen, mean, buffers = self._agree(seen, loss.detach().view(1) / self.size, buffers)
        replica.step(unit, seen, mean, buffers)
        epoch, step = replica.position(unit)
        every = self.args.watch.print_freq
        if every and replica.steps_before(unit + 1) % every == 0:
            label = f"epoch {epoch + 1}/{self.args.num_epochs}"
            self.log.print0(
                f"{label}, step {step + 1}/{replica.steps_per_epoch}: loss {mean.item():.4g}"
            )
        return self.knock

    def _agree(self, *parts: Tensor) -> list[Tensor]:
        """The sums of some vectors over the ranks, with which a unit is done."""
        knock = torch.tensor([float(self.membership.somebody_knocks())])
        message = torch.cat([knock, *parts])
        with communication():
            dist.all_reduce(message)
        self.knock = bool(message[0] > 0)
        return list(message[1:].split([len(part) for part in parts]))

    def _evaluate(self, unit: int) -> bool:
        replica, log = self.replica, self.log
        replica.check_seen()
        epoch, _ = replica.position(unit)
        with communication(computing=True):
            evaluation = evaluate(
                replica.eval_model,
                self.test_loader,
                len(replica.data.classes),
                replica.amp.autocast,
            )
        better = replica.is_best(evaluation)
        if self.rank == 0:  # before it counts: if this rank is lost, another one does it again
            self._write_epoch(epoch, evaluation.loss, evaluation.metrics)
            if better:
                self._save("best.safetensors")
        self._agree()
        mean = replica.losses.mean().item()
        replica.end_epoch(evaluation)
        label, accuracy = (
            f"epoch {epoch + 1}/{self.args.num_epochs}",
            evaluation.metrics["accuracy"],
        )
        losses, speed = {"loss": mean, "test": evaluation.loss}, (None, "images")
        log.print0(epoch_line(label, losses, ("accuracy", accuracy), speed, 0, better))
        return self.knock

    def _write_epoch(self, epoch: int, loss: float, metrics: dict[str, Any]) -> None:
        """Write the losses and metrics of an epoch. Rank 0 does."""
        first, log = epoch * self.replica.steps_per_epoch, self.log
        for number, value in enumerate(self.replica.losses.tolist(), first + 1):
            log.scalars(number, {"loss/train": value})
        known = {f"test/{name}": value for name, value in metrics.items() if value is not None}
        log.scalars(first + self.replica.steps_per_epoch, {"loss/test": loss} | known)
        log.write_lines()
        log.write_events()

    def _save(self, name: str) -> str:
        """Write the model that is evaluated, and what it is. Rank 0 does."""
        hashed = parameter_hash(self.replica.eval_model)
        words = about(cast("Any", self.replica)) | {"parameter_hash": hashed}
        save_model(self.args.out / name, self.replica.eval_model, words)
        return hashed

    def note_seconds(self, unit: int, seconds: float) -> None:
        """Keep what the way to the first unit of this generation has cost, on rank 0."""
        if unit == self.first and self.rank == 0:
            self.membership.note_seconds(seconds)

    def finish(self) -> None:
        """Write what came out. Every rank calls this, and leaves when all have come so far.

        If rank 0 is lost meanwhile, another one writes.
        """
        if self.rank == 0:
            self._write_result(self._save("model.safetensors"))
            self.membership.store.set("finished", "")
        with communication():
            dist.barrier()

    def _write_result(self, hashed: str) -> None:
        args, replica, log = self.args, self.replica, self.log
        history = self.membership.history()
        for generation in history:
            generation["steps_done"] = replica.steps_before(generation["steps_done"])
        began, ended, steps = (
            current().started,
            time.time(),
            args.num_epochs * replica.steps_per_epoch,
        )
        result: dict[str, Any] = {
            "example": "imagenet_ddp",
            "argv": sys.argv,
            "launcher": "survive",
            "world_size": self.size,
            "threads": torch.get_num_threads(),
            "device": "cpu",
            "backend": "gloo",
            **replica.data.facts,
            "class_names": replica.data.class_names,
            "arguments": all_flags(args) | args.options["settings"],
            "settings": replica.config,
            "commit": machine.commit(),
            "host": platform.node(),
            "epochs": args.num_epochs,
            "steps": steps,
            "global_batch": args.global_batch,
            "precision": replica.amp.name,
            "metrics": replica.known_metrics(),
            "parameter_hash": hashed,
            "generations": history,
            "seconds": {"total": round(ended - began, 3)},
            "started": utc(began),
            "ended": utc(ended),
            "versions": machine.versions(),
        }
        file = args.out / "result.json"
        write_atomically(file, (json.dumps(result, indent=2) + "\n").encode())
        log.write_events()
        title = f"imagenet_ddp --survive: {args.recipe.arch} on {replica.data}"
        draw_curves(args.out / "curves.png", log.points, title, args.recipe.label_smoothing)
        accuracy = result["metrics"]["accuracy"]
        log.print0(
            f"imagenet_ddp: accuracy {accuracy:.4f}, {len(history)} generations of members, "
            f"{steps} steps, {result['seconds']['total']:.1f} s, parameters {hashed[:12]}, "
            f"result {file}"
        )
