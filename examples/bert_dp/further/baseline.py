"""Train a linear model on the same reviews, as a baseline for BERT's accuracy.

    python -m examples.bert_dp.further.baseline --csv FILE

The model is a linear SVM on TF-IDF features of characters and character pairs.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import make_pipeline
from sklearn.svm import LinearSVC

from ..args import REVIEWS, run
from ..data import Reviews, split


@dataclass(frozen=True)
class Args:
    """Train a linear model on reviews."""

    csv: Path = REVIEWS
    """csv file with the columns label (0 or 1) and review."""
    seeds: int = 5
    """Number of splits; the other programs use the same splits with --seed 0, 1, ..."""


def main(args: Args) -> None:
    """Print the accuracy on each split's validation reviews."""
    reviews, accuracies = Reviews(args.csv), []
    for seed in range(args.seeds):
        train, validation = (zip(*part, strict=True) for part in split(reviews, seed))
        model = make_pipeline(TfidfVectorizer(analyzer="char", ngram_range=(1, 2)), LinearSVC())
        accuracies.append(model.fit(*train).score(*validation))
        print(f"seed {seed}: accuracy {accuracies[-1]:.4f}")
    print(f"mean accuracy {mean(accuracies):.4f}")


if __name__ == "__main__":
    run(main, Args)
