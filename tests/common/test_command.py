"""`distributed-examples`: every program by its name, and what a shell needs to complete names and flags."""

import re
import subprocess
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from common.command import SHELLS, flags_class, main, programs, short
from common.launch.usage import flags_of
from tests.conftest import ROOT, Programs
from tests.runs import mutated

COMMAND = ("-m", "common.command")
COMPLETE = """
source "$1"
shift
function=$(complete -p distributed-examples | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
COMP_WORDS=(distributed-examples "$@") COMP_CWORD=$#
"$function"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_it_is_installed_under_its_name() -> None:
    (found,) = entry_points(group="console_scripts", name="distributed-examples")
    assert found.load() is main


def test_all_programs_that_pages_start_are_listed(programs: Programs) -> None:
    listed = programs.run(*COMMAND).stdout
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/en/*.md"), *ROOT.glob("examples/*/README.md")]
    started = {
        name for page in pages for name in re.findall(r"-m (?:examples|common)\.([a-z][\w.]*\w)", page.read_text())
    }
    known = set(re.findall(r"^  (\S+)  ", listed, re.MULTILINE))
    assert started - known <= {
        name for name in started if name.endswith(".train") or name == "command" or name.startswith("my_")
    }
    assert len(known) > 25
    assert max(map(len, listed.splitlines())) < 100


def test_a_program_of_the_user_needs_no_docstring(programs: Programs, tmp_path: Path) -> None:
    project = mutated(tmp_path)
    (project / "examples" / "bare").mkdir()
    for path in (project / "examples" / "bare" / "__main__.py", project / "examples" / "scratch.py"):
        path.write_text('if __name__ == "__main__":\n    pass\n')
    listed = programs.run(*COMMAND, cwd=project).stdout
    assert {"bare", "scratch"} <= set(re.findall(r"^  (\S+) *$", listed, re.MULTILINE))


def test_it_becomes_the_program(programs: Programs) -> None:
    """Its words, its output, its exit code; a name may be the whole one of the module."""
    by_module = programs.run("-m", "examples.gan_ddp", "--help").stdout
    for name in ("gan_ddp", "examples.gan_ddp"):
        assert programs.run(*COMMAND, name, "--help", cold=True).stdout == by_module
    assert "error: --nproc two" in programs.run(*COMMAND, "gan_ddp", "--nproc", "two", code=2, cold=True).stderr


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["mnist_dp_spawn"],
            "distributed-examples mnist_dp_spawn: there is no such program; perhaps you meant mnist_ddp_spawn",
        ),
        (["--completion", "fish"], "--completion fish: give bash, zsh or tcsh"),
        (["--completion"], "--completion (no shell): give bash, zsh or tcsh"),
    ],
)
def test_mistakes(programs: Programs, words: list[str], line: str) -> None:
    said = programs.run(*COMMAND, *words, code=2).stderr
    assert said.startswith(f"error: {line}")
    assert said.count("\n") == 1


@pytest.fixture(scope="module")
def script(session_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("shell") / "completion"
    file.write_text(session_programs.run(*COMMAND, "--completion", "bash").stdout)
    return file


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        (
            ["resnet_p"],
            {"resnet_pipeline", "resnet_pipeline.micro_batches", "resnet_pipeline.predict", "resnet_pipeline.toy"},
        ),
        (["mnist_ddp_spawn", "--ep"], {"--epochs"}),
        (["mnist_ddp_spawn", "--epochs", "3", "--nproc", "2", "--resu"], {"--resume"}),
        (["bert_dp.trainer", "--device", ""], {"auto", "cuda", "cpu"}),
        (["who", "ta"], {"table.csv"}),
    ],
)
def test_bash_completes(script: Path, tmp_path: Path, typed: list[str], found: set[str]) -> None:
    (tmp_path / "table.csv").touch()
    done = subprocess.run(
        ["bash", "-c", COMPLETE, "bash", script, *typed], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert set(done.stdout.split()) == found


def test_every_flag_of_every_program_is_completed(script: Path) -> None:
    text = script.read_text()
    for module, path in programs().items():
        assert short(module) in text
        cls = flags_class(module, path)
        shell_name = re.sub("[.]", "_", short(module))
        (completed,) = re.findall(
            rf"^_shtab_distributed_examples_{shell_name}_option_strings=\((.*)\)$", text, re.MULTILINE
        )
        known = {name for flag in (flags_of(cls) if cls else ()) for name in flag.names if not flag.positional}
        assert set(completed.replace("'", "").split()) == known | {"-h", "--help"}, module


def test_other_shells(programs: Programs) -> None:
    assert SHELLS == ("bash", "zsh", "tcsh")
    assert programs.run(*COMMAND, "--completion", "zsh").stdout.startswith("#compdef distributed-examples")
