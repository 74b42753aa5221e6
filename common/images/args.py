"""The flags of programs that train on images, and of those that name them. No torch here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, arg

from common.launch.errors import UserError
from common.launch.flags import MAY_CHANGE, Launch, MustExist, at_least
from common.train.precision import Precision


@dataclass(frozen=True)
class ImageArgs:
    """Images: where they come from, and how they are loaded.

    Where they lie and their size may change because what they come to is compared on resume instead
    (`ImageSets.identity`); a run that a broken image has ended may go on with --skip-broken.
    """

    directory: Annotated[Positional[Path | None], arg(name="DIR"), MustExist(), MAY_CHANGE] = None
    """Folder with train/CLASS/* and val/CLASS/*; without it, shapes are drawn."""
    image_size: Annotated[int | None, arg(metavar="PIXELS"), MAY_CHANGE] = None
    """Height and width to which images are cropped (default: 224; 64 for drawn images)."""
    workers: Annotated[int | None, arg(aliases=["-j"], metavar="N"), MAY_CHANGE] = None
    """Loader processes per rank (default: from the cores)."""
    cache: Annotated[Path | None, arg(metavar="FOLDER"), MAY_CHANGE] = None
    """Keep decoded pixels there (several times the size of the JPEGs), for this and other runs."""
    skip_broken: Annotated[bool, MAY_CHANGE] = False
    """Replace a broken image by the next one of its class, and count it, instead of ending."""
    dummy: bool = False
    """Synthetic images, to measure the speed; they can be learned."""
    dummy_images: Annotated[int, arg(metavar="N")] = 480
    """How many of them, in 10 classes."""

    def __post_init__(self) -> None:
        at_least(1, image_size=self.image_size, dummy_images=self.dummy_images)
        at_least(0, workers=self.workers)
        if self.dummy and (self.directory or self.cache):
            raise UserError("--dummy makes images up: leave out DIR and --cache")

    @property
    def kind(self) -> str:
        """folder, drawn or dummy."""
        return "dummy" if self.dummy else "folder" if self.directory else "drawn"

    @property
    def size(self) -> int:
        """Height and width to which images are cropped, in pixels."""
        return self.image_size or (64 if self.kind == "drawn" else 224)


@dataclass(frozen=True)
class PredictArgs:
    """What a trained model says about images."""

    images: Annotated[Positional[Path], arg(name="PATH")]
    """An image, or a folder with images."""
    weights: Annotated[Path | None, arg(metavar="FILE")] = None
    """best.safetensors of a training (default: that in runs/NAME)."""
    out: Annotated[Path, arg(metavar="FILE")] = Path("predictions.csv")
    """Table for the images of a folder, a row each: file, class, probability."""
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N")] = 64
    """Images at once per process: it changes the speed, not the result."""
    launch: OmitArgPrefixes[Launch] = Launch()
    amp: OmitArgPrefixes[Precision] = Precision(precision="fp32", channels_last="no")

    def __post_init__(self) -> None:
        at_least(1, batch_size=self.batch_size)
