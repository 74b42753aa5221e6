"""`python -m examples.mnist_dataparallel`: flags are checked before torch is imported."""

from common.launch.args import start
from examples.mnist_dataparallel.args import Args

if __name__ == "__main__":
    start(Args, "examples.mnist_dataparallel.train:main")
