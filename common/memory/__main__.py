"""`python -m common.memory`: flags are checked before torch is imported."""

from common.launch.args import fail, parse
from common.launch.errors import UserError
from common.memory.args import Args

ABOUT = """Estimate the memory of a training step, for each way to divide it over devices.

    python -m common.memory -a resnet50 -b 256 --optimizer sgd
    python -m common.memory -a bert --layers 24 --hidden 1024 --optimizer adamw --memory 16
"""

if __name__ == "__main__":
    args = parse(Args, description=ABOUT, command="python -m common.memory")
    from common.memory.estimate import main  # with torch: 3 s

    try:
        main(args)
    except UserError as error:
        fail(error)
