"""resnet_pipeline: classify an image, or every image of a folder, by a trained model.

    python -m examples.resnet_pipeline.predict photo.jpg
    python -m examples.resnet_pipeline.predict FOLDER --out predictions.csv  # a row each
    torchrun --nproc-per-node 2 -m examples.resnet_pipeline.predict FOLDER

The model is that of --weights, by default the one in runs/resnet_pipeline. It is
whole: no stage of it is on another process.
"""

from functools import partial

from torch import nn

from common.images.args import PredictArgs
from common.images.predict import Trained, predict
from common.launch.args import start
from common.launch.place import Place
from common.launch.spawn import launch
from examples.resnet_pipeline.model import build as build_resnet


def build(trained: Trained) -> nn.Module:
    """The model that was trained."""
    flags = trained.arguments
    return build_resnet(flags["arch"], len(trained.class_names), flags["norm"])


def main(place: Place, args: PredictArgs) -> None:
    """Predict in every process of this node."""
    launch(partial(predict, example="resnet_pipeline", build=build), place, args)


if __name__ == "__main__":
    start(PredictArgs, "examples.resnet_pipeline.predict:main")
