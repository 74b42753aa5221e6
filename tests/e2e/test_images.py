"""Every image runs its example as hardened as the page shows; none holds more than it needs."""

import json
import re
import shlex
import shutil
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.e2e.engine import COMMANDS, FEW_STEPS, HARDENED, OWN, PAGE, Containers, engine, eventually, image, slowed
from tests.k8s.rendered import BUILT
from tests.machine import here
from tests.runs import newest_step, result


@pytest.fixture
def containers() -> Generator[Containers]:
    started = Containers()
    yield started
    started.clean()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder into which any user may write, as a volume is."""
    folder = tmp_path / "out"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def test_the_page_hardens() -> None:
    wanted = ["--network none", "--read-only", "--cap-drop ALL", "--security-opt no-new-privileges"]
    for flag in (*wanted, "--tmpfs /tmp:exec,size=1g"):
        assert flag in " ".join(HARDENED)
    user = HARDENED[HARDENED.index("--user") + 1]
    assert int(user.split(":")[0]) not in (0, 10001), "a user that the image does not know"


@pytest.mark.parametrize(
    "command", [pytest.param(each, marks=[pytest.mark.gpu] if "--gpus" in each else []) for each in COMMANDS]
)
def test_the_pages_commands_run_as_they_stand(containers: Containers, command: str) -> None:
    _, *words = shlex.split(re.sub(r"-v \w+:", f"-v {containers.volume()}:", command))
    done = engine(*words, limit=400)
    said = done.stdout + done.stderr
    assert "0 error(s)" in said if "common.doctor" in command else "/result.json" in said
    assert "Traceback" not in said


def test_a_training_of_ones_own(containers: Containers, out: Path, tmp_path: Path) -> None:
    """A copy of the template, with the page's file and flags."""
    (dockerfile,) = re.findall(r"```dockerfile\n(.*?)```", PAGE, re.DOTALL)
    context, tag = tmp_path / "project", f"localhost/{containers.token}"
    shutil.copytree(ROOT / "examples/your_model", context / "examples/my_training")
    shutil.copy(ROOT / "examples/__init__.py", context / "examples")
    for file in (context / "examples/my_training").glob("*.py"):
        file.write_text(file.read_text().replace("your_model", "my_training"))
    (context / "my_training.Dockerfile").write_text(dockerfile)
    engine("build", "-f", context / "my_training.Dockerfile", "-t", tag, context, limit=400)
    try:
        said = containers.run("own", tag, *OWN.split("my_training:1 ")[1].split(), out=out)
    finally:
        engine("rmi", "--force", tag)
    assert "my_training: accuracy" in said
    assert result(out / "runs/my_training")["world_size"] == 2


@pytest.mark.parametrize("name", BUILT)
def test_a_demo_runs_hardened_on_embedded_data(containers: Containers, out: Path, name: str) -> None:
    # Two at once would make each other wait with a thread per core each, and throttled threads do not find the limit.
    said = containers.run("demo", image(name), *FEW_STEPS[name], out=out, flags=("--cpus", "1"))
    assert "1 thread(s)" in said, "the container's limit is its number of cores"
    done = result(out / "runs" / name)
    assert done["example"] == name
    assert done["world_size"] == 1
    assert f"result runs/{name}/result.json" in said
    assert "Traceback" not in said
    user = int(HARDENED[HARDENED.index("--user") + 1].split(":")[0])
    assert (out / "runs" / name / "result.json").stat().st_uid == user


INSIDE = """
import glob, json, os, shutil, sys
tools = [t for t in ("gcc", "cc", "g++", "make", "pip", "pip3", "uv", "git", "curl") if shutil.which(t)]
lists = glob.glob("/var/lib/apt/lists/*_Packages*")
folders = ("/app", "/app/common", "/app/docker", "/app/examples", "/opt/venv", "/usr", "/etc")
writable = [p for p in folders if os.access(p, os.W_OK)]
compiled = bool(glob.glob("/app/common/*/__pycache__/*.pyc")) and bool(glob.glob("/app/examples/*/__pycache__/*.pyc"))
import torch
compiled = compiled and os.path.exists(torch.__cached__ if hasattr(torch, "__cached__") else torch.__spec__.cached)
status = open("/proc/1/status").read()
print(json.dumps(dict(tools=tools, lists=lists, writable=writable, compiled=compiled,
    app=sorted(os.listdir("/app")), status=status, path=sys.path[:2],
    examples=sorted(n for n in os.listdir("/app/examples") if not n.startswith("__")),
    first=open("/proc/1/cmdline").read().split(chr(0)))))
"""
LEFT = """
import json, os
folders = ("/tools", "/build", "/root", "/var/cache/uv", "/var/cache/apt/archives", "/tmp", "/out")
files = [os.path.join(f, name) for folder in folders for f, _, names in os.walk(folder) for name in names]
kept = ("/root/.bashrc", "/root/.profile", "/var/cache/apt/archives/lock")
print(json.dumps([f for f in files if f not in kept]))
"""


