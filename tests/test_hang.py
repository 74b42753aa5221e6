"""A hang is explained: nine planted mistakes among three ranks, and the tool for a live run."""

import re
from pathlib import Path

import pytest

from tests import ranks

TRAIN = "examples.mnist_ddp_spawn.train"
IMPORTS = "from datetime import timedelta\n"
LOOP = "            run.log(loss)\n"
LOADER = "        num_workers=args.workers,\n"
MISTAKES = {
    "extra collective": (
        "dist.all_reduce(torch.ones(4)); rank == 1 and dist.all_reduce(torch.ones(4))",
        r"(calls|shapes) differ in collective \d+: .* on rank 0, .*all_reduce \[4\] on rank 1",
    ),
    "collective under a rank branch": (
        "if rank == 0: dist.barrier()",
        r"calls differ in collective \d+: all_reduce .* on rank 1, barrier .* on rank 0",
    ),
    "uneven batches": (
        "if rank == 1: break",
        r"calls differ in collective \d+: all_reduce .* on rank 0, all_gather .* on rank 1",
    ),
    "mismatched shapes": (
        "dist.all_reduce(torch.ones(32 if rank == 1 else 64, 10))",
        r"shapes differ in collective \d+: all_reduce \[64, 10\] on rank 0, "
        r"all_reduce \[32, 10\] on rank 1",
    ),
    "swapped order": (
        "x = torch.ones(4); "
        "(dist.broadcast(x, 0), dist.all_reduce(x)) if rank == 1 else "
        "(dist.all_reduce(x), dist.broadcast(x, 0))",
        r"calls differ in collective \d+: all_reduce \[4\] on rank 0, broadcast \[4\] on rank 1",
    ),
    "endless loop": (
        "while rank == 1: pass",
        r"rank 1 does not wait for other ranks.*train\.py:\d+: .*while rank == 1",
    ),
    "stopped": ("if rank == 1: os.kill(os.getpid(), 19)", r"rank 1 is stopped"),
    "crossed receives": (
        "if rank < 2: dist.recv(torch.ones(1), 1 - rank)",
        r"rank 2 .*|the ranks wait for each other: rank 0 at .*recv.*rank 1 at .*recv",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_named(mistake: str, tmp_path: Path) -> None:
    code, sentence = MISTAKES[mistake]
    planted = f"{LOOP}            if run.step == 4:\n                {code}\n"
    mutate = [(TRAIN, LOOP, planted), (TRAIN, IMPORTS, f"import os\n{IMPORTS}")]
    flags = ["--timeout", "3", "--epochs", "1"]
    training = ranks.run("mnist_ddp_spawn", 3, flags, out=tmp_path / "out", mutate=mutate)
    assert re.search(rf"^{sentence}", training.text, re.MULTILINE), training.text
    assert training.text.count("error: rank") == 1


def test_slow_loader_is_named(tmp_path: Path) -> None:
    slow = f"{LOADER}        collate_fn=lambda b: (rank == 1 and time.sleep(60), b)[1],\n"
    mutate = [(TRAIN, LOADER, slow), (TRAIN, IMPORTS, f"import time\n{IMPORTS}")]
    flags = ["--timeout", "3", "--epochs", "1"]
    training = ranks.run("mnist_ddp_spawn", 3, flags, out=tmp_path / "out", mutate=mutate)
    assert re.search(r"^rank 1 waits for its data loader \(train.py:\d+", training.text, re.M)


def test_undisturbed_run_writes_no_report(tmp_path: Path) -> None:
    training = ranks.run("mnist_ddp_spawn", 2, ["--epochs", "1"], out=tmp_path / "out").done()
    assert not (training.out / "hang").exists()
