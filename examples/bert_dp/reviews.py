"""Reviews from a csv file: read, cleaned, counted, split."""

import hashlib
import io
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pandas
from sklearn.model_selection import train_test_split

from common.launch.errors import UserError
from examples.bert_dp.encoding import utf8

SHIPPED = Path(__file__).with_name("reviews.csv")
ID2LABEL = {0: "差评", 1: "好评"}
WORDS = {
    0: ("0", "差评", "负面", "negative", "neg", "false"),
    1: ("1", "好评", "正面", "positive", "pos", "true"),
}
MEANING = {word: label for label, words in WORDS.items() for word in words}
FEWEST = 10  # reviews per class: a tenth of them is for validation


@dataclass(frozen=True)
class Reviews:
    """Reviews that can be used, and what became of the others.

    Attributes:
        name: where they come from.
        texts: the reviews, none twice.
        labels: 0 (差评) or 1 (好评), one per review.
        rows: where each review stands in the file, from 1 below the header.
        counts: rows by what was done with them, for the log and result.json.
    """

    name: str
    texts: list[str]
    labels: list[int]
    rows: list[int]
    counts: dict[str, int]

    def __str__(self) -> str:
        """One line with all counts."""
        counted = ", ".join(f"{number:,} {what}" for what, number in self.counts.items() if number)
        shares = Counter(self.labels)
        classes = f"{shares[1]:,} {ID2LABEL[1]}, {shares[0]:,} {ID2LABEL[0]}"
        return f"{self.name}: {counted}; {classes}"

    @property
    def digest(self) -> str:
        """Identifies the content."""
        pairs = zip(self.labels, self.texts, strict=True)
        rows = "".join(f"{label}{text}\n" for label, text in pairs)
        return hashlib.sha256(rows.encode()).hexdigest()[:16]


def plain(name: str) -> str:
    """A column's name without differences of case and spaces."""
    return name.strip().lower()


def read_csv(path: Path, text: str = "review", label: str | None = None) -> pandas.DataFrame:
    """Read a csv file as text, with or without a byte order mark, LF or CRLF, quoted or not.

    Args:
        path: UTF-8 with a header.
        text: the column with the reviews; names may differ in case and spaces.
        label: the column with the labels, if it is needed.

    Returns:
        Its rows in their order, all columns, by their names in lower case and without spaces around
        them; only an empty field is missing ("NA" is text).

    Raises:
        UserError: the file is missing, empty, not UTF-8, not a table, or lacks a column; the
            message names the encoding that it seems to have, or the columns.
    """
    needed = [plain(name) for name in (label, text) if name is not None]
    content = utf8(path)
    if not content.strip():
        raise UserError(f"{path} is empty; expected a header with {' and '.join(needed)}")
    header = content.strip().splitlines()[0]
    if header.startswith(("{", "[")):
        raise UserError(
            f'{path} is JSON: write it as csv, for example by python -c "import pandas; '
            f"pandas.read_json('{path}', lines={header.startswith('{')})"
            f".to_csv('table.csv', index=False)\""
        )
    for name, separator in (("tabs", "\t"), ("semicolons", ";")):
        if separator in header and "," not in header:
            raise UserError(
                f"{path} has {name} between its columns: write commas, for example by python -c "
                f"\"import pandas; pandas.read_csv('{path}', sep={separator!r}, dtype=str)"
                f".to_csv('commas.csv', index=False)\""
            )
    try:
        frame = pandas.read_csv(
            io.StringIO(content), dtype=str, keep_default_na=False, na_values=[""]
        )
    except pandas.errors.ParserError as error:
        reason = str(error).removeprefix("Error tokenizing data. C error: ").strip()
        raise UserError(
            f"{path} is not a table ({reason}): "
            f"a review with a comma, quote or line break needs quotes"
        ) from None
    if not isinstance(frame.index, pandas.RangeIndex):
        raise UserError(
            f"{path} has rows with more fields than the header: a review with a comma needs quotes"
        )
    frame.columns = [plain(str(name)) for name in frame.columns]
    if frame.columns.has_duplicates:
        raise UserError(f"{path} names a column twice; it has {', '.join(frame.columns)}")
    _check_columns(path, list(frame.columns), needed, label is not None)
    return frame


