"""your_model: the programs beside the template train what one plain process trains."""

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from examples.your_model.further import fsdp
from tests import programs, ranks

FOLDER = programs.ROOT / "examples" / "your_model"
PLAIN, FSDP = FOLDER / "plain_ddp.py", FOLDER / "further" / "fsdp.py"
LANGUAGE_MODEL = "examples.your_model.further.language_model"


def torchrun(script: Path, world_size: int, cwd: Path, *flags: str) -> tuple[list[int], str]:
    """Run a script in ranks with torchrun's variables; return their exit codes and their output."""
    cwd.mkdir(exist_ok=True)
    port = str(ranks.free_port())
    jobs = [(_script, script, rank, world_size, port, cwd, flags) for rank in range(world_size)]
    codes, texts = ranks._forked(jobs, cwd)
    return codes, "\n".join(texts)


def _script(script: Path, rank: int, world_size: int, port: str, cwd: Path, flags: Any) -> None:
    if world_size > 1 or script == FSDP:  # plain_ddp.py runs alone, too
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = port
    os.chdir(cwd)
    sys.argv = [str(script), *flags]
    exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__", "__doc__": ""})


def epochs(text: str) -> list[tuple[float, float]]:
    """Return loss and accuracy of each epoch."""
    found = re.findall(r"^epoch \d+: loss ([\d.]+), accuracy ([\d.]+)$", text, re.M)
    return [(float(loss), float(accuracy)) for loss, accuracy in found]


def plain_loop(count: int) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Train what plain_ddp.py trains, in one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 32), nn.GELU(), nn.Linear(32, 2))
    rows, labels = map(torch.tensor, load_breast_cancer(return_X_y=True))
    train = torch.tensor([index for index in range(569) if index % 4])
    rows = ((rows - rows[train].mean(0)) / rows[train].std(0)).float()
    optimizer, found = torch.optim.AdamW(model.parameters(), 0.002), []
    for epoch in range(count):
        order = torch.randperm(426, generator=torch.Generator().manual_seed(epoch))
        losses = []
        for batch in train[order].split(48)[:8]:
            losses.append(F.cross_entropy(model(rows[batch]), labels[batch]))
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        correct = (model(rows[::4]).argmax(1) == labels[::4]).double().mean()
        found.append((torch.stack(losses).mean().item(), correct.item()))
    return found, model.state_dict()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_plain_ddp_trains_like_a_plain_loop(world_size: int, tmp_path: Path) -> None:
    expected, weights = plain_loop(4)
    codes, text = torchrun(PLAIN, world_size, tmp_path, "--epochs", "2")
    assert not any(codes), text
    codes, more = torchrun(PLAIN, world_size, tmp_path, "--epochs", "4", "--resume")
    assert not any(codes), more
    found = epochs(text) + epochs(more)
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-4)
    hits, expected_hits = ([right for _, right in each] for each in (found, expected))
    assert hits == pytest.approx(expected_hits, abs=1e-4)
    saved = torch.load(tmp_path / "runs" / "plain_ddp.pt", weights_only=True)
    torch.testing.assert_close(saved["model"], weights, rtol=0, atol=1e-4)


def test_plain_ddp_refuses_a_batch_that_ranks_do_not_divide(tmp_path: Path) -> None:
    codes, text = torchrun(PLAIN, 2, tmp_path, "--batch-size", "47")
    assert codes == [1, 1]
    assert "--batch-size 47 is not divisible by 2 ranks" in text


@pytest.mark.parametrize("script", [PLAIN, FSDP], ids=lambda path: path.stem)
def test_plain_torch_needs_nothing_of_this_repository(script: Path) -> None:
    assert not re.search(r"^\s*(from|import) (\.|common|examples)", script.read_text(), re.M)


