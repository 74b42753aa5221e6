"""Which images a program trains on: a user's folder, drawn ones, or synthetic ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from common.errors import UserError
from common.flags import at_least

if TYPE_CHECKING:
    from common.distributed import World
    from common.images import ImageSets


@dataclass(frozen=True)
class ImageOptions:
    """Images: where they come from, and how they are loaded."""

    directory: Annotated[Positional[Path | None], arg(name="DIR")] = None
    """Folder with train/CLASS/* and val/CLASS/*; without it, shapes are drawn."""
    image_size: Annotated[int | None, arg(metavar="PIXELS")] = None
    """Height and width to which images are cropped (default: 224; 64 for drawn images)."""
    workers: Annotated[int | None, arg(aliases=["-j"], metavar="N")] = None
    """Loader processes per rank (default: from the cores)."""
    cache: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Keep decoded pixels there (about six times the size of the JPEGs), for this and other runs."""
    skip_broken: bool = False
    """Replace a broken image by the next one, and count it, instead of ending the run."""
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

    def load(self, seed: int, out: Path, world: World) -> ImageSets:
        """Find, draw or make up the images.

        Args:
            seed: of crops, or of synthetic images.
            out: where drawn images go, in a folder `images`.
            world: this process's world.

        Raises:
            UserError: there is no such folder, or it does not hold what it must.
        """
        from common.images import drawn_images, image_folders, synthetic_images

        size = self.image_size or (64 if self.kind == "drawn" else 224)
        if self.dummy:
            return synthetic_images(self.dummy_images, size, seed)
        folder = self.directory or drawn_images(out / "images", world)
        return image_folders(folder, size, seed, self.skip_broken, self.cache, world)
