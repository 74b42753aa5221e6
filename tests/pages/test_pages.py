"""Pages: links, flags of documented commands, and the commands that a reader runs first."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import tyro

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    p.relative_to(ROOT)
    for pattern in ("*.md", "docs/*/*.md", "examples/*/*.md", "k8s/*.md", "benchmarks/*.md")
    for p in ROOT.glob(pattern)
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACEHOLDERS = {"N": "2", "M": "2", "R": "0", "C": "1", "DIR": "data", "FOLDER": "data"}


def slug(heading: str) -> str:
    """Return the anchor of a heading, as on GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", "")).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text())
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    text = FENCE.sub("", (ROOT / page).read_text())
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if "://" in target:
            continue
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{target}#{anchor}"


def translated(page: Path) -> Path:
    parts = [part if part != "en" else "zh" for part in page.parts]
    return ROOT / Path(*parts).with_name(parts[-1].replace("README.md", "README.zh-CN.md"))


@pytest.mark.parametrize(
    "page",
    [
        p
        for p in PAGES
        if "zh" not in str(p) and p.parts[0] not in ("CONTRIBUTING.md", "benchmarks")
    ],
    ids=str,
)
def test_both_languages_have_the_same_headings_code_and_links(page: Path) -> None:
    english, chinese = (ROOT / page).read_text(), translated(page).read_text()
    code = [
        [
            re.sub(r"\s*#.*", "", body)
            for kind, body in FENCE.findall(text)
            if kind in ("sh", "python")
        ]
        for text in (english, chinese)
    ]  # comments may be translated
    assert code[0] == code[1]
    for pattern in (r"^(#+) ", r"\]\((?:https?:[^)]*)\)", r"^\|"):
        counts = [
            len(re.findall(pattern, FENCE.sub("", t), re.MULTILINE)) for t in (english, chinese)
        ]
        assert counts[0] == counts[1], pattern


def commands() -> list[tuple[str, str]]:
    """Return each documented `python -m` or `torchrun -m` command, and its page."""
    found = {}
    for page in PAGES:
        text = (ROOT / page).read_text()
        blocks = [body for kind, body in FENCE.findall(text) if kind in ("sh", "")]
        for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
            for match in re.finditer(
                r"-m ((?:examples|tools|benchmarks)\.[\w.]+[^'\"|&;)]*)", line
            ):
                found.setdefault(match[1].split("#")[0].strip(), str(page))
    return sorted(found.items())


@pytest.mark.parametrize(("command", "page"), commands(), ids=lambda text: str(text)[:60])
def test_documented_modules_and_flags_exist(command: str, page: str) -> None:
    module, *words = shlex.split(command)
    if module.endswith(".NAME"):
        return
    path = ROOT / module.replace(".", "/")
    if not (path / "args.py").exists():
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), page
        return
    args = importlib.import_module(f"{module}.args").Args
    known = [word for word in words if not word.startswith("...")]
    tyro.cli(args, args=[PLACEHOLDERS.get(word, word) for word in known])