def fsdp_loop(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train what fsdp.py trains, without ranks, shards or checkpoints."""
    torch.manual_seed(0)
    width, length = fsdp.WIDTH, fsdp.LENGTH
    layers = [
        nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0, batch_first=True)
        for _ in range(fsdp.LAYERS)
    ]
    model = fsdp.GPT(nn.ModuleList(layers))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(fsdp.TEXT) - length, (16,), generator=generator)
        samples = torch.stack([fsdp.TEXT[start : start + length + 1] for start in starts])
        loss = F.cross_entropy(model(samples[:, :-1]).flatten(0, 1), samples[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def fsdp_losses(text: str) -> dict[int, float]:
    return {int(n): float(x) for n, x in re.findall(r"^step (\d+), loss ([\d.]+)$", text, re.M)}


def test_fsdp_trains_like_one_process_and_each_rank_holds_its_shard(tmp_path: Path) -> None:
    """One rank continues from the checkpoint of two."""
    expected, weights = ranks.call(fsdp_loop, 6, folder=tmp_path / "plain")
    codes, text = torchrun(FSDP, 2, tmp_path, "--steps", "3")
    assert not any(codes), text
    codes, more = torchrun(FSDP, 1, tmp_path, "--steps", "3")
    assert not any(codes), more
    found = fsdp_losses(text) | fsdp_losses(more)
    assert found == pytest.approx(dict(enumerate(expected, 1)), rel=1e-4)

    size = sum(weight.numel() for weight in weights.values())
    for rank in range(2):
        assert f"rank {rank} stores {size // 2:,} of {size:,} parameters" in text
    dcp_to_torch_save(tmp_path / "runs" / "fsdp" / "step-00000006", tmp_path / "whole.pt")
    trained = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    for name in trained:
        if name.endswith("in_proj_bias"):  # softmax ignores the bias of keys: Adam amplifies noise
            trained[name][fsdp.WIDTH : 2 * fsdp.WIDTH] = weights[name][fsdp.WIDTH : 2 * fsdp.WIDTH]
    torch.testing.assert_close(trained, weights, rtol=1e-3, atol=1e-4)


def test_fsdp_ignores_a_checkpoint_that_is_incomplete(tmp_path: Path) -> None:
    assert torchrun(FSDP, 1, tmp_path, "--steps", "2")[0] == [0]
    runs = tmp_path / "runs" / "fsdp"
    shutil.copytree(runs / "step-00000002", runs / "step-00000004")
    (runs / "step-00000004" / ".metadata").unlink()  # killed while it saved step 4
    codes, text = torchrun(FSDP, 1, tmp_path, "--steps", "1")
    assert codes == [0], text
    assert list(fsdp_losses(text)) == [3]


def language_model(nproc: str, out: Path) -> ranks.Training:
    """Train from nothing, on a tenth of the text."""
    words = [*programs.PYTHON, LANGUAGE_MODEL, "--nproc", nproc, "--device", "cpu", "--epochs", "2"]
    words += ["--precision", "fp32", "--batch-size", "50", "--seed", "5", "--out", str(out)]
    programs.run(*words, mutate=[(LANGUAGE_MODEL, "[:200_001]", "[:20_001]")]).done()
    return ranks.Training(out, [], [])


def test_language_model_trains_the_same_on_two_ranks(tmp_path: Path) -> None:
    one, two = (language_model(nproc, tmp_path / nproc) for nproc in ("1", "2"))
    assert one.result["steps"] == 2 * (273 // 50)
    assert two.losses == pytest.approx(one.losses, rel=1e-4)
    assert two.result["metrics"] == pytest.approx(one.result["metrics"], rel=1e-4)
    assert one.losses[0] > one.losses[-1] > 1


def test_the_template_marks_four_places() -> None:
    for path in (FOLDER / "train.py", FOLDER / "further" / "language_model.py"):
        marks = re.findall(r"# (\d\. YOUR \w+)", path.read_text())
        assert sorted(marks) == ["1. YOUR DATA", "2. YOUR MODEL", "3. YOUR LOSS", "4. YOUR METRIC"]
