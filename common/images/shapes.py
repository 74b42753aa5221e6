"""Images to train on where there are no files: ten shapes, drawn into a folder of JPEGs."""

import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from common.launch.collectives import local_rank0_first
from common.launch.errors import UserError

SHAPES = (
    "checks",
    "circle",
    "cross",
    "dots",
    "frame",
    "ring",
    "square",
    "stripes-across",
    "stripes-down",
    "triangle",
)


def drawn_images(directory: Path, train: int = 480, val: int = 160, size: int = 80) -> Path:
    """Draw a folder of JPEGs, `train/<shape>/*.jpg` and `val/<shape>/*.jpg`, unless it is there.

    Every rank calls this: one process per node draws while the others wait. Ten shapes in random
    places, sizes and colours, on a noisy background: no single pixel and no colour tells the class.

    Args:
        directory: where the folder is made.
        train: number of images to train on.
        val: number of images to evaluate on.
        size: mean height and width, in pixels.

    Returns:
        The folder.

    Raises:
        UserError: it cannot be written.
    """
    folder = directory / f"shapes-{train}-{val}-{size}"
    with local_rank0_first(f"drawing of {folder}"):
        if not folder.exists():
            try:
                _draw_folder(folder, {"train": train, "val": val}, size)
            except OSError as error:
                raise UserError(
                    f"{folder} cannot be written ({error.strerror}): choose another --out"
                ) from None
    return folder


def _draw_folder(folder: Path, counts: dict[str, int], size: int) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        for part, count in counts.items():
            _draw_part(Path(unfinished) / "shapes" / part, count, size)
        with suppress(OSError):  # another run, or another node, was faster
            (Path(unfinished) / "shapes").rename(folder)
    assert folder.is_dir()


def _draw_part(folder: Path, count: int, size: int) -> None:
    random = np.random.default_rng(0 if folder.name == "train" else 1)
    for shape in SHAPES:
        (folder / shape).mkdir(parents=True)
    for number in range(count):
        shape = SHAPES[number % len(SHAPES)]
        height, width = random.integers(size * 3 // 4, size * 5 // 4, 2).tolist()
        noise = random.integers(0, 90, (height, width, 3), np.uint8)
        picture = Image.fromarray(noise)
        _draw(ImageDraw.Draw(picture), shape, width, height, random)
        picture.save(folder / shape / f"{number:05d}.jpg", quality=85)


def _draw(
    draw: ImageDraw.ImageDraw, shape: str, width: int, height: int, random: np.random.Generator
) -> None:
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
    elif shape == "stripes-across":
        for y in range(top, bottom, 2 * thick):
            draw.rectangle((left, y, right, y + thick), colour)
    elif shape == "stripes-down":
        for x in range(left, right, 2 * thick):
            draw.rectangle((x, top, x + thick, bottom), colour)
    else:
        _draw_small(draw, shape, box, thick, colour)


def _draw_small(
    draw: ImageDraw.ImageDraw, shape: str, box: tuple[int, ...], thick: int, colour: tuple[int, ...]
) -> None:
    """Rows and columns of dots, or of every other square."""
    left, top, right, bottom = box
    for row, y in enumerate(range(top, bottom, 2 * thick)):
        for column, x in enumerate(range(left, right, 2 * thick)):
            if shape == "dots":
                draw.ellipse((x, y, x + thick, y + thick), colour)
            elif (row + column) % 2 == 0:
                draw.rectangle((x, y, x + 2 * thick, y + 2 * thick), colour)
