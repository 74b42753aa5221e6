"""The messages that the tables on troubleshooting quote are those that the program prints."""

import re

import pytest

from tests.conftest import ROOT

TABLES = [
    (ROOT / "docs/en" / page).read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    for page, heading in (("troubleshooting.md", "Messages of the examples"), ("docker.md", "Troubleshooting"))
]
QUOTED = sorted({text for table in TABLES for text in re.findall(r"^\| `(.+?)`", table, re.MULTILINE)})
FILES = [*sorted((ROOT / "common").rglob("*.py")), ROOT / "docker" / "entrypoint.py"]
SOURCES = "".join(path.read_text() for path in FILES)


@pytest.mark.parametrize("message", QUOTED)
def test_quoted_messages_exist(message: str) -> None:
    """The words between the values stand in the source in this order."""
    plain = re.sub(r'"\s*f?"', "", SOURCES)  # adjacent string literals
    words = re.split(
        r"\d[\d., ]*|HOST:PORT|\bP\b|\.\.\.|\blr\b|SIGKILL|--batch-size|the step to resume from|--out|"
        r"Address already in use|Read-only file system|Permission denied",
        message,
    )
    parts = [part.strip(" (),;") for part in words if len(part.strip(" (),;")) > 3]
    assert parts
    for part in parts:
        assert part in plain, part
