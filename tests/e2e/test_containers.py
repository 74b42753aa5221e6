"""The page's images in hardened containers, and two of them as the pods of a job.

Needs root and podman; prepare.sh installs it and makes a base image. Python's packages are
downloaded once.
"""

import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import pytest

from tests import programs
from tests.deploy.rendered import EXAMPLES, REGISTRY, ROOT, TAG, Manifests, manifests
from tests.hooks import At

pytestmark = pytest.mark.timeout(900)  # the first build downloads the packages
E2E = ROOT / "tests" / "e2e"
PAGE = (ROOT / "docs" / "en" / "docker.md").read_text().replace("\\\n", " ")
BUILDS = re.findall(r"^docker (build .*) \.$", PAGE, re.MULTILINE)
RUNS = re.findall(r"^docker run --rm -v (.*)", PAGE, re.MULTILINE)
HARDENED = re.findall(r"-v strict:/out (.*) localhost", PAGE)[0].split()
ENV = os.environ | {"CONTAINERS_CONF": str(E2E / "containers.conf")}
# Few steps; what is tested is around them.
SHORT = {
    "bert_dp": "--epochs 1 --max-length 16 --batch-size 64",
    "gan_ddp": "--epochs 2",
    "imagenet_ddp": "--epochs 1 --arch squeezenet1_1",
    "manual_allreduce_sgd": "--epochs 4",
    "mnist_dataparallel": "--epochs 2",
    "mnist_ddp_spawn": "--epochs 8",
    "resnet_pipeline": "--epochs 1 --arch resnet18",
}


@dataclass(frozen=True)
class End:
    """The end of a container."""

    code: int
    log: str = field(repr=False)

    @property
    def reason(self) -> str:
        return self.log.splitlines()[-1]

    def done(self) -> "End":
        assert self.code == 0, f"{self.code}\n{self.log}"
        return self


