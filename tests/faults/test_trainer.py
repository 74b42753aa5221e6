"""The checkpoints of the Hugging Face Trainer, which are folders that it writes in place."""

import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from common.launch.args import parse
from common.launch.errors import UserError
from examples.bert_dp.args import RobustTrainerArgs, TrainerArgs
from examples.bert_dp.trainer import training_arguments
from examples.bert_dp.trainer_checkpoints import SEAL, check_best, choose, damage_of, seal
from tests.conftest import Programs
from tests.faults.jobs import NPROC, Jobs
from tests.runs import losses, newest_step, result

TRAINER = "bert_dp.trainer"


@pytest.fixture
def copied(tmp_path: Path, jobs: Jobs) -> Path:
    """What an undisturbed run has left, to be damaged."""
    shutil.copytree(jobs.whole(TRAINER), tmp_path / "out")
    return tmp_path / "out"


def resealed(folder: Path) -> None:
    """As an attacker could: anybody can compute the seal."""
    before = json.loads((folder / SEAL).read_text())
    seal(folder, before["config"], {"world_size": before["world_size"], "threads": before["threads"]})


def test_any_flipped_bit_or_cut_is_noticed(copied: Path) -> None:
    """In each file of a checkpoint, its seal included."""
    folder = copied / "checkpoints" / f"checkpoint-{newest_step(copied)}"
    assert damage_of(folder) == ""
    files, chosen = sorted(folder.iterdir()), random.Random(0)
    assert len(files) >= 8
    for number in range(12 * len(files)):
        file = files[number % len(files)]
        content = file.read_bytes()
        position = chosen.randrange(len(content))
        damaged = bytearray(content)
        damaged[position] ^= 1 << chosen.randrange(8)
        file.write_bytes(bytes(damaged) if number % 3 else content[:position])
        assert damage_of(folder), (file, position)
        file.write_bytes(content)
    assert damage_of(folder) == ""


SAVE_AND_BE_KILLED = """
import hashlib, os, random, signal, sys, time
from pathlib import Path
from examples.bert_dp.trainer_checkpoints import damage_of, seal
folder, choose, whole, cut = Path(sys.argv[1]), random.Random(0), 0, 0
files = [folder / name for name in ("model.safetensors", "optimizer.pt")]
def save():
    began = time.monotonic()
    for file in files:
        body = os.urandom(3_000_000)
        file.write_bytes(hashlib.sha256(body).digest() + body)
    (folder / "trainer_state.json").write_text('{"best_model_checkpoint": null}')
    seal(folder, {}, {"world_size": 1})
    return time.monotonic() - began
for number in range(40):
    reading, writing = os.pipe()
    child, began = os.fork(), time.monotonic()
    while child == 0:
        takes = save()
        os.write(writing, b".")
        time.sleep(takes / 3)  # whole for a quarter of the time, on a busy machine, too
    os.read(reading, 1)  # one save is done
    time.sleep((time.monotonic() - began) * 2 * choose.random())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading), os.close(writing)
    damage = damage_of(folder)
    for file in files if not damage else []:
        assert hashlib.sha256(file.read_bytes()[32:]).digest() == file.read_bytes()[:32]
    whole, cut = whole + (not damage), cut + bool(damage)
print(whole, cut)
"""


def test_killed_while_saving_no_half_written_checkpoint_is_taken(programs: Programs, tmp_path: Path) -> None:
    """A process that writes into one folder again and again is killed 40 times."""
    whole, cut = map(int, programs.run("-c", SAVE_AND_BE_KILLED, tmp_path).stdout.split())
    assert whole + cut == 40
    assert cut > 5, "the kills did not hit a save"
    assert whole > 0, "no save was finished"


