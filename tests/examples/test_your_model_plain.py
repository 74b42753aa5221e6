"""your_model/plain_ddp.py: alone in an empty folder, any number of ranks trains the same."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, Programs

PLAIN = ROOT / "examples" / "your_model" / "plain_ddp.py"


def test_started_without_torchrun_it_says_so(programs: Programs, tmp_path: Path) -> None:
    shutil.copy(PLAIN, tmp_path)
    said = programs.run("plain_ddp.py", cwd=tmp_path, cold=True, code=1).stderr
    assert said == "start it by torchrun: torchrun --nproc-per-node 2 plain_ddp.py\n"


def trained(programs: Programs, folder: Path, ranks: int) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Loss and accuracy of each epoch, and the parameters that rank 0 has saved."""
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "plain_ddp.py")
    said = programs.run(*words, cwd=folder).stdout
    assert said.startswith(f"starting {ranks} rank")
    lines = re.findall(r"^epoch \d+: loss ([\d.]+), accuracy ([\d.]+)$", said, re.MULTILINE)
    saved = torch.load(folder / "plain_ddp.pt", weights_only=True)
    return [(float(loss), float(accuracy)) for loss, accuracy in lines], saved


def test_it_needs_nothing_of_this_project() -> None:
    assert not re.search(r"^\s*(from|import) (common|examples)", PLAIN.read_text(), re.MULTILINE)
    assert len(PLAIN.read_text().splitlines()) <= 84


def test_one_rank_and_two_train_the_same(programs: Programs, tmp_path: Path) -> None:
    shutil.copy(PLAIN, tmp_path)
    one, alone = trained(programs, tmp_path, 1)
    two, together = trained(programs, tmp_path, 2)
    assert len(one) == 20
    assert one[-1][1] > 0.95
    assert [loss for loss, _ in two] == pytest.approx([loss for loss, _ in one], rel=1e-3)
    assert two[-1][1] == one[-1][1]
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-5)
    # Without the averaging it is seen: each rank trains a model of its own.
    source = PLAIN.read_text()
    assert "cross_entropy(ddp(" in source
    (tmp_path / "plain_ddp.py").write_text(source.replace("cross_entropy(ddp(", "cross_entropy(model("))
    apart, _ = trained(programs, tmp_path, 2)
    assert apart[-1][0] != pytest.approx(one[-1][0], rel=1e-2)


def test_ranks_that_do_not_divide_the_batch_are_refused(programs: Programs, tmp_path: Path) -> None:
    """They would train with a smaller one. The page names the numbers of ranks that train the same."""
    source, page = PLAIN.read_text(), (ROOT / "docs" / "en" / "your-model.md").read_text()
    (batch,) = re.findall(r"EPOCHS, BATCH_SIZE, LR = 20, (\d+)", source)
    named = "trains the same model with 1, 2, 3 or 6 ranks, which divide its 426 samples and its batch of 48"
    assert named in page
    assert [ranks for ranks in range(1, 49) if 426 % ranks == 0 == int(batch) % ranks] == [1, 2, 3, 6]
    (tmp_path / "plain_ddp.py").write_text(source.replace("BATCH_SIZE, LR = 20, 48", "BATCH_SIZE, LR = 20, 47"))
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "plain_ddp.py")
    said = programs.run(*words, cwd=tmp_path, code=1).stderr
    # Both ranks say it, at times into one line: Python writes the end of a line separately.
    line = "2 ranks do not divide BATCH_SIZE 47: change one"
    lines = [found.replace(line, "") for found in said.splitlines() if line in found]
    assert lines
    assert set(lines) == {""}
