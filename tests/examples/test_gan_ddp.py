"""gan_ddp against a plain loop that breaks the rule, where breaking it does no harm, and against what it forbids."""

import inspect
import json
import re
import signal
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from common.data.idx import ImageData, digits, idx_folder
from examples.gan_ddp.networks import Discriminator, Generator
from examples.gan_ddp.samples import draw, frechet_distance, noise, picture, scaled, side_by_side
from tests.conftest import Programs
from tests.make_data import write_idx
from tests.runs import NO_GPU, Eventually, Result, losses, mutated, newest_step, result

TRAIN = ("-m", "examples.gan_ddp")
TORCHRUN = ("-m", "torch.distributed.run")
SMALL = ("--epochs", 3, "--batch-size", 24, "--precision", "fp32")
LONG = (*TRAIN, "--epochs", 12)
Networks = tuple[dict[str, Tensor], list[float], float]


def plain_loop(
    data: ImageData, norm: Literal["group", "batch"] = "group", ranks: int = 1, apart: bool = True
) -> Networks:
    """The same training without distributed code.

    Args:
        data: the images.
        norm: of the discriminator.
        ranks: shares of the batch that go through the networks one by one: for BatchNorm, it makes a difference.
        apart: two forwards of the discriminator per iteration and share, real and generated images apart.
    """
    torch.manual_seed(0)
    generator, discriminator = Generator(data.size, 32), Discriminator(data.size, norm)

    def judge(rank: int, images: Tensor) -> Tensor:
        for module in discriminator.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 0.0 if rank else 0.1  # rank 0's statistics are the ones that stay
        return discriminator(images)

    optimizers = [
        torch.optim.Adam(network.parameters(), 1e-3, betas=(0.5, 0.99)) for network in (generator, discriminator)
    ]
    found = []
    for epoch in range(3):
        order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(epoch))
        for chosen in order.split(24):
            reals = scaled(data.train.pixels[chosen])
            fakes = generator(noise(len(chosen), 32, 0, len(found)))
            loss = torch.zeros(())
            for rank in range(min(ranks, len(chosen))):
                real, fake = reals[rank::ranks], fakes.detach()[rank::ranks]
                if apart:
                    logits = judge(rank, real), judge(rank, fake)
                else:
                    logits = judge(rank, torch.cat([real, fake])).split([len(real), len(fake)])
                loss = loss + (F.softplus(-logits[0]).sum() + F.softplus(logits[1]).sum()) / len(chosen)
            discriminator.zero_grad()
            loss.backward()
            optimizers[1].step()
            generator.zero_grad()
            fooled = [F.softplus(-judge(rank, fakes[rank::ranks])).sum() for rank in range(min(ranks, len(chosen)))]
            (torch.stack(fooled).sum() / len(chosen)).backward()
            optimizers[0].step()
            found.append(loss.item())
    with torch.no_grad():
        made = generator(noise(1000, 32, 0, 0, 0))
    parts = {"generator": generator, "discriminator": discriminator}
    state = {f"{part}.{name}": value for part, network in parts.items() for name, value in network.state_dict().items()}
    return state, found, frechet_distance(made, scaled(data.test.pixels))


@pytest.fixture(scope="module")
def reference(small: Path) -> Networks:
    return plain_loop(idx_folder(small))


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_ranks_equal_a_plain_loop(
    programs: Programs, tmp_path: Path, small: Path, reference: Networks, nproc: int
) -> None:
    programs.run(*TRAIN, "--nproc", nproc, "--dataset", small, *SMALL, "--out", tmp_path)
    state, expected, distance = reference
    torch.testing.assert_close(losses(tmp_path), expected, rtol=1e-4, atol=0)
    assert result(tmp_path)["metrics"]["frechet_distance"] == pytest.approx(distance, rel=1e-3)
    found = torch.load(max((tmp_path / "checkpoints").glob("step-*.pt")), weights_only=True)["model"]
    torch.testing.assert_close(found, state, rtol=1e-3, atol=1e-4)
    drawn = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert drawn == [f"epoch-{epoch:03}.png" for epoch in (1, 2, 3)]


# -------------------------------------------------------------------------------------------------------- the rule


