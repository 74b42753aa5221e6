"""Run `python -m examples.resnet_pipeline`; flags are read before torch is imported."""

from common.launch import start

from .args import Args

if __name__ == "__main__":
    start(Args, f"{__package__}.train")
