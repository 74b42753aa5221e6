"""imagenet_ddp against a plain loop, under the command lines of pytorch/examples, torchrun's restarts, and damage."""

import copy
import gzip
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.amp import GradScaler
from torchvision import models

from common.images.args import ImageArgs
from common.images.folder import ImageFolder
from common.images.loader import MEAN, STD
from common.launch.errors import UserError
from common.launch.flags import Launch
from common.train.evaluate import classification_metrics
from common.train.loader import local_batch
from examples.imagenet_ddp.args import Recipe
from examples.imagenet_ddp.recipe import build_model, make_optimizer, make_scheduler
from tests.conftest import ROOT, Programs
from tests.machine import here
from tests.make_data import draw_folder
from tests.runs import (
    NO_GPU,
    RECORD,
    TINY,
    Eventually,
    accounted,
    check_predictions,
    losses,
    mutated,
    newest_step,
    predictions,
    result,
    slow,
    tiny_imagenet,
)

TRAIN = ("-m", "examples.imagenet_ddp")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
PROGRAM = "examples/imagenet_ddp/train.py"
# 101 images: 9 batches of 12, the last of 5; neither 2 nor 3 nor 4 divides it
FLAGS = ("--epochs", 5, "-b", 12, "--image-size", 32, "--lr", 0.05, "--precision", "fp32")
CPU = torch.device("cpu")
NO_WEIGHTS = re.compile(
    r"error: --pretrained: https://\S+ could not be downloaded, or read \(.*\); put that file into .*\n"
)
Reference = tuple[nn.Module, list[float], dict[str, Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drawn")
    draw_folder(path, train=101, val=23, size=40)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with a model that starts fast and has no BatchNorm, instead of torchvision's."""
    return tiny_imagenet(tmp_path_factory.mktemp("tiny"))


def batch(data: ImageFolder, keys: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    found = data.__getitems__(keys)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    return (found.images / 255 - mean) / std, found.labels


def order(epoch: int, count: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(epoch)).tolist()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    """The same training without a line of distributed code: model, loss of each step, average of the weights."""
    torch.manual_seed(0)
    model = eval(TINY, {"nn": nn, "classes": 3})
    data = ImageFolder(folder / "train", 32, training=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9, weight_decay=1e-4)
    found: list[float] = []
    average: dict[str, Tensor] = {}
    for epoch in range(5):
        shuffled = order(epoch, 101)
        for number, start in enumerate(range(0, 101, 12)):
            step = epoch * 9 + number
            share = (step + 1) / 9 if step < 9 else (1 + math.cos(math.pi * (step - 9) / 36)) / 2
            optimizer.param_groups[0]["lr"] = 0.05 * share
            images, labels = batch(data, [(epoch, index) for index in shuffled[start : start + 12]])
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
            for name, value in model.state_dict().items():
                average[name] = 0.9 * average[name] + 0.1 * value if name in average else value.clone()
    return model, found, average


@pytest.fixture(scope="module")
def undisturbed(
    shared_programs: Programs, tmp_path_factory: pytest.TempPathFactory, tiny: Path, folder: Path
) -> dict[int, Path]:
    """Runs with 1, 2, 3 and 4 processes that nobody disturbs."""
    outs = {}
    for nproc in (1, 2, 3, 4):
        outs[nproc] = tmp_path_factory.mktemp(f"undisturbed-{nproc}")
        shared_programs.run(*TRAIN, "--nproc", nproc, *FLAGS, "--out", outs[nproc], folder, cwd=tiny)
    return outs


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_ranks_equal_a_plain_loop(undisturbed: dict[int, Path], folder: Path, reference: Reference, nproc: int) -> None:
    model, expected, _ = reference
    out = undisturbed[nproc]
    torch.testing.assert_close(losses(out), expected, rtol=2e-4, atol=0)
    val = ImageFolder(folder / "val", 32, training=False)
    images, labels = batch(val, [(0, index) for index in range(23)])
    with torch.inference_mode():
        scores = model(images).softmax(dim=1)
    found = result(out)
    metrics = classification_metrics(scores.topk(3).indices, labels, 3, scores)
    assert found["metrics"] | {"best_accuracy": 0} == metrics | {"best_accuracy": 0}
    assert found["metrics"]["accuracy"] > 0.8
    check_predictions(out, copy.deepcopy(model), images, labels, file=val.names)
    assert (found["world_size"], found["steps"], found["train_samples"], found["eval_samples"]) == (nproc, 45, 101, 23)


def test_killed_under_torchrun_it_goes_on_by_itself(
    programs: Programs, tmp_path: Path, tiny: Path, folder: Path, undisturbed: dict[int, Path], eventually: Eventually
) -> None:
    """One worker is killed in mid-epoch; torchrun starts both again, and they go on from the last checkpoint."""
    process = programs.start(
        *TORCHRUN, "--nproc-per-node", 2, "--max-restarts", 1, *TRAIN, *FLAGS, "-j", 1,
        "--checkpoint-every", 2, "--out", tmp_path, folder, cwd=tiny_imagenet(tmp_path / "slow", slow(0.05)),
    )  # fmt: skip
    eventually(lambda: newest_step(tmp_path) >= 13, 100, "step 13")
    os.kill(programs.worker(1), signal.SIGKILL)
    done = programs.finish(process)
    step = re.search(r"resumed from .* at step (\d+)", done.stdout)
    assert step
    assert int(step[1]) >= 13
    assert result(tmp_path)["parameter_hash"] == result(undisturbed[2])["parameter_hash"]
    assert losses(tmp_path) == losses(undisturbed[2])


def test_killed_and_resumed_is_bit_identical(
    programs: Programs, tmp_path: Path, tiny: Path, folder: Path, undisturbed: dict[int, Path], eventually: Eventually
) -> None:
    flags = (
        *TRAIN,
        "--nproc",
        3,
        *FLAGS,
        "-j",
        1,
        "--checkpoint-every",
        4,
        "--out",
        tmp_path,
        "--resume",
        "auto",
        folder,
    )
    code = tiny_imagenet(tmp_path / "slow", slow(0.1))
    process = programs.start(*flags, cwd=code)
    eventually(lambda: newest_step(tmp_path) >= 20, 100, "step 20")
    programs.kill()
    process.communicate()
    stopped = newest_step(tmp_path)
    process = programs.start(*flags, cwd=code)
    eventually(lambda: newest_step(tmp_path) >= stopped + 8, 100, "8 steps more")
    started = time.monotonic()
    os.killpg(process.pid, signal.SIGTERM)  # as `timeout` and SLURM do: loader workers get it, too
    done = programs.finish(process, 143)
    assert time.monotonic() - started < here(15)
    assert programs.gone(within=2), "loader workers, too"
    assert re.search(r"stopped by SIGTERM: checkpoint at step \d+; go on with --resume auto\n$", done.stderr)
    programs.run(*flags, cwd=tiny)
    assert result(tmp_path)["parameter_hash"] == result(undisturbed[3])["parameter_hash"]
    assert losses(tmp_path) == losses(undisturbed[3])


def test_a_static_graph_is_resumed_bit_for_bit(programs: Programs, tmp_path: Path, tiny: Path, folder: Path) -> None:
    """Its buckets are laid out anew one step later; with three ranks the layout decides the order of additions."""
    flags = (*TRAIN, "--nproc", 3, *FLAGS, "--epochs", 2, "--static-graph", folder)
    programs.run(*flags, "--checkpoint-every", 4, "--keep", 9, "--out", tmp_path / "whole", cwd=tiny)
    middle = next((tmp_path / "whole/checkpoints").glob("step-00000004-*"))
    programs.run(*flags, "--resume", middle, "--out", tmp_path / "resumed", cwd=tiny)
    hashes = {result(tmp_path / out)["parameter_hash"] for out in ("whole", "resumed")}
    assert len(hashes) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_dropout_is_resumed_bit_for_bit(programs: Programs, tmp_path: Path, folder: Path, workers: int) -> None:
    """In the middle of an epoch: neither loaders nor evaluation draw from the generator that dropout draws from."""
    dropout = ("examples/imagenet_ddp/recipe.py", "nn.Flatten(), nn.Linear", "nn.Flatten(), nn.Dropout(), nn.Linear")
    code = tiny_imagenet(tmp_path / "code", dropout)
    flags = (*TRAIN, "--nproc", 2, *FLAGS, "--epochs", 2, "-j", workers, folder)
    programs.run(*flags, "--checkpoint-every", 4, "--keep", 9, "--out", tmp_path / "whole", cwd=code)
    middle = next((tmp_path / "whole/checkpoints").glob("step-00000004-*"))
    programs.run(*flags, "--resume", middle, "--out", tmp_path / "resumed", cwd=code)
    hashes = {result(tmp_path / out)["parameter_hash"] for out in ("whole", "resumed")}
    assert len(hashes) == 1


def test_a_later_start_has_the_order_and_rate_of_its_epoch(
    programs: Programs, tmp_path: Path, folder: Path, undisturbed: dict[int, Path]
) -> None:
    """--start-epoch: the last two of five epochs are those of a run that has made all five."""
    code = tiny_imagenet(tmp_path / "code", RECORD)
    programs.run(*TRAIN, *FLAGS, "--start-epoch", 3, "--out", tmp_path / "out", folder, cwd=code)
    assert accounted(tmp_path / "out") == {epoch: order(epoch, 101) for epoch in (3, 4)}
    assert result(tmp_path / "out")["steps"] == 18
    rates = [
        [record["lr"] for record in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if "lr" in record]
        for out in (undisturbed[1], tmp_path / "out")
    ]
    assert len(rates[0]) == 5
    assert rates[1] == rates[0][3:]


def test_cache_accumulation_and_ddp_options_change_nothing_that_they_should_not(
    programs: Programs, tmp_path: Path, tiny: Path, folder: Path, undisturbed: dict[int, Path], reference: Reference
) -> None:
    base = (*TRAIN, "--nproc", 2, *FLAGS, folder)
    cache = ("--cache", tmp_path / "cache")
    first = programs.run(*base, *cache, "--find-unused-parameters", "--out", tmp_path / "a", cwd=tiny).stdout
    assert len(re.findall(r"cache .*: (?:101|23) images", first)) == 2
    hashes = {result(out)["parameter_hash"] for out in (tmp_path / "a", undisturbed[2])}
    assert len(hashes) == 1
    more = ("--accumulate", 3, "--static-graph", "--ema", 0.9, "--profile", 2, "--out", tmp_path / "c")
    programs.run(*base, *more, cwd=tiny)
    torch.testing.assert_close(losses(tmp_path / "c"), losses(undisturbed[2]), rtol=2e-4, atol=0)
    trace = json.loads(gzip.decompress((tmp_path / "c" / "trace.json.gz").read_bytes()))
    assert any("backward" in event.get("name", "") for event in trace["traceEvents"])
    average = torch.load(max((tmp_path / "c/checkpoints").glob("step-*")), weights_only=True)["ema"]
    assert int(average.pop("n_averaged")) == 45
    for name, value in average.items():
        torch.testing.assert_close(value, reference[2][name.removeprefix("module.")], rtol=1e-3, atol=1e-5)


# ------------------------------------------------------------------------------------------------- batch norm


def test_batch_norm_normalises_over_each_ranks_samples(programs: Programs, tmp_path: Path, folder: Path) -> None:
    """So ResNet-18 on two ranks equals one model that sees the halves of each batch one after the other."""
    torch.manual_seed(0)
    model = models.resnet18(num_classes=3)
    data = ImageFolder(folder / "train", 64, training=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=1e-4)
    expected = []
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for number in range(2):  # 50 and 50 of the 101 images; the third batch is not compared
        keys = [(0, index) for index in order(0, 101)[number * 50 : number * 50 + 50]]
        optimizer.param_groups[0]["lr"] = 0.01 * (1 + math.cos(math.pi * number / 3)) / 2
        optimizer.zero_grad()
        total = 0.0
        for rank in (1, 0):  # rank 0 last: its statistics stay
            model.load_state_dict(statistics, strict=False)
            images, labels = batch(data, keys[rank::2])
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1) / 2
            loss.backward()
            total += loss.item()
        statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
        optimizer.step()
        expected.append(total)
    programs.run(
        *TRAIN, "--nproc", 2, "--epochs", 1, "--warmup-epochs", 0, "-b", 50, "--image-size", 64, "--lr", 0.01,
        "--precision", "fp32", "--checkpoint-every", 2, "--keep", 9, "--out", tmp_path, folder,
    )  # fmt: skip
    torch.testing.assert_close(losses(tmp_path)[:2], expected, rtol=1e-3, atol=0)
    state = torch.load(next((tmp_path / "checkpoints").glob("step-00000002-*")), weights_only=True)["model"]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=2e-2, atol=2e-3)


# ---------------------------------------------------------------------------------- what users of the field type


def test_nodes_that_see_other_images_stop(
    programs: Programs, tmp_path: Path, tiny: Path, folder: Path, free_port: int
) -> None:
    """As many, one under another name: images would be trained on twice, and others never."""
    shutil.copytree(folder, tmp_path / "other")
    image = next((tmp_path / "other/val").rglob("*.jpg"))
    image.rename(image.with_name("another.jpg"))
    nodes = [
        programs.start(*TRAIN, *FLAGS, "--world-size", 2, "--rank", rank, "--dist-url",
                       f"tcp://127.0.0.1:{free_port}", "--out", tmp_path / str(rank), images, cwd=tiny)
        for rank, images in enumerate((folder, tmp_path / "other"))
    ]  # fmt: skip
    said = "".join(programs.finish(node, 2).stderr for node in nodes)
    (line,) = [line for line in said.splitlines() if line.startswith("error:")]
    assert re.match(r"error: the ranks disagree on the images' names and classes \(rank 0: .*, rank 1: .*\): do", line)


def test_the_command_lines_of_pytorch_examples(programs: Programs, tmp_path: Path, free_port: int) -> None:
    draw_folder(tmp_path / "DIR", train=8, val=6, size=60)

    def run(out: str, line: str) -> Path:
        words = line.replace("PORT", str(free_port)).replace("DIR", str(tmp_path / "DIR")).split()
        said = programs.run(*TRAIN, *words, "--epochs", 1, "--out", tmp_path / out).stderr
        assert ("no CUDA device was found" in said) == ("--no-accel" not in line), "none is looked for"
        return tmp_path / out

    single = result(run("single", "-a resnet18 DIR"))
    assert (single["global_batch"], single["image_size"], single["world_size"]) == (256, 224, 1)
    multi = "--dist-backend gloo --multiprocessing-distributed"
    one = run("one", f"-a resnet18 --dist-url tcp://127.0.0.1:PORT {multi} --world-size 1 --rank 0 DIR")
    assert result(one)["parameter_hash"] == single["parameter_hash"]
    url = f"-a resnet18 --dist-url tcp://127.0.0.1:{free_port} {multi} --world-size 2 --epochs 1 --out {tmp_path}/two"
    nodes = [programs.start(*TRAIN, *url.split(), "--rank", node, tmp_path / "DIR") for node in (0, 1)]
    for node in nodes:
        programs.finish(node)
    two = result(tmp_path / "two")
    assert (two["nodes"], two["world_size"]) == (2, 2)
    more = "-j 4 -p 5 --seed 0 --learning-rate 0.1 --wd 1e-4 --momentum 0.9 --no-accel --start-epoch 0"
    spawned = run("spawned", f"-a resnet18 --nproc 2 {more} DIR")
    assert result(spawned)["parameter_hash"] == two["parameter_hash"]


def test_dummy_images_can_be_learned(programs: Programs, tmp_path: Path) -> None:
    done = programs.run(*TRAIN, "-a", "resnet18", "--dummy", "--image-size", 32, "--nproc", 2, "--out", tmp_path)
    found = losses(tmp_path)
    assert sum(found[-3:]) < 0.7 * sum(found[:3])
    assert "resnet18 on synthetic images (480 train, 96 val, 10 classes, 32 px)" in done.stdout


def test_evaluation_alone(programs: Programs, tmp_path: Path, tiny: Path, folder: Path) -> None:
    flags = (*TRAIN, "--nproc", 2, *FLAGS, "--epochs", 2, "--ema", 0.5, "--out", tmp_path, folder)
    programs.run(*flags, cwd=tiny)
    trained = result(tmp_path)
    before = sorted((path, path.stat().st_mtime) for path in tmp_path.rglob("*") if path.is_file())
    done = programs.run(*flags, "-e", "--resume", "auto", cwd=tiny)
    found = result(tmp_path / "evaluation")
    assert found["parameter_hash"] == trained["parameter_hash"]
    assert found["metrics"] | {"best_accuracy": 0} == trained["metrics"] | {"best_accuracy": 0}
    assert "evaluation of " in done.stdout
    # In smaller pieces, and by ranks that do not divide the batch.
    more = ("--accumulate", 2, "--nproc", 3, "-b", 8, "--profile", 1)
    said = programs.run(*flags, "-e", "--resume", tmp_path / "best.safetensors", *more, cwd=tiny).stderr
    assert said.count("warning: --evaluate does not use --profile\n") == 1
    assert "does not use" not in done.stderr
    assert result(tmp_path / "evaluation")["global_batch"] == 3, "8 by 3 ranks in 2 pieces"
    assert predictions(tmp_path / "evaluation") == predictions(tmp_path)
    assert result(tmp_path / "evaluation")["metrics"]["accuracy"] == trained["metrics"]["best_accuracy"]
    now = [(path, path.stat().st_mtime) for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(entry for entry in now if "evaluation" not in entry[0].parts) == before, "the run's own files stay"


def test_a_first_step_of_float16_that_overflows_leaves_no_trace() -> None:
    model, scaler = nn.Linear(8, 8), GradScaler("cpu")
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = make_optimizer(Recipe(), model, 0.1, scaler)
    scaler.scale(model(torch.full((1, 8), torch.inf)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
    assert [values for values in optimizer.state.values() if values.get("momentum_buffer") is not None] == []
    assert not make_optimizer(Recipe(), model, 0.1, scaler).defaults["fused"]
    assert make_optimizer(Recipe(), model, 0.1, GradScaler("cpu", enabled=False)).defaults["fused"]


def test_pretrained_weights_but_for_the_last_layer(programs: Programs, tmp_path: Path, folder: Path) -> None:
    """Through torchvision's own loader, from the file where a download would have put it."""
    file = models.ResNet18_Weights.DEFAULT.url.rpartition("/")[2]
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    weights = models.resnet18().state_dict()
    torch.save(weights, tmp_path / "hub/checkpoints" / file)
    flags = (*TRAIN, "-a", "resnet18", "--pretrained", "--image-size", 32, "-b", 101, "--out", tmp_path / "out")
    done = programs.run(*flags, "--epochs", 1, "--lr", 0, folder, env={"TORCH_HOME": str(tmp_path)})
    assert "loaded, but for fc.bias, fc.weight" in done.stdout
    state = torch.load(next((tmp_path / "out/checkpoints").glob("step-*")), weights_only=True)["model"]
    assert torch.equal(state["layer4.1.conv2.weight"], weights["layer4.1.conv2.weight"])
    # The same command evaluates what it has trained: the last layer, too, is in the checkpoint.
    programs.run(*flags, folder, "-e", "--resume", "auto", env={"TORCH_HOME": str(tmp_path / "empty")})
    assert result(tmp_path / "out/evaluation")["parameter_hash"] == result(tmp_path / "out")["parameter_hash"]
    empty = programs.run(
        *flags, folder, env={"TORCH_HOME": str(tmp_path / "empty"), "https_proxy": "http://127.0.0.1:9"}, code=2
    )
    assert NO_WEIGHTS.fullmatch(empty.stderr.replace(NO_GPU, ""))


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_no_code_in_pretrained_weights_is_executed(programs: Programs, tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "hub/checkpoints" / models.ResNet18_Weights.DEFAULT.url.rpartition("/")[2]
    file.parent.mkdir(parents=True)
    torch.save(Payload(tmp_path / "executed"), file)
    flags = (*TRAIN, "-a", "resnet18", "--pretrained", "--nproc", 2, "--image-size", 32, "-b", 12)
    done = programs.run(*flags, "--out", tmp_path / "out", folder, env={"TORCH_HOME": str(tmp_path)}, code=2)
    assert NO_WEIGHTS.fullmatch(done.stderr.replace(NO_GPU, ""))
    assert not (tmp_path / "executed").exists()


def test_real_photographs_are_learned(programs: Programs, tmp_path: Path, real_data: Path) -> None:
    """Imagenette's ten classes, in two epochs at a very low resolution: chance is 0.1."""
    programs.run(
        *TRAIN, "-a", "resnet18", "--nproc", 2, "--epochs", 2, "-b", 32, "--image-size", 40, "--lr", 0.03,
        "--out", tmp_path, real_data / "imagenette224_subset", limit=230,
    )  # fmt: skip
    found = result(tmp_path)
    assert (found["train_samples"], found["eval_samples"], found["classes"]) == (1500, 400, 10)
    assert found["metrics"]["accuracy"] > 0.17


# --------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-a", "resnet81", "DIR"], "-a resnet81: torchvision has no such classification model; do you mean resnet18"),
        (["--nproc", 2, "-j", 1, "BROKEN"], r"BROKEN/train/\S+ cannot be used \(it is truncated\): .* --skip-broken"),
        (["--nproc", 2, "--cache", "CACHE", "BROKEN"], r"BROKEN/train/\S+ cannot be used \(it is truncated\)"),
        (["-b", 5, "--image-size", 32, "DIR"], "the last batch of an epoch brings a rank 1 sample"),
        (  # of the 6 images, in backward passes of 5
            ["-b", 10, "--accumulate", 2, "--image-size", 32, "DIR"],
            "the last batch of an epoch brings a rank 1 sample",
        ),
        (["-e", "--resume", "auto", "DIR"], "out holds no checkpoint to evaluate"),
        (["-e", "DIR"], "--evaluate needs weights: give --resume auto"),
        (["-e", "--pretrained", "--init", "x.pt", "DIR"], "give the weights to evaluate as --resume x.pt"),
    ],
)
def test_bad_input_is_one_line(programs: Programs, tmp_path: Path, flags: list[object], words: str) -> None:
    draw_folder(tmp_path / "DIR", train=6, val=3, size=60)
    shutil.copytree(tmp_path / "DIR", tmp_path / "BROKEN")
    file = sorted((tmp_path / "BROKEN/train").rglob("*.jpg"))[2]
    file.write_bytes(file.read_bytes()[:-50])
    flags = [tmp_path / str(flag) if flag in ("DIR", "BROKEN", "CACHE") else flag for flag in flags]
    done = programs.run(*TRAIN, *flags, "--out", tmp_path / "out", code=2)
    line = done.stderr.replace(NO_GPU, "")
    assert re.fullmatch(rf"error: .*{words}.*\n", line), line
    assert not (tmp_path / "out" / "result.json").exists()
    assert newest_step(tmp_path / "out") == 0, "before the first step"


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: build_model(Recipe(arch="alexnet"), 10, 32, CPU), "-a alexnet cannot take images of 32x32"),
        (lambda: build_model(Recipe(arch="vit_b_32"), 10, 50, CPU), "-a vit_b_32 cannot take images of 50x50"),
        (lambda: build_model(Recipe(sync_bn=True), 10, 64, CPU), "--sync-bn: torch's SyncBatchNorm takes CUDA tensors"),
        (lambda: make_scheduler(Recipe(start_epoch=3), sgd(), 10, 3), "--start-epoch 3: the run ends after --epochs 3"),
        (lambda: Recipe(momentum=1), "--momentum 1: give a number from 0 to below 1"),
        (lambda: ImageArgs(dummy=True, directory=Path("DIR")), "--dummy makes images up: leave out DIR"),
        (
            lambda: local_batch(8, 3, "1 rank x 3 passes"),
            r"-size 8 \(global\) cannot be divided by 1 rank x 3 passes; use 9",
        ),
        (lambda: Launch(gpu=0, nproc=2), "--gpu 0 is for a single process"),
        (lambda: Launch(no_accel=True, device="cuda"), "--no-accel contradicts --device cuda"),
    ],
)
def test_other_mistakes_are_users_errors(mistake: Callable[[], object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        mistake()


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)


def test_every_model_of_torchvision_can_be_built() -> None:
    """The small ones here; each family has options of its own."""
    for arch, size in (
        ("squeezenet1_1", 64),
        ("googlenet", 64),
        ("inception_v3", 96),
        ("vit_b_32", 64),
        ("swin_t", 64),
    ):
        model = build_model(Recipe(arch=arch), 7, size, CPU)
        assert model(torch.zeros(2, 3, size, size)).shape == (2, 7)
        # whoever predicts does not know whether training began with torchvision's weights, which need it
        assert getattr(model, "transform_input", True), arch


def test_skipped_images_are_named_and_counted(programs: Programs, tmp_path: Path, tiny: Path, folder: Path) -> None:
    shutil.copytree(folder, tmp_path / "DIR")
    files = sorted((tmp_path / "DIR/train").rglob("*.jpg"))
    files[5].write_bytes(b"<html>not found</html>")
    files[6].write_bytes(b"")
    Image.new("L", (3, 500)).save(files[7], "PNG")  # odd, but an image
    flags = (
        "--nproc",
        2,
        *FLAGS,
        "--epochs",
        1,
        "--skip-broken",
        "--cache",
        tmp_path / "cache",
        "--out",
        tmp_path / "out",
    )
    done = programs.run(*TRAIN, *flags, tmp_path / "DIR", cwd=tiny)
    assert len(re.findall(rf"warning: skipped image [12]: (?:{files[5]}|{files[6]}) \(", done.stderr)) == 2
    assert result(tmp_path / "out")["skipped_images"] == 2


# --------------------------------------------------------------------------------------------------- mutations


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ((PROGRAM, "logits = model(", "logits = network("), "the replicas differ: rank(s) 1 hold other parameters"),
        (
            ("common/train/run.py", "local_samples(self._batch_samples, *self.shard)", "-(-self._batch_samples // 2)"),
            "0 were lost and 1 trained on more than once",
        ),
    ],
)
def test_mutations_are_noticed_by_the_run_itself(
    programs: Programs, tmp_path: Path, folder: Path, change: tuple[str, str, str], words: str
) -> None:
    broken = tiny_imagenet(tmp_path / "broken", change)
    flags = ("--nproc", 2, *FLAGS, "--epochs", 1, "--out", tmp_path / "out", folder)
    assert words in programs.run(*TRAIN, *flags, cwd=broken, code=1).stderr


