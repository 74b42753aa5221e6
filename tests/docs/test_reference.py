"""The tables of reference: torchrun's options against its parser, gloo's calls against the tour."""

import re
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tests.conftest import ROOT, Programs

PAGES = ROOT / "docs" / "en"
OPTION = re.compile(r"^\| `(--[\w-]+)` \| (\S+) \| .+ \|$", re.M)
CALL = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \| (yes|no) \| (yes|no) \| (yes|no) \| (yes|no) \|$", re.M)


def wrong_options(text: str) -> list[str]:
    """Those that torchrun does not have, or that have another default."""
    known = {name: action for action in get_args_parser()._actions for name in action.option_strings}
    found = []
    for name, shown in OPTION.findall(text):
        action = known.get(name)
        default = str(action.default) if action else ""
        if action is None:
            found.append(f"{name} does not exist")
        elif name == "--master-port":  # which torchrun fills in later
            if action.default is not None or shown.strip("`") not in (action.help or ""):
                found.append(f"{name} {shown}")
        elif shown.strip("`") != {"None": "-", "": "-", "False": "off"}.get(default, default):
            found.append(f"{name} is {action.default!r}, not {shown}")
    return found


def test_torchruns_options_are_those_of_its_parser() -> None:
    text = (PAGES / "launchers.md").read_text()
    assert len(OPTION.findall(text)) >= 15
    assert wrong_options(text) == []


@pytest.mark.parametrize(
    ("name", "default"),
    [("--max-restarts", "`3`"), ("--rdzv-backend", "`c10d`"), ("--max-restart", "`0`"), ("--master-port", "`1234`")],
)
def test_a_wrong_option_is_seen(name: str, default: str) -> None:
    assert len(wrong_options(f"| `{name}` | {default} | meaning |\n")) == 1


def test_an_option_may_come_as_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "7")
    assert get_args_parser().parse_args(["program.py"]).nnodes == "7"


def test_gloo_supports_what_the_table_says(programs: Programs) -> None:
    table = CALL.findall((PAGES / "concepts.md").read_text())
    gloo = {name: answer for names, answer, *_ in table for name in re.findall(r"\w+", names)}
    tour = ("-m", "examples.manual_allreduce_sgd.tour", "--nproc", 2)
    said = programs.run(*tour, "send-recv", "barrier", "support").stdout  # the first two check what they did
    tried = dict(re.findall(r"^  gloo on the CPU: (\w+)(?: SUM)? +(yes|no)", said, re.M))
    assert {name for name in gloo if name not in tried} == {"send", "recv", "barrier"}
    assert {name: gloo[name] for name in tried if name in gloo} == {name: tried[name] for name in tried if name in gloo}
    assert tried.keys() - gloo.keys() == set()
    assert (gloo["send"], gloo["recv"], gloo["barrier"]) == ("yes", "yes", "yes")


def test_both_languages_say_the_same_of_backends() -> None:
    """Words are not compared between languages, and here they are the content."""
    english, chinese = ((ROOT / "docs" / name / "concepts.md").read_text() for name in ("en", "zh"))
    translated = chinese.replace(" 是 ", " yes ").replace(" 否 ", " no ").replace("、", ", ")
    assert CALL.findall(translated) == CALL.findall(english)
    options = (Path(ROOT / "docs" / "zh" / "launchers.md").read_text()).replace(" 关 ", " off ")
    assert OPTION.findall(options) == OPTION.findall((PAGES / "launchers.md").read_text())
