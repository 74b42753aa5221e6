"""`--config` and `--save-config`: flags in a file. No torch here."""

import difflib
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.launch.errors import UserError
from common.launch.usage import Flag, flags_of

# What a repeated run does not take over: where the results went, how processes were started.
NOT_REPEATED = ("out", "resume", "config", "save_config")
STARTED = ("nproc", "multiprocessing_distributed", "world_size", "rank", "dist_url", "gpu")
STARTED += ("device", "no_accel", "dist_backend")


def config_file(words: Sequence[str]) -> Path | None:
    """The file that `--config` names on a command line."""
    for number, word in enumerate(words):
        if word in ("--config", "-config") and number + 1 < len(words):
            return Path(words[number + 1])
        if word.startswith("--config="):
            return Path(word.partition("=")[2])
    return None


def config_words(cls: type, file: Path) -> list[str]:
    """What would have to be typed in place of a file.

    Args:
        cls: the flags of the program.
        file: YAML or JSON: names of flags and their values; or the result.json of a run.

    Raises:
        UserError: it cannot be read, or holds what is not a flag.
    """
    values = _read(file)
    if isinstance(values.get("arguments"), dict):
        repeated = values["arguments"].items()
        values = {name: value for name, value in repeated if name not in NOT_REPEATED + STARTED}
    flags: dict[str, Flag] = {}
    for flag in flags_of(cls):
        flags |= {name.lstrip("-").replace("-", "_"): flag for name in (*flag.names, flag.field)}
    words: list[str] = []
    for name, value in values.items():
        flag = flags.get(str(name).replace("-", "_"))
        if flag is None:
            near = difflib.get_close_matches(str(name), flags, 1, cutoff=0.75)
            hint = f"; perhaps {near[0]} is meant" if near else ""
            raise UserError(f"--config {file}: {name} is not a flag of this program{hint}")
        words += _words(flag, value, file)
    return words


def _read(file: Path) -> dict[str, Any]:
    yaml = importlib.import_module("yaml")  # 0.05 s, which only --config has to pay
    try:
        # JSON is YAML, too. All values are text: `no` is not turned into False.
        values = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except OSError as error:
        raise UserError(f"--config {file} cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--config {file} is neither YAML nor JSON: {reason}") from None
    if not isinstance(values, dict):
        raise UserError(f"--config {file}: expected lines like `epochs: 3`")
    return values


def _words(flag: Flag, value: Any, file: Path) -> list[str]:
    if value in ("", "null", "~", None, []):
        return []
    name = flag.names[-1]
    if isinstance(value, list):
        return [name, *map(str, value)]
    if isinstance(value, dict):
        raise UserError(
            f"--config {file}: {flag.field} has a value of its own, not others below it"
        )
    if flag.kind is bool:
        if value.lower() not in ("true", "yes", "false", "no"):
            raise UserError(f"--config {file}: {flag.field}: {value}: give true or false")
        on = value.lower() in ("true", "yes")
        return [name] if on != bool(flag.default) else []
    return [value] if flag.positional else [f"{name}={value}"]


def all_flags(args: Any) -> dict[str, Any]:
    """Every flag and its value, as plain values."""
    return {flag.field: _plain(flag.default) for flag in flags_of(type(args), args)}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (int, float, bool)) else str(value)


def save_config(args: Any, file: Path) -> None:
    """Write all flags as YAML, for `--config`.

    Raises:
        UserError: the file cannot be written.
    """
    values = {name: v for name, v in all_flags(args).items() if name not in NOT_REPEATED[2:]}
    try:
        # JSON's values are YAML's.
        lines = (
            f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--save-config {file} cannot be written ({error.strerror})") from None
