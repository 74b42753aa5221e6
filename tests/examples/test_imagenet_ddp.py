"""imagenet_ddp: parity of several ranks, weights from elsewhere, fp16, the batch script."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from signal import SIGKILL, SIGTERM

import pytest
import torch
import tyro
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision import models

from examples.imagenet_ddp.args import Args
from examples.imagenet_ddp.model import ExponentialAverage
from tests import ranks
from tests.hooks import At
from tests.ranks import Training
from tests.reference import imagenet_ddp as reference

EXAMPLE = "imagenet_ddp"
SCRIPT = Path(__file__).parents[2] / "examples" / EXAMPLE / "job.sbatch"
MODULE = "examples.imagenet_ddp"
OLD = "    if args.pretrained and not"
NEW = "    from tests.reference.imagenet_ddp import GroupNet\n    model = GroupNet(classes)\n"
GROUP_NET = [(f"{MODULE}.model", OLD, NEW + OLD)]  # a model in place of that of --arch


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    reference.prepare(folder)
    return folder


def flags(images: Path, *more: str) -> list[str]:
    return [str(images), *reference.MODEL, "-b", "12", "--seed", "3", "-j", "0", *more]


def assert_same_state(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, dict(expected), rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize(
    ("world_size", "accumulate", "workers"), [(1, 4, 0), (2, 3, 2), (3, 1, 0), (4, 3, 1)]
)
def test_ranks_train_the_same_model(
    images: Path, tmp_path: Path, world_size: int, accumulate: int, workers: int
) -> None:
    words = flags(images, "--ema", "0.6", "--lr", "0.05", "-j", str(workers))
    plain = ranks.call(reference.train, words, 1, reference.GroupNet, folder=tmp_path / "plain")
    words += ["--accumulate", str(accumulate)]
    nodes = 2 if world_size == 4 else 1
    run = ranks.run(
        EXAMPLE, world_size, words, out=tmp_path / "out", nodes=nodes, mutate=GROUP_NET
    ).done()
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    assert run.result["metrics"] == pytest.approx(plain.metrics, rel=1e-4)
    assert [int(row["prediction"]) for row in run.rows()] == plain.predictions
    assert all(f"/{row['label_name']}/" in row["file"] for row in run.rows())
    assert_same_state(run.checkpoint()["parts"]["model"], plain.state)
    assert "12 images" not in run.text
    assert "has no test images for 1 class(es): class 11" in run.text


def test_batch_norm_and_dropout_are_those_of_each_rank(images: Path, tmp_path: Path) -> None:
    words = flags(images)
    plain = ranks.call(reference.train, words, 2, folder=tmp_path / "plain")
    alone = ranks.call(reference.train, words, 1, folder=tmp_path / "alone")
    run = ranks.run(EXAMPLE, 2, words, out=tmp_path / "out").done()
    assert run.losses == pytest.approx(plain.losses, rel=1e-4)
    assert run.losses != pytest.approx(alone.losses, rel=1e-3)
    assert_same_state(load_file(run.out / "best.safetensors"), run.checkpoint()["parts"]["model"])
    statistics = {n: v for n, v in plain.state.items() if n.startswith("features.0.1")}
    found = run.checkpoint()["parts"]["model"]
    torch.testing.assert_close({n: found[n] for n in statistics}, statistics, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("world_size", "workers", "fault"),
    [(2, "2", At(1, 8, SIGKILL)), (3, "0", At(2, 4, SIGTERM)), (2, "0", At(0, 9, SIGTERM))],
)
def test_resumed_run_has_the_same_bits(
    images: Path, tmp_path: Path, world_size: int, workers: str, fault: At
) -> None:
    """The generic test has one rank only, because of BatchNorm."""
    words = flags(images, "--ema", "0.6", "--checkpoint-every", "2", "-j", workers)
    whole = ranks.run(EXAMPLE, world_size, words, out=tmp_path / "whole").done()
    words += ["--resume", "auto"]
    cut = ranks.run(EXAMPLE, world_size, words, out=tmp_path / "cut", fault=fault)
    assert any(cut.codes)
    resumed = ranks.run(EXAMPLE, world_size, words, out=tmp_path / "cut").done()
    assert "resumed from" in resumed.text
    assert resumed.result["parameter_hash"] == whole.result["parameter_hash"]
    assert resumed.losses == whole.losses
    assert resumed.result["metrics"] == whole.result["metrics"]
    assert resumed.rows() == whole.rows()
    best = [load_file(run.out / "best.safetensors") for run in (resumed, whole)]
    torch.testing.assert_close(*best, rtol=0, atol=0)


# --------------------------------------------------------------------------------------- recipe


def test_average_is_that_of_torch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    ours = ExponentialAverage(model, 0.7)
    torchs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=True)
    for _ in range(4):
        with torch.no_grad():
            model(torch.randn(8, 3))
            for parameter in model.parameters():
                parameter += torch.randn_like(parameter)
        ours.update_parameters(model)
        torchs.update_parameters(model)
    found, expected = ours.state_dict(), torchs.state_dict()
    expected["module.1.num_batches_tracked"] = torch.tensor(4)  # torch averages it, rounding down
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.gpu
def test_host_does_not_wait_for_the_average() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).cuda()
    average = ExponentialAverage(model, 0.7)
    average.update_parameters(model)
    torch.cuda.set_sync_debug_mode("error")
    average.update_parameters(model)
    torch.cuda.set_sync_debug_mode("default")


def test_start_epoch_is_an_epoch_of_a_longer_run(images: Path, tmp_path: Path) -> None:
    words = flags(images, "--epochs", "3", "--start-epoch", "2", "--checkpoint-every", "1")
    run = ranks.run(EXAMPLE, 1, words, out=tmp_path / "out", mutate=GROUP_NET).done()
    assert (run.result["steps"], run.result["epochs"]) == (5, 3)
    data = reference.Images(tyro.cli(Args, args=words), "train")
    order = torch.randperm(66, generator=torch.Generator().manual_seed(3 + 2))
    inputs, labels = data.batch(2, order[:12])
    loss = nn.functional.cross_entropy(reference.GroupNet(12)(inputs), labels, label_smoothing=0.1)
    assert run.losses[0] == pytest.approx(loss.item(), rel=1e-5)
    assert run.checkpoint()["parts"]["scheduler"]["_last_lr"] == [0]
    words = [*words, "--start-epoch", "1", "--resume", "auto"]
    other = ranks.run(EXAMPLE, 1, words, out=tmp_path / "out", mutate=GROUP_NET)
    assert "--start-epoch differs from its value in" in other.text


@pytest.mark.parametrize("scale", ["", ", init_scale=2.0**60"])
def test_fp16(images: Path, tmp_path: Path, scale: str) -> None:
    """With a large scale the first steps overflow: they are skipped and leave no trace."""
    old = 'enabled=args.precision == "fp16"'
    mutate = [*GROUP_NET, (f"{MODULE}.train", old, old + scale)]
    plain = flags(images, "--lr", "0.02", "--epochs", "12" if scale else "2")
    words = [*plain, "--precision", "fp16"]
    run = ranks.run(EXAMPLE, 2, words, out=tmp_path / "out", mutate=mutate).done()
    if not scale:
        losses = ranks.call(
            reference.train, plain, 1, reference.GroupNet, folder=tmp_path / "p"
        ).losses
        assert run.losses == pytest.approx(losses, rel=1e-2)
        assert run.losses != pytest.approx(losses, rel=1e-6)
    else:
        skipped = [a == b for a, b in zip(run.losses[::5], run.losses[5::5], strict=False)]
        assert not all(skipped)
    assert run.losses[-1] < 0.97 * run.losses[0]
    assert 0 < run.checkpoint()["parts"]["scaler"]["scale"] < 2**40


def test_dummy_needs_no_files(tmp_path: Path) -> None:
    words = [*reference.MODEL, "--dummy", "-b", "2", "--epochs", "1", "-j", "1"]
    run = ranks.run(EXAMPLE, 1, words, out=tmp_path / "out").done()
    assert run.result["steps"] == 100
    assert "top5" in run.result["metrics"]


# -------------------------------------------------------------------------------------- weights


@pytest.fixture(scope="module")
def trained(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    out = tmp_path_factory.mktemp("trained") / "out"
    words = flags(images, "--ema", "0.6", "--lr", "0.3", "--epochs", "3")
    return ranks.run(EXAMPLE, 2, words, out=out).done()


def printed(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def test_evaluate(images: Path, trained: Training) -> None:
    before = {path: path.stat().st_mtime for path in trained.out.rglob("*")}
    for resume in ("auto", str(trained.out / "best.safetensors")):
        words = flags(images, "-e", "--resume", resume)
        run = ranks.run(EXAMPLE, 3, words, out=trained.out).done()
        best = trained.result["best"]
        if resume == "auto":
            assert printed(trained.result["metrics"]) in run.text
        assert resume == "auto" or f"accuracy {best:.4f}" in run.text
    assert {path: path.stat().st_mtime for path in trained.out.rglob("*")} == before


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Folder in which torchvision finds its weights, and these weights."""
    folder = tmp_path_factory.mktemp("hub")
    url = models.MobileNet_V3_Large_Weights.IMAGENET1K_V2.url  # the newest of two
    weights = models.mobilenet_v3_large().state_dict()
    (folder / "hub/checkpoints").mkdir(parents=True)
    torch.save(weights, folder / "hub/checkpoints" / url.rpartition("/")[2])
    return folder, weights


