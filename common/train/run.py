"""`Run`: the bookkeeping around a training loop.

It knows where the run is, counts samples, saves and resumes, stops with the other ranks, logs, and
says at the end what came out. It never calls the model, the loss, backward or the optimizer.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.launch.errors import Stopped
from common.launch.flags import fixed_flags
from common.launch.who import watcher
from common.launch.who.calls import progress
from common.train.amp import MixedPrecision
from common.train.checkpoint import Checkpoints, Stateful
from common.train.checks import check_replicas
from common.train.ddp import bare, check_gradients
from common.train.evaluate import Evaluation
from common.train.files import check_writable
from common.train.greet import begin, greet, too_large
from common.train.loader import local_batch, local_samples, rest_of_epoch
from common.train.log import Log
from common.train.meters import Meters
from common.train.profile import Profile
from common.train.seed import seed_numpy_and_python
from common.train.state import Options, TrainState
from common.train.stop import Stop
from common.train.summary import about, show_epoch, write_predictions, write_result
from common.train.weights import init_model, save_model


class Run:
    """Surrounds a training loop; a context manager. Every rank makes one and calls its methods.

    Args:
        args: the flags: `launch`, `amp`, `watch`, `seed`, `batch_size`, `out`, `resume`,
            `checkpoint_every`, and, if it is there, `init`.
        device: of this rank.
        data: `str(data)` says what is trained on; `data.facts` goes into result.json;
            `data.identity`, if there is one, is compared on resuming; `data.class_names` and
            `data.test_columns`, values of each test sample by name, go into predictions.csv.
        options: see `Options`.

    `print0`, `warn` and `scalars` are those of `Log`, `autocast`, `prepare` and `scaler` those of
    `MixedPrecision`.

    Raises:
        UserError: the folder cannot be written; the ranks disagree on the precision, or do not
            divide the batch.
    """

    def __init__(self, args: Any, device: torch.device, data: Any, **options: Any) -> None:
        self.args, self.device, self.data = args, device, data
        self.options = Options(**options)
        self.batch_size: int = self.options.batch_size or args.batch_size
        self.shard = self.options.shard or (dist.get_rank(), dist.get_world_size())
        self.state = TrainState()
        self.amp = MixedPrecision(args.amp, device)
        self.autocast, self.prepare = self.amp.autocast, self.amp.prepare
        self.scaler = self.amp.scaler
        self.config = dict(fixed_flags(args)) | getattr(data, "identity", {})
        self.config |= dict(self.options.settings) | self.amp.settings
        self.num_epochs = 0
        self._log = Log(args.out, active=dist.get_rank() == 0)
        self.print0, self.warn, self.scalars = self._log.print0, self._log.warn, self._log.scalars
        self.meters = Meters(self._log, self.options.unit)
        self.profile = Profile(getattr(args.watch, "profile", 0), self._log, device)
        self._surroundings = ExitStack()  # what is entered before the loop, and left after it
        self._batch_samples = 0
        seed_numpy_and_python()
        local_batch(self.batch_size, self.shard[1])  # a mistake that all ranks meet comes first
        if dist.get_rank() == 0:
            check_writable(args.out, "--out")
            watcher.publish(args.out)  # where python -m common.who finds the ranks
        greet(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and self.state.step:
            step = self.state.step + 1
            error.add_note(f"in step {step}, or while evaluating or saving after the one before")
        try:
            self._surroundings.__exit__(kind, error, trace)
        finally:
            self._log.close(error)

    def resume(
        self, *, before_save: Callable[[], object] = lambda: None, **parts: Stateful | None
    ) -> None:
        """Go on from the checkpoint of `--resume`, or else from the weights of `--init`, if any.

        Every rank calls this.

        Args:
            before_save: called by every rank before the best weights or a checkpoint are written.
            parts: what checkpoints hold, without wrappers: `model`, which is also the one that is
                checked and kept when it is the best, `optimizer`, `scheduler`; None is left out.

        Raises:
            UserError: the checkpoint is damaged, or was made with other flags; the weights are of
                another model.
        """
        args, self._before_save, self._unchecked = self.args, before_save, parts.get("model")
        self.parts = {name: bare(part) for name, part in parts.items() if part is not None}
        self.parts["scaler"] = self.scaler
        checkpoints = Checkpoints(
            args.out / "checkpoints", self.parts, self.config, args.watch.keep
        )
        found = checkpoints.load(args.resume)
        if found:
            self.state = TrainState.resumed(found.state["progress"])
            self.print0(f"resumed from {found.path} at step {self.state.step}")
        elif init := getattr(args, "init", None):
            init_model(init, self.parts["model"])
        self.meters.of_epoch = self.state.losses
        begin(self, resumed=found is not None)
        self._stop = self._surroundings.enter_context(Stop())  # left last, when all is written
        self._checkpoints = self._surroundings.enter_context(checkpoints)
        self._surroundings.enter_context(self.profile)

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left, from the one in which the resumed run was interrupted."""
        self.num_epochs, last = count, self.meters.last_step
        while self.state.epoch < count and self.state.step < last:
            epoch = self.state.epoch
            self.label = f"epoch {epoch + 1}/{count}"
            yield epoch
            assert self.state.epoch > epoch or self.state.step >= last, "end_epoch is missing"

    def steps(self, loader: Any) -> Iterator[Any]:
        """The batches of an epoch that are left; after each, a step is done. Every rank calls this.

        Args:
            loader: batches whose last item, the samples' indices in the dataset, is not given to
                the loop, but counted: the ranks must see each sample once.

        Raises:
            Stopped: after the common last step of all ranks, and a checkpoint.
            CheckError: samples were lost, or trained on twice.
        """
        state, samples, total = self.state, len(loader.dataset), len(loader)
        batches, self._seen = rest_of_epoch(
            loader, self.args.seed, state, self.batch_size, self.shard
        )
        self.meters.begin(self.label, total, self.num_epochs, state)
        batches = self.profile.input(batches, state)
        for *batch, indices in self.meters.training(batches):
            left = samples - state.batch * self.batch_size
            self._batch_samples = min(self.batch_size, left)
            yield batch
            self._seen.add(indices, self.batch_share()[1])
            self._end_step(total)
        self.meters.gather_losses(state.step)
        if state.batch == total:
            self._seen.check(self.options.counts)

    def batch_share(self) -> tuple[int, int]:
        """Samples in the current global batch, and in this rank's share: the rest is padding."""
        return self._batch_samples, local_samples(self._batch_samples, *self.shard)

    def log(self, loss: Tensor, **others: Tensor) -> None:
        """Keep a step's loss, a scalar; its mean over the ranks is the loss of the global batch."""
        self.meters.loss(loss, **others)

    def _end_step(self, steps_in_epoch: int) -> None:
        state, every = self.state, self.args.watch.print_freq
        if self._unchecked is not None:
            check_gradients(cast("nn.Module", self._unchecked))
            self._unchecked = None
            if warning := too_large(self.batch_size, self.data):  # after mistakes, which are alone
                self.warn(warning)
        state.batch += 1
        state.step += 1
        self.meters.step(self._batch_samples)
        progress.update(step=state.step, samples=self.meters.samples)
        self.profile.end_step()
        if every and state.step % every == 0:
            self.meters.progress(f"{self.label}, step {state.batch}/{steps_in_epoch}", state.step)
        signum = self._stop.agreed()
        last = self.options.save_before_evaluation and state.batch == steps_in_epoch
        if signum or state.step % self.args.checkpoint_every == 0 or last:
            self._save(wait=bool(signum))
        if signum:
            raise Stopped(signum, f"checkpoint at step {state.step}; go on with --resume auto")

    def _save(self, wait: bool = False) -> None:
        self.meters.gather_losses(self.state.step)
        self.state.losses = self.meters.of_epoch
        self.state.seen = self._seen.so_far(self.options.counts) if self.state.batch else []
        self._before_save()
        self._checkpoints.save(asdict(self.state), wait)

    def end_epoch(
        self,
        evaluation: Evaluation | Mapping[str, float],
        *,
        best: str = "accuracy",
        smaller_is_better: bool = False,
        model: nn.Module | None = None,
        save_best: Callable[[], object] | None = None,
    ) -> None:
        """Show and record the evaluation, keep the best model and its predictions, save.

        Every rank calls this.

        Args:
            evaluation: what `evaluate` returns, or metrics by name.
            best: the metric that decides which model is the best.
            smaller_is_better: as of an error.
            model: the one to keep in best.safetensors; by default the part of this name.
            save_best: called on rank 0 instead, when the model is the best so far.

        Raises:
            UserError: the model diverged, and is not saved; the ranks' metrics differ, or
                `best` is not one of them.
        """
        self._before_save()  # the best weights are of the same parts as the checkpoint
        if show_epoch(self, evaluation, best, smaller_is_better) and self._log.active:
            file, model = self.args.out / "best.safetensors", bare(model or self.parts["model"])
            (save_best or partial(save_model, file, model, about(self)))()
            if isinstance(evaluation, Evaluation):
                write_predictions(self, evaluation)
        if self.state.batch >= self.meters.steps_in_epoch:  # else --limit-steps has cut it
            self.state.epoch, self.state.batch = self.state.epoch + 1, 0
        self._save()

    def finish(self, *, parameter_hash: str = "", **facts: Any) -> None:
        """Check that all replicas are equal, and write what came out. Every rank calls this.

        Args:
            parameter_hash: of a program that has checked its replicas itself.
            facts: more for result.json.

        Raises:
            CheckError: the replicas differ.
        """
        self._surroundings.close()
        parameter_hash = parameter_hash or check_replicas(self.parts["model"])
        best = {f"best_{name}": value for name, value in self.state.best.items()}
        metrics = {"metrics": self.state.metrics | best, "parameter_hash": parameter_hash}
        write_result(self, metrics | self.profile.found | facts)
