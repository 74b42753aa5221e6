"""The messages that the troubleshooting table quotes are those that the program prints."""

import re

import pytest

from tests.conftest import ROOT

TABLE = (ROOT / "README.md").read_text().split("## Troubleshooting")[1].split("\n## ")[0]
QUOTED = [text for row in TABLE.splitlines() for text in re.findall(r"^\| `(.+?)`", row)]
SOURCES = "".join(path.read_text() for path in sorted((ROOT / "common").rglob("*.py")))


@pytest.mark.parametrize("message", QUOTED)
def test_quoted_messages_exist(message: str) -> None:
    """The words between the values stand in the source in this order."""
    plain = re.sub(r'"\s*f?"', "", SOURCES)  # adjacent string literals
    words = re.split(
        r"\d[\d., ]*|HOST:PORT|\bP\b|\.\.\.|\blr\b|SIGKILL|Address already in use|--batch-size|the step to resume from",
        message,
    )
    parts = [part.strip(" (),;") for part in words if len(part.strip(" (),;")) > 3]
    assert parts
    for part in parts:
        assert part in plain, part