def test_pretrained_has_a_new_head(
    images: Path, tmp_path: Path, hub: tuple[Path, dict[str, Tensor]]
) -> None:
    env = {rank: {"TORCH_HOME": str(hub[0])} for rank in (0, 1)}
    large = ["-a", "mobilenet_v3_large", "--pretrained", "--lr", "0", "--epochs", "1"]
    words = flags(images, *large)
    run = ranks.run(EXAMPLE, 2, words, out=tmp_path / "out", env=env).done()
    assert "except classifier.3.bias, classifier.3.weight" in run.text
    state = run.checkpoint()["parts"]["model"]
    assert state["classifier.3.weight"].shape == (12, 1280)
    for name, value in hub[1].items():
        if "running" not in name and "tracked" not in name and "classifier.3" not in name:
            torch.testing.assert_close(state[name], value, rtol=0, atol=0)
    refused = ranks.run(EXAMPLE, 1, [*words, "-e"], out=tmp_path / "e", env=env)
    assert refused.codes == [2]
    # The same command evaluates what it has trained, without a download.
    words = [*words, "-e", "--resume", "auto"]
    offline = {0: {"TORCH_HOME": str(tmp_path / "empty"), "https_proxy": "http://127.0.0.1:9"}}
    run = ranks.run(EXAMPLE, 1, words, out=tmp_path / "out", env=offline).done()
    words = flags(images, "--pretrained")
    missing = ranks.run(EXAMPLE, 1, words, out=tmp_path / "m", env=offline)
    assert missing.codes == [2]
    assert "\nerror: cannot load https://" in missing.text


