"""`python -m examples.mnist_ddp_spawn`: flags are checked before torch is imported."""

from common.launch.args import start
from examples.mnist_ddp_spawn.args import Args

if __name__ == "__main__":
    start(Args, "examples.mnist_ddp_spawn.train:main")