def podman(*words: object) -> End:
    done = subprocess.run(
        ["podman", *map(str, words)],
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    return End(done.returncode, done.stdout)


def run(image: str, *words: object, flags: list[str], name: str = "") -> End:
    """Run a container; it is gone when this returns, also after an error."""
    name = name or f"e2e-{secrets.token_hex(4)}"
    hardened = [*HARDENED, "--read-only-tmpfs=false"]  # not podman's default, but docker's
    if "--network" in flags:
        at = hardened.index("--network")
        del hardened[at : at + 2]
    try:
        return podman("run", "--rm", "--name", name, *hardened, *flags, image, *words)
    finally:
        podman("rm", "--force", "--ignore", name)


def for_this_machine() -> list[str]:
    """Return what a build of the base needs here: another base, and the network."""
    base = subprocess.check_output([E2E / "prepare.sh"], env=ENV, text=True).strip()
    revision = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    arguments = f"BASE_IMAGE={base}", f"REVISION={revision}"
    words = [word for argument in arguments for word in ("--build-arg", argument)]
    return ["--network", "host", *words, str(ROOT)]


@pytest.fixture(scope="module", autouse=True)
def images() -> None:
    """Build the base and every example with the page's lines, on a minimal Debian."""
    for_base, for_example = BUILDS
    podman(*for_base.split(), *for_this_machine()).done()
    for name in EXAMPLES:
        podman(*for_example.replace("imagenet_ddp", name).split(), ROOT).done()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder into which every user may write, like a volume."""
    folder = tmp_path / "out"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_hardened(out: Path, name: str) -> None:
    """Offline, read-only, without capabilities, as a user that the image does not know."""
    wanted = "--network none --read-only --cap-drop ALL --security-opt no-new-privileges"
    assert wanted in " ".join(HARDENED)
    image = f"{REGISTRY}/{name}:{TAG}"
    flags = ["--volume", f"{out}:/out", "--env", "OMP_NUM_THREADS=1"]
    end = run(image, *SHORT.get(name, "--epochs 2").split(), flags=flags).done()
    assert "Traceback" not in end.log
    found, user = result(out / "runs" / name), HARDENED[HARDENED.index("--user") + 1]
    assert (found["world_size"], found["args"]["device"]) == (1, "auto")
    assert re.fullmatch(r"[0-9a-f]{40}", found["commit"])
    assert (out / "runs" / name / "result.json").stat().st_uid == int(user.split(":")[0])


INSIDE = """
import glob, json, os, shutil
tools = [tool for tool in ("gcc", "g++", "pip", "uv", "git", "curl") if shutil.which(tool)]
folders = ("/app", "/app/common", "/app/docker", "/app/examples/gan_ddp", "/opt/venv", "/etc")
files = [f for d in ("/tools", "/build", "/root/.cache", "/var/lib/apt/lists", "/tmp", "/out")
         for f in glob.glob(d + "/**", recursive=True) if os.path.isfile(f)]
print(json.dumps([tools, [f for f in folders if os.access(f, os.W_OK)], files,
    sorted(os.listdir("/app")), len(glob.glob("/app/common/__pycache__/*")) > 5]))
"""


def test_the_image_contains_the_source_and_nothing_else() -> None:
    end = run(f"{REGISTRY}/base:{TAG}", "-c", INSIDE, flags=["--entrypoint", "python"]).done()
    assert json.loads(end.log) == [[], [], [], ["common", "docker", "examples", "tools"], True]


def test_the_commands_of_the_page(out: Path) -> None:
    """Those without GPUs, in few steps. Each user has a volume."""
    for user, command in enumerate(RUNS):
        if "--gpus" not in command:
            (out / str(user)).mkdir()
            (out / str(user)).chmod(0o1777)
            words = re.sub(r"^\w+:", f"{out}/{user}:", command).replace("imagenet_ddp", "gan_ddp")
            podman("run", "--rm", "-v", *words.split(), *SHORT["gan_ddp"].split()).done()


@pytest.mark.nightly
def test_compile_in_a_hardened_container(out: Path) -> None:
    """An image with a compiler, and a tmpfs from which compiled code can be loaded."""
    name = f"{REGISTRY}/base:{TAG}-compile"
    podman(*BUILDS[0].split()[:-1], name, "--build-arg", "COMPILER=yes", *for_this_machine()).done()
    words = ["-m", "examples.imagenet_ddp", "--compile", *SHORT["imagenet_ddp"].split()]
    assert "Traceback" not in run(name, *words, flags=["--volume", f"{out}:/out"]).done().log


# ------------------------------------------------------------------------------- pods of a job


def pod(job: Manifests, index: int, network: str, out: Path, flags: str, fault: At | None) -> End:
    """Run a container with the image, command, environment, user, cores and names of a pod."""
    security, container = job.pod["securityContext"], job.container
    host = f"{job.name}-{index}"
    words = ["--network", network, "--hostname", host, "--network-alias", host]
    words += ["--network-alias", f"{host}.{job.pod['subdomain']}"]  # what the Service does
    words += ["--user", f"{security['runAsUser']}:{security['runAsGroup']}", "--shm-size", "1g"]
    words += ["--cpus", container["resources"]["limits"]["cpu"], "--volume", f"{out}:/out"]
    env = job.environment(index)
    if fault:  # the launcher is the container's first process, which the kubelet signals
        words += ["--volume", f"{ROOT / 'tests'}:/hooks/tests:ro"]
        env |= {"PYTHONPATH": "/hooks/tests/site:/hooks:/app", "TESTS_LAUNCHER": "1"}
        env |= {"TESTS_HOOK": json.dumps([[], astuple(fault)]), "PYTHONDONTWRITEBYTECODE": "1"}
    words += [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    words += ["--entrypoint", json.dumps(container["command"])]
    arguments = [*container["args"], *flags.split()]
    return run(container["image"], *arguments, flags=words, name=f"{network}-{index}")


@pytest.fixture
def network() -> Iterator[str]:
    name = f"e2e-{secrets.token_hex(4)}"
    podman("network", "create", "--internal", name).done()
    yield name
    podman("network", "rm", "--force", name)


@pytest.mark.parametrize(
    ("name", "fault", "codes"),
    [
        ("mnist_ddp_spawn", At(1, 5, SIGTERM, "launcher"), [143, 143]),  # `kubectl delete pod`
        ("resnet_pipeline", At(0, 3, SIGTERM, "launcher"), [143, 143]),
        ("manual_allreduce_sgd", At(0, 15, SIGKILL), [137, 75]),  # out of memory, for example
    ],
)
def test_a_pod_is_lost_and_comes_back(
    tmp_path: Path, out: Path, network: str, name: str, fault: At, codes: list[int]
) -> None:
    """The pods exit with codes of the failure policy, start again, and train the same model."""
    job, folder = manifests(name), out / "runs" / name

    def both(fault: At | None) -> list[End]:
        with ThreadPoolExecutor(2) as pool:
            pods = [pool.submit(pod, job, i, network, out, SHORT[name], fault) for i in range(2)]
            return [end.result() for end in pods]

    lost = both(fault)
    assert [end.code for end in lost] == codes, [end.log for end in lost]
    reasons = {
        143: "stopped by SIGTERM: ",
        137: "error: a rank was killed by SIGKILL",
        75: " has exited",
    }
    assert all(reasons[end.code] in end.reason for end in lost), [end.log for end in lost]
    assert not (folder / "result.json").exists()

    first, _ = [end.done() for end in both(None)]
    assert "resumed from " in first.log
    words = [sys.executable, "-m", f"examples.{name}", "--nproc", "2", "--out", tmp_path / "whole"]
    threads = job.environment(0)["OMP_NUM_THREADS"]
    programs.run(*words, *SHORT[name].split(), env={"OMP_NUM_THREADS": threads}).done()
    whole, found = result(tmp_path / "whole"), result(folder)
    assert (found["world_size"], found["threads"]) == (2, int(threads))
    assert found["parameter_hash"] == whole["parameter_hash"]


def test_a_mistake_ends_both_pods(out: Path, network: str) -> None:
    job = manifests("gan_ddp")
    with ThreadPoolExecutor(2) as pool:
        pods = [pool.submit(pod, job, i, network, out, "--batch-size 7", None) for i in range(2)]
    ends = [end.result() for end in pods]
    assert all("--batch-size 7 is not divisible by 2 ranks" in end.reason for end in ends)
    assert [end.code for end in ends] == [2, 2]
