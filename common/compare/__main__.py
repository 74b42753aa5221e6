"""`python -m common.compare`: needs no torch."""

from common.compare.args import Args
from common.compare.page import compare
from common.launch.args import fail, parse
from common.launch.errors import UserError

if __name__ == "__main__":
    args = parse(Args, command="python -m common.compare")
    try:
        compare(args.runs, args.out)
    except UserError as error:
        fail(error)
