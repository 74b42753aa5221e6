"""What concerns the whole model although no process has it: its state, and its evaluation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from common.checkpoint import Stateful
from common.data import ImageData, Shard
from common.distributed import World, gather
from common.errors import UserError
from common.metrics import Evaluation, classification_metrics
from common.proof import parameter_hash
from examples.resnet_pipeline.grid import Grid
from examples.resnet_pipeline.images import only_labels
from examples.resnet_pipeline.model import Stage
from examples.resnet_pipeline.options import Cut
from examples.resnet_pipeline.parts import Parts
from examples.resnet_pipeline.schedule import Message, receive, send


class Whole:
    """Model and optimizer of all stages, put together on the main rank as if the model had never been cut.

    So a checkpoint is read by the un-split model, and by a pipeline that is cut elsewhere.

    Args:
        stages: this process's stages, by their index.
        optimizer: of their parameters, in their order.
        unsplit: the un-split model, on the meta device.
        grid: this process's place.
        world: this process's world.
    """

    def __init__(
        self, stages: Mapping[int, Stage], optimizer: Optimizer, unsplit: nn.Module, grid: Grid, world: World
    ) -> None:
        self.stages, self.optimizer, self.grid, self.world = stages, optimizer, grid, world
        self.names = [name for stage in stages.values() for name, _ in stage.named_parameters()]
        self.model = unsplit
        self.parts: dict[str, dict[str, Any]] = {}

    def gather(self) -> None:
        """Bring the state of all stages to the main rank; every rank calls this."""
        state = self.optimizer.state_dict()
        mine = {
            "model": {k: v.detach().cpu() for s in self.stages.values() for k, v in s.state_dict().items()},
            "optimizer": {
                "state": {
                    self.names[number]: {k: v.cpu() if isinstance(v, Tensor) else v for k, v in values.items()}
                    for number, values in state["state"].items()
                },
                "group": {k: v for k, v in state["param_groups"][0].items() if k != "params"},
            },
        }
        held = gather(self.world, mine if self.grid.replica == 0 else None)
        parts = [part for part in held if part is not None]
        self.parts = {
            "model": {k: v for part in parts for k, v in part["model"].items()},
            "optimizer": {
                "state": {k: v for part in parts for k, v in part["optimizer"]["state"].items()},
                "group": mine["optimizer"]["group"],
            },
        }
        if held:  # on the main rank
            self.model.load_state_dict(self.parts["model"], assign=True)  # strict: nothing is missing, nothing twice

    def facts(self, cut: Cut, most_kept: int) -> dict[str, Any]:
        """What result.json says about the pipeline; every rank calls this.

        Args:
            cut: the flags.
            most_kept: of how many micro-batches this process kept the activations at the same time.
        """
        facts = {name: getattr(cut, name) for name in ("arch", "norm", "engine", "schedule", "micro_batches")}
        kept = gather(self.world, most_kept)
        return facts | {"stages": self.grid.stages, "replicas": self.grid.replicas, "most_kept": kept}

    def parameter_hash(self) -> str:
        """Of the un-split model; empty on other ranks than the main one. Every rank calls this."""
        if not self.parts:  # resumed at its end: there was no epoch to gather after
            self.gather()
        return parameter_hash(self.model) if self.parts["model"] else ""

    @property
    def checkpoint_parts(self) -> dict[str, Stateful]:
        """Model and optimizer as a checkpoint wants them; their state is what `gather` has brought."""
        return {
            "model": _Half(self, "model", self._load_model),
            "optimizer": _Half(self, "optimizer", self._load_optimizer),
        }

    def _load_model(self, state: Mapping[str, Any]) -> None:
        for stage in self.stages.values():
            stage.load_state_dict({name: state[name] for name in stage.state_dict()})

    def _load_optimizer(self, state: Mapping[str, Any]) -> None:
        numbered = {n: state["state"][name] for n, name in enumerate(self.names) if name in state["state"]}
        groups = [state["group"] | {"params": list(range(len(self.names)))}]
        self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})


@dataclass(frozen=True)
class _Half:
    """Model or optimizer of a `Whole`."""

    whole: Whole
    kind: str
    load: Callable[[Mapping[str, Any]], None]

    def state_dict(self) -> dict[str, Any]:
        """On the main rank."""
        return self.whole.parts[self.kind]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """On every rank."""
        self.load(state_dict)


@torch.inference_mode()
def predict(parts: Parts, grid: Grid, loader: DataLoader[Any]) -> tuple[Tensor, Tensor]:
    """Send batches forward through the pipeline; a stage works on one while the next works on the one before.

    Args:
        parts: this process's stages.
        grid: this process's place.
        loader: this replica's batches.

    Returns:
        Probabilities [N, classes] and labels [N] on the process with the last stage; nothing on the others.
    """
    owners, plan = parts.owners, parts.plan
    found, truth = [torch.empty(0, *plan.parts[-1].shape)], [torch.empty(0, dtype=torch.long)]
    for images, labels, _ in loader:
        x, leaving = images, list[Message]()
        for index, stage in parts.stages.items():
            before, after = (owners[i] if 0 <= i < len(owners) else grid.stage for i in (index - 1, index + 1))
            if before != grid.stage:
                shape, dtype = plan.input(index)
                message = receive((len(labels), *shape), dtype, stage, grid.ranks[before], grid.pipeline, index)
                with grid.watching(grid.ranks[before], "waits for an evaluation"):
                    message.work.wait()
                x = message.tensor
            elif index == 0:
                x = stage.numerics.images(images)
            x = stage(x)
            if after != grid.stage:
                leaving.append(send(x, stage, grid.ranks[after], grid.pipeline, index + 1))
            elif index == len(owners) - 1:
                found.append(x.float().softmax(dim=1).cpu())
                truth.append(labels)
        for message in leaving:
            message.work.wait()
    return torch.cat(found), torch.cat(truth)


def evaluate(parts: Parts, grid: Grid, data: ImageData, world: World) -> Evaluation:
    """Classify the whole test set, each sample once.

    Returns:
        As `common.metrics.evaluate`; labels and predictions are those of the set on the main rank only.

    Raises:
        UserError: the model diverged.
    """
    for stage in parts.stages.values():
        stage.eval()
    shard = Shard(len(data.test), grid.replica, grid.replicas)
    test = data.test if parts.first else only_labels(data.test)
    rows = predict(parts, grid, DataLoader(test, 50, sampler=shard, collate_fn=data.normalise))
    for stage in parts.stages.values():
        stage.train()
    labels = torch.empty(len(data.test), dtype=torch.long)
    scores = torch.full((len(data.test), data.classes), torch.nan)
    held = gather(world, (grid.replica, *rows))
    for replica, probabilities, truth in held:
        if len(truth):
            scores[replica :: grid.replicas], labels[replica :: grid.replicas] = probabilities, truth
    shared: list[Any] = [None]
    if held:  # on the main rank
        top = scores.topk(min(5, data.classes)).indices
        metrics = classification_metrics(top, labels, data.classes, scores)
        loss = F.nll_loss(scores.double().log(), labels).item()
        shared = [(metrics, loss) if scores.isfinite().all() else "diverged"]
    dist.broadcast_object_list(shared)
    if shared[0] == "diverged":
        raise UserError("training diverged: the model's outputs are not finite numbers; lower --lr")
    metrics, loss = shared[0]
    return Evaluation(metrics, loss, labels, scores.argmax(dim=1))
