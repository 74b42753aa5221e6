"""What a member of `--survive` trains, and all that a newcomer has to be given of it."""

from typing import Any

import torch
from torch import Tensor, nn

from common.data.samplers import GlobalBatchSampler
from common.images.sets import ImageSets
from common.launch.flags import fixed_flags
from common.train.amp import MixedPrecision
from common.train.checks import CheckError
from common.train.ddp import check_smallest_batch
from common.train.evaluate import Evaluation
from common.train.weights import init_model
from examples.imagenet_ddp.args import Args
from examples.imagenet_ddp.recipe import build_model, make_ema, make_optimizer, make_scheduler

METRICS = ("loss", "accuracy", "top5", "precision", "recall", "f1", "auc", "best_accuracy")


class Replica:
    """Model, optimizer, and what the epoch has come to: the same on all ranks after each step.

    The training is a row of units: the steps of an epoch, then its evaluation, and so on.

    Args:
        args: the flags.
        data: what is trained on.
        device: of this rank.
    """

    def __init__(self, args: Args, data: ImageSets, device: torch.device) -> None:
        self.args, self.data, self.amp = args, data, MixedPrecision(args.amp, device)
        self.config = dict(fixed_flags(args)) | data.identity
        self.config |= args.options["settings"] | self.amp.settings
        recipe, classes = args.recipe, len(data.classes)
        self.network = self.amp.move(build_model(recipe, classes, data.size, device))
        if args.init:
            init_model(args.init, self.network)
        self.ema = make_ema(recipe, self.network)
        self.optimizer = make_optimizer(recipe, self.network, args.learning_rate, self.amp.scaler)
        self.parameters = list(self.network.parameters())
        for parameter in self.parameters:  # as it is before the first step
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self.sampler = GlobalBatchSampler(len(data.train), args.global_batch, args.seed, 0, 1)
        self.order = self.sampler.order()
        self.steps_per_epoch = len(self.sampler)
        self.units = args.num_epochs * (self.steps_per_epoch + 1)
        self.schedule = make_scheduler(
            recipe, self.optimizer, self.steps_per_epoch, args.num_epochs
        )
        self.losses = torch.zeros(self.steps_per_epoch)  # in this epoch, as is the next
        self.times_seen = torch.zeros(len(data.train), dtype=torch.uint8)
        self.metrics = torch.full((len(METRICS),), torch.nan, dtype=torch.float64)
        self._keep_buffers()

    @property
    def eval_model(self) -> nn.Module:
        """The model that is evaluated and kept: the average of weights, if there is one."""
        return self.ema.module if self.ema else self.network

    def position(self, unit: int) -> tuple[int, int]:
        """The epoch of a unit, and its step in it; the evaluation comes after the last one."""
        return divmod(unit, self.steps_per_epoch + 1)

    def steps_before(self, unit: int) -> int:
        """How many steps come before a unit."""
        epoch, step = self.position(unit)
        return epoch * self.steps_per_epoch + step

    def check_smallest_batch(self, world_size: int) -> None:
        """Check that the model can be trained on what a rank gets of an epoch's last batch.

        Raises:
            UserError: it is too small; with fewer ranks, each gets more.
        """
        sampler = GlobalBatchSampler(
            len(self.data.train), self.args.global_batch, self.args.seed, 0, world_size
        )
        size, least = self.data.size, sampler.smallest(self.args.global_batch)
        images = self.amp.to_device(torch.zeros(least, 3, size, size))
        check_smallest_batch(self.network, self.amp.autocast, images)

    # ------------------------------------------------------------------ all of it, as one message

    def _tensors(self) -> list[Tensor]:
        momenta = [self.optimizer.state[p]["momentum_buffer"] for p in self.parameters]
        average = self.ema.state_dict().values() if self.ema else ()
        known = (self.losses, self.times_seen, self.metrics)
        return [*self.network.state_dict().values(), *momenta, *average, *known]

    def state(self) -> Tensor:
        """A copy of everything, side by side: [n], uint8."""
        flat = (tensor.detach().contiguous().flatten() for tensor in self._tensors())
        return torch.cat([tensor.view(torch.uint8) for tensor in flat])

    @torch.no_grad()
    def load(self, state: Tensor) -> None:
        """Go on with another rank's state, [n]."""
        tensors = self._tensors()
        parts = state.split([tensor.numel() * tensor.element_size() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            # a copy, because 8 bytes must lie at a multiple of 8
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
        self._keep_buffers()

    # ------------------------------------------------------------------------------------ a step

    def batch(self, unit: int) -> Tensor:
        """The global batch of a step, as indices into the dataset: [B], or what is left."""
        epoch, step = self.position(unit)
        if self.sampler.epoch != epoch:
            self.sampler.set_epoch(epoch)
            self.order = self.sampler.order()
        first, size = step * self.sampler.batch_size, self.sampler.batch_size
        return self.order[torch.arange(first, min(first + size, len(self.data.train)))]

    def buffers(self) -> Tensor:
        """BatchNorm's statistics, side by side: [b]. Whole numbers count, and are equal anyway."""
        floats = [buffer.flatten() for buffer in self.network.buffers() if _is_float(buffer)]
        return torch.cat([torch.zeros(0), *floats])

    def _keep_buffers(self) -> None:
        self._kept = [buffer.clone() for buffer in self.network.buffers()]

    @torch.no_grad()
    def undo(self) -> None:
        """Forget what forwards have done to the buffers since the last step that is done."""
        for buffer, kept in zip(self.network.buffers(), self._kept, strict=True):
            buffer.copy_(kept)

    @torch.no_grad()
    def step(self, unit: int, seen: Tensor, loss: Tensor, buffers: Tensor) -> None:
        """Take a step, after a backward.

        Args:
            unit: which one.
            seen: how often each sample of the batch was in a rank's share, [B].
            loss: of the batch, a scalar.
            buffers: those of rank 0, [b].
        """
        floats = [buffer for buffer in self.network.buffers() if _is_float(buffer)]
        parts = buffers.split([buffer.numel() for buffer in floats])
        for buffer, part in zip(floats, parts, strict=True):
            buffer.copy_(part.view_as(buffer))
        done = self.steps_before(unit)
        self.optimizer.param_groups[0]["lr"] = self._learning_rate(done)
        self.optimizer.step()
        if self.ema:
            self.ema.update_parameters(self.network)
        self.times_seen[self.batch(unit)] += seen.to(torch.uint8)
        self.losses[self.position(unit)[1]] = loss
        self._keep_buffers()

    def _learning_rate(self, step: int) -> float:
        """What the schedule, taken step by step, has come to."""
        return self.args.learning_rate * self.schedule.lr_lambdas[0](step)

    # ---------------------------------------------------------------------------- an evaluation

    def check_seen(self) -> None:
        """Check that the epoch is complete.

        Raises:
            CheckError: samples were lost or trained on twice.
        """
        wrong = int((self.times_seen != 1).sum())
        if wrong:
            raise CheckError(f"{wrong} samples of the epoch were lost, or trained on twice")

    def is_best(self, evaluation: Evaluation) -> bool:
        """Whether the model has never been better."""
        return (
            not evaluation.metrics["accuracy"] <= self.metrics[-1].item()
        )  # not a number at first

    def end_epoch(self, evaluation: Evaluation) -> None:
        """Keep what was found, and begin to count anew."""
        found = {"loss": evaluation.loss, **evaluation.metrics}
        best = evaluation.metrics["accuracy"] if self.is_best(evaluation) else self.metrics[-1]
        for number, name in enumerate(METRICS[:-1]):
            value = found.get(name)
            self.metrics[number] = torch.nan if value is None else value
        self.metrics[-1] = best
        self.losses.zero_()
        self.times_seen.zero_()

    def known_metrics(self) -> dict[str, Any]:
        """The metrics of the last evaluation, and the best accuracy, by name."""
        values = dict(zip(METRICS, self.metrics.tolist(), strict=True))
        return {name: value for name, value in values.items() if value == value and name != "loss"}


def _is_float(buffer: Tensor) -> bool:
    return buffer.is_floating_point()
