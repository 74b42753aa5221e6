"""Build the site from the pages of the repository; MkDocs calls the functions `on_...`.

README.md is the home page, and the README of each example, of k8s and of benchmarks is a page. A
file that a page links to is copied to files/.
"""

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
EXAMPLE = re.compile(
    r"^\| \[`(\w+)`\]\(examples/.*?\) \| (.*?) \| !\[(.*?)\]\((.*?)\) \|$", re.MULTILINE
)
OTHER_LANGUAGE = re.compile(r"^.*\]\(README(?:\.zh-CN)?\.md\).*\n", re.MULTILINE)
SLUG = slugify(case="lower")  # as in mkdocs.yml
NAVIGATION: dict[str, list[dict[str, Any]]] = {
    "en": [
        {"Home": "index.md"},
        {"Getting started": "getting-started.md"},
        {"Examples": "examples"},
        {
            "Learn": [
                {"Concepts": "concepts.md"},
                {"Data or model parallel?": "parallelism.md"},
                {"Your own model": "your-model.md"},
            ]
        },
        {
            "Run": [
                {"Launchers": "launchers.md"},
                {"Docker": "docker.md"},
                {"Kubernetes": "k8s.md"},
                {"Troubleshooting": "troubleshooting.md"},
            ]
        },
        {
            "Evidence": [
                {"Faults and claims": "faults.md"},
                {"Benchmarks": "benchmarks.md"},
                {"Comparison": "comparison.md"},
                {"Scale": "scale.md"},
            ]
        },
    ],
    "zh": [
        {"首页": "index.md"},
        {"快速上手": "getting-started.md"},
        {"示例": "examples"},
        {
            "学习": [
                {"概念": "concepts.md"},
                {"数据并行还是模型并行？": "parallelism.md"},
                {"换成自己的模型": "your-model.md"},
            ]
        },
        {
            "运行": [
                {"启动方式": "launchers.md"},
                {"Docker": "docker.md"},
                {"Kubernetes": "k8s.md"},
                {"故障排查": "troubleshooting.md"},
            ]
        },
        {
            "依据": [
                {"故障与结论": "faults.md"},
                {"基准测试": "benchmarks.md"},
                {"与 pytorch/examples 比较": "comparison.md"},
                {"大规模": "scale.md"},
            ]
        },
    ],
}


def in_language(path: str, language: str) -> str:
    """Return the translation of a page, or the page itself if there is none."""
    translated = path.replace("README.md", "README.zh-CN.md").replace("docs/en/", "docs/zh/")
    return translated if language == "zh" and (ROOT / translated).exists() else path


def address(path: str) -> str:
    """Return where a file of the repository is on the site."""
    path = path.replace(".zh-CN", "")
    if path == "README.md":
        return "index.md"
    if match := re.fullmatch(r"(examples/\w+|k8s|benchmarks)/README\.md", path):
        return f"{match[1]}.md"
    if match := re.fullmatch(r"docs/(?:en|zh)/([\w-]+\.md)", path):
        return match[1]
    return f"files/{path}{'.txt' if path.endswith('.md') else ''}"


def anchors(path: str) -> list[str]:
    """Return the anchors of the headings of a page, in order."""
    text = FENCE.sub("", (ROOT / path).read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return [f"#{SLUG(heading.replace('`', ''), '-')}" for heading in headings]


def content(origin: str, language: str) -> tuple[str, set[str]]:
    """Return a page with the links of the site, and the files that it links to."""
    text, page = OTHER_LANGUAGE.sub("", (ROOT / origin).read_text()), address(origin)
    targets: set[str] = set()

    def link(match: re.Match[str]) -> str:
        start, path, anchor = match[1], match[2], match[3] or ""
        if "://" in path or not path:
            return match[0]
        target = os.path.normpath(PurePosixPath(origin).parent / path)
        if (ROOT / target).is_dir():
            target += "/README.md" if (ROOT / target / "README.md").exists() else "/__init__.py"
        if not (ROOT / target).exists():
            raise PluginError(f"{origin} links to {path}, which does not exist")
        translated = in_language(target, language)
        if anchor and translated != target:
            pairs = zip(anchors(target), anchors(translated), strict=True)
            anchor = dict(pairs).get(anchor, anchor)
        targets.add(translated)
        return start + os.path.relpath(address(translated), PurePosixPath(page).parent) + anchor

    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(link, part) for part in parts[::2]]
    hidden = "---\nhide: [navigation]\n---\n\n" if page == "index.md" else ""
    return hidden + "".join(parts), targets


def cards(language: str) -> str:
    """Return the page of all examples: a card for each row of the table in README.md."""
    rows = EXAMPLE.findall((ROOT / in_language("README.md", language)).read_text())
    items = [
        f"-   [![{alt}](../files/{picture})]({name}.md)\n\n"
        f"    **[{name}]({name}.md)**\n\n    {what}\n"
        for name, what, alt, picture in rows
    ]
    title = next(
        t for entry in NAVIGATION[language] for t, page in entry.items() if page == "examples"
    )
    return f'# {title}\n\n<div class="grid cards" markdown>\n\n' + "\n".join(items) + "\n</div>\n"


def examples() -> list[str]:
    """Return the names of the examples, in the order of README.md."""
    return [row[1] for row in EXAMPLE.finditer((ROOT / "README.md").read_text())]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation: `NAVIGATION`, with a page per example."""
    config.theme.static_templates.discard("404.html")  # for servers only
    logging.getLogger("jieba").setLevel(logging.WARNING)  # prints how it loads its words
    pages = ["examples/index.md", *({name: f"examples/{name}.md"} for name in examples())]
    config.nav = [
        {title: pages if page == "examples" else page}
        for entry in NAVIGATION[config.theme["language"]]
        for title, page in entry.items()
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add all pages, and the files that they link to."""
    language = config.theme["language"]
    todo = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs" / language).glob("*.md"))]
    todo += ["README.md", "k8s/README.md", "benchmarks/README.md"]
    todo += [f"examples/{name}/README.md" for name in examples()]
    todo += [
        row[3] for row in EXAMPLE.findall((ROOT / in_language("README.md", language)).read_text())
    ]
    pages: dict[str, str | Path] = {"examples/index.md": cards(language)}
    pages |= {name: ROOT / "docs" / name for name in ("iframe-worker.js", "site.css")}
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
    for page, source in pages.items():
        if known := files.get_file_from_path(page):
            files.remove(known)
        if isinstance(source, Path):
            files.append(File.generated(config, page, abs_src_path=str(source)))
        else:
            files.append(File.generated(config, page, content=source))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Let the language switch lead to the same page in the other language.

    The links for search engines are removed: from them the theme's script would fetch a map of
    each site, which a page that is opened from the disk may not do.
    """
    own = page.file.dest_uri
    english = config.theme["language"] == "en"
    where = {"en": own, "zh": f"zh/{own}"} if english else {"en": f"../{own}", "zh": own}
    for language, path in where.items():
        relative = os.path.relpath(path, PurePosixPath(own).parent)
        output = output.replace(f'href="#{language}"', f'href="{relative}"')
    output = output.replace('data-md-component="source"', "")  # would ask the host for its stars
    return re.sub(r'<link rel="alternate"[^>]*>', "", output)
