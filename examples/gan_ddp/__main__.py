"""`python -m examples.gan_ddp`: flags are checked before torch is imported."""

from common.launch.args import start
from examples.gan_ddp.args import Args

if __name__ == "__main__":
    start(Args, "examples.gan_ddp.train:main")
