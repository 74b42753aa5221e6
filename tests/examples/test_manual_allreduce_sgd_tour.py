"""manual_allreduce_sgd: the tour of torch.distributed, the smallest program, and the ring that its pages show."""

import inspect
import re
import textwrap

import pytest
import torch

from examples.manual_allreduce_sgd.allreduce import ring
from examples.manual_allreduce_sgd.topics import TOPICS
from tests.conftest import ROOT, Programs

EXAMPLE = "examples.manual_allreduce_sgd"


@pytest.mark.parametrize("nproc", [2, 4])
def test_the_tour_checks_every_rank(programs: Programs, nproc: int) -> None:
    done = programs.run("-m", f"{EXAMPLE}.tour", "--nproc", nproc)
    assert done.stderr == ""
    assert done.stdout.endswith(f"every rank checked what it holds: {len(TOPICS) + 1} topic(s), {nproc} ranks\n")
    assert torch.__version__.startswith("2.11.") or "\nall_to_all\n  rank" in done.stdout, "that gloo has none"
    if nproc == 4:
        page = (ROOT / "examples/manual_allreduce_sgd/README.md").read_text()
        shown = [block for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL) if "rank  before" in block]
        assert shown
        for block in shown:
            assert block in done.stdout


def test_products_of_many_ranks_are_exact(programs: Programs) -> None:
    said = programs.run("-m", f"{EXAMPLE}.tour", "--nproc", 16, "all-reduce").stdout
    assert "479001600" in said.partition("PRODUCT")[2].partition("\n\n")[0], "12!"


@pytest.mark.parametrize("module", ["manual_allreduce_sgd.survive", "mnist_ddp_spawn.sampler"])
@pytest.mark.parametrize("flags", [("--device", "cuda"), ("--device", "auto", "--dist-backend", "nccl")])
def test_a_gpu_is_not_ignored_in_silence(programs: Programs, module: str, flags: tuple[object, ...]) -> None:
    said = programs.run("-m", f"examples.{module}", *flags, code=2).stderr
    assert said.startswith("error: this program works on the CPU, with gloo: leave out ")


def test_a_wrong_topic_is_one_line(programs: Programs) -> None:
    done = programs.run("-m", f"{EXAMPLE}.tour", "--nproc", 2, "broadcats", code=2)
    assert done.stderr.startswith("error: broadcats is not a topic; there are send-recv, isend-irecv, ")


@pytest.mark.parametrize(("flags", "ranks", "total"), [((), 2, 1), (("--nproc", 3), 3, 3)])
def test_the_smallest_program(programs: Programs, flags: tuple[object, ...], ranks: int, total: int) -> None:
    done = programs.run("-m", f"{EXAMPLE}.run", *flags)
    expected = [f"rank {rank} of {ranks}: the sum of all ranks is {total}" for rank in range(ranks)]
    assert sorted(done.stdout.splitlines()) == expected


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_pages_show_the_ring_as_it_is(page: str) -> None:
    body = inspect.getsource(ring).split('"""')[2]
    assert f"```python{textwrap.dedent(body)}```" in (ROOT / "examples/manual_allreduce_sgd" / page).read_text()
