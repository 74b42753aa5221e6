"""The state of the un-split model and of its optimizer, by parameter name, gathered on stage 0.

Checkpoints therefore do not depend on the cuts: a run with 2 stages can resume with 3 or 1. The
whole state must fit into rank 0's memory; `torch.distributed.checkpoint` avoids this.
"""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import Tensor, nn
from torch.optim import Optimizer

# Flattened: the optimizer's entries have names like state.layer1.0.conv1.weight.exp_avg.
OPTIONS = dcp_state.StateDictOptions(cpu_offload=True, flatten_optimizer_state_dict=True)


class WholeModel:
    """The parameters and buffers of all stages of a pipeline; `stage` is this rank's stage."""

    def __init__(self, stage: nn.Module, pipe: dist.ProcessGroup) -> None:
        self.stage, self.pipe = stage, pipe

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state on the first stage, and {} on other stages. Every rank calls this."""
        return gather(dcp_state.get_model_state_dict(self.stage, options=OPTIONS), self.pipe)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this stage's entries."""
        names = self.stage.state_dict().keys() & state.keys()
        self.stage.load_state_dict({name: state[name] for name in names})

    def copy_to(self, model: nn.Module) -> nn.Module:
        """Copy the state to an un-split model on each rank; return it. Every rank calls this."""
        states = [self.state_dict()]
        dist.broadcast_object_list(states, group=self.pipe, group_src=0)
        model.load_state_dict(states[0])
        return model


class WholeOptimizer:
    """The optimizer state of all stages; `optimizer` has the parameters of `stage`."""

    def __init__(self, optimizer: Optimizer, stage: nn.Module, pipe: dist.ProcessGroup) -> None:
        self.optimizer, self.stage, self.pipe = optimizer, stage, pipe

    def state_dict(self) -> dict[str, Any]:
        """Return the state on the first stage, and {} on other stages. Every rank calls this."""
        own = dcp_state.get_optimizer_state_dict(self.stage, self.optimizer, options=OPTIONS)
        return gather(own, self.pipe)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load this stage's entries."""
        dcp_state.set_optimizer_state_dict(self.stage, self.optimizer, state, options=OPTIONS)


def gather(own: dict[str, Any], pipe: dist.ProcessGroup) -> dict[str, Any]:
    """Return all ranks' entries on the first rank, and {} on other ranks. Every rank calls this."""
    first, size = dist.get_rank(pipe) == 0, dist.get_world_size(pipe)
    states: list[dict[str, Any]] | None = [{}] * size if first else None
    dist.gather_object(own, states, group=pipe, group_dst=0)
    return {name: value for state in states or [] for name, value in state.items()}
