"""Train a linear model on bert_dp's reviews, as a baseline for BERT's accuracy.

    python -m examples.bert_dp.further.baseline --csv FILE

The model is a linear SVM on TF-IDF features of characters and character pairs.
"""

from pathlib import Path
from statistics import mean

import tyro
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import make_pipeline
from sklearn.svm import LinearSVC

from common.launch import one_line_errors

from ..args import REVIEWS
from ..data import Reviews, split


def main(csv: Path = REVIEWS, seeds: int = 5) -> None:
    """Train on several random splits, and print the accuracy on their validation reviews.

    Args:
        csv: csv file with the columns label (0 or 1) and review.
        seeds: number of splits; the other programs use the same splits with --seed 0, 1, ...
    """
    reviews, accuracies = Reviews(csv.expanduser()), []
    for seed in range(seeds):
        train, validation = (zip(*part, strict=True) for part in split(reviews, seed))
        model = make_pipeline(TfidfVectorizer(analyzer="char", ngram_range=(1, 2)), LinearSVC())
        accuracies.append(model.fit(*train).score(*validation))
        print(f"seed {seed}: accuracy {accuracies[-1]:.4f}")
    print(f"mean accuracy {mean(accuracies):.4f}")


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main)
