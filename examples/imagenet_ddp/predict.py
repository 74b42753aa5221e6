"""imagenet_ddp: what a trained model says about an image, or about every image of a folder.

    python -m examples.imagenet_ddp.predict photo.jpg
    python -m examples.imagenet_ddp.predict FOLDER --out predictions.csv  # a row each
    torchrun --nproc-per-node 2 -m examples.imagenet_ddp.predict FOLDER

The model is that of --weights, by default the one in runs/imagenet_ddp.
"""

import torch
from torch import nn

from common.images.args import PredictArgs
from common.images.predict import Trained, predict
from common.launch.args import start
from common.launch.place import Place
from common.launch.record import record
from common.launch.spawn import launch
from examples.imagenet_ddp.args import Recipe
from examples.imagenet_ddp.recipe import build_model


def build(trained: Trained) -> nn.Module:
    """The model that was trained."""
    recipe, cpu = Recipe(trained.arguments["arch"]), torch.device("cpu")
    return build_model(recipe, len(trained.class_names), trained.size, cpu)


def main(place: Place, args: PredictArgs) -> None:
    """Start a process per rank."""
    launch(main_worker, place, args)


@record
def main_worker(local_rank: int, place: Place, args: PredictArgs) -> None:
    """One process of the job."""
    predict(local_rank, place, args, build)


if __name__ == "__main__":
    start(PredictArgs, "examples.imagenet_ddp.predict:main")
