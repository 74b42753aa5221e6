"""The copy test: an example's train.py, taken out of this repository, is a plain PyTorch program that trains the same.

docs/*/your-model.md tells readers what to do: here it is done to the text of each example, in an empty folder, with the
page's stand-in for `Run`. torchrun starts two processes, and the losses must be those of the example.
"""

import dataclasses
import inspect
import re
import shutil
import textwrap
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch

from common.data.idx import digits
from common.images.folder import ImageFolder
from common.launch.args import parse
from tests.conftest import ROOT, Programs
from tests.examples.copies import COPIES, EPOCH
from tests.runs import losses, mutated, result

PAGE = (ROOT / "docs" / "en" / "your-model.md").read_text()
(STAND_IN,) = re.findall(r"```python\n(import .*?class Run\b.*?)```", PAGE, re.DOTALL)
FLAGS = ("--precision", "fp32")
STEPS = 10

# What the page says to delete, and what to take instead.
DELETED = {"JOB", "Place", "launch", "start", "wait_for", "warm_up_buckets"}
INSTEAD = dict.fromkeys(("Run", "choose_device", "evaluate"), "stand_in")
INSTEAD["record"] = "torch.distributed.elastic.multiprocessing.errors"
WHOLE = {  # files that need nothing but torch
    "common.data.models": "models",
    "common.data.samplers": "samplers",
    "common.launch.messages": "device_messages",
    "common.train.replicas": "replicas",
}


def namespace(flags: Any) -> str:
    """Flags as the text of a SimpleNamespace: their values, and those of their properties."""
    names = [field.name for field in dataclasses.fields(flags)]
    names += [name for name, value in vars(type(flags)).items() if isinstance(value, property)]
    values = {name: getattr(flags, name) for name in names}
    written = (
        f"{name}={namespace(value) if dataclasses.is_dataclass(value) else plain(value)}"
        for name, value in values.items()
    )
    return f"SimpleNamespace({', '.join(written)})"


def method(flags: Any, path: str) -> str:
    """A method of the flags, as the text of a function that is bound to their namespace."""
    owner, name = path.split(".")
    source = textwrap.dedent(inspect.getsource(getattr(type(getattr(flags, owner)), name)))
    return f"{source}\nARGS.{path} = functools.partial({name}, ARGS.{owner})\n"


def plain(value: Any) -> str:
    return f"Path({str(value)!r})" if isinstance(value, PurePath) else repr(value)


def imports(found: re.Match[str]) -> str:
    """Replaces an import of this project's names."""
    module, names = found[1], [name.strip() for name in found[2].strip("()").split(",") if name.strip()]
    if module.startswith("examples."):
        own = module.split(".")[2]
        return f"from {'flags' if own == 'args' else own} import {', '.join(names)}"
    lines = []
    for name in names:
        if name not in DELETED:
            lines.append(f"from {WHOLE.get(module) or INSTEAD.get(name, 'yours')} import {name}")
    return "\n".join(lines)


