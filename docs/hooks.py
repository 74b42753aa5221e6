"""The site's pages from the repository. Nothing is kept twice: MkDocs calls the functions `on_...` when it builds.

- README.md is the home page. The README of each example is its page, in the order of the table in README.md.
- A link to a file or folder of the repository leads to a page that shows it; pictures and HTML are taken along.
- k8s/README.md is the page on Kubernetes, benchmarks/README.md the one on benchmarks.
- A page of docs/en that `NAVIGATION` does not name stands at its end.
"""

import ast
import logging
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r"^\| \[`(\w+)`\]\(examples/.*?\) \| (.*?) \| !\[(.*?)\]\((.*?)\) \|$", re.MULTILINE)
OTHER_LANGUAGE = re.compile(r"^.*\]\(README(?:\.zh-CN)?\.md\).*\n", re.MULTILINE)  # the site's header links to it
COMMAND, FLAG = re.compile(r"<code>[^<>]*</code>"), re.compile(r"(?<=\s)(--?[a-z][\w-]{1,30})")
TOKEN = re.compile(r"<code>([^<>\s]{1,32})</code>")  # a name or a flag; it breaks nowhere
SLUG = slugify(case="lower")  # as in mkdocs.yml
AS_THEY_ARE = (".png", ".svg", ".jpg", ".gif", ".html")
NAVIGATION: dict[str, list[dict[str, Any]]] = {
    "en": [
        {"Home": "index.md"},
        {"Getting started": "getting-started.md"},
        {"Examples": "examples"},
        {"Learn": [
            {"Concepts": "concepts.md"},
            {"Data or model parallel?": "parallelism.md"},
            {"The model does not fit": "model-does-not-fit.md"},
            {"Your own model": "your-model.md"},
            {"The shared code": "common.md"},
        ]},
        {"Run": [
            {"Launchers": "launchers.md"},
            {"GPUs": "gpus.md"},
            {"Docker": "docker.md"},
            {"Kubernetes": "k8s.md"},
            {"From a notebook": "notebook.md"},
            {"Debug one rank": "debug.md"},
            {"Troubleshooting": "troubleshooting.md"},
            {"Faults": "faults.md"},
        ]},
        {"Evidence": [
            {"What is tested": "tested.md"},
            {"What it costs at scale": "scale.md"},
            {"Benchmarks": "benchmarks.md"},
            {"Compared with pytorch/examples": "comparison.md"},
        ]},
    ],
    "zh": [
        {"首页": "index.md"},
        {"快速上手": "getting-started.md"},
        {"示例": "examples"},
        {"学习": [
            {"概念": "concepts.md"},
            {"数据并行还是模型并行？": "parallelism.md"},
            {"模型放不下": "model-does-not-fit.md"},
            {"换成自己的模型": "your-model.md"},
            {"共用代码": "common.md"},
        ]},
        {"运行": [
            {"启动方式": "launchers.md"},
            {"GPU": "gpus.md"},
            {"Docker": "docker.md"},
            {"Kubernetes": "k8s.md"},
            {"在 notebook 中使用": "notebook.md"},
            {"调试一个 rank": "debug.md"},
            {"故障排查": "troubleshooting.md"},
            {"故障": "faults.md"},
        ]},
        {"依据": [
            {"测试了什么": "tested.md"},
            {"规模扩大时的代价": "scale.md"},
            {"基准测试": "benchmarks.md"},
            {"与 pytorch/examples 比较": "comparison.md"},
        ]},
    ],
}  # fmt: skip
MORE = {"en": "More", "zh": "更多"}
ENGLISH_ONLY = '!!! note "说明"\n    本页目前只有英文版。\n\n'


def examples() -> list[str]:
    """The examples that have a README, by name, in the order of the table in README.md."""
    listed = [row[1] for row in EXAMPLE.finditer((ROOT / "README.md").read_text())]
    return listed + sorted({path.parent.name for path in (ROOT / "examples").glob("*/README.md")} - {*listed})