# ------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--accumulate 5", "batch size 6 is not divisible by --accumulate 5"),
        ("-b 13", "--batch-size 13 is not divisible by 2 ranks"),
        ("-b 68", "--batch-size 68 exceeds the training set"),
        ("-a resnet19", "torchvision has no model resnet19; try resnet"),
        ("--sync-bn", "--sync-bn needs CUDA"),
        ("--start-epoch 2", "--start-epoch 2 must be below --epochs 2"),
        ("-e", "--evaluate needs weights"),
        ("-e --resume auto", "checkpoints has no checkpoint"),
    ],
)
def test_mistakes_are_one_line(images: Path, tmp_path: Path, words: str, message: str) -> None:
    run = ranks.run(EXAMPLE, 2, flags(images, *words.split()), out=tmp_path / "out")
    assert run.codes == [2, 2]
    (error,) = re.findall("^error: (.*)", run.text, re.MULTILINE)
    assert message in error


def test_damaged_image_is_one_line(images: Path, tmp_path: Path) -> None:
    shutil.copytree(images, tmp_path / "images")
    broken = sorted((tmp_path / "images/train").rglob("*.jpg"))[7]
    broken.write_bytes(broken.read_bytes()[:200])
    words = [str(tmp_path / "images"), *flags(images, "-j", "2")[1:]]
    run = ranks.run(EXAMPLE, 2, words, out=tmp_path / "out")
    assert sorted(run.codes) in ([2, 2], [2, 75])
    assert run.text.count(f"error: cannot decode {broken}: ") == 1
    assert "Traceback" not in run.text


