"""The commands in the documentation run, in a folder of their own, exactly as written, each once."""

import argparse
import os
import re
import signal
from collections.abc import Generator
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import ROOT, Programs
from tests.docs.markdown import PAGES, Shell, shell_blocks
from tests.docs.shell import WarmShell, shell
from tests.k8s.rendered import BUILT, TEMPLATES
from tests.machine import here
from tests.warm import COLD, DRAW, MARK, PASSED_ON

TESTS = "".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))
ELSEWHERE = {"your-model.md"}  # test_your_model.py runs its commands, in the copy that the page makes
# What tests/e2e starts from nothing, in the images.
IN_IMAGES = {f"examples.{name}" for name in (*BUILT, *TEMPLATES)} | {"torch.distributed.run", "common.doctor"}

# What torchrun says when all is done, with exit code 0, if the node where nodes meet was gone first. Each line of a
# record begins with the same time, process and place. https://github.com/pytorch/pytorch/issues/69520
LEFT_FIRST = re.compile(
    r"^(E\d+ .*/elastic/agent/server/api\.py:\d+\] )Error waiting on exit barrier.*\n(\1.*\n)*", re.M
)

# torchrun as a node that is last to leave the barrier at the end: after the file named first is there.
LATE = """
import sys, time
from pathlib import Path
from torch.distributed.elastic.utils import store
from torch.distributed.run import main
enter = store._barrier_nonblocking
def enter_and_linger(*args, **kwargs):
    key = enter(*args, **kwargs)
    while not Path(sys.argv[1]).exists():
        time.sleep(0.02)
    return key
store._barrier_nonblocking = enter_and_linger
main(sys.argv[2:])
"""


def expanded(commands: list[str]) -> list[str]:
    """The commands of a block, with the variables that it sets itself (`run="-m module"`, then `$run`) put in."""
    found, variables = [], dict[str, str]()
    for command in commands:
        found.append(re.sub(r"\$(\w+)", lambda name: variables.get(name[1], name[0]), command))
        if assigned := re.fullmatch(r'(\w+)=(?:"([^"]*)"|(\S*))', found[-1]):
            variables[assigned[1]] = assigned[2] or assigned[3] or ""
    return found


def to_run(pages: list[Path]) -> list[tuple[Path, int, str, set[str]]]:
    """The blocks that are run, and the modules that neither the images nor the pages have started before.

    All blocks but those that say why not, and those whose commands all stand in earlier ones: each runs in an empty
    folder, and a command that only writes elsewhere is the same.
    """
    found, known, started = [], set[str](), set(IN_IMAGES)
    for page in pages:
        for number, block in enumerate(shell_blocks(page.read_text())):
            commands = {re.sub(r" --out \S+", "", command) for command in block.commands}
            if block.run and page.name not in ELSEWHERE and not known.issuperset(commands):
                modules = {name for command in expanded(block.commands) for name in modules_of(command)}
                found.append((page, number, block.code, modules - started))
                started |= modules
                known.update(commands)
    return found


def modules_of(command: str) -> set[str]:
    """What the interpreters in a command are told to run; torchrun is a module, too."""
    return set(re.findall(r"(?<= -m )[\w.]+", re.sub(r"\btorchrun\b", "python -m torch.distributed.run", command)))


def label(value: object) -> str | None:
    if isinstance(value, Path):
        return value.parent.name if value.name == "README.md" else value.stem
    return str(value) if isinstance(value, int) else ""


