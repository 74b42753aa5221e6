"""resnet_pipeline, the program: however it is cut, interrupted, resumed or damaged.

Its schedules and engines: test_resnet_pipeline_schedules.py.
"""

import json
import os
import re
import shutil
import signal
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file

from common.images.folder import ImageFolder
from common.images.sets import ImageSets
from common.train.amp import MixedPrecision
from common.train.checks import parameter_hash
from common.train.precision import Precision
from examples.resnet_pipeline import images as read
from examples.resnet_pipeline.args import Args
from examples.resnet_pipeline.grid import Grid
from examples.resnet_pipeline.images import loaders
from tests import warm
from tests.conftest import Programs
from tests.machine import here
from tests.runs import NO_GPU, SMALL_RESNET, Eventually, losses, mutated, newest_step, result, slow

warm.ALSO += ["torch.distributed.pipelining"]

TRAIN = ("-m", "examples.resnet_pipeline")
TORCHRUN = ("-m", "torch.distributed.run")
# 30 images in batches of 8: three whole batches and one of 6, each in 3 micro-batches
SMALL = ("-a", "resnet18", "--image-size", 32, "--images", 30, "-b", 8, "-m", 3, "--epochs", 2, "--lr", 0.001,
         "--norm", "group", "--precision", "fp32", "--threads", 1)  # fmt: skip

