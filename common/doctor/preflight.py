"""Check a machine, a container or a whole job: what would fail, and what to do about it.

    python -m common.doctor                                      # this machine, one process
    python -m common.doctor --nproc 2 --out runs --data DIR      # may both read and write?
    torchrun --nnodes 2 --node-rank R --master-addr HOST0 -m common.doctor
    python -m common.doctor --json                               # for programs

Exit code 0 if nothing would fail (there may be warnings), 1 if something would, 2 after a mistake
in the flags.
"""

import json
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict

import torch.distributed as dist

from common.doctor.args import Args
from common.doctor.findings import Check, Finding, Here
from common.doctor.job import TOGETHER
from common.doctor.machine import ALONE
from common.launch.collectives import broadcast_object, gather_objects
from common.launch.console import say
from common.launch.device import choose_device
from common.launch.errors import UserError
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import launch


def main(place: Place, args: Args) -> None:
    """Examine every process of the job."""
    launch(main_worker, place, args)


@record
def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """Examine one process by itself, then all of them together."""
    place.export(local_rank)
    device, backend = choose_device(args.launch, local_rank)
    here = Here(args, place, device, backend)
    mine = examine(ALONE, here)  # first: the ranks may not meet
    try:
        dist.init_process_group(backend, init_method=JOB, timeout=args.launch.patience)
    except (UserError, RuntimeError, ValueError) as error:
        if local_rank != 0:  # torchrun ends all as soon as one ends: local rank 0 speaks first
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5)
            sys.exit(1)
        remedy = "see the findings above, the host name and the interfaces first"
        mine.append(Finding("process group", "error", first_line(error), remedy))
        show({place.worker(local_rank).rank: mine}, here)  # what this node knows is all there is
        sys.exit(1)
    everybody = gather_objects(mine + examine(TOGETHER, here))
    healthy = broadcast_object(lambda: show(dict(enumerate(everybody)), here))
    dist.destroy_process_group()
    if not healthy:
        sys.exit(1)


def examine(checks: Mapping[str, Check], here: Here) -> list[Finding]:
    """The findings of some checks; one that fails is a finding, too, and the others go on."""
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            findings += check(here)
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            remedy = "this check failed: see the message"
            findings.append(Finding(name, "error", first_line(error), remedy))
    return findings


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error) or type(error).__name__).splitlines()[0]


def show(everybody: Mapping[int, list[Finding]], here: Here) -> bool:
    """Print the findings, equal ones of several ranks once.

    Args:
        everybody: the findings of each rank.
        here: this process.

    Returns:
        Whether none of them is an error.
    """
    merged: dict[Finding, list[int]] = {}
    for rank, findings in everybody.items():
        for finding in findings:
            merged.setdefault(finding, []).append(rank)
    size = here.place.world_size
    errors, warnings = (sum(f.state == state for f in merged) for state in ("error", "warning"))
    if here.args.json:
        place = here.place
        head = {"world_size": size, "nodes": place.num_nodes, "launcher": place.launcher}
        count = {"errors": errors, "warnings": warnings}
        found = [asdict(finding) | {"ranks": ranks} for finding, ranks in merged.items()]
        lines = [json.dumps({**head, **count, "findings": found}, indent=2)]
    else:
        lines = []
        for finding, ranks in merged.items():
            who = "" if len(ranks) == size else f" (rank {', '.join(map(str, ranks))})"
            lines.append(f"{finding.state:8}{finding.check}{who}: {finding.found}")
            if finding.remedy:
                lines.append(f"{'':8}-> {finding.remedy}")
        lines.append(f"{errors} error(s), {warnings} warning(s), world size {size}")
    say("\n".join(lines))
    return not errors
