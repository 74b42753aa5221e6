"""Processes end with the process that started them: nothing else would end them."""

import multiprocessing.connection
import os
import threading
import time


def end_with_parent(agent: bool = False) -> None:
    """End this process at once when the one that spawned it is killed.

    Args:
        agent: the parent is torchrun's agent, which `multiprocessing` does not know.
    """
    parent, pid = multiprocessing.parent_process(), os.getppid()
    if parent is None and not agent:
        return

    def watch() -> None:
        if parent is not None:
            multiprocessing.connection.wait([parent.sentinel])
        while parent is None and os.getppid() == pid:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
