"""Workers that torchrun has restarted."""

import os

from common.launch import rendezvous
from common.launch.collectives import broadcast_object

REACHED = "an attempt has reached its checkpoints"


def go_on() -> bool:
    """Whether this is a restart that continues from the job's own checkpoints.

    Every rank calls this, once, before checkpoints are moved or written. An attempt that died
    before it came so far has left none: those in the folder are an earlier run's. Where the store
    does not know the earlier attempt, nobody can tell, and the restart goes on.
    """
    if int(os.environ.get(rendezvous.RESTARTS, "0")) == 0:
        _note()
        return False
    return broadcast_object(_note)


def _note() -> bool:
    """Note that this attempt has come so far; on rank 0, whether one before it had."""
    store = rendezvous.of_all_attempts
    if store is None or os.environ.get("RANK", "0") != "0":
        return True
    before = store.check([REACHED]) or not rendezvous.restart_is_known
    store.set(REACHED, "")
    return before
