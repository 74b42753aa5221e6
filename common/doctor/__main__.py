"""`python -m common.doctor`: flags are checked before torch is imported."""

from common.doctor.args import Args
from common.launch.args import start

if __name__ == "__main__":
    start(Args, "common.doctor.preflight:main")
