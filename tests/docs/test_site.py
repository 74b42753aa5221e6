"""The site that `make docs` builds: complete, read from the disk without a network, in a real browser, on a phone."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest
from mkdocs.exceptions import PluginError
from selenium.webdriver import Chrome
from selenium.webdriver.support.wait import WebDriverWait

from tests.browser import DESK, PHONE, complaints, requests, show, started
from tests.conftest import ROOT
from tests.machine import here

pytestmark = pytest.mark.xdist_group("site")  # one build, one browser
HOSTILE = "http://127.0.0.1:9"  # a proxy that nobody serves: whoever asks the network fails


def imported(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the commands of the Makefile, into another folder."""
    folder = tmp_path_factory.mktemp("site")
    recipe = re.findall(r"^\t@\$\(BIN\)/python (-m mkdocs .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(recipe) == 2
    env = {"PATH": os.environ["PATH"], "NO_MKDOCS_2_WARNING": "1", "http_proxy": HOSTILE, "https_proxy": HOSTILE}
    for command, out in zip(recipe, (folder, folder / "zh"), strict=True):
        words = [sys.executable, *shlex.split(command), "--site-dir", str(out)]
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=here(120), check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


def pages(site: Path) -> list[Path]:
    """All but the source files' pages, of which one stands for all."""
    found = [path for path in sorted(site.rglob("*.html")) if "source" not in path.relative_to(site).parts]
    return [*found, site / "source" / "common" / "launch" / "resolve.py.html"]


def test_every_example_has_a_page_in_both_languages(site: Path) -> None:
    names = [path.parent.name for path in (ROOT / "examples").glob("*/README.md")]
    assert len(names) >= 4
    for language in (site, site / "zh"):
        home = (language / "index.html").read_text()
        for name in names:
            assert (language / "examples" / f"{name}.html").exists()
            assert f'href="examples/{name}.html"' in home


def test_links_lead_to_files_and_nothing_is_fetched(site: Path) -> None:
    """Includes the switch between the languages."""
    missing = []
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert re.findall(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=\"?(?:https?:)?//[^>]*>", text) == []
        for link in re.findall(r"<(?:a|img|script)[^>]+(?:href|src)=\"(?!data:)([^\"#?]+)", text):
            if "://" not in link and not (page.parent / unquote(link)).exists():
                missing.append((page.relative_to(site), link))
    assert missing == []
    assert 'href="zh/concepts.html" hreflang="zh"' in (site / "concepts.html").read_text()
    assert 'href="../../examples/mnist_ddp_spawn.html"' in (site / "zh/examples/mnist_ddp_spawn.html").read_text()


def test_the_navigation_has_every_page(site: Path) -> None:
    """Also those that nobody has put in its place; the examples in the order of the table in README.md."""
    names = [
        row[1] for row in re.finditer(r"^\| \[`(\w+)`\]\(examples", (ROOT / "README.md").read_text(), re.MULTILINE)
    ]
    for language, folder in ((site, "en"), (site / "zh", "zh")):
        bar = (language / "concepts.html").read_text().partition('<nav class="md-nav md-nav--primary')[2]
        links = re.findall(r'<a href="([\w/-]+)\.html"[^>]*class="md-nav__link', bar)
        own = {path.stem for path in (ROOT / "docs" / folder).glob("*.md")} - {
            "concepts"
        }  # the page itself has no link
        assert own | {"index", "faults", "k8s", "benchmarks"} <= set(links), own - set(links)
        assert [link for link in links if link.startswith("examples/")][1:] == [f"examples/{name}" for name in names]


def test_the_cards_are_those_that_the_program_draws(site: Path) -> None:
    cards = imported("docs/cards.py")
    drawn = cards.drawings()
    assert {path.stem: path.read_text() for path in cards.FOLDER.glob("*.svg")} == drawn
    for language, folder in ((site, "cards"), (site / "zh", "cards/zh")):
        page = (language / "examples" / "index.html").read_text()
        assert [name for name in drawn if f"{folder}/{name}.svg" not in page or f'href="{name}.html"' not in page] == []


def test_the_benchmarks_are_a_page_and_a_file(site: Path) -> None:
    for language in (site, site / "zh"):
        page = (language / "benchmarks.html").read_text()
        assert page.count("<img") >= 8
        assert "<td>met</td>" in page
        assert 'href="files/benchmarks/results/report.html"' in page
        shown = (language / "files/benchmarks/results/report.html").read_text()
        assert shown.startswith("<!doctype html>"), "its source"


def test_the_pictures_are_those_that_the_program_draws() -> None:
    diagrams = imported("docs/diagrams.py")
    drawn = diagrams.drawings()
    assert {path.stem: path.read_text() for path in diagrams.FOLDER.glob("*.svg")} == drawn
    used = "".join(path.read_text() for path in (ROOT / "docs" / "en").glob("*.md"))
    assert [name for name in drawn if f"concepts/{name}.svg" not in used] == []


# ------------------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser() -> Generator[Chrome]:
    with started() as opened:
        yield opened


LOOK = """
    const scrolls = (e) => e && (/auto|scroll/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
    const wide = (e) => e.getBoundingClientRect().right > arguments[0] + 1 && e.getBoundingClientRect().width > 0;
    return [
        ...(document.documentElement.scrollWidth > arguments[0] ? ["the page is too wide"] : []),
        ...[...document.querySelectorAll("body *")].filter((e) => e.closest("article") && wide(e) && !scrolls(e))
            .map((e) => `${e.tagName} is too wide`),
        ...[...document.images].filter((i) => !i.complete || !i.naturalWidth).map((i) => `no picture ${i.src}`),
        ...(document.querySelector("h1") ? [] : ["no heading"]),
    ]
"""


def faults(browser: Chrome, page: Path, width: int) -> list[str]:
    """What is wrong with a page: errors on the console, pictures that are missing, parts beyond the screen."""
    show(browser, page, width)
    found = list(browser.execute_script(LOOK, width))
    return found + complaints(browser)


def test_pages_on_a_phone(site: Path, browser: Chrome) -> None:
    found = {str(page.relative_to(site)): faults(browser, page, PHONE) for page in pages(site)}
    assert len(found) > 20
    assert {page: wrong for page, wrong in found.items() if wrong} == {}
    assert requests(browser) == []


@pytest.mark.parametrize(("page", "words", "expected"), [
    ("index.html", "reduce-scatter", "Concepts"),
    ("zh/index.html", "邻居", "概念"),
    ("zh/index.html", "混合精度", "换成自己的模型"),
])  # fmt: skip
def test_search_works_from_the_disk(site: Path, browser: Chrome, page: str, words: str, expected: str) -> None:
    show(browser, site / page, DESK)
    field = browser.find_element("css selector", "[data-md-component=search-query]")
    # All but the last key at once: the theme's worker logs an error for `reduce-`, half a word, if it is asked in time.
    browser.execute_script("arguments[0].focus(); arguments[0].value = arguments[1]", field, words[:-1])
    field.send_keys(words[-1])
    # In one call: the results of the last key replace those of the keys before. Chinese words have marks between them.
    titles = "return [...document.querySelectorAll('.md-search-result__article h1')].map(title => title.innerText)"
    titles += ".map(title => title.replaceAll('\\u200b', ''))"
    WebDriverWait(browser, here(30)).until(lambda _: expected in browser.execute_script(titles))
    results = int(re.findall(r"\d+", browser.find_element("css selector", ".md-search-result__meta").text)[0])
    assert results < 15, "words are sought, not every page that has one of their characters"
    assert browser.get_log("browser") == []


def test_a_faulty_page_is_seen(tmp_path: Path, browser: Chrome) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        '<meta name="viewport" content="width=device-width"><h1>x</h1><img src="none.png">'
        '<article><p style="width:500px">x</p></article><script>console.error("broken"); missing()</script>'
        '<script src="http://example.org/x.js"></script>'
    )
    found = "\n".join(faults(browser, page, PHONE))
    for wrong in ("the page is too wide", "P is too wide", "no picture", "broken", "missing is not defined"):
        assert wrong in found
    assert requests(browser) == ["http://example.org/x.js"]


