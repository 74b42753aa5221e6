"""Random numbers: seeded, saved and restored with the checkpoint."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_numpy_and_python() -> None:
    """Seed Python's and NumPy's generators from the seed that torch's has in this process."""
    seed = torch.initial_seed()
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state() -> dict[str, Any]:
    """The state of all generators of this process, as tensors and plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    words = torch.from_numpy(np.asarray(keys).astype(np.int64))
    state: dict[str, Any] = {
        "python": list(random.getstate()[1]),
        "numpy": (str(kind), words, position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()  # DataParallel draws on all of them
        state["device"] = torch.cuda.current_device()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Set all generators to a state that `random_state` returned."""
    random.setstate((3, tuple(state["python"]), None))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    assert isinstance(keys, Tensor)
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        for device, one in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(one, device)
        if "device" in state and (own := torch.cuda.current_device()) != state["device"]:
            torch.cuda.set_rng_state(state["cuda"][state["device"]], own)  # --gpu, or fewer visible
