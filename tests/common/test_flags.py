"""Flags: answered before torch is imported, mistakes in one line."""

import ast
import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated

import pytest

from common.launch import early
from common.launch.args import parse
from common.launch.cgroup import cores
from common.launch.config import all_flags, save_config
from common.launch.console import say
from common.launch.early import announce, check_processes, judge, sleep_while_waiting
from common.launch.errors import UserError
from common.launch.flags import MAY_CHANGE, Launch, Watch, equal_parts, fixed_flags
from common.launch.place import Place
from common.train.precision import Precision
from common.who import Args as WhoArgs
from examples.bert_dp.args import PredictArgs, TrainerArgs
from examples.imagenet_ddp.args import Args as ImagenetArgs
from examples.manual_allreduce_sgd.args import Args as UnequalArgs
from examples.mnist_ddp_spawn.args import Args
from examples.resnet_pipeline.args import Args as PipelineArgs
from tests import warm
from tests.conftest import ROOT, Programs
from tests.machine import here
from tests.runs import NO_GPU, shown

EXAMPLES = sorted(path.parent.name for path in (ROOT / "examples").glob("*/__main__.py"))
STARTED = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "examples").glob("*/*.py")
    if re.search(r"^    (start\(Args|runpy)", path.read_text(), re.MULTILINE) and path.name != "__main__.py"
)
# Those whose flags have a file of their own answer before torch is imported.
QUICK = [f"examples.{name}" for name in EXAMPLES]
NEEDED = {"examples.bert_dp.predict": ("--text", "a review")}
MISTAKES = (
    (["--nprok", "2"], "error: Unrecognized options: --nprok, 2; perhaps you meant --nproc .*\n"),
    (["--nproc", "0"], "error: --nproc 0: at least 1 process is needed\n"),
    (["--dist-backend", "mpi"], r"error: --dist-backend mpi: give auto, nccl or gloo \(.*\)\n"),
    (["--timeout", "soon"], r"error: --timeout soon: give a number \(.*\)\n"),
    (["--threads=few"], r"error: --threads few: give a whole number \(.*\)\n"),
    (["--threads"], r"error: --threads: its value is missing: --threads N \(.*\)\n"),
    (["--nproc", "1000"], r"error: --nproc 1000: this machine has \d+ core\(s\) for them: give at most \d+; .*\n"),
    (["--config", "nowhere.yaml"], r"error: --config nowhere.yaml cannot be read \(No such file or directory\)\n"),
    (["--track", "mlflow"], r"error: --track mlflow: this package is not installed: pip install mlflow\n"),
    (["--resume", "nowhere"], r"error: checkpoint nowhere does not exist: --resume takes auto, a path, or no\n"),
    (["--out", "README.md"], r"error: --out README.md is a file: choose a folder\n"),
    (
        ["--out", "/proc/runs"],
        r"error: --out /proc/runs cannot be written \(No such file or directory\): choose another folder\n",
    ),
    (["--world-size", "2", "--rank", "5", "--dist-url", "tcp://h:1"], "error: --rank 5 with --world-size 2: .*\n"),
)
# Forks a process for every command: starting Python 65 times takes half a minute.
NO_TORCH = """
import json, os, runpy, sys, tempfile
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "sklearn", "matplotlib", "pandas", "torchvision", "transformers"):
            raise AssertionError(f"{name} is imported before the flags are read")
sys.meta_path.insert(0, Refuse())
import tyro
answers = []
for command in json.loads(sys.argv[1]):
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]
    if os.fork() == 0:
        for descriptor, file in enumerate(files, 1):
            os.dup2(file.fileno(), descriptor)
        sys.argv = command
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        sys.exit(0)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    answers.append([code, *(file.seek(0) or file.read() for file in files)])
print(json.dumps(answers))
"""
Answers = dict[str, list[tuple[int, str, str]]]


