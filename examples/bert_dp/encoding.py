"""The text of a file, or one line that names its encoding."""

import shlex
from pathlib import Path

from common.launch.errors import UserError

MANY = 20  # letters that only UTF-8 has so: the file is UTF-8, whatever comes after
BEGINNINGS = {  # of files that are not text
    b"PK\x03\x04": "an Excel file, or a zip archive: save its table as csv in UTF-8",
    b"\xd0\xcf\x11\xe0": "an old Excel file: save its table as csv in UTF-8",
    b"\x1f\x8b": "packed by gzip: unpack it by gunzip",
    b"PAR1": "a Parquet file: write it as csv, for example by pandas.read_parquet and to_csv",
}


def utf8(path: Path) -> str:
    """The text of a file.

    Raises:
        UserError: it cannot be read, or is not text in UTF-8.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    for beginning, what in BEGINNINGS.items():
        if content.startswith(beginning):
            raise UserError(f"{path} is {what}")
    encoding = _wide(content)
    if encoding is None:
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            valid = content[: error.start].decode("utf-8")
            line = valid.count("\n") + 1
            if sum(not character.isascii() for character in valid) > MANY:
                raise UserError(
                    f"{path} is UTF-8, but not in line {line}: mend that line, or leave such bytes "
                    f"out by {_converted(path, 'UTF-8', '-c ')}"
                ) from None
            encoding = _likely(content)
    raise UserError(
        f"{path} is not UTF-8, it is probably {encoding}: "
        f"convert it by {_converted(path, encoding)}"
    )


def _wide(content: bytes) -> str | None:
    """The encoding of a file with zeros among the letters of its header."""
    if b"\0" not in content[:100]:
        return None
    if b"\0\0\0" in content[:100]:
        return "UTF-32"
    return "UTF-16BE" if content.startswith(b"\0") else "UTF-16"  # with its mark, or little-endian


def _likely(content: bytes) -> str:
    """The encoding of bytes that are not UTF-8: western, if few of them are above ASCII."""
    few = sum(byte > 127 for byte in content) < len(content) / 10
    return "WINDOWS-1252" if few else "GB18030"  # which includes GBK and GB2312


def _converted(path: Path, encoding: str, flags: str = "") -> str:
    return f"iconv {flags}-f {encoding} -t UTF-8 {shlex.quote(str(path))} > utf8.csv"
