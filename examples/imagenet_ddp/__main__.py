"""`python -m examples.imagenet_ddp`: flags are checked before torch is imported."""

from common.launch.args import start
from examples.imagenet_ddp.args import Args

if __name__ == "__main__":
    start(Args, "examples.imagenet_ddp.train:main", survive="examples.imagenet_ddp.survive:main")