@pytest.fixture(scope="module")
def answers(shared_programs: Programs) -> Answers:
    """What each program answers to --help and to each mistake: exit code, standard output, standard error."""
    commands = [
        [program, *words, *NEEDED.get(program, ())]
        for program in QUICK
        for words in (["--help"], *(words for words, _ in MISTAKES))
    ]
    found: Answers = {}
    said = json.loads(shared_programs.run("-c", NO_TORCH, json.dumps(commands), cold=True).stdout)
    for command, answer in zip(commands, said, strict=True):
        found.setdefault(command[0], []).append(tuple(answer))
    return found


@pytest.mark.parametrize("program", QUICK)
def test_help_and_mistakes_answer_without_heavy_imports(answers: Answers, program: str) -> None:
    (code, text, _), *others = answers[program]
    assert code == 0
    check_help(text, program)
    for (code, out, err), (_, line) in zip(others, MISTAKES, strict=True):
        assert (code, out) == (2, ""), err
        assert re.fullmatch(line, err), err


def check_help(text: str, program: str) -> None:
    """As it is typed, in 80 columns but for the commands shown, six flags first, one default per flag, no Python."""
    does, blank, usage = text.splitlines()[:3]
    assert re.fullmatch(rf"{program.split('.')[1]}(\.\w+)?: (train|classify) .*\.", does)
    assert blank == ""
    flags = text.partition("\n\nCommon flags:\n")[2]
    assert re.fullmatch(rf"usage: python -m {program}( \[DIR\])? \[flags\]", usage)
    assert all(len(line) <= 80 for line in flags.splitlines())
    first = re.findall(r"^  (?:-\w, )?([\w-]+)", flags.partition("\n\n")[0], re.MULTILINE)
    assert len(first) == 6
    assert {"--nproc", "--epochs", "--batch-size", "--out", "--resume"} <= set(first)
    entries = re.split(r"\n  (?=-|DIR)", flags)
    assert [entry for entry in entries if entry.count("(default: ") > 1] == []
    assert not re.search(r"\{None\}|: None|\bINT\b|\bFLOAT\b|\bSTR\b", flags)
    assert [
        entry for entry in entries if not re.search(r"[a-z]{2}.*\.$", entry.strip().split("\n\n")[0], re.DOTALL)
    ] == []
    assert len(re.findall(r"^  (?:-|DIR)", flags, re.MULTILINE)) == len(entries) > 25


@pytest.mark.parametrize("program", ["examples.mnist_ddp_spawn", "common.who", "common.compare"])
def test_another_python_than_that_of_the_environment_is_named(programs: Programs, program: str) -> None:
    said = programs.run("-S", "-m", program, code=2, cold=True).stderr  # without site-packages
    assert re.fullmatch(r"error: \S+ has none of the packages .* '\. \.venv/bin/activate' .*\n", said)


def test_what_nobody_reads_goes_nowhere() -> None:
    reading, writing = os.pipe()
    with open(writing, "w") as file:  # noqa: PTH123 - a descriptor
        assert say("read", file)
        assert os.read(reading, 100) == b"read\n"
        os.close(reading)
        assert not say("unread", file)
        assert say("nowhere", file)


@pytest.mark.parametrize(("reader", "read"), [("head -1", r"mnist_ddp_spawn: train .*\n"), ("true", "")])
def test_a_reader_of_the_help_may_leave(reader: str, read: str) -> None:
    """After a line, or, as `true` does, before there is any."""
    command = f"set -o pipefail; {sys.executable} -m examples.mnist_ddp_spawn --help | {reader}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.fullmatch(read, done.stdout)
    assert done.stderr == ""


@pytest.mark.parametrize("program", STARTED)
def test_only_the_main_rank_reports_a_mistake(programs: Programs, program: str) -> None:
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "RANK": "1"}
    assert programs.run("-m", program, "--nprok", 2, env=place, code=2).stderr == ""


def test_all_examples_have_a_front_door() -> None:
    assert len(EXAMPLES) >= 7
    assert sorted(path.parent.name for path in (ROOT / "examples").glob("*/train.py")) == EXAMPLES


