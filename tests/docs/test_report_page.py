"""The report of the benchmarks, opened in a real browser."""

from collections.abc import Generator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from benchmarks import report
from tests.browser import DESK, PHONE, complaints, requests, show, started
from tests.conftest import ROOT

HIDDEN = "return [...document.images].filter(each => !(each.complete && each.naturalWidth > 200)).length"
WIDEST = "return Math.max(...[...document.querySelectorAll('*')].map(each => each.getBoundingClientRect().right))"


@pytest.fixture(scope="module")
def browser() -> Generator[Chrome]:
    with started() as opened:
        yield opened


def test_the_report(browser: Chrome, tmp_path: Path) -> None:
    """At the width of a phone and of a desk: no complaint, no request, all charts, nothing beyond the edge."""
    file = report.write(ROOT / "benchmarks/results", tmp_path / "report.html")
    for width in (PHONE, DESK):
        show(browser, file, width)
        assert browser.execute_script("return window.innerWidth") == width
        assert complaints(browser) == []
        assert requests(browser) == []
        assert browser.execute_script("return document.images.length") >= 8
        assert browser.execute_script(HIDDEN) == 0
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.execute_script(WIDEST) <= width
        assert browser.execute_script("return [...document.images].every(each => each.alt)")


def test_what_is_wrong_with_a_report_is_seen(browser: Chrome, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        '<meta name="viewport" content="width=device-width"><img src="none.png">'
        "<p style='width:900px'>x</p><script>console.error('this'); missing()</script>"
    )
    show(browser, page, PHONE)
    said = " ".join(complaints(browser))
    assert "this" in said
    assert "missing is not defined" in said
    assert browser.execute_script(HIDDEN) == 1
    assert browser.execute_script(WIDEST) > PHONE