def test_weights_of_other_classes_are_refused(
    images: Path, tmp_path: Path, trained: Training
) -> None:
    shutil.copytree(images, tmp_path / "images")
    for part in ("train", "val"):
        (tmp_path / "images" / part / "class 00").rename(tmp_path / "images" / part / "Class 00")
    for more in (["-e"], []):
        words = [str(tmp_path / "images"), *flags(images, *more)[1:]]
        words += ["--resume", str(trained.out / "best.safetensors")]
        run = ranks.run(EXAMPLE, 1, words, out=tmp_path / "out")
        assert run.codes == [2]
        assert "has the classes" in run.text


# ------------------------------------------------------------------------------------- commands


def test_flags_of_pytorch_examples() -> None:
    """Return to the words of imagenet/main.py: rows 99 and 100, and its short forms."""
    line = "-a resnet50 --dist-url tcp://HOST0:29500 --dist-backend nccl --world-size 2 --rank 1"
    args = tyro.cli(Args, args=[*line.split(), "--multiprocessing-distributed", "DIR"])
    assert (args.data, args.arch, args.world_size, args.rank) == (Path("DIR"), "resnet50", 2, 1)
    assert (args.epochs, args.batch_size, args.image_size) == (90, 256, 224)
    assert (args.lr, args.momentum, args.weight_decay) == (0.1, 0.9, 1e-4)
    line = "-j 3 --epochs 5 --start-epoch 1 -b 8 --lr 1 --momentum 0 --wd 0 -p 7 --seed 2 -e DIR"
    args = tyro.cli(Args, args=[*line.split(), "--resume", "model.pth", "--pretrained", "--dummy"])
    assert (args.workers, args.epochs, args.start_epoch, args.batch_size) == (3, 5, 1, 8)
    assert (args.lr, args.momentum, args.weight_decay, args.log_every) == (1, 0, 0, 7)
    assert (args.evaluate, args.resume) == (True, "model.pth")
    assert args.pretrained and args.dummy
    digits = Args()
    assert (digits.epochs, digits.batch_size, digits.image_size) == (6, 96, 32)


@pytest.mark.parametrize(
    ("codes", "again"),
    [
        ([0], False),
        ([2], False),
        ([143], True),
        ([137, 1, 75], True),
        ([137, 1, 75, 1], False),
        ([143, 143, 143, 1], True),  # planned stops are no faults
        ([1, 1, 1, 143, 1], True),  # nor are faults before one
        ([1, 1, 1, 143, 1, 1, 1, 1], False),
    ],
)
def test_batch_script_queues_itself_again(tmp_path: Path, codes: list[int], again: bool) -> None:
    """A mistake in the command remains one; anything else may be a lost node, three times."""
    texts = {"srun": 'echo "$@" >words\nexit $CODE', "scontrol": 'echo "$@" >requeued'}
    for name, text in texts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    env["SLURM_CPUS_PER_TASK"] = "5"
    for code in codes:
        (tmp_path / "requeued").unlink(missing_ok=True)
        command = ["bash", SCRIPT, "-a", "resnet50", "my images"]
        done = subprocess.run(command, env=env | {"CODE": str(code)}, cwd=tmp_path, check=False)
        assert done.returncode == code
        assert (tmp_path / "requeued").exists() or code == codes[-1]
    assert (tmp_path / "requeued").exists() == again
    words = (tmp_path / "words").read_text()
    assert "--cpus-per-task=5" in words  # srun does not inherit it
    assert f"python -m {MODULE} --resume auto -a resnet50 my images\n" in words


def test_batch_script_requests_one_task_per_gpu() -> None:
    options = re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", SCRIPT.read_text(), re.MULTILINE)
    requested = dict(options)
    assert requested["ntasks-per-node"] == requested["gpus-per-node"]
    assert requested["signal"] == "TERM@180"  # time to save
    assert requested["open-mode"] == "append"
    assert {"requeue", "cpus-per-task", "mem"} <= requested.keys()
