"""The images of this example: a folder, or shapes that are drawn; which process reads them."""

from common.images.folder import LabelsOnly
from common.images.loader import Batches, eval_loader, train_loader
from common.images.sets import ImageSets, image_folders
from common.images.shapes import drawn_images
from common.launch.collectives import assert_same_on_all_ranks
from common.train.amp import MixedPrecision
from examples.resnet_pipeline.args import Args
from examples.resnet_pipeline.grid import Grid


def image_sets(args: Args) -> ImageSets:
    """The folder of --dataset, or drawn shapes. Every rank calls this."""
    drawn = args.dataset is None
    folder = args.dataset or drawn_images(args.out / "images", args.images, -(-args.images // 2))
    data = image_folders(folder, args.image_size, args.seed, args.skip_broken, augment=not drawn)
    # The last stage reads its labels on its own machine.
    names = data.train.digest + data.val.digest
    assert_same_on_all_ranks(names, "the images' names and classes")
    return data


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
