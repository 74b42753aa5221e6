"""Folders of images: found, decoded, cropped, resized; and images to train on where there are no files.

The distribution is that of torchvision's `RandomResizedCrop` + `RandomHorizontalFlip` for training and of `Resize` +
`CenterCrop` for evaluation. Three things make it fast: of a JPEG only the cropped region is decoded, it is resized
once, straight to its final size, and pixels stay bytes until the batch is on the device (`common.data.Batches`).

Everything random follows from (seed, epoch, index of the sample): it does not matter which worker or rank loads it, or
whether the run was interrupted.
"""

import hashlib
import importlib
import importlib.util
import io
import math
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

from common.distributed import World, main_first, say
from common.errors import UserError
from common.pixel_cache import PixelCache, pixel_cache

# nvimgcodec decodes a region of a JPEG without computing the rest; it has no wheel for macOS.
DECODER = (
    "nvimgcodec" if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nvimgcodec") else "Pillow"
)
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # RandomResizedCrop's: share of the area, width / height
KEPT = 224 / 256  # what CenterCrop(224) keeps of the shorter side after Resize(256)

Box = tuple[int, int, int, int]
"""Top, left, height, width."""
Pixels = NDArray[np.uint8]


class BrokenImageError(ValueError):
    """A file that is no image, or one that is not complete."""


@dataclass(frozen=True)
class Batch:
    """What a loader worker sends: bytes, which are a quarter of floats."""

    images: Tensor
    """[B, 3, size, size], uint8, in channels-last order."""
    labels: Tensor
    """[B], int64."""
    indices: Tensor
    """[B], int64: which samples of the dataset."""
    broken: list[str]
    """Why a sample was replaced by its successor, if any was."""

    def pin_memory(self) -> "Batch":
        """The same in page-locked memory, from which a GPU copies by itself (called by the DataLoader)."""
        return Batch(self.images.pin_memory(), self.labels.pin_memory(), self.indices, self.broken)