def test_a_checkpoint_is_complete_on_every_rank_before_it_is_sealed(
    programs: Programs, tmp_path: Path, jobs: Jobs
) -> None:
    """Rank 1 writes its random state a second after rank 0 has come to the seal."""
    parts = "examples/bert_dp/trainer_parts.py"
    late = (
        "class ReportCallback(",
        "def late(trainer, output_dir, write=Trainer._save_rng_state):\n"
        "    import time\n"
        "    time.sleep(dist.get_rank())\n"
        "    write(trainer, output_dir)\n"
        "Trainer._save_rng_state = late\n\n\n"
        "class ReportCallback(",
    )
    words = (*jobs[TRAINER].words, "--epochs", 1, "--nproc", 2, "--out", tmp_path)
    programs.run(*words, cwd=jobs.broken("late", (parts, *late)))
    (sealed,) = (tmp_path / "checkpoints").glob(f"checkpoint-*/{SEAL}")
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= json.loads(sealed.read_text())["digests"].keys()


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one process, in this one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_restarted_workers_go_on_from_the_newest(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although --resume names an older one: it was for the first start, and they have gone on since."""
    folder = copied / "checkpoints"
    steps = sorted(int(path.parent.name.split("-")[1]) for path in folder.glob(f"checkpoint-*/{SEAL}"))
    older, config = (
        folder / f"checkpoint-{steps[0]}",
        json.loads((folder / f"checkpoint-{steps[0]}" / SEAL).read_text()),
    )
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for resume in (str(older), "auto", "no"):
        found = choose(folder, resume, config["config"])
        assert found
        assert found.step == steps[-1]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    found = choose(folder, str(older), config["config"])
    assert found
    assert found.step == steps[0], "at the first start it is taken"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("change", ["new", "gone"])
def test_a_setting_that_is_new_or_gone_is_named(copied: Path, change: str) -> None:
    folder = copied / "checkpoints"
    config = json.loads((folder / f"checkpoint-{newest_step(copied)}" / SEAL).read_text())["config"]
    was, now = ("None", "5") if change == "new" else (str(config.pop("hidden")), "None")
    config |= {"colour": 5} if change == "new" else {}
    name = "colour" if change == "new" else "hidden"
    with pytest.raises(UserError, match=rf"was made with {name} = {was}, this run has {now}: give the same flags"):
        choose(folder, "auto", config)


@pytest.mark.usefixtures("alone")
def test_the_seed_is_that_of_the_trainers_sampler(tmp_path: Path) -> None:
    """With which it draws the order of the reviews."""
    for cls in (TrainerArgs, RobustTrainerArgs):
        args = parse(cls, ["--seed", "7", "--device", "cpu", "--out", str(tmp_path)])
        given = training_arguments(args, torch.device("cpu"))
        assert (given.seed, given.data_seed) == (7, None), "None: the same"


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("payload-was-executed",)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state_1.pth", "training_args.bin"])
def test_no_code_in_a_checkpoint_is_executed(programs: Programs, copied: Path, jobs: Jobs, name: str) -> None:
    job, last = jobs[TRAINER], newest_step(copied)
    folder = copied / "checkpoints" / f"checkpoint-{last - 8}"
    assert (folder / name).exists()
    torch.save(Payload(), folder / name)
    resealed(folder)
    run = (*job.words, "--nproc", NPROC, "--resume", folder, "--out", copied)
    done = programs.run(*run, cwd=job.code, code=0 if name == "training_args.bin" else 2)  # which is never read
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    refused = f"error: {folder} is not a checkpoint of this program: it holds something else than tensors"
    assert lines == ([] if name == "training_args.bin" else [refused])
    assert not list(job.code.rglob("payload-was-executed"))


def test_a_signal_in_the_last_step_of_an_epoch(programs: Programs, tmp_path: Path, jobs: Jobs) -> None:
    """The epoch is still evaluated: without that, another model might be taken for the best."""
    at = ("examples/bert_dp/trainer_parts.py", "self.stop.agreed()", "15 * (state.global_step in {steps})")
    broken = jobs.broken("stopping", (*at[:2], at[2].format(steps=(16, 20, 64))))
    run = (*jobs[TRAINER].words, "--nproc", NPROC, "--resume", "auto", "--out", tmp_path)
    for step in (16, 20, 64):
        done = programs.run(*run, cwd=broken, code=143)
        assert done.stderr.endswith(f"stopped by SIGTERM: checkpoint at step {step}; go on with --resume auto\n")
        assert newest_step(tmp_path) == step
    programs.run(*run, cwd=broken)
    whole = jobs.whole(TRAINER)
    assert result(tmp_path)["parameter_hash"] == result(whole)["parameter_hash"]
    assert result(tmp_path)["metrics"] == result(whole)["metrics"]
    assert losses(tmp_path) == losses(whole)


def test_without_warm_buckets_three_ranks_resume_differently(programs: Programs, tmp_path: Path, jobs: Jobs) -> None:
    """The mutation: if it makes no difference any more, `on_train_begin` is not needed."""
    parts = "examples/bert_dp/trainer_parts.py"
    broken = jobs.broken(
        "cold",
        (parts, "            warm_up_buckets(", "            (lambda *_: None)("),
        (parts, "self.stop.agreed()", "15 * (state.global_step == 20)"),
    )
    run = (*jobs[TRAINER].words, "--nproc", NPROC, "--resume", "auto", "--out", tmp_path)
    programs.run(*run, cwd=broken, code=143)
    programs.run(*run, cwd=broken)
    # the last bits; whether losses, which are rounded, show them depends on the processor
    assert result(tmp_path)["parameter_hash"] != result(jobs.whole(TRAINER))["parameter_hash"]


def best_of(out: Path) -> Path:
    """The checkpoint with the best model, which is not the last one."""
    last = out / "checkpoints" / f"checkpoint-{newest_step(out)}"
    best = Path(json.loads((last / "trainer_state.json").read_text())["best_model_checkpoint"]).name
    assert best != last.name, "choose another seed"
    return last.with_name(best)


def test_a_damaged_best_model_is_made_again(programs: Programs, copied: Path, jobs: Jobs) -> None:
    """What goes on from a checkpoint would hand out the best model so far: that has to be whole, too."""
    job, weights = jobs[TRAINER], best_of(copied) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    with pytest.raises(
        UserError, match=r"^the best model, .*, is damaged \(model.safetensors does not match its digest"
    ):
        check_best(str(weights.parent))
    done = programs.run(*job.words, "--nproc", NPROC, "--resume", "auto", "--out", copied, cwd=job.code)
    assert re.search("warning: .* is damaged .its best model, .*: model.safetensors does not match", done.stdout)
    assert result(copied)["parameter_hash"] == result(jobs.whole(TRAINER))["parameter_hash"]