def test_an_image_holds_what_it_needs_and_nothing_else(containers: Containers) -> None:
    name = "imagenet_ddp"
    said = containers.run("inside", image(name), "python", "-c", INSIDE)
    inside = json.loads(said.splitlines()[-1])
    assert {key: inside[key] for key in ("tools", "lists", "writable")} == {
        "tools": [],
        "lists": [],
        "writable": [],
    }
    said = containers.run("left", image(name), "python", "-c", LEFT, flags=("--user", "0"))  # who may look everywhere
    assert json.loads(said.splitlines()[-1]) == []
    assert inside["compiled"]
    assert [entry for entry in inside["app"] if entry != "__pycache__"] == ["common", "docker", "examples"]
    assert inside["examples"] == [name]
    assert inside["first"][:3] == ["python", "/app/docker/entrypoint.py", "--"]
    assert "CapEff:\t0000000000000000" in inside["status"]
    assert "NoNewPrivs:\t1" in inside["status"]
    assert "/out" not in inside["path"], "Python must not import from a folder that anyone can write to"

    (config,) = json.loads(engine("image", "inspect", image(name)).stdout)
    assert config["Config"]["User"] == "10001:10001"
    labels = config["Config"]["Labels"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert len(labels["org.opencontainers.image.revision"]) == 40
    assert labels["org.opencontainers.image.title"] == name


def test_an_example_adds_little_to_the_base() -> None:
    sizes = {name: json.loads(engine("image", "inspect", image(name)).stdout)[0]["Size"] for name in ("base", *BUILT)}
    print({name: f"{size / 1e9:.3f} GB" for name, size in sizes.items()})
    assert {name: size for name, size in sizes.items() if size > sizes["base"] + 2e6} == {}


def test_flags_and_mistakes(containers: Containers, out: Path) -> None:
    """Flags go to the program; a mistake ends with 2."""
    name = "mnist_ddp_spawn"
    said = containers.run("mistake", image(name), *("--nproc", "2", "--batch-size", "7", "--out", "/tmp/out"), code=2)
    assert "cannot be divided by 2 ranks" in said
    said = containers.run("no-volume", image(name), code=2)
    assert "cannot be written (Read-only file system): choose another folder" in said


TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2", "-m", "examples.manual_allreduce_sgd")


@pytest.mark.parametrize(
    ("name", "program"),
    [("mnist_ddp_spawn", ("--nproc", "2")), ("manual_allreduce_sgd", TORCHRUN)],
    ids=["spawn", "torchrun"],
)
def test_stop_lets_it_save(
    containers: Containers, tmp_path: Path, out: Path, name: str, program: tuple[str, ...]
) -> None:
    """`docker stop` ends with 143 and a checkpoint; resumed from just that step, it ends with the same bits."""
    words = (*program, *FEW_STEPS[name], "--checkpoint-every", "2")
    containers.run("whole", image(name), *words, "--out", "whole", out=out)
    slow = tuple(word for mount in slowed(tmp_path / "slow") for word in ("--volume", mount))
    stopped = containers.start("stopped", image(name), *words, "--out", "stopped", out=out, flags=slow)
    eventually(lambda: newest_step(out / "stopped") >= 4, 60, "a checkpoint")
    started = time.monotonic()
    engine("stop", "--time", "60", stopped)
    said = containers.finish(stopped, code=143)
    assert time.monotonic() - started < here(10)
    steps = re.findall(r"^stopped by SIGTERM: checkpoint at step (\d+); go on with --resume auto", said, re.MULTILINE)
    assert len(steps) == (2 if program[0] == "torchrun" else 1), "again below torchrun's tracebacks"
    step = steps[-1]
    said = containers.run("resumed", image(name), *words, "--resume", "auto", "--out", "stopped", out=out)
    assert f"at step {step}\n" in said.split("resumed from", 1)[1], "no step is done twice"
    assert result(out / "stopped")["parameter_hash"] == result(out / "whole")["parameter_hash"]


def test_the_doctor_finds_a_hardened_container_healthy(containers: Containers, out: Path) -> None:
    said = containers.run("doctor", image("imagenet_ddp"), "python", "-m", "common.doctor", "--json", out=out)
    report = json.loads(said[said.index("{") :])
    assert report["errors"] == 0
    findings = {finding["check"]: finding for finding in report["findings"]}
    assert findings["round trip"]["state"] == "ok"
    assert findings["shared memory"]["state"] == "warning", "64 MB are too little for loader workers"
    assert "--shm-size" in findings["shared memory"]["remedy"]


def test_the_end_for_memory_is_named(containers: Containers) -> None:
    flags = ("--memory", "300m", "--memory-swap", "300m")
    said = containers.run("memory", image("base"), "python", "-c", "bytearray(10**9)", code=137, flags=flags)
    assert "the kernel ended 1 process(es): the memory limit of the container was reached" in said
