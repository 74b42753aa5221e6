"""Containers for the tests: docker or podman, whichever is there; all are gone when a test ends."""

import functools
import importlib.util
import json
import os
import re
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from tests.conftest import ROOT
from tests.machine import here
from tests.runs import mutated, slow

# The page's commands with one container, and the flags of the first: all containers of the tests are as hardened.
PAGE = (ROOT / "docs/en/docker.md").read_text().replace("\\\n", " ")
*COMMANDS, OWN = re.findall(r"^docker run .*", PAGE, re.MULTILINE)  # the last, with an image of the user's own
HARDENED = re.findall(r"(?<=docker run --rm ).*?(?= -v )", COMMANDS[0])[0].split()


# All of each program, in few steps. Of imagenet_ddp with a model whose gradients and checkpoints are a tenth of
# ResNet-18's: what is tested is around it.
SMALLEST = "squeezenet1_1"
FEW_STEPS = {
    "bert_dp": ("--limit-steps", "6", "--hidden", "64", "--dropout", "0"),
    "gan_ddp": ("--limit-steps", "8"),
    "imagenet_ddp": ("--limit-steps", "16", "--image-size", "32", "-a", SMALLEST),
    "manual_allreduce_sgd": ("--limit-steps", "16"),
    "mnist_dataparallel": ("--limit-steps", "16"),
    "mnist_ddp_spawn": ("--limit-steps", "16"),
    "resnet_pipeline": ("-a", "resnet18", "--image-size", "32", "--images", "64", "-b", "16", "--limit-steps", "4"),
}


def load(path: str) -> ModuleType:
    """A script of the project that is not in a package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load("docker/build.py")
ENV = os.environ | (
    {} if "CONTAINERS_CONF" in os.environ else {"CONTAINERS_CONF": str(ROOT / "tests/e2e/containers.conf")}
)


@functools.cache
def program() -> str:
    """docker or podman."""
    return build.engine(ENV)


def image(name: str, **variables: str) -> str:
    """The full name of an example's image, as it is built with some variables."""
    return build.targets(ENV | variables)[name]["tags"][0]


def engine(*words: object, code: int | None = 0, limit: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a command of the engine and check its exit code (None: any)."""
    command = [program(), *map(str, words)]
    with tempfile.TemporaryDirectory() as folder:  # podman's monitor leaves a file `oom` in its working directory
        done = subprocess.run(
            command, cwd=folder, env=ENV, capture_output=True, text=True, timeout=here(limit), check=False
        )
    assert code is None or done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def slowed(folder: Path) -> tuple[str]:
    """What to mount for steps of a second and more: the training lasts until it is disturbed."""
    change = slow(1)
    return (f"{mutated(folder, change) / change[0]}:/app/{change[0]}:ro",)


@dataclass
class Containers:
    """The containers, networks and volumes of one test."""

    token: str = field(default_factory=lambda: f"e2e-{uuid.uuid4().hex[:8]}")
    names: list[str] = field(default_factory=list)
    networks: list[str] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)

    def volume(self) -> str:
        """The name of a volume that the first container makes."""
        self.volumes.append(f"{self.token}-volume{len(self.volumes)}")
        return self.volumes[-1]

    def network(self, *flags: str) -> str:
        name = f"{self.token}-net{len(self.networks)}"
        engine("network", "create", *flags, name)
        self.networks.append(name)
        return name

    def start(self, name: str, image: str, *words: str, out: Path | None = None, flags: tuple[str, ...] = ()) -> str:
        """Start a hardened container and return its full name; flags given later win over the hardened ones."""
        full = f"{self.token}-{name}"
        self.names.append(full)
        hardened = [*HARDENED, *(["--read-only-tmpfs=false"] if program() == "podman" else [])]
        if "--network" in flags:
            at = hardened.index("--network")
            del hardened[at : at + 2]
        mounts = ["-v", f"{out}:/out"] if out else []
        engine("run", "--detach", "--name", full, *hardened, *mounts, *flags, image, *words)
        return full

    def finish(self, full: str, code: int | None = 0, limit: float = 400) -> str:
        """Wait for the end of a container, check its exit code, and return what it said."""
        got = int(engine("wait", full, limit=limit).stdout)
        done = engine("logs", full)
        said = done.stdout + done.stderr
        assert code is None or got == code, f"{full} ended with {got}, not {code}:\n{said}"
        return said

    def run(
        self,
        name: str,
        image: str,
        *words: str,
        code: int = 0,
        out: Path | None = None,
        flags: tuple[str, ...] = (),
        limit: float = 400,
    ) -> str:
        """Start a container and wait for its end."""
        return self.finish(self.start(name, image, *words, out=out, flags=flags), code, limit)

    def address(self, full: str) -> str:
        """The container's address in its network."""
        (found,) = json.loads(engine("inspect", full).stdout)
        (network,) = found["NetworkSettings"]["Networks"].values()
        return network["IPAddress"]

    def clean(self) -> None:
        for name in self.names:
            engine("rm", "--force", name, code=None)
        for name in self.networks:
            engine("network", "rm", name, code=None)
        for name in self.volumes:
            engine("volume", "rm", "--force", name, code=None)


def eventually(condition: Callable[[], object], limit: float, what: str) -> None:
    deadline = time.monotonic() + here(limit)
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {here(limit):.0f} s"
        time.sleep(0.1)
