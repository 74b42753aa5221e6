"""`python -m examples.your_model`: flags are checked before torch is imported."""

from common.launch.args import start
from examples.your_model.args import Args

if __name__ == "__main__":
    start(Args, "examples.your_model.train:main")
