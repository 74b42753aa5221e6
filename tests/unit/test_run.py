"""The bookkeeping of `Run`, with a model that does not matter."""

import contextlib
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, WeightedRandomSampler

from common import checkpoint
from common import run as run_module
from common.checkpoint import load_weights
from common.images import ResumableSampler
from common.launch import RunArgs, UserError
from common.run import Run
from tests import ranks

SMALL: Any = {"batch_size": 12}


def begin(out: Path, *, model: Any = None, about: Any = None, parts: Any = (), **flags: Any) -> Run:
    args = RunArgs(out=out, device="cpu", precision="fp32", **{**SMALL, **flags})
    model = nn.Linear(2, 2) if model is None else model
    return Run(args, torch.device("cpu"), "test", model=model, about=about, **dict(parts))


def epoch(run: Run, score: float = 0.0, steps: int = 1) -> bool:
    for _ in run.steps([None] * steps):
        run.log(torch.tensor(1.0))
    return run.end_epoch({"accuracy": score}, score=score)


def best_epochs(out: Path) -> list[bool]:
    run = begin(out, model=(model := nn.Linear(1, 1)))
    found = []
    for number, score in enumerate([0.5, 0.5, 0.7, 0.6]):
        nn.init.constant_(model.weight, number)
        found.append(epoch(run, score))
    with pytest.raises(UserError, match="the score is NaN"):
        epoch(run, float("nan"))
    return found


def test_equal_score_is_not_the_best(tmp_path: Path) -> None:
    found = ranks.call(best_epochs, tmp_path / "out", folder=tmp_path, ranks=1)[0]
    assert found == [True, False, True, False]
    weights, _ = load_weights(tmp_path / "out/best.safetensors")
    assert weights["weight"].item() == 2


def begin_twice(out: Path) -> None:
    reading, writing = os.pipe()
    if (first := os.fork()) == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        begin(out)
        if os.fork() == 0:  # like a loader worker
            os.close(writing)
            os.read(reading, 1)  # until the other processes have closed the pipe
        os._exit(0)
    assert os.waitpid(first, 0)[1] == 0
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    begin(out)


def test_worker_of_a_killed_rank_does_not_lock_the_folder(tmp_path: Path) -> None:
    ranks.call(begin_twice, tmp_path / "out", folder=tmp_path)


def averaged(out: Path) -> None:
    model = nn.Linear(1, 1)
    average = AveragedModel(nn.Linear(1, 1))
    for parameter in average.module.parameters():
        nn.init.constant_(parameter, 7.0)
    parts = {"ema": average, "none": None}
    epoch(begin(out, model=model, about={"classes": ["a"]}, parts=parts))


def test_best_weights_are_the_average(tmp_path: Path) -> None:
    ranks.call(averaged, tmp_path / "out", folder=tmp_path, ranks=1)
    weights, about = load_weights(tmp_path / "out/best.safetensors")
    assert weights["weight"].item() == 7
    assert weights.keys() == {"weight", "bias"}
    assert about["classes"] == ["a"]
    parts = torch.load(max((tmp_path / "out/checkpoints").iterdir()))["parts"]
    assert parts.keys() == {"model", "ema"}