def in_language(path: str, language: str) -> str:
    """A page's file in this language, or in English where there is no translation."""
    translated = path.replace("README.md", "README.zh-CN.md") if path != "docs/faults.md" else "docs/zh/faults.md"
    return translated if language == "zh" and (ROOT / translated).exists() else path


def address(path: str) -> str:
    """Where a file or folder of the repository is on the site."""
    path = path.replace(".zh-CN", "")
    if path == "README.md":
        return "index.md"
    if match := re.fullmatch(r"(examples/\w+|k8s|benchmarks)/README\.md", path):
        return f"{match[1]}.md"
    if match := re.fullmatch(r"docs/(?:en/|zh/)?([\w-]+\.md)", path):
        return match[1]
    if PurePosixPath(path).suffix in AS_THEY_ARE:
        return f"files/{path}"
    return f"source/{path}/index.md" if (ROOT / path).is_dir() else f"source/{path}.md"


def _hidden(code: re.Match[str]) -> str:
    return re.sub(r"[^\n]", "x", code[0])  # comments in code look like headings


def anchors(path: str) -> list[str]:
    """The anchors of a page's headings, in their order."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub(_hidden, (ROOT / path).read_text()), re.MULTILINE)
    return [f"#{SLUG(heading.replace('`', ''), '-')}" for heading in headings]


def translated_anchor(anchor: str, target: str, language: str) -> str:
    """A heading's anchor in the translation of a page: that of the heading at the same place."""
    translated = in_language(target, language)
    if not anchor or translated == target:
        return anchor
    return dict(zip(anchors(target), anchors(translated), strict=True)).get(anchor, anchor)


def rewritten(text: str, origin: str, page: str, language: str) -> tuple[str, set[str]]:
    """Turn links that are relative to a file of the repository into links of the site.

    Args:
        text: Markdown.
        origin: the file that it comes from.
        page: the page that it becomes a part of.
        language: of the site.

    Returns:
        The text, and the files and folders that it links to.
    """
    targets: set[str] = set()

    def link(match: re.Match[str]) -> str:
        start, path, anchor = match[1], match[2], match[3] or ""
        if "://" in path or (not path and page == address(origin)):
            return match[0]
        target = os.path.normpath(PurePosixPath(origin).parent / path) if path else origin
        if not (ROOT / target).exists():
            raise PluginError(f"{origin} links to {path}, which does not exist")
        targets.add(target)
        relative = os.path.relpath(address(target), PurePosixPath(page).parent)
        return start + relative + translated_anchor(anchor, target, language)

    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(link, re.sub(r"^<!-- not run.*?-->\n", "", part, flags=re.MULTILINE)) for part in parts[::2]]
    return "".join(parts), targets


def content(origin: str, language: str) -> tuple[str, set[str]]:
    """The page that a file of the repository becomes, and what it links to."""
    if (ROOT / origin).is_dir():
        return folder_page(origin)
    text = (ROOT / origin).read_text()
    page = address(origin)
    if page.startswith("source/") and not origin.endswith(".md"):
        kind = {".py": "python", ".yml": "yaml"}.get(PurePosixPath(origin).suffix, PurePosixPath(origin).suffix[1:])
        return f"---\nsearch:\n  exclude: true\n---\n\n# {origin}\n\n````{kind}\n{text.rstrip()}\n````\n", set()
    text, targets = rewritten(OTHER_LANGUAGE.sub("", text), origin, page, language)
    untranslated = language == "zh" and "zh" not in origin and re.match(r"examples|k8s|benchmarks", origin)
    text = (ENGLISH_ONLY if untranslated else "") + text
    return ("---\nhide: [navigation]\n---\n\n" if page == "index.md" else "") + text, targets


def cards(language: str) -> str:
    """The page of all examples: a card for each row of the table in README.md."""
    text = (ROOT / in_language("README.md", language)).read_text()
    title = next(name for entry in NAVIGATION[language] for name, page in entry.items() if page == "examples")
    items = [
        f"-   [![{alt}](../files/{picture})]({name}.md)\n\n    **[{name}]({name}.md)**\n\n    {about}\n"
        for name, about, alt, picture in EXAMPLE.findall(text)
    ]
    return f'# {title}\n\n<div class="grid cards" markdown>\n\n' + "\n".join(items) + "\n</div>\n"


