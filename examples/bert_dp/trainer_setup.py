"""What both Trainer programs need before they make a Trainer."""

import os
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, logging

from common.launch.device import choose_device
from common.launch.place import Place
from common.launch.rendezvous import JOB
from common.train.loader import local_batch
from common.train.profile import Profile
from examples.bert_dp.tokens import Encoded


def join(local_rank: int, place: Place) -> torch.device:
    """Become a rank, as `train.py` does, in the environment that the Trainer expects.

    The Trainer uses the process group that it finds. Every rank calls this.

    Returns:
        The device of this rank.
    """
    place.export(local_rank)
    device, backend = choose_device(place.flags, local_rank)
    bound = device if device.type == "cuda" else None  # nccl connects now, not in the first step
    dist.init_process_group(backend, init_method=JOB, timeout=place.flags.patience, device_id=bound)
    logging.set_verbosity_error()  # it would warn of a process group of one process
    logging.disable_progress_bar()  # of the files of a checkpoint
    if dist.get_world_size() == 1:
        os.environ.pop("LOCAL_RANK", None)  # with it, one process would not use DataParallel
    else:  # accelerate would set another number of threads, and with it change the last bits
        os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        if device.type == "cuda":  # accelerate takes the device of this number
            os.environ["LOCAL_RANK"] = str(device.index)
    return device


def device_batch(batch_size: int, device: torch.device) -> int:
    """The Trainer's batch size, which is per device, from the global one.

    Args:
        batch_size: samples in the global batch.
        device: of this rank; alone, a process uses all CUDA devices that it sees.

    Raises:
        UserError: the devices do not divide the batch.
    """
    world_size, devices = dist.get_world_size(), 1
    if world_size == 1 and device.type == "cuda":
        devices = torch.cuda.device_count()
    what = f"{devices} devices" if devices > 1 else None
    return local_batch(batch_size, world_size * devices, what)


class ProfileCallback(TrainerCallback):
    """Lets `--profile` see the Trainer's steps and its waits for data, as `Run` does."""

    def __init__(self, trainer: Trainer, profile: Profile) -> None:
        self.profile, fetch = profile, trainer.get_batch_samples

        def fetched(*args: Any, **more: Any) -> Any:
            with profile.waiting():
                return fetch(*args, **more)

        trainer.get_batch_samples = fetched

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the wait for its data."""
        self.profile.begin_step(state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the optimizer's step."""
        self.profile.end_step()


def samples(encoded: Encoded) -> Any:
    """Tokenised texts as the Trainer takes them: a dictionary each, padded by its collator."""
    starts, ids = encoded.starts.tolist(), encoded.ids.tolist()
    ends = zip(starts[:-1], starts[1:], encoded.labels.tolist(), strict=True)
    return [{"input_ids": ids[start:end], "labels": label} for start, end, label in ends]
