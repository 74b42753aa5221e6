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
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from common.checkpoint import describe
from common.launch import UserError

# Folders that file servers, archivers and Windows create; they are not classes.
NO_CLASSES = {"@eaDir", "@Recycle", "@Recently-Snapshot", "@__thumb", "#recycle", "#snapshot"}
NO_CLASSES |= {"$RECYCLE.BIN", "System Volume Information", "__MACOSX", "lost+found"}


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images as bytes [3, size, size] and labels, from a folder with one subfolder per class.

    Classes and images are in the same order as in torchvision's ImageFolder. A key (epoch, index)
    selects a random crop; a plain index selects the center crop.

    Args:
        root: folder with the class folders.
        size: height and width of the images, in pixels.
        seed: seed of the random crops.
        classes: class names in the order of their labels; default: the sorted folder names.

    Raises:
        UserError: the folder or a class is missing, empty or unknown, or a link repeats images.
    """

    def __init__(
        self, root: Path, size: int, seed: int = 0, classes: Sequence[str] | None = None
    ) -> None:
        self.seed = seed
        self.center_crop = center_crop(size)
        self.random_crop = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()])
        folders = _class_folders(root)
        self.classes = list(classes or folders)
        self.samples: list[tuple[str, int]] = []
        reached = {os.path.realpath(root): str(root)}
        for name, folder in folders.items():
            if name not in self.classes:
                text = f"{readable(folder)} is not a class of the training set"
                raise UserError(f"{text}; rename or remove it")
            if not (paths := list_images(folder, reached)):
                kinds = " ".join(IMG_EXTENSIONS)
                raise UserError(f"{readable(folder)} has no images ({kinds}); remove it")
            label = self.classes.index(name)
            self.samples += [(path, label) for path in paths]
        self.targets = [label for _, label in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def columns(self) -> dict[str, list[str]]:
        """The image paths, as a column for `predictions.csv`."""
        return {"file": [readable(path) for path, _ in self.samples]}

    def __getitem__(self, index: Any) -> tuple[Tensor, int]:
        """Return an image as bytes [3, size, size], and its label."""
        epoch, index = index if isinstance(index, tuple) else (None, index)
        path, label = self.samples[index]
        image = decode(path)
        if epoch is None:
            return self.center_crop(image), label
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would also seed the GPU's generator.
            torch.default_generator.manual_seed(hash((self.seed, epoch, index)))
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


def _class_folders(root: Path) -> dict[str, str]:
    """Return the class folders, sorted by name. Names are converted to NFC."""
    folders: dict[str, str] = {}
    for entry in _visible(os.fspath(root)):
        if entry.is_symlink() and not Path(entry.path).exists():
            raise UserError(f"{readable(entry.path)} is a broken link; fix or remove it")
        if entry.is_dir():
            name = unicodedata.normalize("NFC", readable(entry.name))
            if name in folders:
                raise UserError(f"{readable(root)} has {name} in two Unicode forms; merge them")
            folders[name] = entry.path
    if not folders:
        raise UserError(f"{readable(root)} has no class folders; expected CLASS/*.jpg in it")
    return dict(sorted(folders.items()))


def _visible(folder: str) -> list[os.DirEntry[str]]:
    """Return a folder's visible entries: files, then folders, each sorted by name."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: (entry.is_dir(), entry.name))
    except OSError as error:
        text = f"{readable(folder)}: {error.strerror}"
        raise UserError(f"{text}; expected a folder with images") from None
    return [x for x in entries if not x.name.startswith(".") and x.name not in NO_CLASSES]


def list_images(folder: str, reached: dict[str, str]) -> list[str]:
    """Return all images below a folder. Links are followed, but must not repeat images.

    `reached` maps the real paths of folders and images to the paths that led there.
    """
    real_folder, images = os.path.realpath(folder), list[str]()
    _reach(real_folder, folder, reached)
    for entry in _visible(folder):
        if entry.is_dir():
            images += list_images(entry.path, reached)
        elif entry.name.lower().endswith(IMG_EXTENSIONS):
            real = f"{real_folder}/{entry.name}"
            _reach(os.path.realpath(real) if entry.is_symlink() else real, entry.path, reached)
            images.append(entry.path)
    return images


def _reach(real: str, path: str, reached: dict[str, str]) -> None:
    """Record that `path` leads to `real`. Raise UserError if another path leads there."""
    if first := reached.get(real):
        raise UserError(f"{readable(path)} duplicates images of {readable(first)}; remove the link")
    reached[real] = path
