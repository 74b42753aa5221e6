"""Read labeled reviews from a csv file, and clean, split and tokenize them."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, random_split
from transformers import BertTokenizer

from common.checkpoint import describe
from common.launch import UserError

ID2LABEL = {0: "差评", 1: "好评"}  # bad, good


class Reviews(Dataset[tuple[str, int]]):
    """Dataset of reviews and their labels, 0 or 1, from a csv file in UTF-8.

    Incomplete rows and reviews that occur with both labels are left out. Repeated reviews are used
    once, because they could otherwise be in both the training and the validation set.

    Attributes:
        rows: each review's row number in the file; the first row below the header is 1.
        about: summary of the rows that were left out.
    """

    def __init__(self, path: Path) -> None:
        cells = read_cells(path)
        names, needed = cells.iloc[0].tolist(), ["label", "review"]
        if any(names.count(name) != 1 for name in needed):
            raise UserError(f"{path} has the columns {', '.join(names)}; expected label,review")
        table = cells.iloc[1:, [names.index(name) for name in needed]].set_axis(needed, axis=1)
        table = table.apply(lambda column: column.str.strip())
        complete = table[(table != "").all(axis=1)]
        labels = pandas.to_numeric(complete["label"], errors="coerce")
        for row, label in complete["label"][~labels.isin(ID2LABEL)].items():
            raise UserError(f"{path}, row {row}: label {label!r} is neither 0 (bad) nor 1 (good)")
        once = complete.assign(label=labels.astype(int)).drop_duplicates()
        usable = once.drop_duplicates("review", keep=False)
        self.rows, self.texts = usable.index.tolist(), usable["review"].tolist()
        self.labels = usable["label"].tolist()
        self.about = (
            f"{path.name}: {len(table):,} rows, {len(table) - len(complete)} incomplete, "
            f"{len(complete) - len(once)} repeated, {len(once) - len(usable)} with both labels"
        )
        if len(usable) < 10 or set(self.labels) != set(ID2LABEL):
            raise UserError(f"{self.about}; training needs at least 10 usable rows and both labels")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[str, int]:
        return self.texts[index], self.labels[index]

    def columns(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        """Return the row numbers and texts of the given reviews, for predictions.csv."""
        return {"row": [self.rows[i] for i in indices], "text": [self.texts[i] for i in indices]}


def read_cells(path: Path) -> pandas.DataFrame:
    """Return all cells of a csv file as text. Row 0 is the header."""
    refuse_lfs_pointer(path)
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
        if "\0" in text:
            line = text.count("\n", 0, text.index("\0")) + 1
            raise UserError(f"{path} has a NUL byte on line {line}; delete it with tr -d '\\000'")
        columns = len(pandas.read_csv(io.StringIO(text), nrows=0).columns)
        return pandas.read_csv(
            io.StringIO(text),
            header=None,
            dtype=str,
            na_filter=False,
            skip_blank_lines=columns > 1,  # with one column, an empty line is also a row
        )
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        text = f"{path} is not valid UTF-8 (line {line}); save it as CSV UTF-8"
        raise UserError(f"{text}, or use iconv -f ENCODING -t UTF-8 (GB18030 or UTF-16)") from None
    except ValueError as error:
        reason = str(error).strip().split("C error: ")[-1]
        raise UserError(f"{path} is not valid CSV: {reason}; quote cells with commas") from None


def refuse_lfs_pointer(path: Path) -> None:
    """Raise UserError if a file is missing or is a git-lfs pointer."""
    reason = describe(path)
    if "git-lfs" in reason or not path.is_file():
        raise UserError(f"cannot read {path}: {reason}")


def split(reviews: Reviews, seed: int) -> list[Subset[tuple[str, int]]]:
    """Split the reviews 90:10 at random, because review files are usually sorted by label."""
    return random_split(reviews, [0.9, 0.1], torch.Generator().manual_seed(seed))


def collate(
    tokenizer: BertTokenizer, max_length: int, samples: Sequence[tuple[str, int]]
) -> tuple[Tensor, Tensor]:
    """Tokenize a batch; return token IDs [B, L], padded to the longest review, and labels [B]."""
    texts, labels = zip(*samples, strict=True)
    tokens = tokenizer(
        list(texts), padding=True, truncation=True, max_length=max_length, return_tensors="pt"
    )
    return tokens["input_ids"], torch.tensor(labels)
