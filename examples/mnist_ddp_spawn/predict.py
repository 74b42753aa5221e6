"""mnist_ddp_spawn: classify an image, or every image of a folder, by a trained model.

    python -m examples.mnist_ddp_spawn.predict digit.png
    python -m examples.mnist_ddp_spawn.predict FOLDER --out predictions.csv  # a row each
    torchrun --nproc-per-node 2 -m examples.mnist_ddp_spawn.predict FOLDER

The model is that of --weights, by default the one in runs/mnist_ddp_spawn.
Images become grey and as large as those that it was trained on: white on black, as MNIST's.
"""

from functools import partial

from common.images.args import PredictArgs
from common.images.predict import digit_net, predict
from common.launch.args import start
from common.launch.place import Place
from common.launch.spawn import launch


def main(place: Place, args: PredictArgs) -> None:
    """Predict in every process of this node."""
    launch(partial(predict, example="mnist_ddp_spawn", build=digit_net), place, args)


if __name__ == "__main__":
    start(PredictArgs, "examples.mnist_ddp_spawn.predict:main")
