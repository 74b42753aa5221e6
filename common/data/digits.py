"""The embedded digits, read and split as scikit-learn does, without its import.

Every rank reads them, and the import costs each of them 1 to 5 seconds.
"""

import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def load_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Pixels [1797, 64], 0 to 16, and labels [1797], from the file of the installed package."""
    package = importlib.util.find_spec("sklearn")  # found, not imported
    assert package is not None, "pyproject.toml asks for scikit-learn"
    assert package.origin is not None
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(file, delimiter=",", dtype=np.int64)
    return table[:, :-1].astype(np.float64), table[:, -1]


def stratified_split(
    labels: NDArray[np.int64], test_samples: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The indices of the training and of the test part; each class has its share in both.

    Equals scikit-learn's `train_test_split(..., stratify=labels, random_state=seed)`.
    """
    random = np.random.RandomState(seed)  # numpy promises that its numbers never change
    counts = np.bincount(labels)
    train_counts = _shares(counts, len(labels) - test_samples, random)
    test_counts = _shares(counts - train_counts, test_samples, random)
    train, test = [], []
    for number, (of_train, of_test) in enumerate(zip(train_counts, test_counts, strict=True)):
        members = random.permutation(np.flatnonzero(labels == number))
        train.append(members[:of_train])
        test.append(members[of_train : of_train + of_test])
    return random.permutation(np.concatenate(train)), random.permutation(np.concatenate(test))


def _shares(
    counts: NDArray[np.int64], samples: int, random: np.random.RandomState
) -> NDArray[np.int64]:
    """How many of each class to draw: rounded down, then one more for the largest remainders."""
    exact = counts / counts.sum() * samples
    shares = np.floor(exact)
    missing, remainders = int(samples - shares.sum()), exact - shares
    for value in np.unique(remainders)[::-1]:
        if missing == 0:
            break
        (equal,) = np.nonzero(remainders == value)
        chosen = random.choice(equal, min(len(equal), missing), replace=False)
        shares[chosen] += 1
        missing -= len(chosen)
    return shares.astype(np.int64)
