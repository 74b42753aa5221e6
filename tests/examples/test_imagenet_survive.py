"""`imagenet_ddp --survive`: processes that are killed at chosen moments, against a replay in which nobody is lost."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import nn

from tests.conftest import ROOT, Programs
from tests.machine import here
from tests.make_data import draw_folder
from tests.runs import losses, mutated, result

TRAIN = (
    *("-m", "examples.imagenet_ddp", "--epochs", 3, "-b", 12, "--image-size", 32, "--lr", 0.05, "--precision", "fp32"),
    *("--nproc", 3, "--threads", 1, "--timeout", 900, "--device", "cpu"),  # nothing may have to wait so long
)
STEPS, ALL, LEFT = 9, [0, 1, 2], [0, 2]
FOLDER = "examples/imagenet_ddp"
NORMED = (
    "nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 16, 3, 2), nn.BatchNorm2d(16), "
    "nn.GELU(), nn.Dropout(0.1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, classes))"
)
SMALL_MODEL = (
    f"{FOLDER}/recipe.py",
    "model = models.get_model(recipe.arch, weights=None, num_classes=classes, **options)",
    f"model = {NORMED}",
)
BUCKETS = "gradient_as_bucket_view=True", "gradient_as_bucket_view=True, bucket_cap_mb=0.001"  # several of them
KILL, FAIL = "kill", "fail"
Fault = tuple[str, int, int, str]  # moment, member, unit or generation, what happens

# A copy of the project in which members have accidents, wherever this is called.
ACCIDENT = '''
import os, signal, time
from common.launch.errors import Lost
from common.train.membership import Membership

FAULTS = {faults}


def accident(moment: str, member: int, number: int) -> None:
    """Have the one that is planned for this moment, if any."""
    match FAULTS.pop((moment, member, number), None):
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "fail":
            raise Lost("as if a connection had closed")


def in_backward(parameter, membership: Membership, unit: int) -> None:
    """When the last gradient is computed, of the first layer: others are on their way."""
    def hook(gradient):
        time.sleep(0.05)
        accident("backward", membership.me, unit)
    if ("backward", membership.me, unit) in FAULTS:
        parameter.register_hook(hook)


def await_knock(membership: Membership, unit: int) -> bool:
    """Newcomers are heard in unit 5, in which all wait for one."""
    while unit == 5 and not membership.somebody_knocks():
        time.sleep(0.01)
    return unit == 5
'''
GENERATION = f"{FOLDER}/generation.py"
HOOKS = (
    SMALL_MODEL,
    (GENERATION, *BUCKETS),
    (GENERATION, "\nfrom torch import Tensor\n", "\nfrom torch import Tensor\nfrom .accidents import *\n"),
    (
        GENERATION,
        "                logits = self.model(images).float()\n",
        '                accident("forward", self.membership.me, unit)\n'
        "                logits = self.model(images).float()\n"
        "                in_backward(replica.parameters[0], self.membership, unit)\n",
    ),
    (
        GENERATION,
        "        seen = torch.isin",
        '        accident("before", self.membership.me, unit)\n        seen = torch.isin',
    ),
    (
        GENERATION,
        "        replica.step(unit, seen, mean, buffers)\n",
        '        accident("after", self.membership.me, unit)\n        replica.step(unit, seen, mean, buffers)\n',
    ),
    (
        GENERATION,
        "        better = replica.is_best(evaluation)\n",
        '        accident("evaluated", self.membership.me, unit)\n        better = replica.is_best(evaluation)\n',
    ),
    (
        GENERATION,
        "        self._agree()\n",
        '        accident("written", self.membership.me, unit)\n        self._agree()\n',
    ),
    (
        GENERATION,
        '        self.membership.store.set("finished", "")\n',
        '        self.membership.store.set("finished", "")\n            accident("finished", self.membership.me, 0)\n',
    ),
    (
        GENERATION,
        "            warm_up_buckets(self.model)",
        '            accident("wrapped", membership.me, membership.generation)\n'
        "            warm_up_buckets(self.model)",
    ),
)


def with_faults(folder: Path, faults: tuple[Fault, ...], *changes: tuple[str, str, str]) -> Path:
    """A copy of the project with these accidents, and with what else is changed."""
    copy = mutated(folder, *changes, *HOOKS)
    text = ACCIDENT.format(faults={fault[:3]: fault[3] for fault in faults})
    (copy / FOLDER / "accidents.py").write_text(text)
    replay = (ROOT / "benchmarks" / "imagenet_replay.py").read_text()
    assert BUCKETS[0] in replay
    (copy / "replay.py").write_text(replay.replace(*BUCKETS))
    return copy


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last of 3 batches has two samples."""
    folder = tmp_path_factory.mktemp("drawn")
    draw_folder(folder, train=26, val=7, size=40)
    return folder


