"""The images of this example: a folder, or shapes that are drawn; which process reads them."""

from common.images.folder import ImageFolder, LabelsOnly
from common.images.loader import Batches, eval_loader, train_loader
from common.images.sets import ImageSets
from common.images.shapes import drawn_images
from common.launch.collectives import assert_same_on_all_ranks
from common.launch.errors import UserError
from common.train.amp import MixedPrecision
from examples.resnet_pipeline.args import Args
from examples.resnet_pipeline.grid import Grid


class StrictFolder(ImageFolder):
    """A folder without broken images: the last stage could not know the label of a replacement."""

    def mistake(self, index: int, error: Exception) -> UserError:
        """What to tell the user about a broken image."""
        return UserError(f"{self.file(index)} cannot be used ({error}): remove or replace it")


def image_sets(args: Args) -> ImageSets:
    """The folder of --dataset, or drawn shapes. Every rank calls this."""
    drawn = args.dataset is None
    folder = args.dataset or drawn_images(args.out / "images", args.images, -(-args.images // 2))
    train = StrictFolder(folder / "train", args.image_size, training=not drawn, seed=args.seed)
    val = StrictFolder(folder / "val", args.image_size, training=False, classes=train.classes)
    # The last stage reads its labels on its own machine.
    assert_same_on_all_ranks(train.digest + val.digest, "the images' names and classes")
    return ImageSets(str(folder), train, val)


def loaders(
    args: Args, data: ImageSets, amp: MixedPrecision, grid: Grid
) -> tuple[Batches, Batches]:
    """This process's training and test batches: replica d gets positions d, d + D, d + 2D, ...

    Only the first stage reads pixels; the others get the labels.
    """
    first = grid.pp_rank == 0
    train, val = (data.train, data.val) if first else (LabelsOnly(data.train), LabelsOnly(data.val))
    shard = {"rank": grid.dp_rank, "world_size": grid.dp_size}
    # A loader's time-out comes before that of the stages that wait for this one.
    timeout = grid.timeout.total_seconds() / 2
    workers = args.workers if first else 0
    return (
        train_loader(train, args.batch_size, amp, args.seed, workers, timeout=timeout, **shard),
        eval_loader(val, 50, amp, workers=0, **shard),
    )