# ------------------------------------------------------------------------------------------------- the program


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with a ResNet-18 of two layers, and so of a sixteenth of the parameters."""
    return mutated(tmp_path_factory.mktemp("code") / "shallow", SMALL_RESNET)


@pytest.fixture(scope="module")
def trained(shared_programs: Programs, tmp_path_factory: pytest.TempPathFactory, shallow: Path) -> dict[str, Path]:
    """The same training, cut in several ways."""
    ways = {
        "1": (),
        "3 gpipe": ("--nproc", 3, "--schedule", "gpipe", "--cuts", "layer1.1", "layer4.0"),
        "2 zbv": ("--nproc", 2, "--engine", "torch", "--schedule", "zbv"),
        "2 interleaved": ("--nproc", 2, "--schedule", "interleaved"),
        "3 hand zbv": ("--nproc", 3, "--schedule", "zbv"),
        "other decay": ("--weight-decay", 0.5),
    }
    outs = {}
    for name, flags in ways.items():
        outs[name] = tmp_path_factory.mktemp("trained")
        shared_programs.run(*TRAIN, *SMALL, *flags, "--out", outs[name], cwd=shallow)
    return outs


def test_however_it_is_cut_the_result_is_the_same(trained: dict[str, Path]) -> None:
    found = {name: result(out) for name, out in trained.items()}
    expected = found["1"]
    for name in ("3 gpipe", "2 interleaved", "3 hand zbv"):
        assert found[name]["parameter_hash"] == expected["parameter_hash"]
        assert found[name]["metrics"] == expected["metrics"]
        assert (trained[name] / "predictions.csv").read_text() == (trained["1"] / "predictions.csv").read_text()
        assert losses(trained[name]) == pytest.approx(losses(trained["1"]), rel=1e-6)
    # torch's engine fills micro-batches of 3, 3, 2 samples up to 3, 3, 3
    assert losses(trained["2 zbv"]) == pytest.approx(losses(trained["1"]), rel=1e-2)
    assert [value["stages"] for value in found.values()] == [1, 3, 2, 2, 3, 1]
    assert (expected["steps"], expected["global_batch"], expected["train_samples"]) == (8, 8, 30)
    assert found["other decay"]["parameter_hash"] != expected["parameter_hash"]
    assert found["3 gpipe"]["most_kept"] == [3, 3, 3]
    assert found["1"]["most_kept"] == [1]
    assert all(0 < found[name]["bubble"] < 1 for name in ("3 gpipe", "2 zbv", "2 interleaved"))


def test_two_nodes_under_torchrun_train_the_same(
    programs: Programs, tmp_path: Path, trained: dict[str, Path], shallow: Path, free_port: int
) -> None:
    """Two agents on loopback with a stage each."""
    nodes = [
        programs.start(
            *TORCHRUN, "--nnodes", 2, "--nproc-per-node", 1, "--node-rank", node, "--master-addr", "127.0.0.1",
            "--master-port", free_port, *TRAIN, *SMALL, "--out", tmp_path, cwd=shallow,
        )
        for node in (0, 1)
    ]  # fmt: skip
    for node in nodes:
        programs.finish(node)
    found = result(tmp_path)
    assert (found["launcher"], found["nodes"], found["stages"]) == ("torchrun", 2, 2)
    assert found["parameter_hash"] == result(trained["1"])["parameter_hash"]


def test_the_unsplit_model_loads_what_a_pipeline_leaves(trained: dict[str, Path]) -> None:
    out = trained["3 gpipe"]
    model = torchvision.models.resnet18(num_classes=10, norm_layer=lambda c: torch.nn.GroupNorm(32, c))
    model.layer3, model.layer4, model.fc = torch.nn.Identity(), torch.nn.Identity(), torch.nn.Linear(128, 10)
    newest = max((out / "checkpoints").glob("step-*.pt"))
    model.load_state_dict(torch.load(newest, weights_only=True)["model"])
    assert parameter_hash(model) == result(out)["parameter_hash"]
    best, unsplit = load_file(out / "best.safetensors"), load_file(trained["1"] / "best.safetensors")
    assert best.keys() == model.state_dict().keys()
    assert all(torch.equal(best[name], unsplit[name]) for name in best)


def test_the_timeline_shows_every_operation(trained: dict[str, Path]) -> None:
    for name, processes in (("2 zbv", 2), ("3 gpipe", 3), ("2 interleaved", 2), ("3 hand zbv", 3)):
        events = json.loads((trained[name] / "trace.json").read_text())["traceEvents"]
        work = [event for event in events if event["ph"] == "X"]
        assert {event["pid"] for event in work} == set(range(processes))
        assert all(event["dur"] > 0 and event["ts"] >= 0 for event in work)
        for process in range(processes):
            mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in work if e["pid"] == process)
            assert all(end <= start for (_, end), (start, _) in pairwise(mine)), "one after another"
        stages = {event["args"]["stage"] for event in work}
        forwards = [(e["args"]["stage"], e["args"]["micro-batch"]) for e in work if e["cat"] == "forward"]
        assert sorted(forwards) == [(stage, micro) for stage in sorted(stages) for micro in range(3)]
        assert (trained[name] / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_resumed_at_its_end_it_says_the_same_again(
    programs: Programs, tmp_path: Path, trained: dict[str, Path], shallow: Path
) -> None:
    shutil.copytree(trained["2 interleaved"], tmp_path / "out")
    flags = ("--nproc", 2, "--schedule", "interleaved", "--resume", "auto", "--out", tmp_path / "out")
    programs.run(*TRAIN, *SMALL, *flags, cwd=shallow)
    assert result(tmp_path / "out")["parameter_hash"] == result(trained["1"])["parameter_hash"]
    assert losses(tmp_path / "out") == losses(trained["2 interleaved"])


def test_replicas_agree_or_the_run_fails(
    programs: Programs, tmp_path: Path, trained: dict[str, Path], shallow: Path
) -> None:
    flags = (*TRAIN, *SMALL, "--nproc", 4, "--stages", 2, "-m", 2)
    programs.run(*flags, "--out", tmp_path / "out", cwd=shallow)
    assert result(tmp_path / "out")["replicas"] == 2
    # other sums than with one replica, and rounding is amplified from step to step
    assert losses(tmp_path / "out") == pytest.approx(losses(trained["1"]), rel=2e-2)
    broken = mutated(
        tmp_path / "broken",
        SMALL_RESNET,
        ("examples/resnet_pipeline/train.py", "average_over_replicas(local.modules, grid)", "pass"),
    )
    done = programs.run(*flags, "--epochs", 1, "--out", tmp_path / "broken-out", cwd=broken, code=1)
    assert "CheckError: the replicas differ: rank(s) 2, 3 hold other parameters than rank 0, 1" in done.stderr


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """A folder of 9 images to train on and 5 to evaluate on."""
    for part, count in (("train", 9), ("val", 5)):
        for number in range(count):
            folder = tmp_path / part / ("cat", "dog")[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            pixels = torch.randint(0, 256, (40 + number, 60, 3), dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    return tmp_path


def test_all_stages_of_a_replica_get_its_labels_and_the_first_one_its_pixels(pets: Path) -> None:
    train, val = (ImageFolder(pets / part, 32, training=part == "train") for part in ("train", "val"))
    amp = MixedPrecision(Precision(), torch.device("cpu"))
    for dp_rank in (0, 1):
        seen = []
        for pp_rank in (0, 1):
            grid = Grid(2, 2, pp_rank, dp_rank, (0, 1), mock.Mock(), {}, amp.device, timedelta(seconds=4))
            for batches in loaders(Args(batch_size=4), ImageSets("pets", train, val), amp, grid):
                images, labels, indices = (torch.cat(parts) for parts in zip(*batches, strict=True))
                assert images.shape == (len(labels), 3, *((32, 32) if pp_rank == 0 else (0, 0)))
                seen.append((labels.tolist(), indices.tolist()))
        assert seen[:2] == seen[2:]
        assert [len(labels) for labels, _ in seen[:2]] == [5, 3 - dp_rank]  # of 9 in 4s, the last one padded; of 5


def test_photographs_are_cropped_anew_in_each_epoch_and_drawn_shapes_are_not(
    pets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "drawn_images", lambda *_: pets)
    monkeypatch.setattr(read, "assert_same_on_all_ranks", lambda *_: None)
    for dataset in (pets, None):
        train = read.image_sets(Args(dataset=dataset)).train
        first, second = (train.__getitems__([(epoch, 0)]).images for epoch in (0, 1))
        assert torch.equal(first, second) == (dataset is None)


def test_a_folder_of_images_is_trained_on(programs: Programs, tmp_path: Path, shallow: Path, pets: Path) -> None:
    flags = ("-a", "resnet18", "--nproc", 2, "-b", 4, "-m", 2, "--epochs", 1, "--workers", 1, "--norm", "group")
    programs.run(*TRAIN, *flags, "--dataset", pets, "--out", tmp_path / "out", cwd=shallow)
    found = result(tmp_path / "out")
    assert (found["train_samples"], found["eval_samples"], found["steps"]) == (9, 5, 3)
    rows = (tmp_path / "out" / "predictions.csv").read_text().splitlines()[1:]
    assert [row.split(",")[1] for row in rows] == ["0", "0", "0", "1", "1"]
    # interrupted in mid-epoch: the crops of what follows are those of an undisturbed run, loaded by whomever
    saved = (*flags, "--workers", 0, "--checkpoint-every", 2, "--dataset", pets, "--out", tmp_path / "again")
    programs.run(*TRAIN, *saved, cwd=shallow)
    next((tmp_path / "again" / "checkpoints").glob("step-00000003*")).unlink()
    done = programs.run(*TRAIN, *saved, "--resume", "auto", cwd=shallow)
    assert "at step 2\n" in done.stdout
    assert result(tmp_path / "again")["parameter_hash"] == found["parameter_hash"]
    broken = pets / "train" / "cat" / "4.png"
    broken.write_bytes(broken.read_bytes()[:200])
    for workers in (0, 1):  # a loader's worker passes its mistakes on in a traceback
        done = programs.run(*TRAIN, *flags, "--workers", workers, "--dataset", pets, "--out", tmp_path / "out", code=2)
        line = done.stderr.replace(NO_GPU, "")
        assert re.fullmatch(
            rf"error: {broken} cannot be used \(.*\): remove or replace it, or give --skip-broken\n", line
        ), line


def test_interrupted_and_resumed_at_another_number_of_stages(
    programs: Programs, tmp_path: Path, trained: dict[str, Path], shallow: Path, eventually: Eventually
) -> None:
    flags = (*TRAIN, *SMALL, "--out", tmp_path, "--checkpoint-every", 1, "--resume", "auto")
    process = programs.start(*flags, "--nproc", 3, cwd=mutated(tmp_path / "slow", SMALL_RESNET, slow(0.5)))
    eventually(lambda: newest_step(tmp_path) >= 2, 100, "step 2")
    process.send_signal(signal.SIGTERM)
    done = programs.finish(process, 143)
    stopped = re.search(r"stopped by SIGTERM: checkpoint at step (\d+); go on with --resume auto\n", done.stderr)
    assert stopped
    step = int(stopped[1])
    assert step < 8
    resumed = programs.run(*flags, "--nproc", 2, cwd=shallow)
    assert f"at step {step}" in resumed.stdout
    assert result(tmp_path)["parameter_hash"] == result(trained["1"])["parameter_hash"]
    assert losses(tmp_path) == pytest.approx(losses(trained["1"]), rel=1e-6)


# ------------------------------------------------------------------------------------------------- the faults


@pytest.mark.timed
@pytest.mark.parametrize(
    ("engine", "signum", "what"),
    [
        ("hand", signal.SIGKILL, r"pipeline rank 1 of 3 \(rank 1\) ended while pipeline rank "),
        ("hand", signal.SIGSTOP, r"pipeline rank 1 of 3 \(rank 1\) was silent for TIMEOUT s while pipeline rank "),
        ("torch", signal.SIGKILL, r"no word from rank (0, )?1(, 2)? in step "),
        ("torch", signal.SIGSTOP, r"no word from rank (0, )?1(, 2)? in step "),
    ],
)
def test_a_lost_stage_is_named_and_ends_all(
    programs: Programs, tmp_path: Path, eventually: Eventually, engine: str, signum: signal.Signals, what: str
) -> None:
    timeout = round(here(4))
    flags = ("--epochs", 500, "--timeout", timeout, "--checkpoint-every", 1, "--engine", engine)
    process = programs.start(*TRAIN, *SMALL, *flags, "--nproc", 3, "--out", tmp_path)
    eventually(lambda: newest_step(tmp_path) >= 2, 100, "step 2")
    started = time.monotonic()
    os.kill(programs.worker(1), signum)
    done = programs.finish(process, 1, timeout + 120)
    assert time.monotonic() - started < timeout + here(8), "the timeout, and two seconds for others to report"
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: rank")]
    assert len(lines) == 1, done.stderr
    # by the stage that waits for it, or between the steps by whoever waits for all; who computes has not noticed yet,
    # but of a process that was killed the launcher says which one it is
    others = "(0, )?1(, 2)?" if signum == signal.SIGKILL else "1(, 2)?"
    what = what.replace("TIMEOUT", str(timeout))
    assert re.search(rf"{what}|no word from rank {others} in step ", lines[0]), lines[0]
    assert ("error: the process with local rank 1 was ended by SIGKILL" in done.stderr) == (signum == signal.SIGKILL)
    assert "Traceback" not in done.stderr
    assert programs.gone(within=2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nproc", 2, "--stages", 3], "--stages 3: it must divide the 2 processes"),
        (["--nproc", 2, "--stages", 1, "-b", 7], r"--batch-size 7 \(global\) cannot be divided by 2 replicas"),
        (["--schedule", "zero-bubble"], "--schedule zero-bubble needs --engine torch; by hand: zb-h1, zbv"),
        (["--schedule", "zb-h1", "--engine", "torch"], "--schedule zb-h1 needs --engine hand"),
        (["--schedule", "zbv", "--recompute"], "--recompute with --schedule zbv"),
        (["--schedule", "zb-h1", "--compile"], "--compile with --schedule zb-h1: a compiled backward pass"),
        (["--cuts", "layer9.0"], "--cuts layer9.0: no block of this name; a stage may begin with layer1"),
        (["--cuts", "layer1.0", "layer2.0"], r"--cuts: 1 stages need 0 cut\(s\), 2 were given"),
        (["--dataset", "nowhere"], "--dataset nowhere: there is no such file or folder"),
        (["--weights", "nowhere"], "--init nowhere: there is no such file or folder"),
        (["--weights", "/dev/null"], "/dev/null cannot be read as weights"),
        (["--dataset", "k8s"], "k8s/train must be a folder with one folder of images per class"),
        (["-b", 3, "-m", 3], "BatchNorm cannot normalise over one value"),
        # the epoch's last batch has 4 of the 40 images: micro-batches of 2, 1 and 1
        (["-b", 12, "-m", 3], "BatchNorm cannot normalise over one value"),
        (["--nproc", 2, "--engine", "torch", "-m", 1], "--engine torch --schedule 1f1b --micro-batches 1"),
    ],
)
def test_bad_input_is_one_line(programs: Programs, tmp_path: Path, flags: list[object], words: str) -> None:
    done = programs.run(*TRAIN, "-a", "resnet18", "--images", 40, *flags, "--out", tmp_path, code=2)
    line = done.stderr.replace(NO_GPU, "")
    assert re.fullmatch(rf"error: .*{words}.*\n", line), line
