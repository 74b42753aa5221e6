"""Random numbers: seeded on every rank, saved and restored with the checkpoint."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_everything(seed: int, rank: int, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch with `seed + rank`, so that dropout differs between ranks.

    Parameters do not differ for it: DistributedDataParallel sends rank 0's to all when it wraps the model.

    Args:
        seed: the run's seed; rank 0 uses it as it is.
        rank: this process's global rank.
        deterministic: also make CUDA kernels repeatable, which is slower (the CPU's are repeatable anyway).
    """
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)  # all devices
    if deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def seed_loader_worker(_: int) -> None:
    """A DataLoader's `worker_init_fn`: seed Python and NumPy from the seed that torch gave the worker.

    torch seeds only itself in a worker; forked workers would otherwise draw equal NumPy numbers. And the worker ends
    when its rank does: torch itself watches the server that a worker was forked from, which stays for its sake.
    """
    from common.distributed import end_with_parent  # which imports this module

    end_with_parent()
    seed = torch.initial_seed() % 2**32
    random.seed(seed)
    np.random.seed(seed)


def random_state() -> dict[str, Any]:
    """The state of all generators of this process, as tensors and plain values (loadable by `weights_only`)."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": list(random.getstate()[1]),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Set all generators to a state that `random_state` returned."""
    random.setstate((3, tuple(state["python"]), None))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    assert isinstance(keys, Tensor)
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
