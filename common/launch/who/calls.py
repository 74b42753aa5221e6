"""The last collectives and messages of this process.

Collectives are read from torch's flight recorder, which records them anyway, when somebody asks.
Messages are not in it under gloo, so `note_messages` keeps the last ones.
"""

import importlib
import pickle
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from common.launch.who import process

# What a rank waits in when it waits for its data.
LOADERS = ("torch/utils/data/dataloader.py", "common/train/loader.py", "common/images/loader.py")
SIZES = {"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Int": 4, "Long": 8, "Short": 2}
LAST = 24  # calls that are told

progress: dict[str, Any] = {}
"""What the training says of itself: `step`, and what `python -m common.top` shows."""
_messages: deque[dict[str, Any]] = deque(maxlen=LAST)
counts: dict[str, int] = {}
"""Messages of this process, by kind."""
_recorded: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()


def note_messages() -> None:
    """Keep the last messages of this process. Costs 2 to 3 us for each.

    It is done at the process group, which all of torch's functions call: programs may have imported
    `isend` and `irecv` already, and torch compares these with its own.
    """
    if getattr(dist.ProcessGroup.send, "noted", False):
        return
    for kind in ("send", "recv"):
        setattr(dist.ProcessGroup, kind, noted(kind, getattr(dist.ProcessGroup, kind)))


def noted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that keeps what it is called with, and calls the given one."""

    def note(group: Any, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        counts[kind] = counts.get(kind, 0) + 1
        frame = sys._getframe(1)
        while "/torch/" in frame.f_code.co_filename and frame.f_back:
            frame = frame.f_back
        message: dict[str, Any] = {
            "kind": kind,
            "number": counts[kind],
            "tensors": [(tuple(tensor.shape), tensor.nbytes) for tensor in tensors],
            "frame": (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name),
            "made": time.time(),
            "peer": peer,
            "group": group,
        }
        _messages.append(message)
        work = function(group, tensors, peer, tag)
        # NCCL gives none for one message of a batch: then nobody can wait for this one.
        message["work"] = weakref.ref(work) if work is not None else lambda: None
        return work

    note.noted = True  # ty: ignore[missing-attribute]
    return note


def _finished(message: dict[str, Any]) -> bool:
    """Whether somebody has waited for a message, or nobody can any more."""
    work = message["work"]() if "work" in message else None
    return "work" in message and (work is None or work.is_completed())


def messages() -> list[dict[str, Any]]:
    """The last messages of this process, the newest last."""
    told = []
    for message in list(_messages):
        file, line, _ = message["frame"]
        told.append(
            {
                "group": message["group"].group_name,
                "ranks": dist.get_process_group_ranks(message["group"]),
                "kind": message["kind"],
                "number": message["number"],
                "shapes": [list(shape) for shape, _ in message["tensors"]],
                "bytes": sum(size for _, size in message["tensors"]),
                "file": file,
                "line": line,
                "made": message["made"],
                "done": _finished(message),
                "peer": dist.get_process_group_ranks(message["group"])[message["peer"]],
            }
        )
    return told


def groups() -> dict[dist.ProcessGroup, str]:
    """The process groups of this process and their names."""
    names = dist.distributed_c10d._world.pg_names.copy()
    return {group: name for group, name in names.items() if isinstance(group, dist.ProcessGroup)}


def begun() -> dict[dist.ProcessGroup, dict[str, int]]:
    """How many calls of each group have begun, by the device whose backend it is."""
    number = c10d.Backend._get_sequence_number_for_group  # ty: ignore[missing-attribute]
    return {
        group: {str(on): number(group._get_backend(on)) for on in group._device_types}
        for group in groups()
    }


def readable() -> bool:
    """Whether the flight recorder may be read now: not while a group's first collective begins.

    The recorder adds the group to its table then, without a lock against readers: a reader that
    found the new entry still empty ended the process with SIGSEGV (torch 2.15).
    """
    began = {group: {on for on, count in by.items() if count} for group, by in begun().items()}
    if not all(by <= _recorded.get(group, set()) for group, by in began.items()):
        time.sleep(0.01)  # adding a group takes microseconds
        _recorded.update(began)
    return any(began.values())


def recorded(lines: bool = True) -> Iterator[dict[str, Any]]:
    """The flight recorder's entries, of each backend that has one here.

    Args:
        lines: whether to look up the lines that issued them, which takes a second the first time:
            torch imports torch._inductor for them, which torch._dynamo imports, and the other way
            round. The main thread may be importing them, too: always in one order, or one thread
            finds the other's half made.
    """
    if lines:
        importlib.import_module("torch._dynamo")
    if not readable():
        return
    how = {"includeStackTraces": lines}
    for name, backend in (("_dump_fr_trace", {"backend": "gloo"}), ("_dump_nccl_trace", {})):
        dump = getattr(c10d, name, None)
        if dump is None:
            continue
        try:
            dumped = dump(**how, **backend)
        except TypeError:  # before torch 2.15 there is one recorder, without a name
            dumped = dump(**how)
        yield from pickle.loads(dumped).get("entries", [])  # noqa: S301 - of this process


def counted() -> bytes:
    """The numbers of the collectives that were begun and ended last, as text. Takes 5 us."""
    if not readable():
        return b""
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    dumps = [getattr(c10d, name) for name in names if hasattr(c10d, name)]
    return b"".join(dump(includeCollectives=False) for dump in dumps)


def active() -> set[tuple[str, int]]:
    """Groups and numbers of the collectives that have begun and not ended."""
    calls = collectives(lines=False)
    return {(call["group"], call["number"]) for call in calls if not call["done"]}


def collectives(lines: bool = True) -> list[dict[str, Any]]:
    """The last collectives of this process, the oldest first; with or without their `lines`."""
    entries = sorted(recorded(lines), key=lambda entry: entry["time_created_ns"])
    told, members = [], dist.distributed_c10d._world.pg_group_ranks
    ranks = {name: list(members[group]) for group, name in groups().items()}
    for entry in entries[-LAST:]:
        if entry["is_p2p"]:
            continue
        stack = entry.get("frames", [])
        frames = [(each["filename"], each["line"], each["name"]) for each in stack]
        file, line, _ = (process.of_example(frames) or [("?", 0, "")])[0]
        shapes, kinds = entry["input_sizes"], entry["input_dtypes"]
        numbers = [torch.Size(shape).numel() for shape in shapes]
        sizes = [SIZES.get(kind, 1) for kind in kinds]
        told.append(
            {
                "group": entry["process_group"][0],
                "ranks": ranks.get(entry["process_group"][0], []),
                "kind": entry["profiling_name"].partition(":")[2],
                "number": entry["collective_seq_id"],
                "shapes": shapes,
                "bytes": sum(n * size for n, size in zip(numbers, sizes, strict=True)),
                "file": file,
                "line": line,
                "made": entry["time_created_ns"] / 1e9,
                "done": entry["retired"] or entry["state"] == "completed",
            }
        )
    return told
