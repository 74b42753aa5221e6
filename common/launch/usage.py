"""What `--help` says, and the answer to a value of the wrong type. No torch here."""

import ast
import functools
import inspect
import re
import textwrap
import types
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tyro.conf import Positional

# Of these, a program's first six come first.
FIRST = ("DIR", "dataset", "csv", "nproc", "epochs", "batch_size", "out", "resume", "lr", "seed")
KINDS = {int: ("N", "a whole number"), float: ("X", "a number"), Path: ("PATH", "a path")}
NAMES_WIDTH, WIDTH = 25, 80  # columns


@dataclass(frozen=True)
class Flag:
    """One flag of a program.

    Attributes:
        field: its name in the dataclass.
        names: as they are typed, short ones first; of a positional argument, what stands for it.
        kind: the type of its value, without None.
        takes: what follows its name, in a word; empty for a switch.
        default: its value when it is not given; `MISSING` if it has to be.
        section: the part of `--help` it belongs to.
        marks: what else its type says.
        of: the dataclass that it is a field of.
    """

    field: str
    names: tuple[str, ...]
    kind: Any
    takes: str
    default: Any
    section: str
    marks: tuple[Any, ...]
    of: type

    @property
    def about(self) -> str:
        """The sentence below the field."""
        return _sentences(self.of)[self.field]

    @property
    def positional(self) -> bool:
        """Whether its value is typed without a name."""
        return not self.names[0].startswith("-")

    def wrong(self, value: str) -> str:
        """What to give instead of a value; empty if its type is right."""
        if get_origin(self.kind) is Literal:
            *others, last = map(str, get_args(self.kind))
            return "" if value in (*others, last) else f"give {', '.join(others)} or {last}"
        if self.kind not in (int, float):
            return ""
        try:
            self.kind(value)
        except ValueError:
            return f"give {KINDS[self.kind][1]}"
        return ""


def flags_of(cls: Any, default: Any = None, section: str = "Flags") -> Iterator[Flag]:
    """The flags of a dataclass, and of those in it.

    Args:
        cls: the dataclass, with a sentence under each field.
        default: an instance with the values that are taken where a flag is not given.
        section: of those that are not in another dataclass.
    """
    hints = get_type_hints(cls, include_extras=True)
    for field in fields(cls):
        hint, value = hints[field.name], getattr(default, field.name, field.default)
        marks = getattr(hint, "__metadata__", ())
        kind = hint.__origin__ if marks else hint
        if is_dataclass(kind):
            title = (kind.__doc__ or field.name).splitlines()[0].rstrip(".")
            yield from flags_of(kind, value, title)
            continue
        if get_origin(kind) in (Union, types.UnionType):
            kind = next(each for each in get_args(kind) if each is not types.NoneType)
        confs = [mark for mark in marks if hasattr(mark, "aliases")]
        aliases = [alias for conf in confs for alias in conf.aliases or ()]
        name = f"--{field.name.replace('_', '-')}"
        if kind is bool and value is True:
            name = f"--no-{name[2:]}"
        names = (*sorted(aliases, key=len), name)
        if any(mark in get_args(Positional[int]) for mark in marks):
            shown = [conf.name or conf.metavar for conf in confs if conf.name or conf.metavar]
            names = (shown[0] if shown else field.name.upper(),)
        takes = next((conf.metavar for conf in confs if conf.metavar), _takes(kind))
        yield Flag(field.name, names, kind, takes, value, section, marks, cls)