def test_two_backwards_let_the_ranks_drift_apart(programs: Programs, tmp_path: Path, small: Path) -> None:
    """The second backward's gradients are not averaged; DDP says nothing, the check at the end of the epoch does."""
    run = (*TRAIN, "--dataset", small, *SMALL, "--break-the-rule", "two-backwards", "--out", tmp_path)
    done = programs.run(*run, "--nproc", 2, code=1)
    assert "CheckError: the replicas differ: rank(s) 1 hold other parameters than rank 0" in done.stderr
    assert not (tmp_path / "result.json").exists()
    programs.run(*run)  # with one process nothing is wrong: that is why it is found late


@pytest.mark.parametrize("way", ["two-forwards", "two-passes"])
def test_ways_that_are_right_without_buffers(
    programs: Programs, tmp_path: Path, small: Path, reference: Networks, way: str
) -> None:
    run = (*TRAIN, "--dataset", small, *SMALL, "--break-the-rule", way, "--out", tmp_path)
    programs.run(*run, "--nproc", 2)
    torch.testing.assert_close(losses(tmp_path), reference[1], rtol=1e-4, atol=0)


@pytest.fixture(scope="module")
def with_batchnorm(small: Path) -> dict[str, Networks]:
    """Shares of two ranks, real and generated images apart, and together."""
    return {way: plain_loop(idx_folder(small), "batch", 2, way == "two-forwards") for way in ("two-forwards", "no")}


BATCHNORM = (*TRAIN, "--nproc", 2, *SMALL, "--norm", "batch")
# Since its pull request 175851, autograd does not see that DDP writes BatchNorm's statistics before each forward.
HIDDEN = "_unsafe_preserve_version_counter"
OLD_TORCH = f"import contextlib\ntorch.autograd.{HIDDEN} = lambda tensors: contextlib.nullcontext()\n"


@pytest.mark.parametrize("way", ["two-forwards", "no"])
def test_batchnorm(
    programs: Programs, tmp_path: Path, small: Path, with_batchnorm: dict[str, Networks], way: str
) -> None:
    """Both are right where torch hides the writing from autograd, but they do not compute the same."""
    fails = way == "two-forwards" and HIDDEN not in inspect.getsource(DistributedDataParallel._sync_buffers)
    run = (*BATCHNORM, "--dataset", small, "--break-the-rule", way, "--out", tmp_path)
    done = programs.run(*run, code=1 if fails else 0)
    if fails:
        assert "has been modified by an inplace operation" in done.stderr
        return
    state, expected, _ = with_batchnorm[way]
    torch.testing.assert_close(losses(tmp_path), expected, rtol=1e-4, atol=0)
    found = torch.load(max((tmp_path / "checkpoints").glob("step-*.pt")), weights_only=True)["model"]
    counter = "discriminator.3.num_batches_tracked"
    assert found[counter] == 27 * (3 if way == "two-forwards" else 2), "of rank 0, without those of `warm_up_buckets`"
    torch.testing.assert_close(found | {counter: 0}, state | {counter: 0}, rtol=1e-3, atol=1e-4)
    other = with_batchnorm["no" if way == "two-forwards" else "two-forwards"][1]
    assert max(abs(a - b) / b for a, b in zip(losses(tmp_path), other, strict=True)) > 1e-2


@pytest.mark.parametrize("way", ["two-forwards", "two-passes", "no"])
def test_batchnorm_as_it_was_in_older_versions_of_torch(
    programs: Programs, tmp_path: Path, small: Path, way: str
) -> None:
    """Without what hides it, two forwards before a backward fail; one forward and one backward in turn never did."""
    old = mutated(tmp_path / "old", ("examples/gan_ddp/train.py", "import torch\n", f"import torch\n{OLD_TORCH}"))
    run = (*BATCHNORM, "--dataset", small, "--break-the-rule", way, "--out", tmp_path / "out", "--epochs", 1)
    done = programs.run(*run, cwd=old, code=1 if way == "two-forwards" else 0)
    assert ("has been modified by an inplace operation" in done.stderr) == (way == "two-forwards")


