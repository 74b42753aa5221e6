"""`Run`: the bookkeeping around a training loop."""

import fcntl
import json
import math
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.profiler import profile, schedule, tensorboard_trace_handler
from torch.utils.data import DataLoader, DistributedSampler

from common import checkpoint, hang
from common.ddp import all_reduce_mean, check_replicas, unwrapped
from common.launch import STOP_SIGNALS, NodeArgs, RunArgs, UserError
from common.log import Log
from common.precision import autocast, set_kernels
from common.rank import Stopped

STOP_DELAY = 0.1  # seconds: approximate delay until ranks react to a signal
# The flags that a resumed run may change.
FREE = vars(NodeArgs()).keys() - {"seed", "batch_size", "epochs", "precision", "deterministic"}


class Run:
    """Bookkeeping for a training loop: resume, save, stop all ranks together, and log.

    `Run` never calls the model, the loss, backward or the optimizer. Every rank creates a `Run`
    after its `parts`, the objects to save and restore. `model` is required. Each part has
    `state_dict()`, which every rank calls, and `load_state_dict()`; None is skipped.

    The first line that `Run` prints contains `what`, which describes the model or the data, and
    the number of data-parallel `replicas` (default: the number of ranks). `about` is metadata for
    best.safetensors, as plain values; its `classes` are compared with those of a loaded file.

    Raises:
        UserError: the checkpoint is damaged or does not match this run, or another run uses --out.
    """

    def __init__(
        self,
        args: RunArgs,
        device: torch.device,
        what: object,
        *,
        replicas: int | None = None,
        about: Mapping[str, Any] | None = None,
        **parts: Any,
    ) -> None:
        self.args, self.device = args, device
        self.about = json.loads(json.dumps(about or {}))  # tuples become lists, as after loading
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        set_kernels(args.deterministic, device)
        self.autocast = autocast(args.precision, device)
        self.parts = {name: unwrapped(part) for name, part in parts.items() if part is not None}
        ddp = isinstance(parts["model"], DistributedDataParallel)
        names = parts["model"].module.named_parameters() if ddp else ()
        self._frozen = {name: p for name, p in names if not p.requires_grad}
        self._epoch_random = checkpoint.random_state()  # at the start of this epoch
        self.epoch = self.batch = self.step = 0  # batch: number of steps done in this epoch
        self.best: float | None = None
        self.metrics: dict[str, float] = {}
        self.flags = json.loads(json.dumps(vars(args), default=str))  # plain values
        self._losses: list[Tensor] = []  # this rank's losses, not yet averaged
        self._epoch_losses: list[float] = []  # this epoch's losses, averaged over the ranks
        self._epochs, self._speed = args.epochs, 0.0
        self._began = time.perf_counter()
        self._continues = False  # True after loading a checkpoint from --out
        self._log = Log(args.out, active=self.rank == 0)
        self.print0, self.warn, self.scalars = self._log.print0, self._log.warn, self._log.add
        if self.rank == 0:
            self._lock_folder()
        self._greet(what, replicas)
        self._resume()
        self._log.open(self.step if self._continues else 0)
        dist.barrier()  # no rank continues before rank 0 has moved an earlier run's files
        if self.world_size > 1:
            hang.keep_fatal_stack(args.out / "hang")
        self._signum, self._next_exchange = 0, self.step + 1
        if args.profile:
            when = schedule(skip_first=10, wait=0, warmup=1, active=args.profile, repeat=1)
            folder, name = str(args.out / "profile"), f"rank-{self.rank}"
            write = tensorboard_trace_handler(folder, name, use_gzip=True)
            self._profile = profile(schedule=when, on_trace_ready=write)
            self._profile.start()
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._remember_signal)

    def _lock_folder(self) -> None:
        try:
            self.args.out.mkdir(parents=True, exist_ok=True)
            self._lock = (self.args.out / "lock").open("a")  # "w" would truncate a live run's file
        except OSError as error:
            text = f"cannot write to --out {self.args.out}: {error.strerror}"
            raise UserError(f"{text}; choose another folder") from None
        try:
            # flock would be inherited by loader workers, which may outlive a killed rank.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another run is using {self.args.out}; use another --out") from None
        except OSError as error:  # on a network file system without locks
            text = f"cannot lock --out {self.args.out} ({error.strerror})"
            self.warn(f"{text}; make sure that no other run uses this folder")

    def _greet(self, what: object, replicas: int | None) -> None:
        parts, unit = (self.world_size, "rank") if replicas is None else (replicas, "replica")
        local, left = divmod(self.args.batch_size, parts)  # left is 0 except in the SGD example
        local_batch = f"{local + 1} or {local}" if left else str(local)
        kind, dtype = self.device.type, torch.float32
        name = torch.cuda.get_device_name(self.device) if kind == "cuda" else "CPU"
        with self.autocast:
            if torch.is_autocast_enabled(kind):
                dtype = torch.get_autocast_dtype(kind)
        self.print0(
            f"{what}\n{self.world_size} rank(s) on {name}, {dist.get_backend()}, "
            f"{str(dtype).removeprefix('torch.')}, {torch.get_num_threads()} thread(s) each; "
            f"batch {self.args.batch_size} = {parts} {unit}{'s' * (parts > 1)} x {local_batch}"
        )

    def _resume(self) -> None:
        resume, found = self.args.resume, None
        restarts = torch.tensor(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
        dist.all_reduce(restarts, dist.ReduceOp.MAX)  # each node's torchrun counts separately
        if restarts and checkpoint.checkpoints(self.args.out / "checkpoints"):
            resume = "auto"
        if resume == "auto":
            found = checkpoint.newest(self.args.out / "checkpoints", self.warn)
        elif resume != "no" and Path(resume).suffix == ".pt":
            state = checkpoint.load(Path(resume))
            found = (Path(resume), state) if "parts" in state else None  # else a state dict
        self._check_same_step(found[1]["step"] if found else None)
        if found is not None:
            self._load_checkpoint(*found)
        elif resume not in ("auto", "no"):
            checkpoint.load_model(Path(resume), self.parts["model"], self.about)
            self.print0(f"loaded the weights from {resume}")

    def _check_same_step(self, step: int | None) -> None:
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, (step, platform.node(), os.getpid(), self.flags))
        for name in self.flags.keys() - FREE:
            if len(values := {str(flags.get(name)) for *_, flags in found}) > 1:
                self.warn(f"the ranks were started with different --{name}: {sorted(values)}")
        if self.rank == 0:  # tools/hang.py sends SIGUSR1 to these processes
            self._lock.truncate(0)
            self._lock.write("".join(f"{host} {pid}\n" for _, host, pid, _ in found))
            self._lock.flush()
        steps = [step for step, *_ in found]
        if len({*steps}) > 1:
            raise UserError(f"the ranks found different checkpoints (steps {steps}); share --out")

    def _load_checkpoint(self, path: Path, state: Mapping[str, Any]) -> None:
        checkpoint.check_classes(path, state.get("about", {}), self.about)
        for name, value in state["args"].items():
            now = self.flags.get(name)
            if value != now and name in ("seed", "batch_size", "start_epoch"):
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{flag} differs from its value in {path}; use {flag} {value}")
            if value != now and name not in FREE:
                self.warn(f"{path} was saved with {name} = {value}; this run uses {now}")
        for name, part in self.parts.items():
            try:
                saved = state["parts"][name]
                if isinstance(part, OneCycleLR) and part.total_steps != saved["total_steps"]:
                    raise ValueError("the schedule depends on --epochs; use the saved value")
                part.load_state_dict(saved)
            except (KeyError, ValueError, RuntimeError) as error:
                reason = str(error).splitlines()[-1].strip()
                raise UserError(f"{path} does not match {name}: {reason}") from None
        self.epoch, self.batch, self.step = state["epoch"], state["batch"], state["step"]
        self._continues = path.resolve().parent == (self.args.out / "checkpoints").resolve()
        self.best = state["best"] if self._continues else None
        self.metrics, self._began = state["metrics"], self._began - state["seconds"]
        self._epoch_losses = state["epoch_losses"]
        if len(state["random"]) == self.world_size:
            now, self._epoch_random = state["random"][self.rank]
            checkpoint.restore_random_state(now)
        else:
            self.warn("the number of ranks has changed, so the result may differ by rounding")
        self.print0(f"resumed from {path}")

    def save(self) -> Path:
        """Write a checkpoint. Every rank calls this; rank 0 writes."""
        self._average_losses()
        self._log.write()  # a resumed run continues the curves from here
        random: list[Any] = [None] * self.world_size
        dist.all_gather_object(random, [checkpoint.random_state(), self._epoch_random])
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        state: dict[str, Any] = {"parts": parts, "random": random, "metrics": self.metrics}
        state |= {"epoch": self.epoch, "batch": self.batch, "step": self.step, "best": self.best}
        state["seconds"] = time.perf_counter() - self._began
        state |= {"args": self.flags, "about": self.about, "epoch_losses": self._epoch_losses}
        path = self.args.out / "checkpoints" / f"step-{self.step:08}.pt"
        if self.rank == 0:
            checkpoint.save(path, state)
        return path

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the remaining epochs; a resumed run starts in the interrupted epoch."""
        self._epochs = count
        for epoch in range(self.epoch, count):
            yield epoch
            assert self.epoch == epoch + 1, "call run.end_epoch at the end of each epoch"
            # A signal may have arrived during the evaluation, whose results are now written.
            signum = torch.tensor(self._signum)
            dist.all_reduce(signum, dist.ReduceOp.MAX)
            if signum:
                self._stop(int(signum))

    def steps(self, loader: Any) -> Iterator[Any]:
        """Yield the remaining batches of an epoch; each is one step. Every rank calls this.

        The loader is a DataLoader, or another iterable with a length.

        Raises:
            Stopped: a signal arrived; all ranks stop after the same step, with a checkpoint.
        """
        skipped = 0
        if isinstance(loader, DataLoader):
            sampler: Any = loader.sampler
            shuffles = isinstance(sampler, DistributedSampler) and getattr(sampler, "shuffle", True)
            if shuffles and sampler.epoch == 0 < self.epoch:
                raise UserError("the sample order never changes; call sampler.set_epoch(epoch)")
            if hasattr(sampler, "skip"):  # for example, a ResumableSampler
                skipped = self.batch
                sampler.skip = skipped * (loader.batch_size or 1)
            # Loader workers draw different numbers on each rank, but repeat them after resuming.
            seed = hash((self.args.seed, self.rank, self.epoch))
            loader.generator = torch.Generator().manual_seed(seed)
        if thawed := [name for name, p in self._frozen.items() if p.requires_grad]:
            self.warn(f"{thawed[0]} was frozen when DDP was created; its gradient is not averaged")
        total, first = len(loader), self.batch
        random = checkpoint.random_state()
        if first == 0:
            self._epoch_random = random
        checkpoint.restore_random_state(self._epoch_random)  # a sampler may draw its order from it
        batches = iter(loader)
        for _ in range(first - skipped):
            next(batches, None)  # the run has already trained on these batches
        if first:
            checkpoint.restore_random_state(random)
        began = self._step_began = time.perf_counter()
        for batch in batches:
            yield batch
            self.batch += 1
            self.step += 1
            if self.batch == first + 1 < total:  # the speed excludes the slow first step
                began = time.perf_counter()
            self._end_step(total)
        seconds, steps = time.perf_counter() - began, max(1, total - first - 1)
        self._speed = steps * self.args.batch_size / seconds

    def _end_step(self, total: int) -> None:
        if self.args.profile:
            self._profile.step()
        label = f"epoch {self.epoch + 1}/{self._epochs}"
        self._log.show_step(self.step, self._epochs * total, label)
        signum, every = self._agreed_signal(), self.args.log_every
        if every and self.step % every == 0:
            loss = self._average_losses()
            self.print0(f"{label}, step {self.batch}/{total}: loss {loss:.4f}")
        if signum:
            self._stop(signum)
        elif self.step % self.args.checkpoint_every == 0 and self.batch < total:
            self.save()

    def log(self, loss: Tensor) -> None:
        """Store this rank's mean loss for a step. Reading the value here would block the host."""
        self._losses.append(loss.detach())

    def _average_losses(self) -> float:
        """Record the losses since the last call, averaged over the ranks; return the last loss."""
        if not self._losses:
            return float("nan")
        losses = torch.stack(self._losses).double().cpu()
        self._losses.clear()
        all_reduce_mean([losses])
        for step, loss in enumerate(losses.tolist(), self.step - len(losses) + 1):
            self.scalars(step, {"loss/train": loss})
        self._epoch_losses += losses.tolist()
        return losses[-1].item()

    def end_epoch(self, metrics: Mapping[str, float], score: float) -> bool:
        """Record metrics, and save the model and a checkpoint. Every rank calls this.

        The metrics are equal on all ranks; the first two are printed. Return True if the score is
        the highest so far; best.safetensors then contains this epoch's weights. Raise UserError if
        the score is NaN or infinite.
        """
        if not math.isfinite(score):
            raise UserError("the score is NaN or infinite: training diverged; lower --lr")
        self._average_losses()
        metrics = {name: float(value) for name, value in metrics.items()}  # converts NumPy scalars
        best = self.best is None or score > self.best
        self.metrics, self.best = metrics, float(score) if best else self.best
        names = {name: "loss/test" if name == "loss" else f"test/{name}" for name in metrics}
        self.scalars(self.step, {names[name]: value for name, value in metrics.items()})
        shown = "  ".join(
            f"test loss {value:.3g}" if name == "loss" else f"{name} {value:.4g}"
            for name, value in list(metrics.items())[:2]  # the line fits in 80 columns
        )
        loss = sum(self._epoch_losses) / max(1, len(self._epoch_losses))
        self.print0(
            f"epoch {self.epoch + 1}/{self._epochs}  loss {loss:.3g}  {shown}  "
            f"{self._speed:,.0f} samples/s{'  best' * best}"
        )
        if best:
            model = self.parts["ema"].module if "ema" in self.parts else self.parts["model"]
            weights = {n: v for n, v in model.state_dict().items() if isinstance(v, Tensor)}
            if self.rank == 0:
                about = self.about | {"example": sys.argv[0], "args": self.flags}
                checkpoint.save_weights(self.args.out / "best.safetensors", weights, about)
        self.epoch, self.batch, self._epoch_losses = self.epoch + 1, 0, []
        self.save()
        return best

    def finish(self, model: Any, **facts: Any) -> None:
        """Compare all replicas, and write result.json with `facts`. Every rank calls this."""
        digest = check_replicas(model)
        seconds = round(time.perf_counter() - self._began, 3)
        result = {"args": self.flags, "argv": sys.argv, "world_size": self.world_size}
        result |= {"epochs": self.epoch, "steps": self.step, "seconds": seconds, "best": self.best}
        result |= {"metrics": self.metrics, "parameter_hash": digest, "device": self.device.type}
        result |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
        self._log.close(result | facts)
        self.print0(f"{self.step} steps in {seconds:.1f} s; {digest[:12]}; {self.args.out}")

    def _remember_signal(self, signum: int, _: object) -> None:
        self._signum = signum

    def _agreed_signal(self) -> int:
        """Return a signal that any rank received, or 0; the value is the same on all ranks.

        The ranks exchange a message every few steps. They read it one step later, without waiting.
        """
        clock = time.perf_counter()
        wish = min(max(int(STOP_DELAY / max(clock - self._step_began, 1e-6)), 1), 100)
        self._step_began = clock
        signum = 0
        if self.step == self._next_exchange:
            self._message = torch.tensor([self._signum, wish], dtype=torch.int32)
            self._work = dist.all_reduce(self._message, dist.ReduceOp.MAX, async_op=True)
        elif self.step == self._next_exchange + 1:
            self._work.wait()
            signum, interval = self._message.tolist()
            self._next_exchange = self.step + interval
        return signum

    def _stop(self, signum: int) -> None:
        path = self.save()
        dist.barrier()  # wait until rank 0 has written the checkpoint
        raise Stopped(signum, f"saved {path}; continue with --resume auto")