def copied(text: str, changes: tuple[tuple[str, str], ...] = ()) -> str:
    """A file of an example, after what the page says has been done to it."""
    for old, new in changes:
        text = text.replace(old, new)
    text = re.sub(r"^from ((?:common|examples)\.[\w.]+) import (\([^)]*\)|.*)$", imports, text, flags=re.MULTILINE)
    text = re.sub(r"^def main\(place.*?\n\n\n", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^.*\b(warm_up_buckets\(|place\.export\().*\n", "", text, flags=re.MULTILINE)
    text = text.replace(", init_method=JOB", "").replace("place: Place, ", "")
    # It ends as `start` does. While Python is taken down, one of torch's threads may ask for its lock: before
    # Python 3.14 that ends the thread, and C++ then the process, by SIGABRT (seen once, after all had been printed).
    begin = ('main_worker(int(os.environ["LOCAL_RANK"]), ARGS)', "sys.stdout.flush()", "os._exit(0)")
    lines = "\n".join(f"    {line}" for line in begin)
    return re.sub(r"^    (?:runpy\.run_module|start)\(.*\)$", lines, text, flags=re.MULTILINE)


def take_out(folder: Path, name: str, flags: Any, example: Path = ROOT) -> None:
    """Copy an example into an empty folder, and give it what it needs there."""
    copy, source = COPIES[name], example / "examples" / name
    for file in copy.files:
        if file.endswith(".py"):
            (folder / file).write_text(copied((source / file).read_text(), copy.changes))
        else:
            shutil.copy(source / file, folder)
    train = copied((source / "train.py").read_text(), copy.changes)
    assert "Run(" in train
    (folder / "train.py").write_text(
        train.replace("\nimport torch\n", "\nimport os\nimport sys\nimport torch\nfrom flags import ARGS\n", 1)
    )
    (folder / "flags.py").write_text(
        "import datetime\nimport functools\nfrom pathlib import Path\nfrom types import SimpleNamespace\n"
        "Args = TextArgs = Recipe = PipelineArgs = Violation = SimpleNamespace\n"
        f"ARGS = {namespace(flags)}\n" + "\n\n".join(method(flags, name) for name in copy.methods)
    )
    (folder / "out").mkdir()
    (folder / "stand_in.py").write_text(STAND_IN)
    shutil.copy(ROOT / "tests" / "examples" / "yours.py", folder)
    for module, file in WHOLE.items():
        shutil.copy(ROOT / f"{module.replace('.', '/')}.py", folder / f"{file}.py")
    for room in ("common", "examples"):  # this project is installed: here it must not be found
        (folder / f"{room}.py").write_text("raise ImportError('this is a copy')\n")
        assert not re.search(rf"^\s*(from|import) {room}\b", train, re.MULTILINE)


def data_of(name: str, flags: Any, out: Path) -> dict[str, Any] | None:
    """The data that an example has trained on, as tensors."""
    if name in ("imagenet_ddp", "resnet_pipeline"):
        (drawn,), augmented = (out / "images").glob("shapes-*"), name == "imagenet_ddp"
        size = flags.images.size if augmented else flags.image_size
        folders = [
            ImageFolder(drawn / part, size, augmented and part == "train", flags.seed) for part in ("train", "val")
        ]
        batches = [folder.__getitems__([(0, index) for index in range(len(folder))]) for folder in folders]
        return {
            part: (batch.images.contiguous(), batch.labels)
            for part, batch in zip(("train", "test"), batches, strict=True)
        }
    if name in ("bert_dp", "your_model"):
        return None
    data = digits()
    parts = {"train": (data.train.pixels, data.train.labels), "test": (data.test.pixels, data.test.labels)}
    return parts | {"mean": data.mean, "std": data.std}


def losses_of_copy(programs: Programs, folder: Path) -> tuple[list[float], str]:
    """The losses that the stand-in has printed, and all that was said."""
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "train.py")
    said = programs.run(*words, cwd=folder).stdout
    return [float(loss) for loss in re.findall(r"^loss (\S+)$", said, re.MULTILINE)], said


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_trains_the_same(programs: Programs, tmp_path: Path, name: str) -> None:
    flags = (*FLAGS, *COPIES[name].flags)
    out, folder = tmp_path / "example", tmp_path / "empty"
    programs.run("-m", f"examples.{name}", "--nproc", 2, "--threads", 1, "--out", out, *flags)
    folder.mkdir()
    args = parse(import_module(f"examples.{name}.args").Args, [*map(str, flags), "--out", str(folder / "out")])
    take_out(folder, name, args)
    if data := data_of(name, args, out):
        torch.save(data, folder / "data.pt")
    found, said = losses_of_copy(programs, folder)
    expected = losses(out)
    assert len(found) == len(expected) >= STEPS
    assert found[:STEPS] == expected[:STEPS]
    if COPIES[name].accuracy:
        accuracy = re.findall(r"'accuracy': ([\d.]+)", said)
        assert float(accuracy[-1]) == pytest.approx(result(out)["metrics"]["accuracy"], abs=1e-6)


# Ways in which the bookkeeping could touch the training: the loss, the samples, their number, the precision.
MEDDLING = {
    "log": ("self.meters.loss(loss, ", "self.meters.loss(loss.data.mul_(2), "),
    "steps": ("yield batch", "yield [batch[0] * 1.01, *batch[1:]]"),
    "batch_share": ("return self._batch_samples, local", "return 2 * self._batch_samples, local"),
    "autocast": ("= self.amp.autocast, self", "= (lambda: torch.autocast('cpu', torch.bfloat16)), self"),
    "prepare": ("self.amp.prepare\n", "lambda model: self.amp.prepare(nn.Sequential(model, nn.Hardtanh()))\n"),
}


@pytest.fixture(scope="module")
def copy_of_mnist(shared_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("empty")
    args = parse(import_module("examples.mnist_ddp_spawn.args").Args, [*map(str, FLAGS + EPOCH)])
    take_out(folder, "mnist_ddp_spawn", args)
    torch.save(data_of("mnist_ddp_spawn", args, folder), folder / "data.pt")
    return losses_of_copy(shared_programs, folder)[0]


@pytest.mark.parametrize("what", MEDDLING)
def test_bookkeeping_that_touches_the_training_is_seen(
    programs: Programs, tmp_path: Path, copy_of_mnist: list[float], what: str
) -> None:
    folder = mutated(tmp_path / "project", ("common/train/run.py", *MEDDLING[what]))
    run = ("-m", "examples.mnist_ddp_spawn", "--nproc", 2, "--threads", 1, "--out", tmp_path / "out")
    programs.run(*run, *FLAGS, *EPOCH, cwd=folder)
    different = [a != b for a, b in zip(losses(tmp_path / "out"), copy_of_mnist, strict=True)]
    assert any(different[:STEPS])
