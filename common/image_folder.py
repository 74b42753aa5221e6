"""A dataset that reads a folder of images as bytes, with reproducible random crops.

The seed, the epoch and an image's index determine its crop. Crops therefore do not depend on the
number of ranks or loader workers, or on interruptions.
"""

import os
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision import datasets
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from common.checkpoint import describe
from common.launch import UserError

# Folders that file servers, archivers and Windows create; they are not classes.
NO_CLASSES = {"@eaDir", "@Recycle", "@Recently-Snapshot", "@__thumb", "#recycle", "#snapshot"}
NO_CLASSES |= {"$RECYCLE.BIN", "System Volume Information", "__MACOSX", "lost+found"}


class ImageFolder(datasets.ImageFolder):
    """torchvision's ImageFolder with images as bytes [3, size, size] and reproducible crops.

    A key (epoch, index) selects a random crop; a plain index selects the center crop.

    Args:
        root: folder with one subfolder of images per class.
        size: height and width of the images, in pixels.
        seed: seed of the random crops.
        classes: class names in the order of their labels; default: the sorted folder names.

    Raises:
        UserError: the folder or a class is missing, empty or unknown, or links repeat images.
    """

    def __init__(
        self, root: Path, size: int, seed: int = 0, classes: Sequence[str] | None = None
    ) -> None:
        self.seed, self.known_classes = seed, classes
        self.center_crop = center_crop(size)
        self.random_crop = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()])
        try:
            super().__init__(str(root))
        except OSError as error:
            siblings = ", ".join(sorted(readable(path.name) for path in root.parent.glob("*/"))[:5])
            raise UserError(
                f"{readable(error.filename)}: {error.strerror}; expected {readable(root)}/CLASS/"
                f"*.jpg ({readable(root.parent)} contains {siblings or 'no folders'})"
            ) from None

    @property
    def columns(self) -> dict[str, list[str]]:
        """The image paths, as a column for `predictions.csv`."""
        return {"file": [readable(path) for path, _ in self.samples]}

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        """Return the class names and their labels."""
        names = list(self.known_classes or _class_folders(directory))
        return names, {name: label for label, name in enumerate(names)}

    @staticmethod
    def make_dataset(
        directory: str | Path, class_to_idx: dict[str, int], *_: Any, **__: Any
    ) -> list[tuple[str, int]]:
        """Return each image's path and label."""
        samples, reached = list[tuple[str, int]](), {os.path.realpath(directory): str(directory)}
        for name, folder in _class_folders(directory).items():
            if name not in class_to_idx:
                known = ", ".join([*list(class_to_idx)[:5], "..."])
                text = f"{readable(folder)} is not a class of the training set ({known})"
                raise UserError(f"{text}; rename or remove it")
            if not (paths := list_images(folder, reached)):
                kinds = " ".join(IMG_EXTENSIONS)
                raise UserError(f"{readable(folder)} has no images ({kinds}); remove it")
            samples += [(path, class_to_idx[name]) for path in paths]
        return samples

    def __getitem__(self, index: Any) -> tuple[Tensor, int]:
        """Return an image as bytes [3, size, size], and its label."""
        epoch, index = index if isinstance(index, tuple) else (None, index)
        path, label = self.samples[index]
        image = decode(path)
        if epoch is None:
            return self.center_crop(image), label
        with torch.random.fork_rng(devices=[]):
            seeds = np.random.SeedSequence([self.seed % 2**64, epoch, index])
            # torch.manual_seed would also set the GPU's generator.
            torch.default_generator.manual_seed(int(seeds.generate_state(1)[0]))
            return self.random_crop(image), label


def decode(path: str | Path) -> Tensor:
    """Decode an image file to RGB bytes [3, H, W]. The EXIF orientation is ignored.

    Raises:
        UserError: the file is damaged or not an image.
    """
    try:
        try:
            image = decode_image(torch.from_numpy(np.fromfile(path, np.uint8)), ImageReadMode.RGB)
        except RuntimeError:  # BMP, TIFF and damaged files, for example
            with Image.open(path) as opened:
                if opened.mode.startswith(("I", "F")):
                    raise ValueError("more than 8 bits per channel; convert it to PNG") from None
                image = F.pil_to_tensor(opened.convert("RGB"))
    except Exception as error:  # Pillow raises errors of many types for damaged files
        reason = describe(Path(path)) if isinstance(error, UnidentifiedImageError) else error
        raise UserError(f"cannot decode {readable(path)}: {reason}") from None
    image = image[0] if image.dim() == 4 else image  # the first frame of an animation
    return F.to_dtype(image, torch.uint8, scale=True)  # converts 16-bit images to 8 bits


def center_crop(size: int) -> v2.Compose:
    """Return the transform for evaluation; for size 224: Resize(256), then CenterCrop(224)."""
    return v2.Compose([v2.Resize(round(size * 256 / 224)), v2.CenterCrop(size)])


def readable(path: str | Path) -> str:
    r"""Return a path as text. Bytes that are not valid UTF-8 are escaped, for example `\xb9`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _class_folders(root: str | Path) -> dict[str, str]:
    """Return the class folders, sorted by name. Names are in NFC; macOS may decompose them."""
    folders: dict[str, str] = {}
    for entry in list(os.scandir(root)):
        if entry.is_symlink() and not Path(entry.path).exists():
            raise UserError(f"{readable(entry.path)} is a broken link; fix or remove it")
        if entry.is_dir() and not _is_hidden(entry.name):
            name = unicodedata.normalize("NFC", readable(entry.name))
            if name in folders:
                raise UserError(f"{readable(root)} has {name} in two Unicode forms; merge them")
            folders[name] = os.fspath(entry.path)
    if not folders:
        root = readable(root)
        raise UserError(f"{root} has no class folders; expected {root}/CLASS/*.jpg")
    return dict(sorted(folders.items()))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in NO_CLASSES


def list_images(folder: str, reached: dict[str, str]) -> list[str]:
    """Return all images below a folder. Links are followed, but may not lead to an image twice.

    `reached` maps the real paths of folders and linked files to the paths that led there.
    """
    real_folder, images = _reach(folder, reached), list[str]()
    for entry in sorted(os.scandir(folder), key=lambda entry: (entry.is_dir(), entry.name)):
        if _is_hidden(entry.name):
            continue
        if entry.is_dir():
            images += list_images(entry.path, reached)
        elif entry.name.lower().endswith(IMG_EXTENSIONS):
            if entry.is_symlink() or f"{real_folder}/{entry.name}" in reached:
                _reach(entry.path, reached)
            images.append(entry.path)
    return images


def _reach(path: str, reached: dict[str, str]) -> str:
    """Record that a folder or linked file was reached, and return its real path."""
    real = os.path.realpath(path)
    # A link to a file in a folder that was already reached also repeats an image.
    first = reached.get(real) or (Path(path).is_symlink() and reached.get(str(Path(real).parent)))
    if first:
        raise UserError(f"{readable(path)} duplicates images of {readable(first)}; remove the link")
    reached[real] = path
    return real