def folder_page(origin: str) -> tuple[str, set[str]]:
    """What is in a folder; of Python modules also the first line of what they say of themselves."""
    rows, targets = [], set()
    for path in sorted((ROOT / origin).iterdir()):
        if path.name.startswith(("__pycache__", ".")):
            continue
        first = (
            (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0] if path.suffix == ".py" else ""
        )
        target = f"{origin}/{path.name}"
        targets.add(target)
        rows.append(f"| [{path.name}]({os.path.relpath(address(target), f'source/{origin}')}) | {first} |\n")
    table = "| | |\n|---|---|\n" + "".join(rows)
    return f"---\nsearch:\n  exclude: true\n---\n\n# {origin}\n\n{table}", targets


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the navigation: `NAVIGATION`, a page per example, and the pages of docs/en that it does not name."""
    config.theme.static_templates.discard("404.html")  # for servers only
    logging.getLogger("jieba").setLevel(logging.WARNING)  # it tells how it loads its words
    language = config.theme["language"]
    listed = [{"examples/index.md" if page == "examples" else page} for page in _pages(NAVIGATION[language])]
    named = set[str]().union(*listed)
    rest = sorted({path.name for path in (ROOT / "docs" / language).glob("*.md")} - named)
    pages = ["examples/index.md", *({name: f"examples/{name}.md"} for name in examples())]
    nav = [
        {title: pages if page == "examples" else page} for each in NAVIGATION[language] for title, page in each.items()
    ]
    config.nav = [*nav, {MORE[language]: rest}] if rest else nav
    return config


def _pages(entries: list[dict[str, Any]]) -> list[str]:
    found = []
    for page in (page for entry in entries for page in entry.values()):
        found += _pages(page) if isinstance(page, list) else [page]
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages are made from, and everything in the repository that they link to."""
    language = config.theme["language"]
    own = sorted((ROOT / "docs" / language).glob("*.md"))
    todo = [str(path.relative_to(ROOT)) for path in own] + ["README.md", "docs/faults.md", "k8s/README.md"]
    todo += ["benchmarks/README.md"]
    todo += [f"examples/{name}/README.md" for name in examples()]
    pages: dict[str, str | Path] = {name: ROOT / "docs" / name for name in ("iframe-worker.js", "site.css")}
    pages["examples/index.md"] = cards(language)
    while todo:
        origin = in_language(todo.pop(), language)
        page = address(origin)
        if page in pages:
            continue
        if page.startswith("files/"):
            pages[page] = ROOT / origin
        else:
            pages[page], targets = content(origin, language)
            todo += targets
    for page, what in pages.items():
        known = files.get_file_from_path(page)
        if known is not None:
            files.remove(known)
        if isinstance(what, Path):
            files.append(File.generated(config, page, abs_src_path=str(what)))
        else:
            files.append(File.generated(config, page, content=what))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Let the language switch lead to the same page in the other language.

    The links for search engines are taken out: from them the theme's script would fetch a map of each language's site,
    which a page that is opened from the disk may not do.
    """
    here = page.file.dest_uri
    where = {"en": here, "zh": f"zh/{here}"} if config.theme["language"] == "en" else {"en": f"../{here}", "zh": here}
    for language, path in where.items():
        output = output.replace(f'href="#{language}"', f'href="{os.path.relpath(path, PurePosixPath(here).parent)}"')
    output = TOKEN.sub(r'<code class="token">\1</code>', output)
    output = COMMAND.sub(lambda code: FLAG.sub(r'<span class="token">\1</span>', code[0]), output)
    output = output.replace('data-md-component="source"', "")  # else the theme asks the repository's host for its stars
    return re.sub(r'<link rel="alternate"[^>]*>', "", output)
