"""A headless Chromium that opens pages from the disk, driven by Selenium."""

import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions, ChromeService

PHONE, DESK = 390, 1400  # widths in pixels


@contextmanager
def started() -> Generator[Chrome]:
    """A browser that finds no host but 127.0.0.1, and keeps what pages log and ask for."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert chromium, "chromium is not installed (make check installs it on Debian)"
    assert driver, "chromedriver is not installed (Debian: chromium-driver)"
    options = ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    hosts = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", hosts):
        options.add_argument(flag)
    with Chrome(options=options, service=ChromeService(driver)) as browser:
        yield browser


def show(browser: Chrome, page: Path, width: int) -> None:
    """Open a file at a width in pixels, and wait until it and its pictures are loaded."""
    metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page.resolve().as_uri())


def complaints(browser: Chrome) -> list[str]:
    """What pages have logged since the last call: errors, warnings, messages."""
    return [entry["message"] for entry in browser.get_log("browser")]


def requests(browser: Chrome) -> list[str]:
    """The addresses that the browser has asked for since the last call, other than files."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [url for url in sent if not url.startswith(("file:", "data:", "about:"))]
