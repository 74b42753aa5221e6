"""your_model.fsdp: any number of ranks trains what one process without FSDP trains, and holds its share only."""

import re
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from examples.your_model.fsdp import BATCH, LAYERS, LENGTH, TEXT, WIDTH, Writer
from tests.conftest import ROOT, Programs
from tests.runs import mutated

STEPS = 6
CHANGES = {
    "FSDP does not average": ("torch.manual_seed(0)", "torch.manual_seed(dist.get_rank())"),
    "all ranks see the same samples": ("starts[dist.get_rank() ::", "starts[0 ::"),
    "the optimizer counts a step too many": ("    first = 0\n", "    first = 0; state(model, optimizer, 0)\n"),
    "what is in no layer is not sharded": ("    fully_shard(model, mesh=mesh)", "    assert mesh"),
}


def train(programs: Programs, ranks: int, checkpoint: Path, steps: int, cwd: Path | None = None) -> str:
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    program = ("-m", "examples.your_model.fsdp", "--steps", steps, "--checkpoint", checkpoint)
    env = {"PYTHONPATH": str(cwd)} if cwd else None
    return programs.run(*words, *program, cwd=cwd, env=env).stdout


def losses(said: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+), loss ([\d.]+)$", said, re.M)}


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The whole parameters of a checkpoint, from the pieces of all ranks."""
    whole = checkpoint.with_suffix(".pt")
    dcp_to_torch_save(checkpoint, whole)
    return torch.load(whole, weights_only=True)["model"]


@pytest.fixture(scope="module")
def plain() -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """One process, without ranks, shards or checkpoints: its losses by step, and its last parameters."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0, batch_first=True) for _ in range(LAYERS)]
    model = Writer(nn.ModuleList(layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = {}
    for step in range(STEPS):
        starts = torch.randint(len(TEXT) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step))
        places = starts[:, None] + torch.arange(LENGTH)
        loss = F.cross_entropy(model(TEXT[places]).flatten(0, 1), TEXT[places + 1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found[step + 1] = loss.item()
    return found, dict(model.state_dict())


def test_two_ranks_train_as_one_process_and_hold_half_each(
    programs: Programs, tmp_path: Path, plain: tuple[dict[int, float], dict[str, torch.Tensor]]
) -> None:
    """And one rank goes on from the checkpoint of the two."""
    expected, parameters = plain
    said = train(programs, 2, tmp_path / "checkpoint", STEPS // 2)
    more = train(programs, 1, tmp_path / "checkpoint", STEPS - STEPS // 2)
    found = losses(said) | losses(more)
    assert list(found) == list(expected)
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-4)
    trained = weights(tmp_path / "checkpoint")
    for name in trained:
        if name.endswith("in_proj_bias"):  # softmax does not see the keys' bias: Adam makes steps of its rounding
            trained[name][WIDTH : 2 * WIDTH] = parameters[name][WIDTH : 2 * WIDTH]
    torch.testing.assert_close(trained, parameters, rtol=1e-3, atol=1e-4)
    whole = sum(parameter.numel() for parameter in parameters.values())
    # Two ranks may print into one line: torchrun's have no buffer, and print() writes the end of a line separately.
    assert sorted(re.findall(r"rank \d holds [\d,]+ of [\d,]+ parameters", said)) == [
        f"rank {rank} holds {whole // 2:,} of {whole:,} parameters" for rank in (0, 1)
    ]
    assert f"rank 0 holds {whole:,} of {whole:,} parameters" in more


def test_killed_while_it_saves_the_checkpoint_before_is_whole(programs: Programs, tmp_path: Path) -> None:
    train(programs, 2, tmp_path / "checkpoint", 2)
    renames = "    if dist.get_rank() == 0:  # all"
    dies = (renames, f"    next(new.glob('*.distcp')).unlink()\n    os._exit(9)\n{renames}")
    project = mutated(tmp_path / "project", ("examples/your_model/fsdp.py", *dies))
    with pytest.raises(AssertionError, match="ended with 1"):
        train(programs, 2, tmp_path / "checkpoint", 2, cwd=project)
    assert list(losses(train(programs, 2, tmp_path / "checkpoint", 1))) == [3]
    (tmp_path / "checkpoint").rename(tmp_path / "checkpoint.old")  # killed between the two renames
    assert list(losses(train(programs, 1, tmp_path / "checkpoint", 1))) == [4]
    assert not (tmp_path / "checkpoint.old").exists()


def test_ranks_that_do_not_divide_the_batch_are_refused(programs: Programs, tmp_path: Path) -> None:
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 3, "-m", "examples.your_model.fsdp")
    done = programs.run(*words, "--steps", 1, "--checkpoint", tmp_path, code=1)
    assert "3 ranks do not divide BATCH 16: change one" in done.stderr


def test_the_page_quotes_the_program() -> None:
    page = (ROOT / "docs" / "en" / "model-does-not-fit.md").read_text()
    (quoted,) = re.findall(r"```python\n(.*?)```", page, re.S)
    assert textwrap.indent(quoted, "    ") in (ROOT / "examples" / "your_model" / "fsdp.py").read_text()


@pytest.mark.parametrize("name", CHANGES)
def test_a_mistake_is_seen(
    programs: Programs, tmp_path: Path, plain: tuple[dict[int, float], dict[str, torch.Tensor]], name: str
) -> None:
    expected, parameters = plain
    project = mutated(tmp_path / "project", ("examples/your_model/fsdp.py", *CHANGES[name]))
    said = train(programs, 2, tmp_path / "checkpoint", 2, cwd=project)
    equal = [losses(said)[step] == pytest.approx(expected[step], rel=1e-4) for step in (1, 2)]
    (held,) = {int(number.replace(",", "")) for number in re.findall(r"holds ([\d,]+) of", said)}
    half = sum(parameter.numel() for parameter in parameters.values()) // 2
    assert not all(equal) or held != half