def test_mutation_statistics_of_each_rank(programs: Programs, tmp_path: Path, small: Path) -> None:
    """After its last forward each rank has statistics of its own, whatever DDP wrote before it."""
    broken = mutated(tmp_path / "broken", ("examples/gan_ddp/train.py", "broadcast_buffers(both)", "pass"))
    done = programs.run(*BATCHNORM, "--dataset", small, "--out", tmp_path / "out", cwd=broken, code=1)
    assert "CheckError: the replicas differ: rank(s) 1 hold other parameters than rank 0" in done.stderr


def test_mutation_noise_of_a_rank(programs: Programs, tmp_path: Path, small: Path, reference: Networks) -> None:
    broken = mutated(tmp_path / "broken", ("examples/gan_ddp/train.py", "[rank::world_size]", "[:local_samples]"))
    run = (*TRAIN, "--nproc", 2, "--dataset", small, *SMALL, "--out", tmp_path / "out")
    programs.run(*run, cwd=broken)
    found = losses(tmp_path / "out")
    assert max(abs(a - b) / b for a, b in zip(found, reference[1], strict=True)) > 1e-3


# ---------------------------------------------------------------------------------------------------- the contract


@pytest.fixture(scope="module")
def undisturbed(shared_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run of 12 epochs with two processes that nobody disturbs."""
    out = tmp_path_factory.mktemp("undisturbed")
    printed = shared_programs.run(*LONG, "--nproc", 2, "--out", out).stdout
    return result(out) | {"losses": losses(out), "out": out, "printed": printed}


def test_the_contract(undisturbed: Result) -> None:
    expected = {
        "example": "gan_ddp",
        "world_size": 2,
        "device": "cpu",
        "dataset": "digits",
        "train_samples": 1436,
        "epochs": 12,
        "steps": 144,
        "global_batch": 120,
    }
    assert {name: undisturbed[name] for name in expected} == expected
    out = undisturbed["out"]
    generator, both = Generator(8, 32), load_file(out / "best.safetensors")
    prefix = "generator."
    assert {name.partition(".")[0] for name in both} == {"generator", "discriminator"}, "to go on from, by --init"
    biased = {name for name in both if name.startswith(prefix) and name.endswith(".bias")}
    assert biased == {f"generator.{layer}.bias" for layer in (0, 2, 5, 7)}, "older files have no others"
    own = {name.removeprefix(prefix): tensor for name, tensor in both.items() if name.startswith(prefix)}
    generator.load_state_dict(own)
    with torch.no_grad():
        made = generator(noise(1000, 32, 0, 0, 0))
    data = digits()
    real = scaled(data.test.pixels)
    distance = frechet_distance(made, real)
    assert undisturbed["metrics"]["best_frechet_distance"] == pytest.approx(distance, rel=1e-3)
    # What the training has learnt: far nearer to real images than noise is, or the mean image, or the start.
    untrained = Generator(8, 32)
    with torch.no_grad():
        assert distance < 0.4 * frechet_distance(untrained(noise(1000, 32, 1)), real)
    assert distance < 0.4 * frechet_distance(real.mean(0, keepdim=True).expand_as(real), real)
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    grids = [out / "samples" / f"epoch-{epoch:03}.png" for epoch in range(1, 13)]
    assert sorted((out / "samples").iterdir()) == grids
    assert len({grid.read_bytes() for grid in grids}) == len(grids)
    with Image.open(grids[-1]) as picture:
        assert picture.size == (4 * 100, 4 * 100)  # 10 x 10 images of 8 x 8 with a border of 1
        assert len(set(picture.tobytes())) > 50
    with Image.open(out / "samples.png") as picture:  # after epochs 1, 6 and 12, with a line above each
        assert picture.size == (3 * 400 + 2 * 24, 400 + 24)
        for number, epoch in enumerate((1, 6, 12)):
            left = number * (400 + 24)
            with Image.open(grids[epoch - 1]) as grid:
                assert picture.crop((left, 24, left + 400, 424)).tobytes() == grid.convert("L").tobytes()
            caption = picture.crop((left, 0, left + 400, 24)).tobytes()
            assert min(caption) < 100 < max(caption) == 255
    assert f"pictures:              {out}/samples.png\n" in undisturbed["printed"]
    assert undisturbed["final_loss"] == undisturbed["losses"][-1]
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert sum("loss/generator" in record for record in records) == 144
    lines = re.findall(r"^epoch \d+/12  .*", undisturbed["printed"], re.MULTILINE)
    assert len(lines) == 12
    assert all(len(line) < 80 for line in lines)
    assert re.fullmatch(
        r"epoch 1/12  loss [\d.]+  frechet_distance [\d.]+  [\d,]+ img/s  \d+ s left  \*best\*", lines[0]
    )


def test_noise_follows_from_each_of_its_seeds() -> None:
    """The reference draws the same noise, and would not see that every step has the same."""
    seeds = [(0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 1, 1), (0, 0, 2)]
    drawn = {each: noise(3, 4, *each) for each in seeds}
    assert all(torch.equal(drawn[each], noise(3, 4, *each)) for each in seeds)
    assert len({tuple(values.flatten().tolist()) for values in drawn.values()}) == len(seeds)


def test_rank_0_alone_puts_the_pictures_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are any: they may have been removed before a run was resumed."""
    for drawn in (False, True):
        if drawn:
            draw(torch.zeros(10, 1, 8, 8), picture(tmp_path, 3))
        for rank in (1, 0):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            side_by_side(tmp_path, 3)
            assert (tmp_path / "samples.png").exists() == (drawn and rank == 0)


def test_frechet_distance() -> None:
    real = scaled(digits().test.pixels)
    assert frechet_distance(real, real) == pytest.approx(0, abs=1e-6)
    assert frechet_distance(real, real + 0.5) == pytest.approx(64 * 0.25, rel=1e-5)


def test_a_training_that_diverges_says_so(programs: Programs, tmp_path: Path) -> None:
    done = programs.run(*TRAIN, "--nproc", 2, "--epochs", 1, "--lr", 1e10, "--out", tmp_path, code=2)
    assert re.fullmatch(r"error: .*diverged.*lower --lr.*\n", done.stderr.replace(NO_GPU, ""))


def test_torchrun_trains_the_same(programs: Programs, tmp_path: Path, undisturbed: Result) -> None:
    programs.run(*TORCHRUN, "--standalone", "--nproc-per-node", 2, *LONG, "--out", tmp_path)
    assert result(tmp_path)["parameter_hash"] == undisturbed["parameter_hash"]


def test_killed_and_resumed_is_bit_identical(
    programs: Programs, tmp_path: Path, undisturbed: Result, eventually: Eventually
) -> None:
    flags = (*LONG, "--nproc", 2, "--checkpoint-every", 7, "--out", tmp_path, "--resume", "auto")
    process = programs.start(*flags)
    eventually(lambda: newest_step(tmp_path) >= 40, 100, "step 40")
    programs.kill()
    process.communicate()
    stopped = newest_step(tmp_path)
    process = programs.start(*flags)
    eventually(lambda: newest_step(tmp_path) > stopped, 100, "a step more")
    process.send_signal(signal.SIGTERM)
    done = programs.finish(process, 143)
    assert re.fullmatch(
        r"stopped by SIGTERM: checkpoint at step \d+; go on with --resume auto\n", done.stderr.replace(NO_GPU, "")
    )
    assert programs.gone(within=2)
    programs.run(*flags)
    assert result(tmp_path)["parameter_hash"] == undisturbed["parameter_hash"]
    assert losses(tmp_path) == undisturbed["losses"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nproc", 2, "-b", 7], r"--batch-size 7 \(global\) cannot be divided by 2 ranks; use 8"),
        (["--latent", 0], "--latent 0: give at least 1"),
        (["--break-the-rule", "yes"], "invalid choice|--break-the-rule"),
        (["--dataset", "ODD"], "images of 10x10 pixels: this generator makes sizes that 4 divides"),
        (["--out", "/proc/nowhere"], "--out /proc/nowhere cannot be written"),
    ],
)
def test_bad_input_is_one_line(programs: Programs, tmp_path: Path, flags: list[object], words: str) -> None:
    write_idx(tmp_path / "odd", train=20, test=10, size=10, classes=10)
    flags = [tmp_path / "odd" if flag == "ODD" else flag for flag in flags]
    out = [] if "--out" in flags else ["--out", tmp_path / "out"]
    done = programs.run(*TRAIN, *flags, *out, code=2)
    assert re.fullmatch(rf"error: .*({words}).*\n", done.stderr.replace(NO_GPU, "")), done.stderr
