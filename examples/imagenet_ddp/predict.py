"""imagenet_ddp: classify an image, or every image of a folder, by a trained model.

    python -m examples.imagenet_ddp.predict photo.jpg
    python -m examples.imagenet_ddp.predict FOLDER --out predictions.csv  # a row each
    torchrun --nproc-per-node 2 -m examples.imagenet_ddp.predict FOLDER

The model is that of --weights, by default the one in runs/imagenet_ddp.
"""

from functools import partial

import torch
from torch import nn

from common.images.args import PredictArgs
from common.images.predict import Trained, predict
from common.launch.args import start
from common.launch.place import Place
from common.launch.spawn import launch
from examples.imagenet_ddp.args import Recipe
from examples.imagenet_ddp.recipe import build_model


def build(trained: Trained) -> nn.Module:
    """The model that was trained."""
    recipe, cpu = Recipe(trained.arguments["arch"]), torch.device("cpu")
    return build_model(recipe, len(trained.class_names), trained.size, cpu)


def main(place: Place, args: PredictArgs) -> None:
    """Predict in every process of this node."""
    launch(partial(predict, example="imagenet_ddp", build=build), place, args)


if __name__ == "__main__":
    start(PredictArgs, "examples.imagenet_ddp.predict:main")
