"""manual_allreduce_sgd against torch's own, against a plain loop, and against silent and dead processes."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from common.data.idx import ImageData, idx_folder
from common.data.models import DigitNet
from common.train.evaluate import classification_metrics
from tests.conftest import ROOT, Programs
from tests.examples.manual_allreduce_checks import MUTATIONS
from tests.examples.manual_allreduce_jobs import WAYS
from tests.machine import here
from tests.runs import NO_GPU, Eventually, losses, result

EXAMPLE = "examples.manual_allreduce_sgd"
TRAIN = ("-m", EXAMPLE)
JOBS = ("-m", "tests.examples.manual_allreduce_jobs")
TORCHRUN = ("-m", "torch.distributed.run")


def parameters(out: Path) -> dict[str, torch.Tensor]:
    newest = max((out / "checkpoints").glob("step-*.pt"))
    return torch.load(newest, weights_only=True)["model"]


# ------------------------------------------------------------------------------------------------ the algorithms


def test_all_reduces_equal_torchs(programs: Programs) -> None:
    """1 to 8 ranks of 8, any length from 0, four dtypes, four layouts, one node and several, pieces of any size."""
    done = programs.run(*JOBS, "properties", "--nproc", 8, "--timeout", 60, limit=200)
    assert done.stdout == "holds for [1, 2, 3, 4, 5, 6, 7, 8] ranks\n"


def test_mutations_are_seen(programs: Programs) -> None:
    done = programs.run(*JOBS, "mutations", "--nproc", 3, "--timeout", 60)
    assert done.stdout.splitlines() == [f"red: {name}" for name, *_ in MUTATIONS]


# ----------------------------------------------------------------------------------------------------- training


def plain_loop(data: ImageData) -> tuple[DigitNet, list[float]]:
    """The same training without a line of distributed code: one process, one model, mean of each batch."""
    torch.manual_seed(1234)
    model = DigitNet(data.size, data.classes)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.5)
    found = []
    for epoch in range(3):
        order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(1234 + epoch)).tolist()
        for start in range(0, len(order), 24):
            images, labels, _ = data.collate(data.train.__getitems__(order[start : start + 24]))
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return model, found


@pytest.fixture(scope="module")
def reference(small: Path) -> tuple[DigitNet, list[float]]:
    return plain_loop(idx_folder(small))


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_every_algorithm_equals_a_plain_loop(
    programs: Programs, tmp_path: Path, small: Path, reference: tuple[DigitNet, list[float]], nproc: int
) -> None:
    quiet = {"HYPOTHESIS_NO_PLUGINS": "1"}  # that of trio, which Selenium needs, warns
    done = programs.run(*JOBS, "trainings", "--nproc", nproc, "--dataset", small, "--folder", tmp_path, env=quiet)
    assert done.stderr == NO_GPU * (len(WAYS) + 2)
    model, expected = reference
    data = idx_folder(small)
    images, labels, _ = data.collate(data.test.__getitems__(list(range(101))))
    with torch.inference_mode():
        scores = model(images).softmax(dim=1)
    metrics = classification_metrics(scores.topk(5).indices, labels, 10, scores)
    said = re.findall(r"mean loss of (.*)", done.stdout)
    assert len(said) == 3 * (len(WAYS) + 2)
    for line in said:
        assert re.fullmatch(", ".join(rf"rank {rank} \d\.\d{{4}}" for rank in range(nproc)), line), "all positive"
    for way in WAYS:
        found = result(tmp_path / way)  # it is written only if all ranks hold the same parameters
        assert (found["algorithm"], found["world_size"], found["steps"]) == (way, nproc, 27)
        torch.testing.assert_close(losses(tmp_path / way), expected, rtol=2e-5, atol=1e-6)
        for name, value in parameters(tmp_path / way).items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-5)
        best = found["metrics"].pop("best_accuracy")
        assert found["metrics"] == metrics
        assert best >= metrics["accuracy"]
    length = sum(value.numel() for value in model.parameters())
    chunks = [len(chunk) for chunk in torch.zeros(length).tensor_split(nproc)]
    elements = 2 * length - chunks[1 % nproc] - chunks[2 % nproc] if nproc > 1 else 0
    for way in ("ring", "fast-ring"):
        assert result(tmp_path / way)["bytes_sent"] == 27 * 4 * elements
    assert result(tmp_path / "bf16")["bytes_sent"] == 27 * 2 * elements, "half the bytes"
    assert result(tmp_path / "shared-memory")["bytes_sent"] == 0
    for way in ("bf16", "shared-bf16"):
        different = max(abs(a - b) for a, b in zip(losses(tmp_path / way), expected, strict=True))
        assert 1e-5 < different < 2e-2, "rounding is visible, and small"


def test_a_run_that_is_cut_off_and_resumed_is_bit_identical(programs: Programs, tmp_path: Path, small: Path) -> None:
    done = programs.run(*JOBS, "resumes", "--nproc", 3, "--dataset", small, "--folder", tmp_path)
    assert re.findall(r"resumed from .* at step (\d+)", done.stdout) == ["12"] * len(WAYS), "3 steps into epoch 2"
    for way in WAYS:
        before, after = tmp_path / way, tmp_path / f"{way}-resumed"
        assert result(before)["parameter_hash"] == result(after)["parameter_hash"]
        assert losses(before) == losses(after)


SMALL = ("--epochs", 3, "-b", 24, "--lr", 0.1, "--precision", "fp32")


def test_two_nodes_under_torchrun(
    programs: Programs, tmp_path: Path, small: Path, reference: tuple[DigitNet, list[float]], free_port: int
) -> None:
    """Two agents on loopback, two ranks each: a shared memory per node, and a ring between the nodes."""
    torchrun = (*TORCHRUN, "--nnodes", 2, "--nproc-per-node", 2, "--master-addr", "127.0.0.1")
    program = (*TRAIN, "-a", "shared-memory", "--dataset", small, *SMALL, "--out", tmp_path)
    nodes = [programs.start(*torchrun, "--master-port", free_port, "--node-rank", node, *program) for node in (0, 1)]
    for node in nodes:
        programs.finish(node)
    found = result(tmp_path)
    assert (found["launcher"], found["nodes"], found["world_size"]) == ("torchrun", 2, 4)
    torch.testing.assert_close(losses(tmp_path), reference[1], rtol=2e-5, atol=1e-6)
    length = sum(value.numel() for value in reference[0].parameters())
    assert found["bytes_sent"] == 27 * 4 * length, "2 (N - 1) / N of the gradients for N = 2 nodes"


# ---------------------------------------------------------------------------------------------- what goes wrong

ENDLESS = ("--epochs", 1000, "--nproc", 3, "--checkpoint-every", 5)


def worker(programs: Programs, out: Path, eventually: Eventually) -> int:
    """The process of the last rank, of a run that is training."""
    eventually(lambda: list((out / "checkpoints").glob("step-*")), 60, "a checkpoint")
    return programs.worker(2)


@pytest.mark.timed
@pytest.mark.parametrize("algorithm", ["ring", "shared-memory"])
def test_a_silent_rank_ends_the_others(
    programs: Programs, tmp_path: Path, algorithm: str, eventually: Eventually
) -> None:
    """A rank is stopped (as by a debugger, or a machine that is lost): its messages never come."""
    timeout = round(here(5))
    process = programs.start(*TRAIN, *ENDLESS, "--timeout", timeout, "-a", algorithm, "--out", tmp_path)
    silent = worker(programs, tmp_path, eventually)
    os.kill(silent, signal.SIGSTOP)
    started = time.monotonic()
    done = programs.finish(process, 1, timeout + 120)
    seconds = time.monotonic() - started
    assert timeout - 1 < seconds < timeout + 55, "not the 120 of the default, and not before"
    # By whoever gave up first, or by one who saw that one's connections close.
    how = "(Timed out waiting|timeout caused|Connection closed by peer)"
    lost = rf"error: rank \d: lost another process \(no word from rank 2 in step .*: .*{how}"
    assert re.search(lost, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert programs.gone(within=2)


def shared_memories(programs: Programs) -> set[str]:
    """Pieces of shared memory that some process of the test still has."""
    found = set()
    for maps in (Path(f"/proc/{pid}/maps") for pid in programs.left()):
        try:
            found |= {line.split()[4] for line in maps.read_text().splitlines() if "memfd:gradients" in line}
        except OSError:
            continue
    return found


def test_killed_ranks_leave_no_shared_memory(programs: Programs, tmp_path: Path, eventually: Eventually) -> None:
    files = set(Path("/dev/shm").iterdir())
    run = (*TRAIN, *ENDLESS, "--timeout", round(here(5)), "-a", "shared-memory", "--out")
    process = programs.start(*run, tmp_path / "one")
    rank = worker(programs, tmp_path / "one", eventually)
    assert len(shared_memories(programs)) == 1
    os.kill(rank, signal.SIGKILL)
    done = programs.finish(process, code=1)
    assert re.search(r"error: .*(was ended by SIGKILL|lost another process)", done.stderr), done.stderr
    process = programs.start(*run, tmp_path / "all")
    worker(programs, tmp_path / "all", eventually)
    programs.kill()  # all at once
    process.communicate()
    assert programs.gone()
    assert not {path for path in set(Path("/dev/shm").iterdir()) - files if "gradients" in path.name}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-a", "ddp", "--compress", "bf16"], "--compress bf16 does not go with ddp: use flat"),
        (["-a", "rings"], "invalid choice|rings"),
        (["--nproc", 2, "-b", 7], r"--batch-size 7 \(global\) cannot be divided by 2 ranks; use 8"),
    ],
)
def test_bad_input_is_one_line(programs: Programs, tmp_path: Path, flags: list[object], words: str) -> None:
    done = programs.run(*TRAIN, *flags, "--out", tmp_path, code=2)
    assert re.fullmatch(rf"error: .*({words}).*\n", done.stderr), done.stderr


def test_memory_that_cannot_be_allocated_is_a_users_mistake(programs: Programs, tmp_path: Path) -> None:
    """A file size limit stands for a machine with too little memory."""
    limited = "import resource as r, runpy, sys; r.setrlimit(r.RLIMIT_FSIZE, (10**5, 10**5)); "
    limited += f"sys.argv[0] = 'train'; runpy.run_module('{EXAMPLE}', run_name='__main__', alter_sys=True)"
    done = programs.run(
        "-c", limited, "-a", "shared-memory", "--out", tmp_path / "out", env={"PYTHONPATH": str(ROOT)}, code=2
    )
    assert re.search(r"error: [\d,]+ bytes of shared memory could not be allocated \(File too large\)", done.stderr)


IN_ANOTHER_CONTAINER = """
from datetime import timedelta
import torch.distributed as dist
from common.launch.errors import UserError
from examples.manual_allreduce_sgd import shared_memory
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
shared_memory.allocate = lambda size: 999  # which the process of that number does not have here
try:
    shared_memory.SharedMemory(100, timedelta(seconds=5), [[0]])
except UserError as error:
    print(error)
"""


def test_memory_of_another_container_is_a_users_mistake(programs: Programs) -> None:
    said = programs.run("-c", IN_ANOTHER_CONTAINER).stdout
    assert said.startswith("the memory of this node's first process could not be opened (No such file or directory): ")


ALL_WAS_DONE = """
import torch
import torch.distributed as dist
from examples.manual_allreduce_sgd.train import mean_losses
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(mean_losses(torch.tensor(0.0), 0))
"""


def test_a_resume_between_the_last_step_and_the_evaluation(programs: Programs) -> None:
    """The run that this one resumes has done all steps of the epoch: there is no loss to show."""
    assert programs.run("-c", ALL_WAS_DONE).stdout == "rank 0 0.0000\n"
