"""How far pixels lie from Pillow's, in levels of 0 to 255: decoded, and as a batch gets them.

    python -m benchmarks.pixels --data DIR      # DIR/val/CLASS/*.jpg

Files are grouped by how much of the colour they keep: 4:4:4 all, 4:2:0 a quarter. How that quarter
is spread over the pixels is left open by the format; of a crop, it may need pixels beside it.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, JpegImagePlugin

from benchmarks import harness
from common.images.crop import middle, random_crop, resize
from common.images.decode import DECODER, Pixels, decode, dimensions
from common.images.find import images_below
from common.launch.flags import at_least

SAMPLINGS = {-1: "grey", 0: "4:4:4", 1: "4:2:2", 2: "4:2:0"}  # by Pillow's numbers
SIZE = 224
CROPS = 10  # of an image, as training draws them


@dataclass(frozen=True, kw_only=True)
class Args:
    """The flags of this program."""

    data: Path = Path("data/images")
    """Folder with JPEGs, or with folders of them."""
    most: int = 200
    """Files to read, evenly spread over all."""
    out: Path = Path("benchmarks/results")
    """Folder for the measurements (.json)."""

    def __post_init__(self) -> None:
        at_least(1, most=self.most)


def differences(content: bytes) -> dict[str, NDArray[np.int64]]:
    """How many values of an image differ from Pillow's by how much: whole, in crops, resized."""
    with Image.open(io.BytesIO(content)) as image:
        picture = image.convert("RGB")
    height, width = dimensions(content)
    whole = np.asarray(picture)
    boxes = [random_crop(0, 0, index, height, width)[0] for index in range(CROPS)]
    crops = [(decode(content, (t, x, h, w)), whole[t : t + h, x : x + w]) for t, x, h, w in boxes]
    box = middle(height, width)
    top, left, rows, columns = box
    cut = picture.crop((left, top, left + columns, top + rows))
    theirs = np.asarray(cut.resize((SIZE, SIZE), Image.Resampling.BILINEAR))
    ours = resize(decode(content, box), SIZE)
    compared = {
        "decoded": [(decode(content, (0, 0, height, width)), whole)],
        "crops decoded": crops,
        "decoded and resized": [(ours, theirs)],
    }
    return {what: histogram(pairs) for what, pairs in compared.items()}


def histogram(pairs: list[tuple[Pixels, Pixels]]) -> NDArray[np.int64]:
    """How many values differ by 0, 1, ... 255 levels."""
    counts = np.zeros(256, np.int64)
    for one, other in pairs:
        counts += np.bincount(np.abs(one.astype(int) - other).ravel(), minlength=256)
    return counts


def summary(counts: NDArray[np.int64]) -> dict[str, float]:
    """Of how many values differ by how much."""
    shares = counts.cumsum() / counts.sum()
    return {
        "within_1_level": round(float(shares[1]), 4),
        "mean": round(float(counts @ np.arange(256) / counts.sum()), 3),
        "percentile_99": int(np.searchsorted(shares, 0.99)),
        "most": int(counts.nonzero()[0].max()),
    }


def main(args: Args) -> None:
    """Measure, write the results, show them."""
    names = [n for n in images_below(args.data) if n.lower().endswith((".jpg", ".jpeg"))]
    chosen = names[:: -(-len(names) // args.most)]
    sums: dict[str, dict[str, Any]] = {}
    files: dict[str, int] = {}
    for name in chosen:
        content = (args.data / name).read_bytes()
        with Image.open(io.BytesIO(content)) as image:
            if image.format != "JPEG" or image.mode == "CMYK":  # which Pillow decodes here, too
                continue
            kind = "grey" if image.mode == "L" else SAMPLINGS[JpegImagePlugin.get_sampling(image)]
        files[kind] = files.get(kind, 0) + 1
        for what, counts in differences(content).items():
            kinds = sums.setdefault(what, {})
            kinds[kind] = kinds.get(kind, 0) + counts
    found = {what: {kind: summary(c) for kind, c in each.items()} for what, each in sums.items()}
    result = {"decoder": DECODER, "files": files, "crops": CROPS, "size": SIZE, "levels": found}
    for what, kinds in found.items():
        for kind, figures in kinds.items():
            print(f"{what}, {kind}: {figures}")
    about = harness.facts("torch", "torchvision", "pillow", "nvidia-nvimgcodec-cu13")
    harness.save("pixels", about | result, args.out)


if __name__ == "__main__":
    harness.program(Args, main, __doc__)
