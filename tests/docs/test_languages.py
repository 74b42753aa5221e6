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

TERMS = {  # one word for one thing: the pattern, and what to write
    r"[Kk]ernels?(?![\w-])|可重复的?内核|(?:GPU|CUDA|torch)[^，。；：|]{0,12}内核": "核函数 (of a GPU)",
    r"(?:流水线|pod 里 ?\d+ ?个|\d 个)阶段": "stage (of a pipeline)",
    r"批量": "批次, 批大小",
    r"作业(?!步)": "任务",
    r"选项": "参数 (a flag)",
    r"图像": "图片",
    r"填充": "补齐 (padding)",
    r"汇合": "会合",
    r"证明": "测试, 验证",
    r"bucket(?!e)": "梯度桶",
    r"簿记": "记录与管理",
    r"逐位|一位一位": "逐比特",
    r"陌生人|一刻钟|吃不饱|来去自由": "书面语",
}


@pytest.mark.parametrize(("page", "translated"), translations(), ids=lambda path: str(path.relative_to(ROOT)))
def test_languages_are_in_step(page: Path, translated: Path) -> None:
    assert skeleton(translated, translated.read_text()) == skeleton(page, page.read_text())


@pytest.mark.parametrize("page", [pair[1] for pair in translations()], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_translation_is_chinese(page: Path) -> None:
    prose = [block for block in re.split(r"\n\s*\n", FENCE.sub("", page.read_text())) if re.match(r"\w", block)]
    assert prose
    assert [block for block in prose if not CHINESE.search(block)] == []
    assert other_terms(page.read_text()) == []
    assert BROKEN.findall(page.read_text()) == []


def other_terms(text: str) -> list[str]:
    """The words of a text for which the pages have another, with that; code is left out."""
    text = re.sub(r"`[^`\n]*`|\]\([^)]*\)", "", FENCE.sub("", text))
    return [f"{match[0]}: {advice}" for term, advice in TERMS.items() for match in re.finditer(term, text)]


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("所以 kernel 越短，批量越大", 2),
        ("内核（`dmesg`）；SLURM 作业步；4 个 stage", 0),
        ("torch 带有适用于每块 GPU 的内核", 1),
    ],
)
def test_another_term_is_seen(text: str, seen: int) -> None:
    assert len(other_terms(text)) == seen


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


@pytest.mark.parametrize(
    ("english", "chinese", "same"),
    [
        ("concepts/rank.svg", "concepts/zh/rank.svg", True),
        ("concepts/rank.svg", "concepts/rank.svg", False),
        ("concepts/zh/rank.svg", "concepts/zh/rank.svg", False),
        ("concepts/zh/rank.svg", "concepts/rank.svg", False),
        ("concepts/rank.svg", "concepts/zh/world.svg", False),
        ("cards/gan_ddp.svg", "cards/zh/gan_ddp.svg", True),
        ("cards/gan_ddp.svg", "cards/gan_ddp.svg", False),
        ("mnist_ddp_spawn.png", "mnist_ddp_spawn.png", True),
        ("mnist_ddp_spawn.png", "zh/mnist_ddp_spawn.png", False),
    ],
)
def test_each_language_shows_its_own_drawings(english: str, chinese: str, same: bool) -> None:
    shown = skeleton(ROOT / "docs" / "en" / "x.md", f"![a](../images/{english})")
    assert (skeleton(ROOT / "docs" / "zh" / "x.md", f"![a](../images/{chinese})") == shown) is same
    shown = skeleton(ROOT / "README.md", f"![a](docs/images/{english})")
    assert (skeleton(ROOT / "README.zh-CN.md", f"![a](docs/images/{chinese})") == shown) is same