# ------------------------------------------------------------------------------------------------- the hooks


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The hooks, for a repository of a few files."""
    module = imported("docs/hooks.py")
    (tmp_path / "README.md").write_text("# T\n\n## On Kubernetes\n\n```sh\n## no heading\n```\n\n## End\n")
    (tmp_path / "k8s").mkdir()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def test_links_follow_the_site(hooks: ModuleType) -> None:
    text = "[a](README.md#end) [b](#end) [c](https://example.org) ![d](k8s)\n```md\n[x](y)\n```\n"
    same, _ = hooks.rewritten(text, "README.md", "index.md", "en")
    assert (
        same == "[a](index.md#end) [b](#end) [c](https://example.org) ![d](source/k8s/index.md)\n```md\n[x](y)\n```\n"
    )
    other, _ = hooks.rewritten("[b](#end)", "README.md", "examples/x.md", "en")
    assert other == "[b](../index.md#end)"
    (hooks.ROOT / "README.zh-CN.md").write_text("# 标题\n\n## 关于 Kubernetes\n\n## 结束\n")
    other, _ = hooks.rewritten("[b](#end)", "README.md", "examples/x.md", "zh")
    assert other == "[b](../index.md#结束)"


def test_a_folder_is_shown(hooks: ModuleType) -> None:
    (hooks.ROOT / "k8s" / "base").mkdir()
    (hooks.ROOT / "k8s" / "job.py").write_text('"""One line.\n\nMore."""\n')
    text, targets = hooks.content("k8s", "en")
    assert "| [base](base/index.md) |  |\n| [job.py](job.py.md) | One line. |\n" in text
    assert targets == {"k8s/base", "k8s/job.py"}


def test_what_is_missing_ends_the_build(hooks: ModuleType) -> None:
    with pytest.raises(PluginError, match=r"links to nothing\.md"):
        hooks.rewritten("[a](nothing.md)", "README.md", "index.md", "en")
