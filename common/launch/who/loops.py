"""What the text of a program says of two ranks that are at different lines of it."""

import ast
from collections.abc import Sequence
from pathlib import Path

Frame = Sequence[str | int]  # file, line, function


def left_loop(first: Sequence[Frame], second: Sequence[Frame]) -> str:
    """The loop in which the second rank is, and which the first has left; "" if there is none.

    Args:
        first: frames of a rank, the innermost first.
        second: those of another one.
    """
    for file, line, function in first:
        for other, within, name in second:
            if (other, name) == (file, function):
                return _between(str(file), int(within), int(line))
    return ""


def _between(file: str, within: int, after: int) -> str:
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.While) and node.end_lineno is not None:
            begins = node.body[0].lineno
            if begins <= within <= node.end_lineno < after:
                return f"{Path(file).name}:{node.lineno}"
    return ""
