"""The first page: short, and its training loop is a correct one."""

from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, Programs
from tests.docs.markdown import FENCE

BEFORE = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)
numbers = torch.Generator().manual_seed(0)
train_set = TensorDataset(torch.randn(48, 5, generator=numbers), torch.arange(48) % 3)
batch_size, epochs = 8, 2


def build_model():
    torch.manual_seed(dist.get_rank())  # DDP has to make them equal
    return torch.nn.Linear(5, 3)

"""
AFTER = "torch.save(model.module.state_dict(), f'{world_size}-{rank}.pt')\n"


def loop() -> str:
    """The Python of the page, which ends by leaving the process group."""
    ((_, code),) = [block for block in FENCE.findall((ROOT / "README.md").read_text()) if block[0] == "python"]
    return code


def trained(programs: Programs, folder: Path, code: str, ranks: int) -> list[dict[str, torch.Tensor]]:
    """The parameters of each rank after the loop."""
    last = "dist.destroy_process_group()\n"
    assert code.endswith(last)
    (folder / "loop.py").write_text(BEFORE + code.removesuffix(last) + AFTER + last)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    programs.run(*torchrun, "loop.py", cwd=folder)
    return [torch.load(folder / f"{ranks}-{rank}.pt") for rank in range(ranks)]


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.timeout(300)
def test_the_loop_trains_the_same_with_one_rank_and_with_two(programs: Programs, tmp_path: Path) -> None:
    (alone,), (first, second) = (trained(programs, tmp_path, loop(), ranks) for ranks in (1, 2))
    assert apart(first, second) == 0
    assert apart(alone, first) < 1e-5
    # The same with averaging left out is seen: the wrapper's place is taken by one that averages nothing.
    plain = loop().replace(
        "DDP(build_model())", "torch.nn.ModuleDict({'module': build_model()}); model.forward = model.module.forward"
    )
    first, second = trained(programs, tmp_path, plain, 2)
    assert apart(first, second) > 1e-3


def test_the_page_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    assert len(text.splitlines()) <= 100
    assert len([line for line in loop().splitlines() if line]) <= 14
