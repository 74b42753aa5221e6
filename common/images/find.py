"""Which files of a folder are samples of which class, and what to say of all others."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

from common.launch.errors import UserError

ALIKE = {"val": ("valid", "validation", "test", "dev"), "train": ("training",)}


@dataclass(frozen=True)
class Found:
    """The images of `root/<class>/**`, in torchvision's order.

    Attributes:
        classes: the names in the order of their numbers.
        files: paths relative to the root.
        labels: numbers of the classes, one per file.
        passed: how many files of which ending are not read.
        empty: folders without a file, which are not classes.
    """

    classes: list[str]
    files: list[bytes] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    passed: Counter[str] = field(default_factory=Counter)
    empty: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """What is not used, in words; nothing if all is."""
        empty = [f"no file in {', '.join(self.empty)}: not counted as classes"] * bool(self.empty)
        passed = [f"{counted(self.passed)} passed over"] * bool(self.passed)
        return ", ".join(passed + empty)


def find_images(root: Path, classes: Sequence[str] = ()) -> Found:
    """Find the images, without hidden files and folders (`.ipynb_checkpoints`, macOS's `._*`).

    Args:
        root: the folder.
        classes: their names; by default those of the folders with files, sorted.

    Raises:
        UserError: there is no such folder, or it holds no class, another class, or a class without
            an image.
    """
    folders = _folders(root)
    listed = {name: _visible(root, name) for name in folders}
    here = [name for name in folders if listed[name]]
    found = Found(list(classes) or here, empty=[name for name in folders if not listed[name]])
    if unknown := sorted(set(here) - set(found.classes)):
        raise UserError(
            f"{readable(root / unknown[0])}: the training set has no such class, "
            f"it has {', '.join(map(readable, found.classes[:5]))} ..."
        )
    for name in here:
        images = [file for file in listed[name] if file.lower().endswith(IMG_EXTENSIONS)]
        passed = Counter(Path(file).suffix.lower() for file in set(listed[name]) - set(images))
        if not images:
            raise UserError(
                f"{readable(root / name)} holds no image that can be read ({counted(passed)}): "
                f"convert them to one of {', '.join(IMG_EXTENSIONS)}, or remove the folder"
            )
        found.passed.update(passed)
        found.files.extend(map(os.fsencode, images))
        found.labels.extend([found.classes.index(name)] * len(images))
    if not found.files:
        raise UserError(
            f"{readable(root)} holds no image in its {len(folders)} folders "
            f"({', '.join(IMG_EXTENSIONS)})"
        )
    return found


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


def _visible(root: Path, name: str) -> list[str]:
    """The files below a folder, relative to the root, but for what is hidden."""
    found: list[str] = []
    for folder, below, files in os.walk(root / name, followlinks=True):
        below[:] = [entry for entry in below if not entry.startswith(".")]
        inside = os.path.relpath(folder, root)
        found += [f"{inside}/{file}" for file in files if not file.startswith(".")]
    return sorted(found, key=lambda file: file.rsplit("/", 1))  # by folder, then by name


def counted(endings: Counter[str]) -> str:
    """Numbers of files by ending, the most frequent first: `3 .heic, 1 without an ending`."""
    ordered = sorted(endings.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{number} {ending or 'without an ending'}" for ending, number in ordered)


def readable(path: Path | str) -> str:
    r"""A path as UTF-8, for files and messages: a byte of another encoding is written `\xb9`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
