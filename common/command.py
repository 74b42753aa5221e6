"""Every program by its name: `distributed-examples NAME [flags]`, the same as `python -m`.

    distributed-examples                               # all names, with a line for each
    distributed-examples mnist_ddp_spawn --nproc 2     # python -m examples.mnist_ddp_spawn ...
    distributed-examples who runs/mnist_ddp_spawn      # python -m common.who ...
    distributed-examples --completion bash > FILE      # after `source FILE`, <Tab> knows all flags

A program is the module that Python would run: nothing is registered by hand.
"""

import argparse
import ast
import difflib
import importlib
import importlib.util
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import shtab

from common.launch.args import fail
from common.launch.errors import UserError
from common.launch.usage import flags_of

COMMAND = "distributed-examples"
PACKAGES = ("examples", "common")
SHELLS = ("bash", "zsh", "tcsh")
SAME = "train"  # python -m examples.NAME.train is python -m examples.NAME


def programs() -> dict[str, Path]:
    """The file of each program by its module, examples first."""
    found: dict[str, Path] = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        (top,) = map(Path, spec.submodule_search_locations or [])
        for path in sorted(top.rglob("*.py")):
            words = [package, *path.relative_to(top).with_suffix("").parts]
            if '__name__ == "__main__"' in path.read_text() and words[-1] not in (SAME, "command"):
                found[".".join(words).removesuffix(".__main__")] = path
    return dict(sorted(found.items(), key=lambda item: PACKAGES.index(item[0].split(".")[0])))


def short(module: str) -> str:
    """What is typed for a module."""
    return module.split(".", 1)[1]


def _about(path: Path) -> str:
    package = path.with_name("__init__.py")
    path = package if path.name == "__main__.py" and package.exists() else path
    line = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    about = re.sub(r"^`python -m [^`]*`: |^[a-z_.]+: |:? `python -m .*", "", line)
    about = about.split(". ")[0].rstrip(".:")
    return about[:1].upper() + about[1:] if " " in about else about


def _list() -> Iterator[str]:
    yield f"usage: {COMMAND} NAME [flags]     {COMMAND} NAME --help"
    found, last = programs(), ""
    width = max(len(short(module)) for module in found) + 2
    for module, path in found.items():
        package = module.split(".")[0]
        if package != last:
            yield f"\n{'Examples' if package == PACKAGES[0] else 'Tools'}:"
        lines = textwrap.wrap(_about(path), 80 - 2 - width, break_on_hyphens=False)
        yield f"  {short(module):{width}}" + f"\n{'':{width + 2}}".join(lines)
        last = package
    yield f"\n{COMMAND} --completion bash|zsh|tcsh prints what a shell needs to complete them"


def flags_class(module: str, path: Path) -> Any:
    """The dataclass that a program hands to `start` or `parse`; None if it has none."""
    called = re.search(r"\b(?:start|parse)\((\w+)[,)]", path.read_text())
    name = f"{module}.__main__" if path.name == "__main__.py" else module
    return getattr(importlib.import_module(name), called[1]) if called else None


def completion(shell: str) -> str:
    """The script that teaches a shell the names of the programs and of their flags.

    Args:
        shell: one of `SHELLS`.

    Raises:
        UserError: another shell.
    """
    if shell not in SHELLS:
        raise UserError(f"--completion {shell}: give {', '.join(SHELLS[:-1])} or {SHELLS[-1]}")
    parser = argparse.ArgumentParser(COMMAND)
    names = parser.add_subparsers()
    for module, path in programs().items():
        program = names.add_parser(short(module), help=_about(path).replace("%", "%%"))
        cls = flags_class(module, path)
        for flag in flags_of(cls) if cls else ():
            choices = get_args(flag.kind) if get_origin(flag.kind) is Literal else None
            switch: Any = {"action": "store_true"} if not flag.takes and not flag.positional else {}
            given: Any = switch or {"choices": choices}
            about = flag.about.replace("%", "%%")
            added = program.add_argument(*flag.names, help=about, **given)
            if flag.kind is Path:
                added.complete = shtab.FILE  # ty: ignore[missing-attribute]
    return shtab.complete(parser, shell)


def main() -> None:
    """What the console script `distributed-examples` calls."""
    words = sys.argv[1:]
    try:
        if words[:1] == ["--completion"]:
            print(completion(" ".join(words[1:]) or "(no shell)"))
        elif words in ([], ["-h"], ["--help"]):
            print("\n".join(_list()))
        else:
            _become(words)
    except UserError as error:
        fail(error)


def _become(words: list[str]) -> None:
    """Replace this process by the program: signals and exit codes are its own.

    Raises:
        UserError: there is no such program.
    """
    by_name = {short(module): module for module in programs()}
    name = words[0].removeprefix("examples.").removeprefix("common.")
    if name not in by_name:
        close = difflib.get_close_matches(name, by_name, 1)
        hint = f"; perhaps you meant {close[0]}" if close else ""
        raise UserError(
            f"{COMMAND} {words[0]}: there is no such program{hint} ({COMMAND} lists them)"
        )
    sys.stdout.flush()
    command = [sys.executable, "-m", by_name[name], *words[1:]]
    os.execv(sys.executable, command)  # noqa: S606 - a module of this project


if __name__ == "__main__":
    main()