class Gathered(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        dist.barrier()
        return super().state_dict(*args, **kwargs)


def collective(out: Path) -> int:
    run = begin(out, model=Gathered(1, 1))
    for score in (0.1, 0.2):
        epoch(run, score)
    return run.epoch


def test_every_rank_takes_part_in_a_checkpoint(tmp_path: Path) -> None:
    assert ranks.call(collective, tmp_path / "out", folder=tmp_path, ranks=2) == [2, 2]


def timed(out: Path) -> str:
    clock = SimpleNamespace(now=0.0)
    vars(run_module)["time"] = SimpleNamespace(perf_counter=lambda: clock.now)
    run = begin(out)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        for number, _ in enumerate(run.steps([None] * 5)):
            clock.now += 100.0 if number == 0 else 2.0
        run.end_epoch({"accuracy": 0.0}, score=0.0)
    return output.getvalue()


def test_speed_leaves_the_first_step_out(tmp_path: Path) -> None:
    text = ranks.call(timed, tmp_path / "out", folder=tmp_path, ranks=1)[0]
    assert " 6 samples/s" in text  # 12 every 2 seconds


def forgotten(out: Path) -> None:
    with pytest.raises(AssertionError, match="end_epoch"):
        for _ in begin(out).epochs(2):
            pass


def test_forgotten_end_of_an_epoch(tmp_path: Path) -> None:
    ranks.call(forgotten, tmp_path / "out", folder=tmp_path, ranks=1)


# ---------------------------------------------------------------------------------- random samples


class Augmented(Dataset[Any]):
    """Random augmentation, from the process's generator or from the key (epoch, index)."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple):
            draw = torch.rand((), generator=torch.Generator().manual_seed(hash(index)))
            return torch.tensor([float(index[1]), draw])
        return torch.tensor([float(index), torch.rand(())])


class Weighted(WeightedRandomSampler):
    """It draws the order of an epoch from the global generator, without replacement here."""

    def __init__(self, data: Any, seed: int) -> None:
        super().__init__([1.0] * len(data), 12, replacement=False)

    def set_epoch(self, epoch: int) -> None:
        pass


def batches(out: Path, workers: int, sampler: type, stop: int, resume: str) -> list[Tensor]:
    """Return the batches of two epochs; `stop` steps without the end of the epoch, if not 0."""
    torch.manual_seed(dist.get_rank())
    order: Any = sampler(Augmented(), seed=3)
    loader = DataLoader(Augmented(), 3, sampler=order, num_workers=workers)
    run, found = begin(out, resume=resume, checkpoint_every=1), []
    for number in run.epochs(2):
        order.set_epoch(number)
        for batch in run.steps(loader):
            found.append(batch)
            run.log(torch.tensor(0.0))
            if run.step + 1 == stop:
                run.step += 1
                run.batch += 1
                run.save()
                return found
        run.end_epoch({}, score=0.0)
    return found


@pytest.mark.parametrize("sampler", [DistributedSampler, ResumableSampler, Weighted])
@pytest.mark.parametrize("workers", [0, 1])
def test_samples_are_random_but_repeatable(workers: int, sampler: type, tmp_path: Path) -> None:
    def call(out: str, stop: int, resume: str = "no") -> list[Tensor]:
        folder, arguments = tmp_path / f"{out}.log{stop}{resume}", (workers, sampler, stop, resume)
        found = ranks.call(batches, tmp_path / out, *arguments, folder=folder, ranks=2)
        return [torch.cat(rows) for rows in found]

    whole = call("whole", 0)
    before, after = call("cut", 3), call("cut", 0, "auto")
    for rank in range(2):  # 2 epochs of 4 batches of 3 samples
        assert torch.equal(torch.cat([before[rank], after[rank]]), whole[rank])
    assert not torch.equal(whole[0][:12, 0], whole[0][12:, 0]), "another order in each epoch"
    if sampler is Weighted:
        return
    draws = torch.cat(whole)[:, 1]
    assert len(draws.unique()) == 48, "other random numbers on each rank and in each epoch"
    assert [sorted(rows[:12, 0].tolist()) for rows in whole] != [
        sorted(whole[0][12:, 0].tolist())
    ] * 2
    assert sorted(torch.cat([rows[:12] for rows in whole])[:, 0].tolist()) == list(range(24))


def loops(out: Path) -> int:
    """Train with loaders that other people have; each has its reason."""
    data, steps = Augmented(), 0
    in_order, shifted = (DistributedSampler(data, shuffle=shuffle) for shuffle in (False, True))
    loaders = [
        DataLoader(data, 5),  # the last batch is smaller
        DataLoader(data, 5, collate_fn=lambda rows: rows[1:] or None),
        DataLoader(data, 5, sampler=in_order),  # its order is the same in every epoch
        DataLoader(data, 5, sampler=shifted),
        DataLoader(data, batch_sampler=[[0, 1, 2], [3]]),
    ]
    run = begin(out)
    for number in run.epochs(2):
        shifted.set_epoch(number + 100)
        for loader in loaders:
            run.batch = 0
            for _ in run.steps(loader):
                steps += 1
        run.end_epoch({}, score=0.0)
    return steps


def test_loaders_need_no_particular_form(tmp_path: Path) -> None:
    assert ranks.call(loops, tmp_path / "out", folder=tmp_path, ranks=1) == [2 * (4 * 5 + 2)]


def seeds(out: Path) -> str:
    return lines(out, seed=dist.get_rank() + 3, nproc=dist.get_rank())


def test_different_flags_of_ranks_are_named(tmp_path: Path) -> None:
    """Two nodes, each with a command line of its own."""
    first, second = ranks.call(seeds, tmp_path / "out", folder=tmp_path, ranks=2)
    assert "warning: the ranks were started with different --seed: ['3', '4']" in first
    assert first.count("warning") == 1
    assert second == ""


def thaw(out: Path) -> list[str]:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(False))
    run = begin(out, model=DDP(model))
    warnings = list[str]()
    for number in run.epochs(2):
        model[1].requires_grad_(number == 1)
        with contextlib.redirect_stderr(io.StringIO()) as output:
            for _ in run.steps([None]):
                warnings.append(output.getvalue())
        run.end_epoch({}, score=0.0)
    return warnings


def test_a_layer_that_was_thawed_is_named_in_the_next_step(tmp_path: Path) -> None:
    first, second = ranks.call(thaw, tmp_path / "out", folder=tmp_path, ranks=2)[0]
    assert first == ""
    assert "warning: 1.weight was frozen when DDP was created" in second


# ---------------------------------------------------------------------------------------- resuming


def refused(out: Path, resume: str, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        begin(out, resume=resume, **options)
    return str(error.value)


def saved(out: Path) -> None:
    """Train with classes and metrics as a copy of the template may have them."""
    run = begin(out, about={"classes": ("cat", "dog"), "size": 8})
    for _ in run.steps([None]):
        run.log(torch.tensor(1.0))
    run.end_epoch({"accuracy": np.float64(0.5), "f1": torch.tensor(0.25)}, score=np.float64(0.5))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with one epoch."""
    folder = tmp_path_factory.mktemp("trained")
    ranks.call(saved, folder / "out", folder=folder, ranks=1)
    return folder / "out"


def test_checkpoint_of_another_model(trained: Path, tmp_path: Path) -> None:
    path = str(next((trained / "checkpoints").iterdir()))
    call = (refused, tmp_path / "out", path)
    message = ranks.call(_other_model, *call[1:], folder=tmp_path, ranks=1)[0]
    assert "does not match model" in message
    assert "\n" not in message


def _other_model(out: Path, resume: str) -> str:
    return refused(out, resume, model=nn.Linear(2, 3))


@pytest.mark.parametrize(
    ("classes", "features", "words"),
    [
        (["dog", "cat"], 2, ["has the classes", "dog"]),
        (["cat", "dog"], 3, ["does not match"]),
        (None, 3, ["does not match"]),
    ],
)
def test_weights_that_do_not_fit(
    classes: list[str] | None, features: int, words: list[str], trained: Path, tmp_path: Path
) -> None:
    for path in (trained / "best.safetensors", *(trained / "checkpoints").iterdir()):
        arguments = (tmp_path / path.suffix, str(path), classes, features)
        log = tmp_path / f"log{path.suffix}"
        message = ranks.call(_other_weights, *arguments, folder=log, ranks=1)[0]
        assert all(word in message for word in words), message
        assert "\n" not in message


def _same_classes(out: Path, path: str) -> Any:
    begin(out).save()  # another run, whose files are moved
    run = begin(out, resume=path, about={"classes": ("cat", "dog")})
    return run.metrics, run.best, len([*out.glob("earlier.0/checkpoints/*")])


def test_classes_and_metrics_are_read_back(trained: Path, tmp_path: Path) -> None:
    for path in (trained / "best.safetensors", *(trained / "checkpoints").iterdir()):
        log = tmp_path / f"log{path.suffix}"
        found = ranks.call(_same_classes, tmp_path / path.suffix, str(path), folder=log, ranks=1)[0]
    assert found == ({"accuracy": 0.5, "f1": 0.25}, None, 1)


def _continued(out: Path, path: Path) -> Any:
    state = checkpoint.load(path) | {"seconds": 1000.0}
    checkpoint.save(out / "checkpoints" / path.name, state)
    run = begin(out, model=(model := nn.Linear(2, 2)), resume="auto")
    run.finish(model)
    return run.best, json.loads((out / "result.json").read_text())["seconds"] > 1000


def test_best_score_and_time_are_continued(trained: Path, tmp_path: Path) -> None:
    path = next((trained / "checkpoints").iterdir())
    assert ranks.call(_continued, tmp_path / "out", path, folder=tmp_path, ranks=1) == [(0.5, True)]


def _other_weights(out: Path, resume: str, classes: Any, features: int) -> str:
    return refused(out, resume, model=nn.Linear(2, features), about={"classes": classes})


def _schedules(out: Path) -> str:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    old, new = ({"scheduler": OneCycleLR(optimizer, 0.1, steps)} for steps in (10, 20))
    path = str(begin(out / "old", parts=old).save())
    begin(out / "resumed", resume=path, parts=old)
    return refused(out / "new", path, parts=new)


def test_schedule_of_another_length_is_refused(tmp_path: Path) -> None:
    """OneCycleLR would restore the old length, and raise after it."""
    message = ranks.call(_schedules, tmp_path / "out", folder=tmp_path, ranks=1)[0]
    assert "does not match scheduler: the schedule depends on --epochs" in message


def lines(out: Path, **flags: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        with contextlib.redirect_stderr(output):
            begin(out, **flags)
    return output.getvalue()


def _greetings(out: Path) -> list[str]:
    first = lines(out / "a")
    args = RunArgs(out=out / "b", batch_size=96)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        Run(args, torch.device("cpu"), "pipeline", replicas=2, model=nn.Linear(1, 1))
    return [first, output.getvalue()]


def test_first_lines_say_what_is_trained(tmp_path: Path) -> None:
    first, second = ranks.call(_greetings, tmp_path / "out", folder=tmp_path, ranks=1)[0]
    assert "batch 12 = 1 rank x 12" in first
    assert "batch 96 = 2 replicas x 48" in second


def _commit(out: Path, revision: str) -> None:
    os.environ |= {"SOURCE_REVISION": revision, "PATH": ""}  # git is not found
    run = begin(out, model=(model := nn.Linear(1, 1)))
    epoch(run)
    run.finish(model, images=7)


@pytest.mark.parametrize(("revision", "shown"), [("abc", "abc"), ("", "unknown")])
def test_result_names_the_source(revision: str, shown: str, tmp_path: Path) -> None:
    ranks.call(_commit, tmp_path / "out", revision, folder=tmp_path, ranks=1)
    result = ranks.Training(tmp_path / "out", [], []).result
    assert (result["commit"], result["images"], result["steps"]) == (shown, 7, 1)
    assert {"seconds", "host", "argv", "threads", "device", "metrics", "best"} <= result.keys()