def _takes(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return "TEXT ..."
    return "" if kind is bool else KINDS.get(kind, ("TEXT", ""))[0]


@functools.cache  # it reads and parses source, 0.1 s for all flags of a program
def _sentences(cls: type) -> dict[str, str]:
    """The sentence below each field of a dataclass, by the field's name."""
    found: dict[str, str] = {}
    for each in reversed([base for base in cls.__mro__ if is_dataclass(base)]):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, [*body.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = getattr(getattr(below, "value", None), "value", None)
                own = " ".join(text.split()) if isinstance(text, str) else ""
                found[field.target.id] = own or found.get(field.target.id, "")
    return found


def help_text(
    cls: type, command: str, description: str, default: Any = None, brief: bool = False
) -> str:
    """What `--help` prints: what the program does, the command as it is typed, the flags.

    Args:
        cls: the flags.
        command: what the user types before them.
        description: the text above them; its first line says what the program does.
        default: as in `flags_of`.
        brief: only the first few flags, if there are many: what `-h` prints.
    """
    flags = list(flags_of(cls, default))
    by_name = {flag.names[0] if flag.positional else flag.field: flag for flag in flags}
    first = [by_name[name] for name in FIRST if name in by_name][:6]
    many = len(flags) > 8
    sections: dict[str, list[Flag]] = {"Common flags": first} if many else {}
    for flag in flags:
        if not (many and (brief or flag in first)):
            sections.setdefault(flag.section, []).append(flag)
    where = "".join(
        f" {flag.names[0]}" if flag.default is MISSING else f" [{flag.names[0]}]"
        for flag in flags
        if flag.positional
    )
    does, _, more = description.strip().partition("\n")
    lines = [does, "", f"usage: {command}{where} [flags]"]
    lines += ["", *more.strip("\n").splitlines()] if more.strip() else []
    for title, members in sections.items():
        lines += ["", f"{title}:", *(line for flag in members for line in _entry(flag))]
    ends = [("-h, --help", "Show this help and exit.")]
    if many:
        ends = [
            ("-h", "Show the common flags and exit."),
            ("--help", f"Show all {len(flags)} flags."),
        ]
    return "\n".join([*lines, *(f"  {name:{NAMES_WIDTH}}{about}" for name, about in ends), ""])


def _entry(flag: Flag) -> list[str]:
    value, about = flag.default, flag.about
    told = "default:" in about or value in (None, "", (), MISSING) or isinstance(value, bool)
    if not told:
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
        about = f"{about.removesuffix('.')} (default: {shown})."
    takes = flag.takes
    if len(takes) > WIDTH // 2:
        takes, about = "NAME", f"{about} One of {takes.replace('|', ', ')}."
    names = f"  {', '.join(sorted(flag.names, key=len))} {takes}".rstrip()
    if flag.positional:
        names = f"  {flag.names[0]}"
    text = textwrap.wrap(about, WIDTH - 2 - NAMES_WIDTH, break_on_hyphens=False)
    indent = " " * (NAMES_WIDTH + 2)
    if len(names) < NAMES_WIDTH + 1:
        return [f"{names:{NAMES_WIDTH + 2}}{text[0]}", *(indent + line for line in text[1:])]
    return [names, *(indent + line for line in text)]


def wrong_value(cls: type, words: Sequence[str]) -> str:
    """The first value of the wrong type, and what to give instead; empty if there is none.

    Args:
        cls: the flags.
        words: of the command line.
    """
    flags = {name: flag for flag in flags_of(cls) for name in flag.names if flag.takes}
    for number, word in enumerate(words):
        typed, equals, value = word.partition("=")
        flag = flags.get(re.sub("(?<=[a-z])_", "-", typed))
        if flag is None or flag.positional:
            continue
        value = value if equals else next(iter(words[number + 1 :]), "")
        if not value or (not equals and value.startswith("--")):
            return f"{typed}: its value is missing: {typed} {flag.takes}"
        if remedy := flag.wrong(value):
            return f"{typed} {value}: {remedy}"
    return ""


def one_line(box: str) -> str:
    """The message inside the box that tyro draws, up to its first ruler, as one line."""
    # On a terminal the box has colours.
    colours_and_frame = r"\x1b\[[0-9;]*m|[│╭╮╰╯]"
    lines = [re.sub(colours_and_frame, "", line).strip() for line in box.splitlines()]
    text: list[str] = []
    for line in lines[1:]:
        if not re.match("──|----", line):  # dashes where the terminal has ASCII only
            text.append(line)
        elif text:
            break
    suggestion = re.search(r"Perhaps you meant:\s*(\S.*)", "\n".join(lines))
    hint = ""
    if suggestion:
        hint = f"; perhaps you meant {suggestion[1].split(', ')[-1].split()[0]}"
    missing = re.match(r"Missing from .*?: (\S+) (.*?)\.? \(required\)", " ".join(text))
    if missing:
        return f"{missing[1]} is missing: {missing[2]}"
    return " ".join(text).rstrip(".") + hint