@pytest.mark.parametrize("program", ["compare", "doctor", "memory", "top", "who"])
def test_the_shared_programs_have_a_help(programs: Programs, program: str) -> None:
    """With the command as it is typed, and without a word of Python's."""
    text = programs.run("-m", f"common.{program}", "--help").stdout
    where = {"compare": " [RUN ...]", "top": " DIR", "who": " DIR"}.get(program, "")
    does, _, text = text.partition("\n\n")
    assert re.fullmatch(r"(Check|Compare|Estimate|Show) .*\.", does)
    assert text.startswith(f"usage: python -m common.{program}{where} [flags]\n")
    assert not re.search(r"dataclasses|MISSING|object at", text)


def test_a_missing_argument_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(WhoArgs, [])
    assert capsys.readouterr().err == "error: DIR is missing: The run's --out (--help lists the flags)\n"


def flag_names(source: str) -> list[str]:
    """The fields of all classes of flags in a file."""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return [
        field.target.id
        for each in classes
        for field in each.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value is not None
    ]


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_flag_is_read(example: str) -> None:
    """A flag that the program never mentions is a dead flag; `Run` reads some."""
    folder = ROOT / "examples" / example
    readers = "".join(path.read_text() for path in folder.glob("*.py"))
    readers += "".join(path.read_text() for path in (ROOT / "common" / "train").glob("*.py"))
    names = flag_names((folder / "args.py").read_text())
    assert names
    assert [name for name in names if not re.search(rf"\.{name}\b|\"{name}\"", readers)] == []


@pytest.mark.parametrize("flags", [Launch, Precision, Watch])
def test_every_shared_flag_is_read(flags: type[Launch | Precision | Watch]) -> None:
    sources = "".join(path.read_text() for path in (ROOT / "common").rglob("*.py"))
    sources += "watch.config"  # which config_file finds in the words of the command
    read = r"(flags|watch)(\.|, \")"  # the Trainer programs have not all of `Watch`: getattr
    unread = [field.name for field in fields(flags) if not re.search(rf"{read}{field.name}\b", sources)]
    assert unread == []


def test_a_new_flag_is_compared_on_resuming_unless_it_says_otherwise() -> None:
    @dataclass(frozen=True)
    class Few:
        lr: float = 0.1
        out: Annotated[Path, MAY_CHANGE] = Path("runs")
        launch: Launch = Launch()

    assert dict(fixed_flags(Few(lr=0.5))) == {"lr": 0.5}


def test_flags_come_from_a_file(tmp_path: Path) -> None:
    """What is typed wins; a run's result.json repeats the run, but not its folder; and what is saved is read again."""
    file = tmp_path / "run.yaml"
    file.write_text("epochs: 3\nlr: 1e-3\nbatch-size: 60\nchannels_last: no\ncompile: true\nnproc: null\n")
    args = parse(Args, ["--config", str(file), "--epochs", "4", "--out", "there"])
    assert (args.epochs, args.lr, args.batch_size) == (4, 1e-3, 60)
    assert (args.amp.channels_last, args.amp.compile, args.launch.nproc) == ("no", True, None)
    assert not parse(Args, [f"--config={file}", "--no-compile"]).amp.compile
    save_config(args, tmp_path / "saved" / "config.yaml")
    again = parse(Args, ["--config", str(tmp_path / "saved" / "config.yaml")])
    assert replace(again, watch=args.watch) == args
    found = tmp_path / "result.json"
    found.write_text(json.dumps({"example": "mnist_ddp_spawn", "arguments": all_flags(args), "steps": 3}))
    assert replace(parse(Args, ["--config", str(found)]), watch=args.watch, out=Path("there")) == args
    assert parse(Args, ["--config", str(found)]).out == Path("runs/mnist_ddp_spawn")


