"""A headless Chromium, spoken to over pipes: no port, no driver, no library."""

import itertools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any


class Browser:
    """Opens pages, and remembers what they complained about.

    Use as a context manager. The protocol: https://chromedevtools.github.io/devtools-protocol
    """

    def __enter__(self) -> "Browser":
        program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        assert program, "no Chromium: install the package chromium (make check does)"
        self.profile = tempfile.mkdtemp()
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # It reads commands from descriptor 3 and writes answers to descriptor 4.
        script = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "bash", program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
             "--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={self.profile}", "about:blank"],
            pass_fds=[theirs_in, theirs_out], start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self.commands, self.answers = os.fdopen(ours_out, "wb", 0), os.fdopen(ours_in, "rb")
        self.numbers = itertools.count(1)
        self.session = ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.session = ""
        self.call("Browser.close")
        self.process.wait(20)
        self.commands.close()
        self.answers.close()
        shutil.rmtree(self.profile, ignore_errors=True)

    def read(self) -> dict[str, Any]:
        """The next message; what a page complains about is kept."""
        text = bytearray()
        while (byte := self.answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            text += byte
        message: dict[str, Any] = json.loads(text)
        method, values = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown" or (
            method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert")
        ):
            self.complaints.append(json.dumps(values))
        if method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.complaints.append(values["entry"]["text"])
        if method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        self.loaded = self.loaded or method == "Page.loadEventFired"
        return message

    def call(self, method: str, **values: object) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": values}
        if self.session:
            message["sessionId"] = self.session
        self.commands.write(json.dumps(message).encode() + b"\0")
        while (answer := self.read()).get("id") != number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, page: Path, width: int, height: int = 800) -> None:
        """Open a file at a width in pixels, and wait until it and its pictures are loaded."""
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.complaints, self.requests, self.loaded = [], [], False
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not self.loaded:
            self.read()

    def value(self, expression: str) -> Any:
        """What a piece of JavaScript gives in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """Save what the page looks like, from top to bottom."""
        import base64

        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))
