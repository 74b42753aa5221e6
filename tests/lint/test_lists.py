"""A new example is in every list: where one is missing, the message says what to add."""

import re
from pathlib import Path

import pytest

from tests.contract.trainings import EXAMPLES
from tests.examples.copies import COPIES
from tests.hashes import PROGRAMS

ROOT = Path(__file__).parents[2]
NAMES = {path.parent.name for path in ROOT.glob("examples/*/train.py")}
TEMPLATE = {"your_model"}  # has no image and no manifests


def keys(file: str) -> set[str]:
    """The names that begin the entries of a file's tables."""
    return set(re.findall(r'^    "(\w+)": \(', (ROOT / file).read_text(), re.MULTILINE)) & NAMES


def test_every_example_is_in_every_list() -> None:
    tox = re.findall(r"^\[testenv:\{(.*)\}(?:-full)?\]$", (ROOT / "tox.ini").read_text(), re.MULTILINE)
    lists = {
        "examples/NAME/README.md": {path.parent.name for path in ROOT.glob("examples/*/README.md")},
        "examples/NAME/README.zh-CN.md": {path.parent.name for path in ROOT.glob("examples/*/README.zh-CN.md")},
        "the table of README.md": set(
            re.findall(r"^\| \[`(\w+)`\]\(examples", (ROOT / "README.md").read_text(), re.MULTILINE)
        ),
        "tox -e NAME, in tox.ini": set(tox[0].split(",")),
        "tox -e NAME-full, in tox.ini": set(tox[1].split(",")),
        "a short training, in tests/contract/trainings.py": set(EXAMPLES),
        "a copy, in tests/examples/copies.py": set(COPIES),
        "a recorded hash, in tests/hashes.py": set(PROGRAMS),
        "TRAININGS of benchmarks/gpu_checks.py": keys("benchmarks/gpu_checks.py"),
        "FEW_STEPS of tests/e2e/engine.py": keys("tests/e2e/engine.py") | TEMPLATE,
        "docker/NAME/Dockerfile": {path.parent.name for path in ROOT.glob("docker/*/Dockerfile")} - {"base"} | TEMPLATE,
        "k8s/overlays/NAME, by python k8s/generate.py": {path.name for path in ROOT.glob("k8s/overlays/*")} & NAMES
        | TEMPLATE,
        "a card, by python -m docs.cards": {path.stem for path in ROOT.glob("docs/images/cards/*.svg")},
    }
    missing = {what: sorted(NAMES - found) for what, found in lists.items() if NAMES - found}
    assert missing == {}, f"add to each of these: {missing}"
    assert {what: sorted(found - NAMES) for what, found in lists.items() if found - NAMES} == {}


def test_the_programs_of_common_are_in_its_table() -> None:
    folders = {path.parent.name for path in (ROOT / "common").rglob("__main__.py")}
    files = {path.stem for path in (ROOT / "common").glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    listed = re.findall(r"^\| `python -m common\.(\w+)", (ROOT / "docs/en/common.md").read_text(), re.MULTILINE)
    assert set(listed) == folders | files, "the first table of docs/en/common.md and docs/zh/common.md"


@pytest.mark.parametrize(("page", "folder"), [("README.md", "en"), ("README.zh-CN.md", "zh")])
def test_the_readme_links_to_every_guide(page: str, folder: str) -> None:
    linked = set(re.findall(r"\]\(docs/(?:en/|zh/)?([\w-]+\.md)", (ROOT / page).read_text()))
    missing = {path.name for path in (ROOT / "docs" / folder).glob("*.md")} - linked
    assert missing == set(), (
        f"link from the last table of {page} to {missing}, and name it in NAVIGATION of docs/hooks.py"
    )
