"""What a page consists of, apart from its words: to compare languages, and to find commands."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tests.conftest import ROOT

FENCE = re.compile(r"```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"((?:<!-- not run: .+? -->\n)?)```sh\n(.*?)```\n((?:<!-- not run above: .+? -->)?)", re.DOTALL)
DRAWING = re.compile(r"^(docs/images/(?:cards|concepts))/(zh/)?")
PAGES = [  # those in English, which the others translate
    ROOT / "README.md",
    *sorted((ROOT / "examples").glob("*/README.md")),
    ROOT / "k8s" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "en").glob("*.md")),
]


@dataclass(frozen=True)
class Shell:
    """A block of commands, and whether the page says why they are not run."""

    code: str
    run: bool

    @property
    def commands(self) -> list[str]:
        """One string per command, without comments and line breaks."""
        lines = re.sub(r"\\\n\s*", "", self.code).splitlines()
        found = [re.sub(r"(^|\s+)#.*", "", line).strip() for line in lines]
        return [re.sub(r"\s+", " ", line) for line in found if line]


def shell_blocks(text: str) -> list[Shell]:
    return [Shell(code, not before and not after) for before, code, after in SHELL.findall(text)]


def translations() -> list[tuple[Path, Path]]:
    """Every page in English and in Chinese."""
    folder = ROOT / "docs" / "zh"
    return [
        (page, page.with_name("README.zh-CN.md") if page.name == "README.md" else folder / page.name) for page in PAGES
    ]


def target(page: Path, link: str) -> str:
    """What a link leads to, the same for all languages; of an anchor only that there is one.

    A drawing with words is in two folders: a Chinese page has to show that of `zh`.
    """
    if "://" in link:
        return link
    path, _, anchor = link.partition("#")
    relative = (page.parent / path).resolve().relative_to(ROOT) if path else page.relative_to(ROOT)
    name = re.sub(r"^docs/(en|zh)/", "docs/", str(PurePosixPath(relative))).replace(".zh-CN", "")
    if page.name == "README.zh-CN.md" or page.parent.name == "zh":
        name = DRAWING.sub(lambda drawing: f"{drawing[1]}/{'' if drawing[2] else 'in English/'}", name)
    return name + ("#" if anchor else "")


def skeleton(page: Path, text: str) -> list[tuple[object, ...]]:
    """Headings, code, tables, lists, pictures, and the names and links in each paragraph, in their order."""
    found: list[tuple[object, ...]] = []
    position = 0
    for fence in FENCE.finditer(text):
        found += _blocks(page, text[position : fence.start()])
        code = "\n".join(Shell(fence[2], run=True).commands) if fence[1] == "sh" else fence[2]
        found.append(("code", fence[1], code))
        position = fence.end()
    return found + _blocks(page, text[position:])


def _blocks(page: Path, text: str) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        lines = block.splitlines()
        if not block.strip():
            continue
        if block.startswith("#"):
            found.append(("heading", len(block) - len(block.lstrip("#"))))
        elif block.startswith("    "):
            found.append(("code", "", block))
        elif block.startswith("|"):
            found += [("row", len(re.sub(r"`[^`]*`", "", line).split("|")), *_names(page, line)) for line in lines]
        elif re.match(r"[-*] |\d+\. ", block):
            items = re.split(r"^(?:[-*]|\d+\.) ", block, flags=re.MULTILINE)[1:]
            found += [("item", *_names(page, item)) for item in items]
        else:
            found.append(("text", *_names(page, re.sub(r"<!-- include: .*? -->", "<!-- include -->", block))))
    return found


def _names(page: Path, text: str) -> tuple[object, ...]:
    comments = re.findall(r"<!-- .*? -->", text)
    links = sorted(target(page, link) for link in re.findall(r"\]\(([^)\s]+)\)", text))
    code = sorted(re.sub(r"\s+", " ", name) for name in re.findall(r"`([^`]+)`", re.sub(r"\]\([^)]*\)", "]", text)))
    return text.count("!["), tuple(comments), tuple(links), tuple(code)
