"""bert_dp: train a linear model on the same reviews. A BERT has to be better than this.

    python -m examples.bert_dp.baseline             # the shipped reviews
    python -m examples.bert_dp.baseline --csv FILE  # takes seconds

It weights characters and pairs of them (TF-IDF), and separates the classes with a linear SVM. Each
seed splits the reviews as `python -m examples.bert_dp --seed` does.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import make_pipeline
from sklearn.svm import LinearSVC
from tyro.conf import arg

from common.launch.args import fail, parse
from common.launch.errors import UserError
from common.launch.flags import MustExist, at_least
from examples.bert_dp.reviews import Reviews, read_reviews, split


@dataclass(frozen=True)
class Args:
    """Train a linear model on reviews, once for each seed."""

    csv: Annotated[Path | None, arg(metavar="FILE"), MustExist()] = None
    """Reviews to train on, columns label and review (default: those shipped with the example)."""
    columns: Annotated[tuple[str, str], arg(metavar="TEXT LABEL")] = ("review", "label")
    """Names of the columns of --csv with the reviews and with the labels."""
    seeds: Annotated[int, arg(metavar="N")] = 5
    """Splits to train on: of the seeds 0, 1, ..."""

    def __post_init__(self) -> None:
        at_least(1, seeds=self.seeds)


def accuracy(reviews: Reviews, seed: int) -> float:
    """Train on nine tenths of the reviews; the share of the others that is classified correctly."""
    model = make_pipeline(TfidfVectorizer(analyzer="char", ngram_range=(1, 2)), LinearSVC())
    (texts, labels), (others, expected) = (
        ([reviews.texts[n] for n in part], [reviews.labels[n] for n in part])
        for part in split(reviews, seed)
    )
    return float(model.fit(texts, labels).score(others, expected))


def main() -> None:
    """Print the accuracy for each seed, and their mean."""
    args = parse(Args, description=__doc__, command="python -m examples.bert_dp.baseline")
    try:
        reviews = read_reviews(args.csv, args.columns)
    except UserError as error:
        fail(error)
    print(reviews)
    found = [accuracy(reviews, seed) for seed in range(args.seeds)]
    for seed, value in enumerate(found):
        print(f"seed {seed}: accuracy {value:.4f}")
    print(f"mean {mean(found):.4f}, from {min(found):.4f} to {max(found):.4f}")


if __name__ == "__main__":
    main()
