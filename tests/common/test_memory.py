"""The memory estimate: what it says without memory is what a real step takes."""

import re
from dataclasses import replace
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torchvision import models

from common.images.classifiers import classifier_options
from common.memory.args import Args
from common.memory.estimate import COLUMNS, STATE, largest_stage, needs
from common.memory.measure import Part, blocks, build, measure_all
from tests.conftest import ROOT, Programs

RESNET = Args(arch="resnet18", batch_size=4, image_size=64, device="cpu")
BERT = Args(arch="bert", batch_size=4, layers=2, hidden=128, length=32, device="cpu")
OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1, 0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters()),
}


def estimated(args: Args, bf16: bool = False) -> list[Part]:
    return measure_all(args)[1]["bf16" if bf16 else "fp32"]


def parts_of(sizes: list[int]) -> list[Part]:
    return [Part(0, size) for size in sizes]


def kept(args: Args, bf16: bool) -> tuple[nn.Module, int, int]:
    """A real step on the CPU: the model after it, and the bytes of what backward needed and of the optimizer."""
    model, forward, inputs = build(args)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    held: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        held.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = forward(inputs)
        loss = F.cross_entropy(logits.float(), torch.zeros(len(logits), dtype=torch.long))
    optimizer = OPTIMIZERS[args.optimizer](model)
    loss.backward()
    optimizer.step()
    counted = sum(tensor.untyped_storage().nbytes() for where, tensor in held.items() if where not in own)
    state = [value for each in optimizer.state.values() for value in each.values()]
    return model, counted, sum(tensor.nbytes for tensor in state if isinstance(tensor, Tensor) and tensor.ndim)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("args", [RESNET, replace(BERT, optimizer="adamw")], ids=["resnet18", "bert"])
def test_it_is_what_a_step_takes(args: Args, bf16: bool) -> None:
    torch.set_num_threads(1)
    model, counted, state = kept(args, bf16)
    parts = estimated(args, bf16)
    # In bf16, batch norm on a CPU keeps a few statistics that its fake kernel does not know of.
    assert sum(part.activations + part.copies for part in parts) == pytest.approx(counted, rel=2e-3 if bf16 else 0)
    row = needs(parts, blocks(model), STATE[args.optimizer], 1)["one device"]
    assert row["parameters"] == sum(parameter.nbytes for parameter in model.parameters())
    assert row["gradients"] == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert row["optimizer"] == state
    assert row["sum"] == sum(row[column] for column in COLUMNS[:-1])


def test_copies_of_weights_are_no_activations() -> None:
    """Twice the batch: twice the activations, and the same copies. In float32 there are none."""
    once, twice = estimated(RESNET, bf16=True), estimated(replace(RESNET, batch_size=8), bf16=True)
    assert sum(part.copies for part in once) == sum(part.copies for part in twice) > 20e6
    ratio = sum(part.activations for part in twice) / sum(part.activations for part in once)
    assert ratio == pytest.approx(2, rel=1e-2)
    assert not any(part.copies for part in estimated(RESNET))


def test_a_gpus_kernels_are_asked_without_a_gpu() -> None:
    """Layer norm is float32 under CUDA's autocast, and in the type of its input under the CPU's."""
    sizes = {
        device: sum(part.activations for part in estimated(replace(BERT, device=device), bf16=True))
        for device in ("cpu", "cuda")
    }
    assert sizes["cpu"] != sizes["cuda"]


# FSDP2 in a world of four that exists by name only: the shards of rank 0 are real.
SHARDED = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchvision import models
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
mesh = dist.init_device_mesh("cpu", (4,))
model = models.resnet18()
for layer in (model.layer1, model.layer2, model.layer3, model.layer4):
    for block in layer:
        fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
