"""The paths of many images in two arrays, which forked processes can share.

A list of a million strings would take 100 MB, and as each use of a string is counted in it, every
process would soon have a copy of its own.
"""

import hashlib
import os
from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

AT_ONCE = 1 << 14  # names


class Names(Sequence[str]):
    """Paths, one after the other, each with a zero byte after it.

    Args:
        text: all bytes, uint8.
        ends: where the zero bytes are, [N], int64.
    """

    def __init__(self, text: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.text, self.ends = text, ends

    @classmethod
    def of(cls, text: bytes | bytearray) -> "Names":
        """The names in a text."""
        content = np.frombuffer(text, np.uint8)
        return cls(content, np.flatnonzero(content == 0))

    def __len__(self) -> int:
        """Number of names."""
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        """A name, or a list of them."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]  # raises IndexError
        start = int(self.ends[number - 1]) + 1 if number else 0
        return os.fsdecode(self.text[start : int(self.ends[number])].tobytes())

    def digest(self, labels: NDArray[np.int64]) -> str:
        """Of all names and their labels, [N].

        As of a NumPy array of bytes, in which each name takes the room of the longest: checkpoints
        hold this digest.
        """
        longest = int(np.diff(self.ends, prepend=-1).max()) - 1
        digest = hashlib.sha256()
        for first in range(0, len(self), AT_ONCE):
            names = [os.fsencode(name) for name in self[first : first + AT_ONCE]]
            digest.update(np.array(names, f"S{longest}").tobytes())
        digest.update(labels.tobytes())
        return digest.hexdigest()[:16]
