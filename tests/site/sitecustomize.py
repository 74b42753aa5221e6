"""Python imports this module first in each process of a program that `programs.py` starts."""

import json
import os
import sys

from tests.hooks import At, Hook

os.environ.setdefault("TESTS_LAUNCHER", str(os.getpid()))
mutate, fault = json.loads(os.environ["TESTS_HOOK"])
sys.meta_path.insert(0, Hook(mutate, fault and At(*fault)))
