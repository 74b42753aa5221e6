"""The commands in the READMEs run, in a folder of their own, exactly as written."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Programs

PAGES = [ROOT / "README.md", *sorted((ROOT / "examples").glob("*/README.md"))]
BLOCK = re.compile(r"((?:<!-- not run: .+? -->\n)?)```sh\n(.*?)```\n((?:<!-- not run above: .+? -->)?)", re.DOTALL)


def blocks(page: Path) -> list[str]:
    """The blocks of a page that are run: all, except those that say why not."""
    return [code for before, code, after in BLOCK.findall(page.read_text()) if not before and not after]


COMMANDS = [(page, number) for page in PAGES for number in range(len(blocks(page)))]


@pytest.mark.parametrize(
    ("page", "number"), COMMANDS, ids=lambda value: getattr(value, "parent", Path(str(value))).name
)
def test_commands_run(programs: Programs, tmp_path: Path, free_port: int, page: Path, number: int) -> None:
    script = "set -e\n" + blocks(page)[number].replace("29500", str(free_port))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [shutil.which("bash") or "bash", "-c", script],
        cwd=tmp_path,
        env={"PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "DDP_TEST_RUN": programs.token},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_links_and_names_exist(page: Path) -> None:
    """Pictures and files that a page links to are there, and so is what its feature table names."""
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    for names, module in re.findall(r"((?:`[\w.]+`(?:, | and )?)+) in `(common/\w+\.py)`", text):
        source = (ROOT / module).read_text()
        for name in re.findall(r"`([\w.]+)`", names):
            assert re.search(rf"\b(def|class) {name.split('.')[-1]}\b", source), f"{name} is not in {module}"


def test_the_page_of_faults_names_tests_that_exist() -> None:
    rows = [line for line in (ROOT / "docs/faults.md").read_text().splitlines() if line.startswith("| ")][1:]
    written = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(rows) > 20
    for row in rows:
        names = re.findall(r"`(test_\w+)`", row.rsplit("|", 2)[1])
        assert names, row
        assert [name for name in names if f"def {name}(" not in written] == []


def test_a_broken_command_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\nfalse\n```\n<!-- not run: reason -->\n```sh\nrm -rf x\n```\n")
    assert blocks(page) == ["false\n"]