def _check_columns(path: Path, columns: list[str], needed: list[str], labelled: bool) -> None:
    """Say what to do about columns that are missing.

    Raises:
        UserError: one is.
    """
    missing = [name for name in needed if name not in columns]
    if not missing:
        return
    first = [number for number, name in enumerate(columns) if name in MEANING]
    if labelled and len(columns) == 2 and first:  # a label where the columns' names belong
        header = ",".join(needed if first == [0] else reversed(needed))
        raise UserError(f"{path} has no header: put one on top, for example by sed -i 1i{header}")
    flag = "--columns TEXT LABEL" if labelled else "--column TEXT"
    raise UserError(
        f"{path} has no column {' and no '.join(missing)}; it has "
        f"{', '.join(map(shorten, columns))}: say which by {flag}, or name them in its first line"
    )


def read_reviews(path: Path | None, columns: tuple[str, str] = ("review", "label")) -> Reviews:
    """Read labelled reviews from the columns with texts and labels.

    Rows without a review or label are left out, and so are repeated reviews: one in training and in
    validation would make the metrics too good. A review that comes with both labels is left out
    altogether.

    Raises:
        UserError: as `read_csv`; a label outside of the set; too few reviews of a class.
    """
    text, label = map(plain, columns)
    frame = read_csv(path or SHIPPED, text, label)[[label, text]]
    frame.columns = ["label", "review"]
    rows = len(frame)
    frame = frame.apply(lambda column: column.str.strip()).replace("", None)
    no_review, no_label = frame["review"].isna(), frame["label"].isna()
    frame = frame[~(no_review | no_label)]
    frame = frame.assign(label=_numbers(path, frame["label"]))
    once = frame.drop_duplicates()
    clear = once.drop_duplicates("review", keep=False)
    counts = {
        "rows": rows,
        "without a review left out": int(no_review.sum()),
        "without a label left out": int((no_label & ~no_review).sum()),
        "repeated left out": len(frame) - len(once),
        "with both labels left out": len(once) - len(clear),
    }
    usable = Counter(clear["label"])
    for label, name in ID2LABEL.items():
        if usable[label] < FEWEST:
            raise UserError(
                f"{path} has {usable[label]} usable review(s) with the label {label} ({name}) of "
                f"{rows} row(s): both labels are needed, each at least {FEWEST} times"
            )
    name = path.stem if path else "shipped reviews"
    numbers = [row + 1 for row in clear.index]
    return Reviews(name, clear["review"].tolist(), clear["label"].tolist(), numbers, counts)


def _numbers(path: Path | None, labels: pandas.Series) -> pandas.Series:
    """Labels as 0 and 1."""
    words = labels.str.lower().str.replace(r"^([01])\.0+$", r"\1", regex=True)
    numbers = words.map(MEANING)
    if numbers.isna().any():
        row, unknown = numbers.index[numbers.isna()][0], int(numbers.isna().sum())
        raise UserError(
            f"{path}, row {row + 1} below the header: the label {labels[row]!r} is none of "
            f"{', '.join(MEANING)} ({unknown} such row(s))"
        )
    return numbers.astype(int)


def split(reviews: Reviews, seed: int) -> tuple[list[int], list[int]]:
    """Positions of nine tenths to train on and one tenth to validate, with equal label shares."""
    positions = list(range(len(reviews.texts)))
    train, validation = train_test_split(
        positions, test_size=0.1, stratify=reviews.labels, random_state=seed
    )
    return train, validation


def shorten(text: str, width: int = 30) -> str:
    """The beginning of a text on one line."""
    line = re.sub(r"\s+", " ", text)
    return line if len(line) <= width else line[: width - 1] + "…"