def test_lists_and_positional_arguments_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"directory": "photos", "arch": "resnet50", "evaluate": False, "dummy": False}))
    args = parse(ImagenetArgs, ["--config", str(file), "-b", "64"])
    assert (args.images.directory, args.recipe.arch, args.batch_size) == (Path("photos"), "resnet50", 64)
    file.write_text(json.dumps({"cuts": ["layer2.0", "layer4.1"]}))
    assert parse(PipelineArgs, ["--config", str(file)]).pipeline.cuts == ("layer2.0", "layer4.1")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("epoch: 3\n", "epoch is not a flag of this program; perhaps epochs is meant"),
        ("epochs: two\n", "--epochs two: give a whole number (--help lists the flags)"),
        ("momentum: 2\n", "--momentum 2.0: give a number from 0 to below 1"),
        ("compile: perhaps\n", "compile: perhaps: give true or false"),
        ("train: {epochs: 3}\n", "train is not a flag of this program"),
        ("epochs: {n: 3}\n", "epochs has a value of its own, not others below it"),
        ("just words\n", "expected lines like `epochs: 3`"),
        ("a: [\n", "is neither YAML nor JSON: .*"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, line: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        parse(Args, ["--config", str(file)])
    said = capsys.readouterr().err
    pattern = line if ".*" in line else re.escape(line)
    assert re.fullmatch(rf"error: --config {re.escape(str(file))}:? {pattern}\n", said), said


def test_torchruns_names_are_known_too() -> None:
    words = ["--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "4", "--dist-url", "tcp://h:1"]
    ours = ["--world-size", "2", "--rank", "1", "--nproc", "4", "--dist-url", "tcp://h:1"]
    assert parse(Args, words) == parse(Args, ours)
    assert parse(Args, words).launch.world_size == 2


def test_the_programs_without_a_run_repeat_one_too(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    args = parse(TrainerArgs, ["--epochs", "3", "--lr", "1e-3"])
    save_config(args, file)
    assert replace(parse(TrainerArgs, ["--config", str(file)]), watch=args.watch) == args


def test_a_line_comes_at_once(programs: Programs) -> None:
    """Before torch is imported, however the processes are started; and from one of them only."""
    for words, env, line in (
        (("--nproc", 2), {}, "starting 2 processes (gloo, 127.0.0.1) ...\n"),
        ((), {}, "starting 1 process (gloo, 127.0.0.1) ...\n"),
        (
            ("--world-size", 2, "--rank", 1, "--nproc", 2, "--dist-url", "tcp://10.0.0.7:1"),
            {},
            "starting 2 processes, node 1 of 2 (gloo, 10.0.0.7) ...\n",
        ),
        (
            ("--device", "cpu"),
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"},
            "starting 3 processes, node 0 of 3, by torchrun (gloo, 127.0.0.1) ...\n",
        ),
        ((), {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, ""),
    ):
        code = f"import sys; sys.argv = ['train', *{[*map(str, words)]!r}]\n" + STOPS_BEFORE_TORCH
        assert programs.run("-c", code, env=env, code=7, cold=True).stdout == line


# The import of torch ends the program.
STOPS_BEFORE_TORCH = """
import os
class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.stdout.flush()
            os._exit(7)
sys.meta_path.insert(0, Stop())
from common.launch.args import start
from examples.mnist_ddp_spawn.args import Args
start(Args, "examples.mnist_ddp_spawn.train:main")
"""


def test_more_processes_than_cores_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    most = max(16, 8 * cores())
    for wanted in (cores(), most):
        place = Place("spawn", 1, 0, wanted, wanted, 0, 0, "127.0.0.1", 0, Launch(device="cpu"))
        check_processes(place)
        announce(place)
        line = f"warning: {wanted} processes share {cores()} core(s): that is slower, not faster\n"
        said = capsys.readouterr()
        assert said.out == f"starting {wanted} processes (gloo, 127.0.0.1) ...\n"
        assert said.err == (line if wanted > cores() else "")
    with pytest.raises(UserError, match=f"give at most {most}"):
        check_processes(replace(place, local_world_size=most + 1))


@pytest.mark.parametrize("program", [*EXAMPLES, "bert_dp:TrainerArgs"])
def test_a_batch_that_ranks_cannot_divide_is_found_before_they_start(tmp_path: Path, program: str) -> None:
    """As all that is known from the flags; of a pipeline, its replicas divide the batch."""
    example, _, cls = program.partition(":")
    more = ["--stages", "1"] if example == "resnet_pipeline" else []
    flags = getattr(import_module(f"examples.{example}.args"), cls or "Args")
    args = parse(flags, ["-b", "7", *more, "--out", str(tmp_path)])
    place = Place("spawn", 1, 0, 2, 2, 0, 0, "127.0.0.1", 0, Launch())
    message = r"--batch-size 7 \(global\) cannot be divided by 2 (ranks|replicas|rank\(s\) x 1 .*); use 8, for example"
    with pytest.raises(UserError, match=f"^{message}$"):
        judge(args, place)
    judge(replace(args, batch_size=8), place)


def test_a_model_that_is_not_trained_yet_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args, place = parse(PredictArgs, ["--text", "a review"]), Place("plain", 1, 0, 1, 1, 0, 0, "", 0, Launch())
    with pytest.raises(UserError, match=r"^--model runs/bert_dp/model: .*; train with python -m examples.bert_dp"):
        judge(args, place)
    (tmp_path / "runs" / "bert_dp" / "model").mkdir(parents=True)
    judge(args, place)


def test_what_divides_a_batch_follows_from_the_flags(tmp_path: Path) -> None:
    place = Place("spawn", 1, 0, 2, 2, 0, 0, "127.0.0.1", 0, Launch())
    out = ["--out", str(tmp_path)]
    judge(parse(PipelineArgs, ["-b", "7", *out]), place)  # one pipeline of two stages
    judge(parse(UnequalArgs, ["-b", "7", "--shares", "3,1", *out]), place)
    judge(parse(ImagenetArgs, ["-b", "12", "--accumulate", "3", *out]), place)
    with pytest.raises(UserError, match=r"by 2 rank\(s\) x 3 backward pass\(es\); use 6, for example$"):
        judge(parse(ImagenetArgs, ["-b", "8", "--accumulate", "3", *out]), place)


# A program whose flags do not judge its batch.
LATE = """
import sys
from common.launch import early
from common.launch.args import start
from examples.your_model.args import Args
early.equal_parts = lambda *_: None
sys.argv = ["x", "--nproc", "2", "-b", "7", "--out", sys.argv[1]]
start(Args, "examples.your_model.train:main")
"""


def test_the_ranks_find_it_as_well(programs: Programs, tmp_path: Path) -> None:
    said = programs.run("-c", LATE, tmp_path, code=2).stderr.replace(NO_GPU, "")
    assert said == "error: --batch-size 7 (global) cannot be divided by 2 ranks; use 8, for example\n"


SPAWNED = Place("spawn", 1, 0, 1, 1, 0, 0, "127.0.0.1", 0, Launch(threads=2))


@pytest.mark.parametrize(
    ("place", "load", "env", "asleep"),
    [
        (SPAWNED, 99.0, {}, True),
        (SPAWNED, 0.5, {}, False),
        (SPAWNED, 99.0, {"OMP_WAIT_POLICY": "active"}, False),
        (SPAWNED, 99.0, {"GOMP_SPINCOUNT": "0"}, False),
        (replace(SPAWNED, flags=Launch(threads=1)), 99.0, {}, False),
        (replace(SPAWNED, flags=Launch()), 99.0, {"OMP_NUM_THREADS": "2"}, True),
        (replace(SPAWNED, flags=Launch()), 99.0, {"OMP_NUM_THREADS": "1"}, False),
        (replace(SPAWNED, flags=Launch(), local_world_size=10_000), 99.0, {}, False),
        # torchrun's own 1 is nobody's choice: the ranks share the cores
        (replace(SPAWNED, flags=Launch(), launcher="torchrun"), 99.0, {"OMP_NUM_THREADS": "1"}, True),
    ],
)
def test_threads_sleep_while_they_wait_on_a_busy_machine(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: Place,
    load: float,
    env: dict[str, str],
    asleep: bool,
) -> None:
    monkeypatch.setattr(os, "environ", dict(env))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(early, "cores", lambda: 4)
    sleep_while_waiting(place)
    line = "warning: this machine has 4 cores and a load of 99: threads sleep while they wait "
    line += "(OMP_WAIT_POLICY=passive); --threads 1 may be faster\n"
    assert capsys.readouterr().err == line * asleep
    assert (os.environ.get("OMP_WAIT_POLICY") == "passive") == asleep


BUSY = """
import os, sys
os.environ.pop("OMP_WAIT_POLICY", None)
os.getloadavg = lambda: (99.0, 99.0, 99.0)
os.environ |= {"OMP_NUM_THREADS": "2", "OMP_DISPLAY_ENV": "true"}
from common.launch.args import start
from examples.mnist_ddp_spawn.args import Args
sys.argv = ["x", "--limit-steps", "1", "--out", sys.argv[1]]
start(Args, "examples.mnist_ddp_spawn.train:main")
"""


def test_it_is_decided_before_openmp_is_there(programs: Programs, tmp_path: Path) -> None:
    """OpenMP says itself what it has read."""
    said = programs.run("-c", BUSY, tmp_path, cold=True).stderr
    assert "a load of 99: threads sleep while they wait" in said
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in said


@pytest.mark.parametrize(("batch_size", "parts"), [(1, 1), (24, 1), (24, 3)])
def test_a_batch_is_divided(batch_size: int, parts: int) -> None:
    assert equal_parts(batch_size, parts) * parts == batch_size


@pytest.mark.parametrize(("batch_size", "parts", "use"), [(0, 1, 1), (-3, 2, 2), (1, 2, 2), (7, 2, 8), (7, 3, 6)])
def test_a_batch_that_cannot_be_divided_is_refused(batch_size: int, parts: int, use: int) -> None:
    words = rf"--batch-size {batch_size} \(global\) cannot be divided by {parts} ranks; use {use}, for example"
    with pytest.raises(UserError, match=words):
        equal_parts(batch_size, parts)


def test_a_wrong_place_is_reported_whoever_finds_it(programs: Programs) -> None:
    for place, line in (
        ({"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "error: RANK='x' in the environment is not a number"),
        ({"RANK": "8", "LOCAL_RANK": "0", "WORLD_SIZE": "8"}, "error: RANK=8 with WORLD_SIZE=8: ranks go from 0 to 7"),
    ):
        assert line in programs.run("-m", "examples.mnist_ddp_spawn", env=place, code=2).stderr


def test_a_mistake_is_one_line_on_a_terminal_too() -> None:
    """There the library that reads the flags draws a coloured box."""
    terminal, its_end = pty.openpty()
    command = [sys.executable, "-m", "examples.mnist_ddp_spawn", "--epoch", "3"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=its_end, stdout=its_end, stderr=its_end)
    os.close(its_end)
    said = shown(terminal)
    assert process.wait(here(10)) == 2
    assert re.fullmatch(r"error: Unrecognized options: --epoch, 3; perhaps you meant --epochs \([^\n]*\)\r\n", said), (
        said
    )


@pytest.mark.parametrize("cold", ["0", "1"])
def test_programs_start_from_nothing_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, cold: str) -> None:
    monkeypatch.setenv(warm.COLD, cold)
    assert warm.possible(["-m", "examples.gan_ddp"], {}) == (cold == "0")
    assert warm.possible(["-m", "examples.gan_ddp"], {warm.SPACE: "a network"})


def test_a_repeated_run_is_started_as_one_likes(tmp_path: Path) -> None:
    """On another machine: neither its devices nor its processes are those of the first run."""
    file = tmp_path / "result.json"
    started = {"nproc": 2, "device": "cpu", "world_size": 2, "rank": 1, "out": "runs/a"}
    file.write_text(json.dumps({"arguments": {"lr": 0.25, "precision": "fp32", **started}}))
    args = parse(Args, ["--config", str(file)])
    assert (args.lr, args.amp.precision) == (0.25, "fp32")
    assert (args.launch, args.out) == (Launch(), Args().out)
