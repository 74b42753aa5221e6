"""What a rank of survive.py trains, and all that a newcomer has to be given of it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD

from common.data.idx import ImageData
from common.data.models import DigitNet
from common.train.checks import CheckError


class Replica:
    """Model, optimizer, and what the epoch has come to: the same on all ranks after each step.

    Args:
        args: the flags.
        data: what is trained on.
    """

    def __init__(self, args: Any, data: ImageData) -> None:
        self.args, self.data = args, data
        torch.manual_seed(args.seed)  # the founders begin with the same model
        self.model = DigitNet(data.size, data.classes)
        self.parameters = list(self.model.parameters())
        self.optimizer = SGD(self.parameters, args.lr, args.momentum)
        for parameter in self.parameters:  # as it is before the first step
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self.times_seen, self.loss = torch.zeros(len(data.train)), torch.zeros(1)  # in this epoch
        self.steps_per_epoch = -(-len(data.train) // args.batch_size)
        self.steps = args.epochs * self.steps_per_epoch

    def _tensors(self) -> list[Tensor]:
        momenta = [self.optimizer.state[p]["momentum_buffer"] for p in self.parameters]
        return [*self.model.state_dict().values(), *momenta, self.times_seen, self.loss]

    def state(self) -> Tensor:
        """A copy of everything, side by side: [n], float32."""
        return torch.cat([tensor.flatten() for tensor in self._tensors()])

    def load(self, state: Tensor) -> None:
        """Go on with another rank's state, [n]."""
        tensors = self._tensors()
        for tensor, part in zip(tensors, state.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def batch(self, step: int) -> Tensor:
        """The global batch of a step, as indices into the dataset: [B], or what is left."""
        epoch, number = divmod(step, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(self.args.seed + epoch)
        order = torch.randperm(len(self.data.train), generator=generator)
        return order.split(self.args.batch_size)[number]

    def backward(self, batch: Tensor, rank: int, world_size: int) -> Tensor:
        """This rank's share of a step, to be summed over the ranks.

        Args:
            batch: the global batch, [B].
            rank: in the group of this step. Its share are the samples rank, rank + W, ...
            world_size: W, of that group.

        Returns:
            [B + n + 1]: which samples of the batch are in the share, the gradients, the loss. Their
            sums over the ranks are those of the mean over the global batch, whatever W is.
        """
        share = batch[rank::world_size]  # [S], may be empty
        pixels, labels, _ = self.data.train.__getitems__(share.tolist())
        logits = self.model(self.data.normalise(pixels))  # [S, classes]
        loss = F.cross_entropy(logits, labels, reduction="sum") / len(batch)
        self.optimizer.zero_grad()
        loss.backward()
        seen = torch.zeros(len(batch))
        seen[rank::world_size] = 1
        gradients = [p.grad.flatten() for p in self.parameters if p.grad is not None]
        return torch.cat([seen, *gradients, loss.detach().view(1)])

    def step(self, batch: Tensor, total: Tensor) -> None:
        """Take the step that follows from the sum over the ranks, [B + n + 1]."""
        sizes = [parameter.numel() for parameter in self.parameters]
        seen, *gradients, loss = total.split([len(batch), *sizes, 1])
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.view_as(parameter)
        self.optimizer.step()
        self.times_seen[batch] += seen
        self.loss += loss

    def end_epoch(self) -> float:
        """Begin to count anew; returns the epoch's mean loss.

        Raises:
            CheckError: samples were lost or trained on twice.
        """
        wrong = int((self.times_seen != 1).sum())
        if wrong:
            raise CheckError(f"{wrong} samples of the epoch were lost, or trained on twice")
        mean = self.loss.item() / self.steps_per_epoch
        self.times_seen.zero_()
        self.loss.zero_()
        return mean

    @torch.inference_mode()
    def accuracy(self) -> float:
        """Top-1 on the whole test set, in percent."""
        correct, test = 0, self.data.test
        for part in torch.arange(len(test)).split(1000):
            images, labels, _ = self.data.collate(test.__getitems__(part.tolist()))
            correct += int((self.model(images).argmax(dim=1) == labels).sum())
        return 100 * correct / len(test)
