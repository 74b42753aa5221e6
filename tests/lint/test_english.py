"""Plain English in pages, docstrings, comments and messages: turns that stop a native reader."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = ("*.md", "examples/*/README.md", "docs/*.md", "docs/en/*.md", "k8s/README.md", "benchmarks/README.md")
PLACES += ("common/**/*.py", "examples/**/*.py", "benchmarks/*.py", "benchmarks/*.toml", "docs/*.py", "docker/*.py")
PLACES += ("k8s/*.py", "Makefile")
FILES = [path for place in PLACES for path in sorted(ROOT.glob(place)) if "zh-CN" not in path.name]
BANNED = {  # the pattern: what to write instead
    r"bit by bit": "bit for bit (bit by bit means gradually)",
    r"for ever": "forever, or without a limit",
    r"(?<!there )(?:is|are|was|were) no (?!longer|more|less)[a-z]+": "is not a ...",
    r"cannot be had|(?:has|have|is|are) to be had": "is not available",
    r"prove(?!-gpu)|proves|proven|proofs?": "tested, checked: a test is no proof",
    r"who(?:ever)? forgets": "without it, ...",
    r"beside a (?:GPU|CPU)": "with a GPU",
    r"in mid-epoch": "in the middle of an epoch",
    r"can (?:do )?all that": "can do everything that",
    r"can be told|(?:is|are) told of": "is known",
    r"made up in memory": "synthetic, generated in memory",
    r"of which an? [\w' ]+ own part": "two sentences",
    r"is best said by": "use ...",
    r"the like of|beside its like": "similar ones",
    r"when which": "when to use which",
    r"goes on (?:from|with|there|in|after)": "continues ...",
    r"conducts": "coordinates",
    r"asked for its": "queried",
    r"takes? long(?:er)? to its end": "takes longer",
    r"what concerns the": "say what the code does",
    r"as nobody (?:has|would)": "a plain verb",
    r"compared with nobody": "compared with nothing",
    r"at the first try": "at the first attempt",
    r"with one vocabulary": "with the same flags",
    r"inside of": "inside",
    r"equally many": "the same number of",
    r"(?:knows?|says?|needs?) nothing of": "nothing about, nothing from",
    r"knows? no|lets? no": "does not know, does not let",
    r"whoever": "anyone who, a process that",
    r"that nobody disturbed|whose \w+ nobody knows": "undisturbed, not known",
    r"in vain": "without success",
    r"is said so": "is marked so",
    r"does not do(?=[.;:])": "is not enough, is not the right one",
    r"(?:is|are) given, is": "no comma between subject and verb",
    r"some percent": "a few percent",
    r"what (?:is )?not, stands": "subject, verb, object",
}


def foreign(text: str) -> list[str]:
    """The turns of a text that are not to stand there, each with what to write."""
    text = re.sub(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|\s+", " ", text, flags=re.DOTALL)  # names are names
    found = {re.compile(rf"\b(?:{turn})\b", re.IGNORECASE): advice for turn, advice in BANNED.items()}
    return [f"{match[0]!r}: write {advice}" for turn, advice in found.items() for match in turn.finditer(text)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_english(path: Path) -> None:
    assert foreign(path.read_text()) == []


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("It resumes bit by bit.", 1),
        ("A cat is no\nimage.", 1),
        ("It is no longer there, and there is no file.", 0),
        ("Who forgets it waits for ever.", 2),
        ("The run `goes on from` there.", 0),
        ("What has been proven; improved, provenance", 1),
    ],
)
def test_a_turn_is_seen(text: str, seen: int) -> None:
    assert len(foreign(text)) == seen
