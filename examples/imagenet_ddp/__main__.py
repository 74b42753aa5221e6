"""Run `python -m examples.imagenet_ddp`; flags are read before torch is imported."""

from common.launch import start

from .args import Args

if __name__ == "__main__":
    start(Args, f"{__package__}.train")
