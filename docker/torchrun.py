"""Run torchrun in a container, and exit with the exit code of the rank that failed first.

    python docker/torchrun.py --nproc-per-node 2 -m examples.imagenet_ddp --resume auto

torchrun exits with 1 after every failure, but a Job's podFailurePolicy needs the exit codes of
`common/rank.py`. By default, this program starts one rank per GPU, or one rank on CPUs.
"""

import logging
import os
import signal
import sys
from collections.abc import Iterable

LOST = 75
# Exit codes of ranks that failed because of another rank: a lost connection, NCCL's watchdog, which
# aborts the rank after a timeout, or torchrun's SIGTERM.
CONSEQUENCES = {LOST: 1, -signal.SIGABRT: 1, 128 + signal.SIGTERM: 2, -signal.SIGTERM: 2}


def main(arguments: list[str]) -> int:
    """Run torchrun without error tables and tracebacks, so that a rank's error is the last line."""
    for signum in (signal.SIGTERM, signal.SIGINT):  # by default, a container's PID 1 ignores them
        signal.signal(signum, lambda number, _: sys.exit(128 + number))
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # no C++ frames from this process
    import torch  # takes seconds
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    del os.environ["TORCH_CPP_LOG_LEVEL"]
    os.environ.setdefault("PET_NPROC_PER_NODE", str(torch.cuda.device_count() or 1))
    logging.disable(logging.ERROR)
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        failures = error.failures.values()
        first = min(failure.timestamp for failure in failures)  # in seconds
        return exit_code(f.exitcode for f in failures if f.timestamp <= first + 1)
    except SignalException as error:
        return 128 + error.sigval
    except (RendezvousError, DistError) as error:
        print(f"error: a node did not join: {str(error).splitlines()[0]}", file=sys.stderr)
        return LOST
    return 0


def exit_code(codes: Iterable[int]) -> int:
    """Return the exit code of the rank that caused the failure; signal n counts as 128 + n."""
    code = min(codes, key=lambda code: (CONSEQUENCES.get(code, 0), code))
    if code == -signal.SIGABRT:
        return LOST
    if code < 0:
        print(f"error: a rank was killed by {signal.Signals(-code).name}", file=sys.stderr)
    return code if code > 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
