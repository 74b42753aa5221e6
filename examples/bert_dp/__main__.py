"""`python -m examples.bert_dp`: flags are checked before torch is imported."""

from common.launch.args import start
from examples.bert_dp.args import Args

if __name__ == "__main__":
    start(Args, "examples.bert_dp.train:main")
