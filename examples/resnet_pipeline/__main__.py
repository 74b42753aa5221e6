"""`python -m examples.resnet_pipeline`: flags are checked before torch is imported."""

from common.launch.args import start
from examples.resnet_pipeline.args import Args

if __name__ == "__main__":
    start(Args, "examples.resnet_pipeline.train:main")
