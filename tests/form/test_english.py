"""Rules on the form of sentences in English pages, docstrings and comments."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/en/*.md"), *ROOT.glob("examples/*/*.md")]
PAGES = [page for page in (*PAGES, ROOT / "k8s/README.md") if "zh-CN" not in page.name]
SOURCES = [p for d in ("common", "examples", "tools", "docker") for p in (ROOT / d).rglob("*.py")]
LONGEST = 25  # words
FORMS = {
    "write 'with' or 'using'": r"\b(?:started|trained|loaded|set) by --",
    "write also, still or no longer before the verb": r",? (?:too|any ?more|anyway|at once)[.;]",
    "write 'does not contain'": r"\bha(?:s|ve|d) not (?:the|an?|any)\b|\bholds? no\b",
    "use American spelling": r"\b(?:colour|grey|behaviour|\w+(?:al|im)is(?:e|ed|ing))\b|\d %",
}


def paragraphs(path: Path) -> Iterator[str]:
    """Yield prose without code and tables; the items of a list are paragraphs."""
    if path.suffix == ".md":
        texts = [re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)]
    else:
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, kinds)]
        texts = [ast.get_docstring(node) or "" for node in nodes]
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        texts += [t.string.strip("# ") for t in tokens if t.type == tokenize.COMMENT]
    for text in texts:
        for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*#>|]|\d+\.) )|\n(?=    )", text):
            if not part.lstrip().startswith("|"):
                yield " ".join(re.sub(r"`[^`]*`", "`code`", part).split())


@pytest.mark.parametrize("path", [*PAGES, *SOURCES], ids=lambda p: str(p.relative_to(ROOT)))
def test_sentences_have_a_plain_form(path: Path) -> None:
    wrong = []
    for paragraph in paragraphs(path):
        wrong += [
            (advice, paragraph) for advice, form in FORMS.items() if re.search(form, paragraph)
        ]
        for sentence in re.split(r"(?<=[.!?:;])(?:\*\*)?\s+", paragraph):
            if sum(bool(re.search(r"\w", word)) for word in sentence.split()) > LONGEST:
                wrong.append(("split this sentence", sentence))
    assert not wrong
