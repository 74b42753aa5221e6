"""English and Chinese say the same: equal headings, code, tables, lists, names, links and pictures, in order."""

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.docs.markdown import FENCE, skeleton, translations

CHINESE = re.compile(r"[\u4e00-\u9fff]")
BROKEN = re.compile(
    r".*[\u4e00-\u9fff，。；：、！？（）]\n *[\u4e00-\u9fff，。；：、！？（）].*"
)  # browsers show a blank there


@pytest.mark.parametrize(("page", "translated"), translations(), ids=lambda path: str(path.relative_to(ROOT)))
def test_languages_are_in_step(page: Path, translated: Path) -> None:
    assert skeleton(translated, translated.read_text()) == skeleton(page, page.read_text())


@pytest.mark.parametrize("page", [pair[1] for pair in translations()], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_translation_is_chinese(page: Path) -> None:
    prose = [block for block in re.split(r"\n\s*\n", FENCE.sub("", page.read_text())) if re.match(r"\w", block)]
    assert prose
    assert [block for block in prose if not CHINESE.search(block)] == []
    assert BROKEN.findall(page.read_text()) == []


def test_every_page_has_its_translation() -> None:
    english = {path.name for path in (ROOT / "docs" / "en").glob("*.md")} | {"faults.md"}
    assert {path.name for path in (ROOT / "docs" / "zh").glob("*.md")} == english


PAGE = """# Title

Text with `name` and [link](../../README.md#part).

```sh
python -m one --flag 1  # comment
```

| a | `b` |
|---|---|
| c | d |

1. first
2. second
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# Title", "## Title"),
        ("`name`", "`other`"),
        ("README.md", "LICENSE"),
        ("--flag 1", "--flag 2"),
        ("| c | d |\n", ""),
        ("| c | d |", "| c |"),
        ("`b`", "b"),
        ("2. second\n", ""),
        ("```sh", "```text"),
        ("1. first", "New text.\n\n1. first"),
    ],
)
def test_a_difference_is_seen(old: str, new: str) -> None:
    page = ROOT / "docs" / "en" / "x.md"
    assert skeleton(page, PAGE.replace(old, new)) != skeleton(page, PAGE)


def test_words_comments_and_the_languages_folders_may_differ() -> None:
    translated = (
        PAGE.replace("Title", "标题").replace("# comment", "# 说明").replace("README.md#part", "README.zh-CN.md#段")
    )
    assert skeleton(ROOT / "docs" / "zh" / "x.md", translated) == skeleton(ROOT / "docs" / "en" / "x.md", PAGE)
