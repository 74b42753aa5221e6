"""Classify a sentence, or each row of a csv file.

    python -m examples.bert_dp.predict --text 房间干净，服务热情，下次还来。
    python -m examples.bert_dp.predict --csv new.csv      # writes new.predictions.csv

train.py and trainer.py save the model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas
import torch
import tyro
from transformers import pipeline

from common.launch import UserError, expand_home, one_line_errors

from .data import read_cells
from .model import pretrained


@dataclass(frozen=True)
class Args:
    """Classify reviews with a trained BERT."""

    model: Path = Path("runs/bert_dp/model")
    """Folder of the trained model."""
    text: str = ""
    """Review to classify."""
    csv: Path | None = None
    """csv file with reviews to classify."""
    column: str = "review"
    """Column of --csv that contains the reviews."""
    out: Path | None = None
    """New file for the rows of --csv and their predictions (default: NAME.predictions.csv)."""


def main(args: Args) -> None:
    """Classify a sentence directly, and a file with transformers' pipeline."""
    if not args.text and not args.csv:
        raise UserError("nothing to predict; pass --text or --csv")
    model, tokenizer = pretrained(args.model, max_length=1, new_head=False)
    limit: Any = {"truncation": True, "max_length": model.config.max_position_embeddings}
    if args.text:
        tokens = tokenizer(args.text, return_tensors="pt", **limit)
        with torch.inference_mode():
            probabilities = model.eval()(**tokens).logits.softmax(dim=1)[0]  # [2]
        names: Any = model.config.id2label
        best = int(probabilities.argmax())
        print(f"{names[best]}  {probabilities[best]:.4f}")
    if args.csv:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        classify = pipeline("text-classification", model, tokenizer=tokenizer, device=device)
        out = args.out or Path(f"{args.csv.stem}.predictions.csv")
        predict_file(args.csv, args.column, out, lambda x: classify(x, batch_size=64, **limit))


def predict_file(path: Path, column: str, out: Path, classify: Callable[..., Any]) -> None:
    """Write the cells of a csv file, and the columns prediction and probability, to a new file."""
    if out.exists():
        raise UserError(f"{out} already exists; choose another file with --out")
    cells = read_cells(path)
    header = cells.iloc[0].tolist()
    if column not in header:
        raise UserError(f"{path} has no column {column}; choose --column from {', '.join(header)}")
    texts = cells.iloc[1:, header.index(column)]
    texts = texts[texts.str.strip() != ""]
    found = classify(texts.tolist()) if len(texts) else []
    answers = pandas.DataFrame(found, texts.index, ["label", "score"])
    cells = cells.join(answers.round(4).astype(str)).fillna("")
    for number, name in enumerate(("prediction", "probability"), len(header)):
        while name in header:  # keep an existing column of the same name
            name += "_new"
        cells.iloc[0, number] = name
    # With this line terminator, pandas quotes cells that contain a carriage return.
    cells.to_csv(out, mode="x", header=False, index=False, lineterminator="\r\n")
    print(f"wrote {len(cells) - 1:,} rows to {out}")


if __name__ == "__main__":
    with one_line_errors():
        main(expand_home(tyro.cli(Args)))
