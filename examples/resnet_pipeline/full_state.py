"""The state of the full model, gathered from its stages on rank 0 as if it had never been cut.

So the un-split model reads a checkpoint, and so does a pipeline that is cut elsewhere.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from common.launch.collectives import broadcast_object, gather_objects
from common.train.checks import parameter_hash
from examples.resnet_pipeline.grid import Grid
from examples.resnet_pipeline.stages import LocalStages

Value = TypeVar("Value")


class FullModel:
    """The parameters and buffers of all stages.

    Attributes:
        module: the un-split model; on rank 0 it holds what `gather` has brought there.

    Args:
        local: this process's stages.
        grid: this process's place.
    """

    def __init__(self, local: LocalStages, grid: Grid) -> None:
        self.stages, self.grid, self.module = local.modules, grid, local.full_model

    def gather(self) -> None:
        """Bring the state of all stages to rank 0. Every rank calls this."""
        own = {
            name: tensor.detach().cpu()
            for stage in self.stages
            for name, tensor in stage.state_dict().items()
        }
        state = _merged_on_rank0(own, self.grid)
        if state:
            # Strict: no name is missing, none is there twice. The meta device's tensors go.
            self.module.load_state_dict(state, assign=True)

    def state_dict(self) -> dict[str, Any]:
        """What `gather` has brought to rank 0."""
        return self.module.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set this process's stages from the state of the full model."""
        for stage in self.stages:
            stage.load_state_dict({name: state_dict[name] for name in stage.state_dict()})

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of this process's stages."""
        for stage in self.stages:
            yield from stage.named_parameters()


class FullOptimizer:
    """The optimizer's state of all parameters, by their names in the un-split model.

    Args:
        local: this process's stages.
        optimizer: of their parameters, in their order, in one group.
        grid: this process's place.
    """

    def __init__(self, local: LocalStages, optimizer: Optimizer, grid: Grid) -> None:
        self.optimizer, self.grid = optimizer, grid
        self.names = [name for stage in local.modules for name, _ in stage.named_parameters()]
        self.gathered: dict[str, Any] = {}

    def gather(self) -> None:
        """Bring the state of all stages' parameters to rank 0. Every rank calls this."""
        state = self.optimizer.state_dict()
        own = {
            self.names[number]: {name: _on_host(value) for name, value in values.items()}
            for number, values in state["state"].items()
        }
        group = {name: v for name, v in state["param_groups"][0].items() if name != "params"}
        self.gathered = {"state": _merged_on_rank0(own, self.grid), "group": group}

    def state_dict(self) -> dict[str, Any]:
        """What `gather` has brought to rank 0."""
        return self.gathered

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the state of this process's parameters from that of all."""
        state, group = state_dict["state"], state_dict["group"]
        numbered = {n: state[name] for n, name in enumerate(self.names) if name in state}
        groups = [group | {"params": list(range(len(self.names)))}]
        self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})


class FullState:
    """Model and optimizer of all stages, for checkpoints, the best weights and the final hash.

    Args:
        local: this process's stages.
        optimizer: of their parameters, in their order.
        grid: this process's place.
    """

    def __init__(self, local: LocalStages, optimizer: Optimizer, grid: Grid) -> None:
        self.model = FullModel(local, grid)
        self.optimizer = FullOptimizer(local, optimizer, grid)
        self._changed = True
        optimizer.register_step_post_hook(self._note_step)

    def _note_step(self, *_: object) -> None:
        self._changed = True

    def gather(self) -> None:
        """Bring everything to rank 0, unless it is there already. Every rank calls this."""
        if self._changed:
            self.model.gather()
            self.optimizer.gather()
            self._changed = False

    def parameter_hash(self) -> str:
        """The hash of the un-split model, on every rank. Every rank calls this."""
        self.gather()
        return broadcast_object(lambda: parameter_hash(self.model.module))


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _merged_on_rank0(own: dict[str, Value], grid: Grid) -> dict[str, Value]:
    """The dictionaries of one pipeline's processes as one, on rank 0; elsewhere nothing."""
    held = gather_objects(own if grid.dp_rank == 0 else {})
    return {name: value for part in held for name, value in part.items()}
