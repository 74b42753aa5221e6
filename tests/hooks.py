"""Faults and mutations that a process applies to the modules that it imports.

A rank that `ranks.py` forks installs a `Hook` itself. A program that `programs.py` starts gets one
from `sitecustomize.py` in tests/site, so that the processes that it starts have it, too.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class At:
    """A signal at the beginning of a step (from 1) of a rank, in the first attempt of the job.

    `to` is the rank itself, the launcher, or the launcher's process group.
    """

    rank: int
    step: int
    signal: int
    to: str = "rank"

    def wrap(self, steps: Callable[..., Iterable[Any]]) -> Callable[..., Iterator[Any]]:
        def faulty(run: Any, loader: Any) -> Iterator[Any]:
            first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            for batch in steps(run, loader):
                if first and (run.rank, run.step + 1) == (self.rank, self.step):
                    launcher = int(os.environ.get("TESTS_LAUNCHER", "0"))
                    kill = os.killpg if self.to == "group" else os.kill
                    kill(os.getpid() if self.to == "rank" else launcher, self.signal)
                yield batch

        return faulty


@dataclass(frozen=True)
class Hook:
    """Import hook: changed texts (module, old, new), and a fault in `Run.steps`."""

    mutate: Sequence[Sequence[str]] = ()
    fault: At | None = None

    def find_spec(self, name: str, path: Any = None, _: Any = None) -> ModuleSpec | None:
        changes = [(old, new) for module, old, new in self.mutate if module == name]
        if not changes and (self.fault is None or name != "common.run"):
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None and spec.origin is not None, f"no module {name}"
        spec.loader = loader = _Loader(name, spec.origin)
        loader.changes, loader.fault = changes, self.fault
        return spec


class _Loader(SourceFileLoader):
    changes: Sequence[tuple[str, str]] = ()
    fault: At | None = None

    def get_code(self, fullname: str) -> Any:
        text = Path(self.path).read_text()
        for old, new in self.changes:
            assert text.count(old) == 1, f"{self.path} contains {text.count(old)} times: {old}"
            text = text.replace(old, new)
        return compile(text, self.path, "exec")

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if self.fault and module.__name__ == "common.run":
            module.Run.steps = self.fault.wrap(module.Run.steps)