def check(programs: Programs, copy: Path, out: Path, expected: list[tuple[int, list[int]]]) -> None:
    """The history is the expected one, and its replay has the same bits; each step and epoch is recorded once."""
    found = result(out)
    assert [(each["steps_done"], each["members"]) for each in found["generations"]] == expected
    replayed = programs.run("-m", "replay", out / "result.json", cwd=copy).stdout.split()[-1]
    assert found["parameter_hash"] == replayed
    assert len(losses(out)) == STEPS
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "test/accuracy" in record] == [3, 6, 9]
    assert found["metrics"]["best_accuracy"] == max(record.get("test/accuracy", 0) for record in records)
    assert (out / "best.safetensors").exists()
    assert list(out.glob("tensorboard/events.*"))


# ---------------------------------------------------------------------------------------------------------- losses

HALF = (("after", 1, 4, KILL), ("after", 2, 4, FAIL))  # member 0 alone has taken the first step of epoch 2
MOMENTS: dict[str, tuple[list[Fault], list[tuple[int, list[int]]]]] = {
    "in forward": ([("forward", 1, 1, KILL)], [(1, LEFT)]),
    "in backward's all-reduce": ([("backward", 1, 4, KILL)], [(3, LEFT)]),
    "between backward and the agreement": ([("before", 0, 5, KILL)], [(4, [1, 2])]),
    "when one has the sum, and others not": ([*HALF, ("before", 0, 6, KILL)], [(4, LEFT), (5, [2])]),
    "in an evaluation, and the next to write in the next": (
        [("evaluated", 1, 3, KILL), ("written", 0, 7, KILL)],
        [(3, LEFT), (6, [2])],
    ),
    "while a group forms": ([("before", 2, 2, KILL), ("wrapped", 1, 1, KILL)], [(2, [0, 1]), (2, [0])]),
    "after the result is written": ([("finished", 0, 0, KILL)], [(9, ALL), (9, [1, 2])]),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_lost_rank_does_not_end_the_training(programs: Programs, tmp_path: Path, images: Path, moment: str) -> None:
    faults, then = MOMENTS[moment]
    copy, out = with_faults(tmp_path / "project", tuple(faults)), tmp_path / "out"
    said = programs.run(*TRAIN, "--survive", "--ema", 0.5, "--out", out, images, cwd=copy).stdout
    last = [] if then[-1][0] == STEPS else [(STEPS, then[-1][1])]
    check(programs, copy, out, [(0, ALL), *then, *last])
    assert re.search(r"^lost member \d: SIGKILL$", said, re.MULTILINE), said
    assert f"after step {then[-1][0]}: members {', '.join(map(str, then[-1][1]))}\n" in said


def test_an_undisturbed_run_ends_as_train_does(programs: Programs, tmp_path: Path, images: Path) -> None:
    """Bit for bit: the same shares, and the same order of additions. (Dropout draws otherwise.)"""
    copy = mutated(tmp_path / "project", (*SMALL_MODEL[:2], SMALL_MODEL[2].replace("nn.Dropout(0.1), ", "")))
    for flags in ((), ("--survive",)):
        programs.run(*TRAIN, "--ema", 0.5, *flags, "--out", tmp_path / f"out{len(flags)}", images, cwd=copy)
    trained, survived = result(tmp_path / "out0"), result(tmp_path / "out1")
    assert survived["parameter_hash"] == trained["parameter_hash"]
    assert survived["metrics"] == trained["metrics"]
    assert losses(tmp_path / "out1") == pytest.approx(losses(tmp_path / "out0"), rel=1e-5)
    best = [load_file(tmp_path / f"out{n}" / "best.safetensors") for n in (0, 1)]
    assert all((best[0][name] == best[1][name]).all() for name in best[0])


def test_a_last_layer_that_stays_random_is_said(programs: Programs, tmp_path: Path, images: Path) -> None:
    """Once, though each member loads the weights alone."""
    copy, weights = mutated(tmp_path / "project", SMALL_MODEL), tmp_path / "five.safetensors"
    save_file(eval(NORMED, {"nn": nn, "classes": 5}).state_dict(), weights)
    flags = ("--epochs", 1, "--init", weights, "--out", tmp_path / "out")
    said = programs.run(*TRAIN, "--survive", *flags, images, cwd=copy).stdout
    assert said.count("weights of ") == 1, said
    assert f"weights of {weights} loaded, but for 9.bias, 9.weight: another number of outputs\n" in said


# A newcomer that came before the others have noticed the loss would be let in at once, and knock at nobody's door.
JOINED = "    store = join(local_number, place)\n"
NOTICED = f"{JOINED}    if number >= place.world_size:\n        store.wait(['1/members'])\n"
WAIT = (
    (f"{FOLDER}/survive.py", JOINED, NOTICED),
    (GENERATION, "float(self.membership.somebody_knocks())", "float(await_knock(self.membership, self.unit))"),
    (GENERATION, "        _, step = self.replica", "        self.unit = unit\n        _, step = self.replica"),
)


def test_a_newcomer_goes_on_alone(programs: Programs, tmp_path: Path, images: Path) -> None:
    """With loader workers. It comes in the middle of epoch 2, loses all others, and has had everything from them."""
    faults: tuple[Fault, ...] = (("before", 1, 1, KILL), ("forward", 0, 8, KILL), ("before", 2, 9, KILL))
    once = ("common/launch/members.py", "if replace:", "if replace and number == 1:")
    copy, out = with_faults(tmp_path / "project", faults, once, *WAIT), tmp_path / "out"
    programs.run(*TRAIN, "--survive", "--replace", "--ema", 0.5, "-j", 1, "--out", out, images, cwd=copy)
    check(programs, copy, out, [(0, ALL), (1, LEFT), (5, [0, 2, 3]), (6, [2, 3]), (7, [3]), (STEPS, [3])])


# Each breaks one thing, at which a run with a lost rank must end otherwise: (file, before, after), moment
MUTATIONS = {
    "a step that failed counts": (f"{FOLDER}/survive.py", "            continue\n", "            done += 1\n", 0),
    "the momentum is not given on": (f"{FOLDER}/replica.py", "*momenta, *average", "*average", 3),
    "the average is not given on": (f"{FOLDER}/replica.py", "*momenta, *average", "*momenta", 3),
    "the buffers of a failed step stay": (f"{FOLDER}/survive.py", "            replica.undo()\n", "", 1),
    "the buffers are those of all ranks": (GENERATION, " * (self.rank == 0)", " / self.size", 0),
    "a step draws anew": (GENERATION, "torch.manual_seed(hash((self.args.seed, unit, self.rank)))", "pass", 1),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_seen(programs: Programs, tmp_path: Path, images: Path, name: str) -> None:
    *change, number = MUTATIONS[name]
    faults, then = list(MOMENTS.values())[number]
    copy, out = with_faults(tmp_path / "project", tuple(faults), (change[0], change[1], change[2])), tmp_path / "out"
    process = programs.start(*TRAIN, "--survive", "--ema", 0.5, "--out", out, images, cwd=copy)
    process.communicate(timeout=here(200))
    with pytest.raises((AssertionError, FileNotFoundError)):
        check(programs, copy, out, [(0, ALL), *then, (STEPS, then[-1][1])])


# ----------------------------------------------------------------------------------------------- what goes wrong

MISTAKES: dict[tuple[object, ...], str] = {
    ("--replace",): "--replace is a flag of --survive: give both",
    ("--survive", "--resume", "auto"): "--survive cannot honour --resume: leave one or the other out",
    ("--survive", "--compile", "--accumulate", 2): (
        "--survive cannot honour --accumulate, --compile: leave one or the other out"
    ),
}


@pytest.mark.parametrize("flags", MISTAKES, ids=str)
def test_a_flag_that_it_does_not_honour_is_refused(programs: Programs, flags: tuple[object, ...]) -> None:
    done = programs.run("-m", "examples.imagenet_ddp", "--nproc", 2, *flags, code=2)
    assert done.stderr == f"error: {MISTAKES[flags]}\n"


def test_an_error_in_an_evaluation_is_no_loss(programs: Programs, tmp_path: Path, images: Path) -> None:
    """It would come again: nothing is tried anew, and its own words are said."""
    change = (GENERATION, "evaluation = evaluate(\n", "evaluation = torch.zeros(2).view(3) or evaluate(\n")
    copy = mutated(tmp_path / "project", SMALL_MODEL, change)
    done = programs.run(*TRAIN, "--survive", "--out", tmp_path / "out", images, cwd=copy, code=1)
    assert re.search(r"error: rank \d: .*RuntimeError: shape '\[3\]' is invalid", done.stderr, re.DOTALL), done.stderr
    assert "has failed" not in done.stderr


def test_it_needs_processes_of_its_own(programs: Programs, tmp_path: Path) -> None:
    words = ("-m", "examples.imagenet_ddp", "--survive", "--out", tmp_path)
    assert programs.run(*words, code=2).stderr == "error: --survive needs several processes: give --nproc\n"
    torchrun = dict(zip(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), "0011", strict=True))
    refused = "error: --survive starts its processes by itself: torchrun and srun end all\n"
    assert programs.run(*words, env=torchrun, code=2).stderr == refused


def test_a_mistake_that_members_find_is_one_line(programs: Programs, tmp_path: Path) -> None:
    words = ("-m", "examples.imagenet_ddp", "--survive", "--nproc", 2, "-a", "nothing", "--dummy", "--out", tmp_path)
    done = programs.run(*words, code=2)
    assert re.fullmatch(r"error: -a nothing: torchvision has no such classification model; .*\n", done.stderr)
