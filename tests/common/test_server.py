"""The server from which workers are forked."""

import subprocess
import sys

from tests.conftest import ROOT

# Its first module only: the others take seconds to import.
ASK = """
import gc, multiprocessing
from common.launch.args import PRELOADED, _start_fork_server
_start_fork_server(list(PRELOADED[:1]))
pool = multiprocessing.get_context("forkserver").Pool(1)
print(pool.apply(gc.isenabled), pool.apply(gc.get_freeze_count))
pool.close()  # `with` would end the worker by SIGTERM, which who is forked from this server holds back
pool.join()
print(gc.isenabled(), gc.get_freeze_count())
"""


def test_workers_do_not_look_for_garbage_in_what_they_inherit() -> None:
    asked = subprocess.run([sys.executable, "-c", ASK], cwd=ROOT, capture_output=True, text=True, check=True)
    worker, parent = (line.split() for line in asked.stdout.splitlines())
    assert worker[0] == parent[0] == "True"
    assert int(worker[1]) > 1_000
    assert parent[1] == "0"
