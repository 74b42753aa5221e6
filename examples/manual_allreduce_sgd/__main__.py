"""`python -m examples.manual_allreduce_sgd`: flags are checked before torch is imported."""

from common.launch.args import start
from examples.manual_allreduce_sgd.args import Args

if __name__ == "__main__":
    start(Args, "examples.manual_allreduce_sgd.train:main")