@dataclass(frozen=True)
class ImageFolder(Dataset[Batch]):
    """The images of `root/<class>/**`, as torchvision's ImageFolder finds and orders them, without `._*` companions.

    Args:
        root: the folder.
        size: height and width of the images, in pixels.
        training: random crops and flips; otherwise the middle.
        seed: of everything random.
        skip_broken: replace a broken image by the next one that is not, instead of raising.
        cache: decoded pixels.
        classes: the names in the order of their numbers; by default those of the folders, sorted.

    Raises:
        UserError: there is no such folder, or it holds no class, another class, or no image.
    """

    root: Path
    size: int
    training: bool
    seed: int = 0
    skip_broken: bool = False
    cache: PixelCache | None = None
    classes: Sequence[str] = ()
    labels: NDArray[np.int64] = field(init=False, repr=False)
    _files: NDArray[np.bytes_] = field(init=False, repr=False)  # an array: forked workers share its memory, where the
    # reference counts of a list of strings would be written to, and so copied page by page

    def __post_init__(self) -> None:
        try:
            here, _ = find_classes(str(self.root))
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{self.root} must be a folder with one folder of images per class: CLASS/*.jpg") from None
        known = list(self.classes or here)
        if unknown := sorted(set(here) - set(known)):
            raise UserError(
                f"{self.root / unknown[0]}: the training set has no such class, it has {', '.join(known[:5])} ..."
            )
        numbers = {name: number for number, name in enumerate(known)}
        found = make_dataset(str(self.root), numbers, is_valid_file=_is_image, allow_empty=True)
        if not found:
            raise UserError(f"{self.root} holds no image in its {len(here)} folders ({', '.join(IMG_EXTENSIONS)})")
        set_field = object.__setattr__  # a frozen dataclass is set up
        set_field(self, "classes", known)
        set_field(self, "labels", np.array([label for _, label in found]))
        set_field(self, "_files", np.array([os.fsencode(os.path.relpath(path, self.root)) for path, _ in found]))

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    def file(self, index: int) -> Path:
        """The path of an image."""
        return self.root / os.fsdecode(bytes(self._files[index]))

    @property
    def names(self) -> list[str]:
        """The paths of all images, relative to the root."""
        return [os.fsdecode(bytes(name)) for name in self._files]

    @property
    def digest(self) -> str:
        """Of the names and classes of all images."""
        return hashlib.sha256(self._files.tobytes() + self.labels.tobytes()).hexdigest()[:16]

    def mistake(self, index: int, error: Exception) -> UserError:
        """What to tell the user about a broken image."""
        return UserError(f"{self.file(index)} cannot be used ({error}): remove or replace it, or give --skip-broken")

    def pixels(self, index: int) -> Pixels:
        """A whole image, decoded: [H, W, 3]."""
        content = self.file(index).read_bytes()
        return decode(content, (0, 0, *dimensions(content)))

    def __getitems__(self, keys: Sequence[Any]) -> Batch:
        """A batch at once.

        Args:
            keys: indices, or for training (epoch, index).
        """
        pairs = [key if isinstance(key, tuple) else (0, key) for key in keys]
        images = np.empty((len(pairs), self.size, self.size, 3), np.uint8)  # [B, size, size, 3]
        labels = np.empty(len(pairs), np.int64)
        broken: list[str] = []
        for row, (epoch, index) in enumerate(pairs):
            for successor in range(len(self)):
                chosen = (index + successor) % len(self)
                try:
                    images[row] = self._load(epoch, chosen)
                except (BrokenImageError, OSError) as error:
                    if not self.skip_broken:
                        raise self.mistake(chosen, error) from None
                    broken.append(f"{self.file(chosen)} ({error})")
                    continue
                labels[row] = self.labels[chosen]
                break
            else:
                raise UserError(f"{self.root}: no image can be read, the last one because of {broken[-1]}")
        indices = torch.tensor([index for _, index in pairs])
        return Batch(torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels), indices, broken)

    def _load(self, epoch: int, index: int) -> Pixels:
        """One image, cropped, resized and flipped: [size, size, 3]."""
        if self.cache:
            whole = self.cache.pixels(index)  # [H, W, 3]
            if whole is None:
                raise BrokenImageError("broken when the cache was built")
            height, width = whole.shape[:2]
        else:
            content = self.file(index).read_bytes()
            height, width = dimensions(content)
        flip = False
        if self.training:
            (top, left, rows, columns), flip = random_crop(self.seed, epoch, index, height, width)
        else:
            top, left, rows, columns = middle(height, width)
        if self.cache:
            assert whole is not None
            region = whole[top : top + rows, left : left + columns]
        else:
            region = decode(content, (top, left, rows, columns))
        return resize(region, self.size, flip)


@dataclass(frozen=True)
class SyntheticImages(Dataset[Batch]):
    """Images made up in memory, at a cost that no training notices: a coloured pattern per class, and noise.

    Args:
        count: number of images.
        size: height and width, in pixels.
        number_of_classes: image i has class i modulo this.
        seed: of the patterns and the noise.
    """

    count: int
    size: int
    number_of_classes: int
    seed: int = 0
    cache: None = None

    @cached_property
    def _patterns(self) -> Pixels:
        random = np.random.default_rng(self.seed)
        return random.integers(0, 128, (self.number_of_classes, 7, 7, 3), np.uint8)

    @cached_property
    def _noise(self) -> Pixels:
        random = np.random.default_rng(self.seed + 1)
        return random.integers(0, 128, (8, self.size, self.size, 3), np.uint8)

    @property
    def digest(self) -> str:
        """Of what makes the images."""
        return f"synthetic {self.count} {self.number_of_classes} {self.seed}"

    @property
    def classes(self) -> list[str]:
        """The names of the classes."""
        return [f"pattern-{number}" for number in range(self.number_of_classes)]

    @property
    def names(self) -> list[str]:
        """The names of the images."""
        return [f"synthetic-{index}" for index in range(self.count)]

    def __len__(self) -> int:
        """Number of images."""
        return self.count

    def __getitems__(self, keys: Sequence[Any]) -> Batch:
        """A batch at once; keys as those of `ImageFolder`."""
        pairs = np.array([key if isinstance(key, tuple) else (0, key) for key in keys])
        labels = pairs[:, 1] % self.number_of_classes
        repeats = -(-self.size // 7)
        images = self._patterns[labels].repeat(repeats, 1).repeat(repeats, 2)[:, : self.size, : self.size]
        images = images + self._noise[pairs.sum(axis=1) % 8]  # [B, size, size, 3]
        indices = torch.from_numpy(pairs[:, 1].copy())
        return Batch(torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels.copy()), indices, [])


Images = ImageFolder | SyntheticImages


@dataclass(frozen=True)
class ImageSets:
    """What to train on and what to evaluate on."""

    name: str
    train: Images
    val: Images

    @property
    def classes(self) -> list[str]:
        """The names of the classes."""
        return list(self.train.classes)

    @property
    def size(self) -> int:
        """Height and width, in pixels."""
        return self.train.size

    @property
    def facts(self) -> dict[str, Any]:
        """What result.json says about the data."""
        return {
            "dataset": self.name,
            "train_samples": len(self.train),
            "eval_samples": len(self.val),
            "classes": len(self.classes),
            "image_size": self.size,
        }

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to be resumed: the samples, wherever they lie."""
        return {
            "train_samples": len(self.train),
            "classes": len(self.classes),
            "image_size": self.size,
            "files": self.train.digest,
        }

    def __str__(self) -> str:
        """One line."""
        decoder = "" if isinstance(self.train, SyntheticImages) else f", decoded by {DECODER}"
        return (
            f"{self.name} ({len(self.train)} train, {len(self.val)} val, {len(self.classes)} classes, "
            f"{self.size} px{decoder}{', cached' if self.train.cache else ''})"
        )


def image_folders(
    directory: Path, size: int, seed: int, skip_broken: bool, cache: Path | None, world: World
) -> ImageSets:
    """The images of `directory/train` and `directory/val`.

    Args:
        directory: the folder.
        size: height and width to which images are cropped and resized, in pixels.
        seed: of the crops.
        skip_broken: replace broken images instead of raising.
        cache: folder of decoded pixels, which are added where they are missing.
        world: this process's world.

    Raises:
        UserError: a folder is missing or empty, or `val` has a class that `train` does not have.
    """
    train = ImageFolder(directory / "train", size, training=True, seed=seed, skip_broken=skip_broken)
    val = ImageFolder(directory / "val", size, training=False, skip_broken=skip_broken, classes=tuple(train.classes))
    if cache:
        for part in (train, val):
            object.__setattr__(part, "cache", _cached(part, cache, world))  # `replace` would list the files again
    return ImageSets(str(directory), train, val)


def synthetic_images(count: int, size: int, seed: int) -> ImageSets:
    """Made-up images of 10 classes: `count` to train on, a fifth of it to evaluate on."""
    train, val = (SyntheticImages(number, size, 10, seed) for number in (count, -(-count // 5)))
    return ImageSets("synthetic images", train, val)


def _cached(images: ImageFolder, directory: Path, world: World) -> PixelCache:
    def pixels(index: int) -> Pixels | None:
        try:
            return images.pixels(index)
        except (BrokenImageError, OSError) as error:
            if images.skip_broken:
                return None
            raise images.mistake(index, error) from None

    started = time.monotonic()
    cache, decoded = pixel_cache(directory, images.root, images.names, pixels, world.cores)
    done = f"{decoded} decoded in {time.monotonic() - started:.1f} s by rank 0" if decoded else "all there already"
    say(world, f"cache {cache.folder}: {len(images)} images, {done}")
    return cache


# ------------------------------------------------------------------------------------------------------ one image


def random_crop(seed: int, epoch: int, index: int, height: int, width: int) -> tuple[Box, bool]:
    """The random crop and flip of a sample, distributed as those of torchvision's `RandomResizedCrop`.

    Drawn by a counter-based generator (Salmon et al., 2011, https://doi.org/10.1145/2063384.2063405): the sample's
    numbers are found without drawing those of the samples before it.

    Returns:
        The box, and whether to flip.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, index, 0, 0]))
    draws = generator.random(23).tolist()
    vertical, horizontal, flip = draws[20:]
    low, high = map(math.log, RATIO)
    for share, shape in zip(draws[0:20:2], draws[1:20:2], strict=True):
        area = height * width * (SCALE[0] + (SCALE[1] - SCALE[0]) * share)
        ratio = math.exp(low + (high - low) * shape)
        rows, columns = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < rows <= height and 0 < columns <= width:
            box = int(vertical * (height - rows + 1)), int(horizontal * (width - columns + 1)), rows, columns
            return box, flip < 0.5
    # No crop of these shapes fits into a very long image: as much of the middle as a permitted shape holds.
    rows, columns = min(height, round(width / RATIO[0])), min(width, round(height * RATIO[1]))
    return ((height - rows) // 2, (width - columns) // 2, max(1, rows), max(1, columns)), flip < 0.5


def middle(height: int, width: int) -> Box:
    """The square that `Resize(256)` and `CenterCrop(224)` keep, in pixels of the original."""
    side = max(1, round(KEPT * min(height, width)))
    return (height - side) // 2, (width - side) // 2, side, side


def resize(region: Pixels, size: int, flip: bool = False) -> Pixels:
    """Resize [H, W, 3] to [size, size, 3], bilinear with antialiasing: as Pillow does it, and faster."""
    owned = np.require(region, requirements=["C", "W"])  # a cached image is read-only
    image = torch.from_numpy(owned).unsqueeze(0).permute(0, 3, 1, 2)  # [1, 3, H, W], channels last: the fast way
    small = F.interpolate(image, (size, size), mode="bilinear", antialias=True)[0]  # [3, size, size]
    return (small.flip(2) if flip else small).permute(1, 2, 0).numpy()  # ten times as fast as NumPy's flip


def dimensions(content: bytes) -> tuple[int, int]:
    """Height and width of an encoded image, whose orientation tag is ignored, as in torchvision.

    Raises:
        BrokenImageError: it is no image, or a JPEG that ends early.
    """
    header = _jpeg_header(content)
    if header:
        return header[:2]
    with _opened(content) as image:
        return image.height, image.width


def decode(content: bytes, box: Box) -> Pixels:
    """Decode a region of an image to RGB.

    Args:
        content: a file of any format that Pillow knows; JPEGs take a faster way.
        box: the region.

    Returns:
        [height, width, 3].

    Raises:
        BrokenImageError: it is no image, or not complete.
    """
    top, left, rows, columns = box
    header = _jpeg_header(content)
    # CMYK (4 components): libraries differ in how they convert it, and Pillow is the reference.
    if header is None or header[2] == 4 or DECODER == "Pillow":
        with _opened(content) as image:
            try:
                whole = np.asarray(image.convert("RGB"))
            except (OSError, SyntaxError, ValueError) as error:
                raise BrokenImageError(str(error)) from None
        return whole[top : top + rows, left : left + columns]
    library, decoder, parameters = _decoders.get()
    region = library.Region(top, left, top + rows, left + columns)
    decoded = decoder.decode(library.CodeStream(content).get_sub_code_stream(region=region), params=parameters)
    if decoded is None:
        raise BrokenImageError("its JPEG data are damaged")
    return np.asarray(decoded)


def _jpeg_header(content: bytes) -> tuple[int, int, int] | None:
    """Height, width and components of a JPEG (ITU-T T.81, annex B); None for another format.

    Raises:
        BrokenImageError: it ends before its end marker, which decoders answer with grey.
    """
    if not content.startswith(b"\xff\xd8\xff"):
        return None
    position, size = 2, (0, 0, 0)
    while content[position : position + 1] == b"\xff" and position + 9 < len(content):
        marker = content[position + 1]
        if marker == 0xFF:  # padding
            position += 1
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # start of frame
            rows, columns = (int.from_bytes(content[position + at : position + at + 2]) for at in (5, 7))
            size = rows, columns, content[position + 9]
        if marker == 0xDA:  # the pixels follow: a marker in them can only be a real one
            if min(size) == 0:
                break
            if content.rfind(b"\xff\xd9", position) == -1:
                raise BrokenImageError("it is truncated")
            return size
        position += 2 + int.from_bytes(content[position + 2 : position + 4])
    raise BrokenImageError("it is truncated or damaged: a JPEG without pixels")


def _opened(content: bytes) -> Image.Image:
    if not content:
        raise BrokenImageError("it is empty")
    try:
        return Image.open(io.BytesIO(content))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        raise BrokenImageError("it is no image") from None


class _Decoders(threading.local):
    """A decoder per thread and process: it has threads, which a forked process does not inherit."""

    made_in = 0
    made: tuple[Any, Any, Any] = (None, None, None)

    def get(self) -> tuple[Any, Any, Any]:
        """The library, a decoder, its parameters."""
        if self.made_in != os.getpid():
            with _quiet():  # it reports the GPU libraries that it does not find, and that are not needed here
                nvimgcodec: Any = importlib.import_module("nvidia.nvimgcodec")
                parameters = nvimgcodec.DecodeParams(apply_exif_orientation=False)
                decoder = nvimgcodec.Decoder(
                    device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
                    max_num_cpu_threads=1,
                    backends=[nvimgcodec.Backend(nvimgcodec.CPU_ONLY)],
                    options=":fancy_upsampling=0",  # so that a region has the same pixels as in the whole image
                )
            self.made, self.made_in = (nvimgcodec, decoder, parameters), os.getpid()
        return self.made


_decoders = _Decoders()
_stderr = threading.Lock()


class _quiet:  # noqa: N801 - used like a function
    """Send what native code writes to standard error to a file that nobody reads."""

    def __enter__(self) -> None:
        _stderr.acquire()
        self._kept = os.dup(2)
        with tempfile.TemporaryFile() as nowhere:
            os.dup2(nowhere.fileno(), 2)

    def __exit__(self, *_: object) -> None:
        os.dup2(self._kept, 2)
        os.close(self._kept)
        _stderr.release()


def _is_image(path: str) -> bool:
    name = os.path.basename(path)  # noqa: PTH119 - a million times
    return name.lower().endswith(IMG_EXTENSIONS) and not name.startswith("._")


# ---------------------------------------------------------------------------------------------------- drawn images

SHAPES = ("checks", "circle", "cross", "dots", "frame", "ring", "square", "stripes-across", "stripes-down", "triangle")


def drawn_images(directory: Path, world: World, train: int = 480, val: int = 160, size: int = 80) -> Path:
    """Draw a folder of JPEGs, `train/<shape>/*.jpg` and `val/<shape>/*.jpg`, unless it is there already.

    One process per node draws while the others wait. Ten shapes in random places, sizes and colours, on a noisy
    background: no single pixel and no colour tells the class.

    Args:
        directory: where the folder is made.
        world: this process's world.
        train: number of images to train on.
        val: number of images to evaluate on.
        size: mean height and width, in pixels.

    Returns:
        The folder.

    Raises:
        UserError: it cannot be written.
    """
    folder = directory / f"shapes-{train}-{val}-{size}"
    with main_first(world, f"drawing of {folder}"):
        if not folder.exists():
            try:
                directory.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(dir=directory) as unfinished:
                    for part, count in (("train", train), ("val", val)):
                        _draw_part(Path(unfinished) / "shapes" / part, count, size)
                    with suppress(OSError):  # another run, or another node, was faster
                        (Path(unfinished) / "shapes").rename(folder)
                assert folder.is_dir()
            except OSError as error:
                raise UserError(f"{folder} cannot be written ({error.strerror}): choose another --out") from None
    return folder


def _draw_part(folder: Path, count: int, size: int) -> None:
    random = np.random.default_rng(0 if folder.name == "train" else 1)
    for shape in SHAPES:
        (folder / shape).mkdir(parents=True)
    for number in range(count):
        shape = SHAPES[number % len(SHAPES)]
        height, width = random.integers(size * 3 // 4, size * 5 // 4, 2).tolist()
        picture = Image.fromarray(random.integers(0, 90, (height, width, 3), np.uint8)).resize((width, height))
        _draw(ImageDraw.Draw(picture), shape, width, height, random)
        picture.save(folder / shape / f"{number:05d}.jpg", quality=85)


def _draw(draw: ImageDraw.ImageDraw, shape: str, width: int, height: int, random: np.random.Generator) -> None:
    colour = tuple(random.integers(120, 256, 3).tolist())
    side = int(min(width, height) * random.uniform(0.5, 0.85))
    left, top = int(random.uniform(0, width - side)), int(random.uniform(0, height - side))
    right, bottom, thick = left + side, top + side, max(2, side // 7)
    box = (left, top, right, bottom)
    if shape == "circle":
        draw.ellipse(box, colour)
    elif shape == "ring":
        draw.ellipse(box, outline=colour, width=thick)
    elif shape == "square":
        draw.rectangle(box, colour)
    elif shape == "frame":
        draw.rectangle(box, outline=colour, width=thick)
    elif shape == "triangle":
        draw.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], colour)
    elif shape == "cross":
        draw.line(box, colour, thick)
        draw.line((left, bottom, right, top), colour, thick)
    else:  # rows and columns of small boxes
        for y in range(0, side, 2 * thick):
            for x in range(0, side, 2 * thick):
                at = left + x, top + y
                if shape == "stripes-across":
                    draw.rectangle((left, at[1], right, at[1] + thick), colour)
                elif shape == "stripes-down":
                    draw.rectangle((at[0], top, at[0] + thick, bottom), colour)
                elif shape == "dots":
                    draw.ellipse((*at, at[0] + thick, at[1] + thick), colour)
                elif (x + y) // (2 * thick) % 2 == 0:
                    draw.rectangle((*at, at[0] + 2 * thick, at[1] + 2 * thick), colour)
