"""Imported first by the process from which workers are forked, and by nothing else.

Importing torch makes a million objects and no garbage: Python's collector, which looks at them
again and again, would take a tenth of the time or more. The workers inherit these objects; there,
too, each look would cost time, and a copy of every page, since it writes into the objects.
"""

import gc
import os


def _after_fork() -> None:
    gc.freeze()
    gc.enable()


gc.disable()
os.register_at_fork(after_in_child=_after_fork)