print(sum(parameter.to_local().nbytes for parameter in model.parameters()))
"""


def test_a_shard_is_what_fsdp_keeps(programs: Programs) -> None:
    held = int(programs.run("-c", SHARDED).stdout)
    model = models.resnet18()
    row = needs(estimated(RESNET), blocks(model), STATE["sgd"], 4)["FSDP2"]
    assert row["parameters"] == pytest.approx(held, rel=1e-3)  # classes, 1,000, are no multiple of 4
    units = [unit for name, unit in model.named_modules() if re.fullmatch(r"layer\d\.\d", name)]
    assert len(units) == 8
    assert blocks(model) == [sum(parameter.nbytes for parameter in unit.parameters()) for unit in units]


def test_ddp_and_a_pipeline() -> None:
    parts = [Part(100, 8, 50), Part(20, 400, 10), Part(40, 160, 20)]
    rows = needs(parts, [], STATE["adamw"], 2)
    assert rows["DDP"] | {"sum": 0} == dict(zip(COLUMNS, (160, 160, 320, 284 + 80, 0, 0), strict=True))
    # 100 * 4 + 8 + 50 and the 490 + 340 of the others, or 458 + 490 and 340: the second stage of the first is less
    assert rows["pipeline"]["sum"] == 830


@pytest.mark.parametrize("sizes", [[5, 1, 1, 1, 1, 1], [1, 2, 3, 4, 5, 6], [9], [0, 0, 7, 0], [3, 3, 3]])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_the_largest_stage_is_as_small_as_can_be(sizes: list[int], stages: int) -> None:
    places = range(1, len(sizes))
    best = min(
        max(sum(sizes[a:b]) for a, b in zip((0, *cut), (*cut, len(sizes)), strict=True))
        for number in range(min(stages, len(sizes)))
        for cut in combinations(places, number)
    )
    assert sum(sizes[number] for number in largest_stage(sizes, stages)) == best


def test_the_page_shows_what_it_prints(programs: Programs) -> None:
    """Up to a hundredth: another version of torch may keep a little more."""
    page = (ROOT / "docs" / "en" / "model-does-not-fit.md").read_text()
    (command,) = re.findall(r"^python (-m common.memory .* --memory 16)$", page, re.M)
    (shown,) = re.findall(r"```text\n(bert: .*?)```", page, re.S)
    said = programs.run(*command.split()).stdout
    numbers = re.compile(r"\d+\.\d+")
    assert numbers.sub("0", said) == numbers.sub("0", shown)
    pairs = zip(numbers.findall(said), numbers.findall(shown), strict=True)
    assert [pair for pair in pairs if abs(float(pair[0]) - float(pair[1])) > 0.011] == []


def test_the_table_says_what_fits(programs: Programs) -> None:
    words = ("-a", "resnet18", "-b", 64, "--optimizer", "adamw", "--ranks", 2, "--memory", 1)
    said = programs.run("-m", "common.memory", *words).stdout
    rows = [line.split() for line in said.splitlines() if re.match(r"(one device|DDP|FSDP2|pipeline)", line)]
    assert len(rows) == 8
    for row in rows:
        *numbers, total = (float(word) for word in row if re.fullmatch(r"[\d.]+\d", word) and "." in word)
        assert sum(numbers) == pytest.approx(total, abs=0.03)
        assert ("no" in row) == (total > 1)
        assert ("fits," in row or "fits" in row) == (total <= 1)
    assert [row[-2] for row in rows if row[0] == "DDP"] == ["2", "1"]


@pytest.mark.parametrize(
    "arch", ["convnext_tiny", "inception_v3", "maxvit_t", "regnet_y_400mf", "swin_t", "swin_v2_t", "vit_b_16"]
)
def test_models_whose_making_needs_values_are_measured(arch: str) -> None:
    """Their initial values, or their sizes, are computed with tensors, which fake ones cannot do."""
    size = 299 if arch == "inception_v3" else 224
    parts = estimated(replace(RESNET, arch=arch, image_size=size, batch_size=1), bf16=True)
    with torch.device("meta") if "regnet" not in arch else torch.device("cpu"):
        reference = models.get_model(arch, **classifier_options(arch, size))
    assert sum(part.parameters for part in parts) == sum(p.nbytes for p in reference.parameters())
    assert sum(part.activations for part in parts) > 1e6


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("-a", "vit_b_16", "--image-size", 100),
            "-a vit_b_16 cannot take images of 100x100 (Input shape indivisible by patch size!): change --image-size",
        ),
        (("-a", "resnet51"), "--arch resnet51: give bert, or a classifier of torchvision"),
        (("-b", 0), "--batch-size 0: give at least 1"),
        (("-a", "bert", "--hidden", 100), "--hidden 100: give a multiple of 64, the width of a head"),
    ],
)
def test_a_mistake_is_one_line(programs: Programs, words: tuple[object, ...], line: str) -> None:
    assert programs.run("-m", "common.memory", *words, code=2).stderr == f"error: {line}\n"