@pytest.fixture(scope="session")
def fonts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where matplotlib keeps its list of fonts, which every new HOME would have to wait for."""
    return tmp_path_factory.mktemp("fonts")


@pytest.fixture(scope="session")
def warm_shell(tmp_path_factory: pytest.TempPathFactory) -> Generator[WarmShell]:
    """Where commands are run."""
    with shell(tmp_path_factory.mktemp("shell")) as started:
        yield started


@pytest.mark.timeout(450)
@pytest.mark.parametrize(("page", "number", "code", "cold"), to_run(PAGES), ids=label)
def test_commands_run(
    programs: Programs,
    warm_shell: WarmShell,
    tmp_path: Path,
    fonts: Path,
    free_port: int,
    page: Path,
    number: int,
    code: str,
    cold: set[str],
) -> None:
    """A program that the images do not start, starts from nothing where the pages first show it; others are forked."""
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), MARK: programs.token}
    env |= {"MPLCONFIGDIR": str(fonts), DRAW: "1", **passed_on}
    done = warm_shell.run(code.replace("29500", str(free_port)), tmp_path, env, here(400), cold)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in LEFT_FIRST.sub("", done.stderr)


def test_a_program_of_the_shell_starts_from_nothing_once(warm_shell: WarmShell, tmp_path: Path) -> None:
    """And ends with its own code, or by the signal that its starter gets."""
    (tmp_path / "told.py").write_text("import sys\nprint('torch' in sys.modules)\nsys.exit(3)\n")
    run = partial(warm_shell.run, cwd=tmp_path, env={"PATH": os.environ["PATH"]}, timeout=here(60))
    forked = str(os.environ.get(COLD) != "1")
    for cold, imported in (({"told"}, "False"), (set[str](), forked)):
        done = run("python -m told", cold=cold)
        assert (done.returncode, done.stdout, done.stderr) == (3, f"{imported}\n", "")
    program = "print('begun', flush=True); import time; time.sleep(600)"
    done = run(f'python -c "{program}" >said & while [ ! -s said ]; do sleep 0.1; done; kill %1; wait %1', cold=set())
    assert done.returncode == 128 + signal.SIGTERM, done.stderr


def test_a_node_that_leaves_last_has_only_this_to_say(programs: Programs, tmp_path: Path, free_port: int) -> None:
    """What the page on troubleshooting says of it: both nodes end with 0."""
    nodes = ("--nnodes", 2, "--nproc-per-node", 1, "--master-addr", "127.0.0.1", "--master-port", free_port)
    host = programs.start("-m", "torch.distributed.run", *nodes, "--node-rank", 0, "-m", "platform")
    late = programs.start("-c", LATE, tmp_path / "gone", *nodes, "--node-rank", 1, "-m", "platform")
    programs.finish(host)
    (tmp_path / "gone").touch()
    said = programs.finish(late).stderr
    assert said.count("Traceback") == 1
    assert "Traceback" not in LEFT_FIRST.sub("", said)
    assert "Traceback (of a rank)" in LEFT_FIRST.sub("", said + "Traceback (of a rank)")
    assert "Traceback" in LEFT_FIRST.sub("", said.replace("Error waiting on exit barrier", "Another error"))


def written(pages: list[Path]) -> set[str]:
    """Every command in the pages that starts a program or make: in a block (run or not), or between backticks."""
    found: set[str] = set()
    for page in pages:
        text = page.read_text()
        pieces = [command for block in shell_blocks(text) for command in expanded(block.commands)]
        pieces += re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        for piece in pieces:
            found.update(part.strip(" \"'") for part in re.split(r"[;&|]+|:::", piece))
    return {command for command in found if re.search(r"\b(python -m|torchrun|make) ", command)}


def unknown_flags(command: str, known: dict[str, set[str]]) -> list[str]:
    """The flags of a command that its program, or torchrun, does not have; `known` maps a module to its flags."""
    before, _, after = command.partition(" -m ")
    words = after.split()
    flags = {"torchrun": before.split()[1:] if "torchrun" in before else []}
    if words and words[0] in known:
        flags[words[0]] = words[1:]
    return [
        word
        for program, given in flags.items()
        for word in given
        if re.match(r"--?[a-zA-Z]", word) and word.split("=")[0] not in known[program]
    ]


def flags_of(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text))


def test_flags_exist(programs: Programs) -> None:
    """Also those of commands that are not run, because they need GPUs, clusters or hours."""
    from torch.distributed.run import get_args_parser

    commands = {command for command in written(PAGES) if not re.search(r"\bmy_\w+", command)}  # a reader's own copies
    modules = set(re.findall(r"-m (examples\.\w+(?:\.\w+)?)", "\n".join(commands))) - {"examples.NAME"}
    assert {f"examples.{path.parent.name}" for path in (ROOT / "examples").glob("*/train.py")} <= modules
    started = {module: programs.start("-m", module, "--help") for module in sorted(modules)}
    known = {module: flags_of(programs.finish(process).stdout) for module, process in started.items()}
    parser: argparse.ArgumentParser = get_args_parser()
    known["torchrun"] = flags_of(parser.format_help())
    assert all(known.values())
    assert {command: bad for command in commands if (bad := unknown_flags(command, known))} == {}


def test_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"docs", "demo", "test"} <= targets
    assert {word for command in written(PAGES) for word in re.findall(r"^make ([\w-]+)", command)} <= targets


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_links_and_names_exist(page: Path) -> None:
    """Pictures and files that a page links to are there, and so are the tests and the functions that it names."""
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    assert [name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in TESTS] == []
    for names, module in re.findall(r"((?:`[\w.]+`(?:, | and )?)+) in `(common/[\w/]+\.py)`", text):
        source = (ROOT / module).read_text()
        for name in re.findall(r"`([\w.]+)`", names):
            assert re.search(rf"\b(def|class) {name.split('.')[-1]}\b", source), f"{name} is not in {module}"


def test_a_broken_command_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\nfalse\n```\n<!-- not run: reason -->\n```sh\nrm -rf x\n```\n")
    assert shell_blocks(page.read_text()) == [Shell("false\n", True), Shell("rm -rf x\n", False)]
    assert [code for _, _, code, _ in to_run([page])] == ["false\n"]


def test_a_program_starts_from_nothing_in_the_images_or_where_it_is_first_shown(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    blocks = ("python -m examples.gan_ddp", "torchrun -m examples.one.more", "torchrun -m examples.one.more --flag")
    page.write_text("".join(f"```sh\n{block}\n```\n" for block in blocks))
    assert [cold for *_, cold in to_run([page])] == [set(), {"examples.one.more"}, set()]


def test_a_flag_that_is_unknown_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('```sh\nrun="-m examples.one.train --good 1"\ntorchrun --nnodes 2 $run --out $HOME --bad 1\n```\n')
    (command,) = written([page])
    assert command == "torchrun --nnodes 2 -m examples.one.train --good 1 --out $HOME --bad 1"
    program = "examples.one.train"
    assert unknown_flags(command, {"torchrun": {"--nnodes"}, program: {"--good", "--out"}}) == ["--bad"]
    assert unknown_flags(command, {"torchrun": {"--out"}, program: {"--good", "--out", "--bad"}}) == ["--nnodes"]


def test_a_command_runs_once(tmp_path: Path) -> None:
    first, second = tmp_path / "first.md", tmp_path / "second.md"
    first.write_text("```sh\none --flag 1  # comment\ntwo\n```\n")
    second.write_text("```sh\none \\\n    --flag 1\n```\n```sh\ntwo\nthree\n```\n")
    assert [code for _, _, code, _ in to_run([first, second])] == ["one --flag 1  # comment\ntwo\n", "two\nthree\n"]


def test_a_wrong_flag_is_seen() -> None:
    known = {"torchrun": {"--nnodes"}, "examples.a.train": {"--lr", "-b"}}
    assert unknown_flags("torchrun --nnodes 2 -m examples.a.train --lr 1 -b 8", known) == []
    assert unknown_flags("torchrun --nodes=2 -m examples.a.train --lx -1", known) == ["--nodes=2", "--lx"]