def test_mutation_statistics_of_batch_norm_not_shared(programs: Programs, tmp_path: Path, folder: Path) -> None:
    broken = mutated(tmp_path / "broken", ("common/launch/collectives.py", "dist.broadcast(buffer, 0)", "pass"))
    flags = ("--nproc", 2, "--epochs", 1, "-b", 34, "--image-size", 64, "--out", tmp_path / "out", folder)
    assert "the replicas differ" in programs.run(*TRAIN, *flags, cwd=broken, code=1).stderr


@pytest.mark.parametrize(
    ("change", "right"),
    [
        (("sampler.set_epoch(epoch)", "sampler.set_epoch(0)"), 9),  # steps, up to the first that must be wrong
        (("labels[local_samples:] = PADDING", "labels[local_samples:] += 0"), 8),  # the last batch: 5 of 2 ranks
        (("with nullcontext() if is_last else model.no_sync()", "with model.no_sync()"), 1),
        (("loss_sum * world_size", "loss_sum"), 0),
    ],
)
def test_mutations_that_parity_notices(
    programs: Programs, tmp_path: Path, folder: Path, reference: Reference, change: tuple[str, str], right: int
) -> None:
    broken = tiny_imagenet(tmp_path / "broken", (PROGRAM, *change))
    flags = ("--nproc", 2, *FLAGS, "--accumulate", 2, "--out", tmp_path / "out", folder)
    programs.run(*TRAIN, *flags, cwd=broken, code=1 if "no_sync" in change[0] else 0)
    found = losses(tmp_path / "out")
    torch.testing.assert_close(found[:right], reference[1][:right], rtol=2e-4, atol=0)
    assert max(abs(a - b) / b for a, b in zip(found[right:], reference[1][right:], strict=False)) > 1e-2


