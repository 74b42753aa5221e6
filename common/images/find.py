"""Which files of a folder are samples of which class, and what to say of all others."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from torchvision.datasets.folder import IMG_EXTENSIONS

from common.images.names import Names
from common.launch.errors import UserError

ALIKE = {"val": ("valid", "validation", "test", "dev"), "train": ("training",)}


Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class Found:
    """The images of `root/<class>/**`, in torchvision's order.

    Attributes:
        classes: the names in the order of their numbers.
        files: paths relative to the root.
        labels: numbers of the classes, [N].
        digest: of files and labels.
        unused: what lies there and is not used, in words; nothing if all is.
        folders: those that were listed, relative to the root, each with what `stamp` said before.
    """

    classes: list[str]
    files: Names
    labels: NDArray[np.int64]
    digest: str
    unused: str
    folders: dict[str, Stamp]


def stamp(folder: Path) -> Stamp:
    """What differs after a file or folder in a folder was added, removed or renamed.

    Its number, and the times of its last change in ns; the second of them nobody can set. Zeros if
    nobody may know.
    """
    try:
        status = folder.stat()
    except OSError:
        return 0, 0, 0
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def find_images(root: Path, classes: Sequence[str] = ()) -> Found:
    """Find the images, without hidden files and folders (`.ipynb_checkpoints`, macOS's `._*`).

    Args:
        root: the folder.
        classes: their names; by default those of the folders with files, sorted.

    Raises:
        UserError: there is no such folder, or it holds no class, another class, or a class without
            an image; or one of its folders cannot be read.
    """
    stamps = {".": stamp(root)}
    text, counts, passed, barren = bytearray(), dict[str, int](), Counter[str](), list[str]()
    folders = _folders(root)
    for name in folders:
        images, others = list[str](), list[str]()
        for file in _visible(root, name, stamps):
            (images if file.lower().endswith(IMG_EXTENSIONS) else others).append(file)
        of_class = Counter(Path(file).suffix.lower() for file in others)
        if images:
            text += os.fsencode("\0".join(images)) + b"\0"
        elif others:
            barren.append(
                f"{readable(root / name)} holds no image that can be read ({counted(of_class)})"
            )
        if images or others:
            counts[name] = len(images)
        passed.update(of_class)
    known = list(classes) or list(counts)
    if unknown := sorted(set(counts) - set(known)):
        raise UserError(
            f"{readable(root / unknown[0])}: the training set has no such class, "
            f"it has {', '.join(map(readable, known[:5]))} ..."
        )
    if barren:
        raise UserError(
            f"{barren[0]}: convert them to one of {', '.join(IMG_EXTENSIONS)}, or remove the folder"
        )
    if not text:
        raise UserError(
            f"{readable(root)} holds no image in its {len(folders)} folders "
            f"({', '.join(IMG_EXTENSIONS)})"
        )
    numbers = {name: number for number, name in enumerate(known)}
    labels = np.repeat([numbers[name] for name in counts], list(counts.values()))
    files, empty = Names.of(text), [name for name in folders if name not in counts]
    return Found(known, files, labels, files.digest(labels), _unused(passed, empty), stamps)


def _unused(passed: Counter[str], empty: list[str]) -> str:
    """What is not used, in words.

    Args:
        passed: how many files of which ending are not read.
        empty: folders without a file, which are not classes.
    """
    words = [f"{counted(passed)} passed over"] * bool(passed)
    words += [f"no file in {', '.join(map(readable, empty))}: not counted as classes"] * bool(empty)
    return ", ".join(words)


def images_below(folder: Path) -> list[str]:
    """The images in a folder and in those below it, relative to it, without hidden ones.

    Raises:
        UserError: there is none.
    """
    files = [os.path.normpath(file) for file in _visible(folder, ".")]
    images = [file for file in files if file.lower().endswith(IMG_EXTENSIONS)]
    if not images:
        endings = Counter(Path(file).suffix.lower() for file in files)
        there = counted(endings) or "no file"
        raise UserError(f"{readable(folder)} holds no image that can be read ({there})")
    return images


def _folders(root: Path) -> list[str]:
    """The visible folders of the root, sorted.

    Raises:
        UserError: there is none; what is there instead is named.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except OSError as error:
        _unreadable(error)
    names = [name for name in names if not name.startswith(".")]
    if names:
        return names
    near = ""
    if root.parent.is_dir() and not root.exists():
        beside = sorted(path.name for path in root.parent.iterdir() if path.is_dir())
        shown = ", ".join(map(readable, beside[:5])) + " ..." * (len(beside) > 5)
        near = f"; {readable(root.parent)} holds {shown or 'no folder'}"
        for other in ALIKE.get(root.name, ()):
            if other in beside:
                near += f": rename {other} to {root.name}, or link it (ln -s {other} {root.name})"
                break
    raise UserError(
        f"{readable(root)} must be a folder with one folder of images per class: CLASS/*.jpg{near}"
    )


def _visible(root: Path, name: str, stamps: dict[str, Stamp] | None = None) -> list[str]:
    """The files below a folder, relative to the root, but for what is hidden.

    Args:
        root: the root.
        name: of the folder in it.
        stamps: gets those of the folder and of all below, each from before it is listed.
    """
    found: dict[str, list[str]] = {}
    if stamps is not None:
        stamps[name] = stamp(root / name)
    for folder, below, files in os.walk(root / name, onerror=_unreadable, followlinks=True):
        below[:] = [entry for entry in below if not entry.startswith(".")]
        inside = os.path.relpath(folder, root)
        if stamps is not None:
            stamps |= {f"{inside}/{entry}": stamp(Path(folder, entry)) for entry in below}
        found[inside] = sorted(file for file in files if not file.startswith("."))
    return [f"{inside}/{file}" for inside in sorted(found) for file in found[inside]]


def _unreadable(error: OSError) -> NoReturn:
    """Without this, a folder that cannot be listed would be one without images."""
    raise UserError(f"{readable(error.filename)} cannot be read ({error.strerror})") from None


def counted(endings: Counter[str]) -> str:
    """Numbers of files by ending, the most frequent first: `3 .heic, 1 without an ending`."""
    ordered = sorted(endings.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(
        f"{number} {readable(ending) or 'without an ending'}" for ending, number in ordered
    )


def readable(path: Path | str) -> str:
    r"""A path as UTF-8, for files and messages: a byte of another encoding is written `\xb9`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