SRUN = """#!{python}
import os, pathlib, subprocess, sys
words = sys.argv[sys.argv.index("python") :]  # what comes before is for srun
step = {{"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "here"}}
common = step | {{"MASTER_PORT": "{port}"}}
tasks = [
    subprocess.Popen(words, env=os.environ | common | {{"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}})
    for task in (0, 1)
]
pathlib.Path("{folder}/tasks").write_text(" ".join(str(task.pid) for task in tasks))
sys.exit(max(task.wait() for task in tasks))  # as srun
"""


def test_the_batch_script_saves_queues_itself_again_and_goes_on(
    programs: Programs,
    tmp_path: Path,
    free_port: int,
    tiny: Path,
    folder: Path,
    undisturbed: dict[int, Path],
    eventually: Eventually,
) -> None:
    """SLURM's commands are emulated: `srun` starts two tasks, `scontrol` notes what it is asked for."""
    for name, text in {
        "srun": SRUN.format(python=sys.executable, port=free_port, folder=tmp_path),
        "scontrol": f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n',
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "1",
    }
    env |= {"DDP_TEST_RUN": programs.token, "CUDA_VISIBLE_DEVICES": ""}
    words = ["bash", "examples/imagenet_ddp/job.sbatch", *map(str, FLAGS), "--checkpoint-every", "1"]
    words += ["--out", str(tmp_path / "out"), str(folder)]

    def batch_job(code: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(words, cwd=code, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)

    job = batch_job(tiny_imagenet(tmp_path / "slow", slow(0.1)))
    eventually(lambda: newest_step(tmp_path / "out") >= 9, 60, "a checkpoint")
    for pid in (tmp_path / "tasks").read_text().split():  # as --signal=TERM@180 does
        os.kill(int(pid), signal.SIGTERM)
    assert "checkpoint at step" in programs.finish(job, code=143).stderr
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    (tmp_path / "asked").unlink()
    programs.finish(batch_job(tiny))
    assert not (tmp_path / "asked").exists()
    assert result(tmp_path / "out")["launcher"] == "slurm"
    assert result(tmp_path / "out")["parameter_hash"] == result(undisturbed[2])["parameter_hash"]


@pytest.mark.parametrize(
    ("codes", "again"),
    [
        ([0], False),
        ([2], False),
        ([143], True),
        ([137, 1, 75], True),
        ([137, 1, 75, 1], False),
        ([143, 143, 143, 1], True),  # stops before the limit are no faults
        ([1, 1, 1, 143, 1], True),  # faults that it has got over do not count
        ([1, 1, 1, 143, 1, 1, 1, 1], False),
    ],
)
def test_the_batch_script_queues_itself_again_unless_that_cannot_help(
    tmp_path: Path, codes: list[int], again: bool
) -> None:
    """A mistake in the command stays one; what ended otherwise may have lost a node: three times."""
    asked = tmp_path / "asked"
    for name, text in {"srun": "exit $CODE", "scontrol": f'echo "$@" > {asked}'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"}
    script = ROOT / "examples" / "imagenet_ddp" / "job.sbatch"
    for restarts, code in enumerate(codes):
        asked.unlink(missing_ok=True)
        env |= {"CODE": str(code), "SLURM_RESTART_COUNT": str(restarts)}
        done = subprocess.run(["bash", script], env=env, cwd=tmp_path, check=False)
        assert done.returncode == code
        assert asked.exists() or restarts == len(codes) - 1
    assert asked.exists() == again


def test_the_batch_script_asks_slurm_for_what_it_needs() -> None:
    """One task per GPU; time to save before the limit; the same log and job after it was queued again."""
    script = (ROOT / "examples" / "imagenet_ddp" / "job.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", script, re.MULTILINE))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    assert asked["signal"] == "TERM@180"
    assert asked["mem"] == "0"
    assert "requeue" in asked
    assert asked["open-mode"] == "append"
    assert "cpus-per-task" in asked
    assert 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" ' in script, "srun does not take it over"
