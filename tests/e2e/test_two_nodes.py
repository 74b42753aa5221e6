"""Two containers on a private network, with the command and the environment that the manifests give their pods."""

import json
import re
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import yaml

from common.launch.errors import RETRY
from tests.conftest import ROOT, Programs
from tests.e2e.engine import ENV, FEW_STEPS, SMALLEST, Containers, engine, eventually, image, program, slowed
from tests.k8s.rendered import EXAMPLES, Manifests, manifests
from tests.machine import here
from tests.runs import RECORD, Result, accounted, mutated, newest_step, result

# With checkpoints to be killed between.
SHORT = {name: (*flags, "--checkpoint-every", "2") for name, flags in FEW_STEPS.items()}
LISTENING = (  # local ports of sockets in state LISTEN, version 4 and 6
    "import json; rows = [l.split() for f in ('tcp', 'tcp6') for l in open(f'/proc/net/{f}').readlines()[1:]];"
    "print(json.dumps(sorted({int(r[1].rpartition(':')[2], 16) for r in rows if r[3] == '0A'})))"
)
CONNECT = """
import json, socket, sys
host, ports = sys.argv[1], json.loads(sys.argv[2])
def reached(port):
    try:
        socket.create_connection((host, port), timeout=1).close()
        return True
    except OSError:
        return False
print(json.dumps([port for port in ports if reached(port)]))
"""


@pytest.fixture
def containers() -> Generator[Containers]:
    started = Containers()
    yield started
    started.clean()


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    folder = tmp_path / "volume"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def pods(
    containers: Containers,
    job: Manifests,
    network: str,
    out: Path,
    attempt: int,
    more: tuple[str, ...],
    env: dict[str, str] | None = None,
    indexes: tuple[int, ...] = (0, 1),
    mounts: tuple[str, ...] = (),
) -> list[str]:
    """Start pods of a job as containers: its image, command, arguments, environment, user, names, grace, cores."""
    pod, container = job.pod, job.container
    assert container["command"] == ["python", "/app/docker/entrypoint.py", "--"]  # the image's entrypoint
    security = pod["securityContext"]
    started = []
    for index in indexes:
        host = f"{job.name}-{index}"
        flags = ["--network", network, "--hostname", host, "--network-alias", host]
        flags += ["--network-alias", f"{host}.{pod['subdomain']}"]  # what the headless Service does
        flags += ["--user", f"{security['runAsUser']}:{security['runAsGroup']}"]
        flags += [
            "--cpus",
            container["resources"]["limits"]["cpu"],
            "--shm-size",
            "1g",
            "--stop-timeout",
            str(pod["terminationGracePeriodSeconds"]),
        ]
        for name, value in (job.environment(index) | (env or {})).items():
            flags += ["--env", f"{name}={value}"]
        for mount in mounts:
            flags += ["--volume", mount]
        words = (*container["args"], *more)
        started.append(containers.start(f"{index}-{attempt}", container["image"], *words, out=out, flags=tuple(flags)))
    return started


def reference(programs: Programs, name: str, out: Path, more: tuple[str, ...], threads: int) -> Result:
    """Two processes of the same program without containers."""
    words = ("-m", f"examples.{name}", "--nproc", 2, "--threads", threads, "--out", out, *more)
    programs.run(*words, limit=400)
    return result(out)


def check_two_nodes(programs: Programs, run: Path, name: str, out: Path, more: tuple[str, ...]) -> Result:
    """Two nodes have ended with the bits of two processes on one, without containers."""
    found = result(run)
    expected = reference(programs, name, out, more, found["threads"])
    assert (found["world_size"], found["nodes"]) == (2, 2)
    assert (expected["world_size"], expected["nodes"]) == (2, 1)
    assert found["parameter_hash"] == expected["parameter_hash"]
    return found


@pytest.mark.parametrize(("name", "victim"), [("imagenet_ddp", 1), ("manual_allreduce_sgd", 0)])
def test_two_nodes_lose_one_and_go_on(
    containers: Containers, programs: Programs, tmp_path: Path, volume: Path, name: str, victim: int
) -> None:
    """As in a cluster: one pod is killed, the other says that it is not the cause, both start again and resume."""
    job = manifests(f"overlays/{name}")
    # A pod's network can go before the last packets of its connections: then the other one learns of it by --timeout.
    more, run = (*SHORT[name], "--timeout", "45"), volume / "runs" / name
    network = containers.network("--internal")

    first = pods(containers, job, network, volume, 1, more, mounts=slowed(tmp_path / "slow"))
    eventually(lambda: newest_step(run) >= 4, 90, "a checkpoint")
    engine("kill", "--signal", "KILL", first[victim])
    containers.finish(first[victim], code=137)
    said = containers.finish(first[1 - victim], code=RETRY, limit=90)
    assert "lost another process" in said.splitlines()[-1], f"the last line is the reason: {said}"
    assert not (run / "result.json").exists()

    second = pods(containers, job, network, volume, 2, more)
    said = [containers.finish(pod) for pod in second]
    assert f"resumed from runs/{name}/checkpoints" in said[0]
    assert "resumed" not in said[1]  # the main rank speaks for all
    assert check_two_nodes(programs, run, name, tmp_path / "reference", more)["launcher"] == "torchrun"


@pytest.mark.parametrize(("name", "victim"), [("mnist_ddp_spawn", 1), ("manual_allreduce_sgd", 0)])
def test_a_pod_that_is_deleted_saves_first(
    containers: Containers, programs: Programs, tmp_path: Path, volume: Path, name: str, victim: int
) -> None:
    """`kubectl delete pod` is SIGTERM to one of two nodes: both end with 143 after the same step, and go on from it."""
    job = manifests(f"overlays/{name}")
    more, run = SHORT[name], volume / "runs" / name
    network = containers.network("--internal")

    first = pods(containers, job, network, volume, 1, more, mounts=slowed(tmp_path / "slow"))
    eventually(lambda: newest_step(run) >= 4, 90, "a checkpoint")
    engine("stop", first[victim], limit=200)  # it has the pod's time of grace
    said = [containers.finish(pod, code=143, limit=90) for pod in first]
    steps = [re.search(r"^stopped by SIGTERM: checkpoint at step (\d+); go on", text.splitlines()[-1]) for text in said]
    assert all(steps), f"the last line of each pod is the reason, not torchrun's traceback: {said}"
    step = newest_step(run)
    assert {int(found[1]) for found in steps if found} == {step}

    second = pods(containers, job, network, volume, 2, more)
    said = [containers.finish(pod) for pod in second]
    assert f" at step {step}\n" in said[0].partition("resumed from")[2], "nothing is done again"
    check_two_nodes(programs, run, name, tmp_path / "reference", more)


@pytest.mark.parametrize("name", sorted(EXAMPLES - {"imagenet_ddp", "manual_allreduce_sgd", "mnist_ddp_spawn"}))
def test_the_other_examples_on_two_nodes(
    containers: Containers, programs: Programs, tmp_path: Path, volume: Path, name: str
) -> None:
    """Those that the tests above do not lose a pod of."""
    job = manifests(f"overlays/{name}")
    for pod in pods(containers, job, containers.network("--internal"), volume, 1, SHORT[name]):
        containers.finish(pod)
    check_two_nodes(programs, volume / "runs" / name, name, tmp_path / "reference", SHORT[name])


def test_pods_are_added_and_removed_while_it_trains(containers: Containers, tmp_path: Path, volume: Path) -> None:
    """One pod, two, one again: each of the 480 images is trained on once in each epoch, which ends once."""
    job = manifests("overlays/imagenet_ddp_elastic")
    noted = mutated(tmp_path / "code", RECORD) / RECORD[0]
    more = ("--epochs", "1000", "--checkpoint-every", "2", "--image-size", "32", "-a", SMALLEST)
    run = volume / "runs" / "imagenet_ddp"
    network = containers.network("--internal")

    def said(pod: str) -> str:
        done = engine("logs", pod)
        return done.stdout + done.stderr

    def epochs(pod: str) -> list[int]:
        return [int(epoch) for epoch in re.findall(r"^epoch (\d+)/1000  loss", said(pod), re.MULTILINE)]

    def start(index: int) -> str:
        return pods(containers, job, network, volume, 1, more, None, (index,), (f"{noted}:/app/{RECORD[0]}:ro",))[0]

    stays = start(0)
    eventually(lambda: newest_step(run) >= 4, 120, "training with one pod")
    goes = start(1)
    two = "continuing with 2 node(s), world 1 -> 2: the same samples follow in the same order"
    eventually(lambda: two in said(stays) + said(goes), 120, "two pods")
    before = len(epochs(stays) + epochs(goes))
    eventually(lambda: len(epochs(stays) + epochs(goes)) > before, 120, "an epoch's end, and check, with two pods")
    engine("stop", goes, limit=200)
    assert containers.finish(goes, code=143).splitlines()[-1].startswith("stopped by SIGTERM: checkpoint at step")
    one = "continuing with 1 node(s), world 2 -> 1: the same samples follow in the same order"
    eventually(lambda: one in said(stays), 120, "one pod")
    before = len(epochs(stays))
    eventually(lambda: len(epochs(stays)) > before, 120, "an epoch's end, and check, with one pod again")
    engine("stop", stays, limit=200)
    assert "CheckError" not in containers.finish(stays, code=143) + said(goes)
    ended = sorted(epochs(stays) + epochs(goes))
    assert ended == list(range(1, len(ended) + 1))
    trained_on = accounted(run)
    assert [sorted(trained_on[epoch]) for epoch in range(len(ended))] == [list(range(480))] * len(ended)


# 2 cores are 2 threads per rank in a pod, and other bits than those of 2 ranks that share 2 cores.
@pytest.mark.parametrize(("name", "cores"), [("manual_allreduce_sgd", 2), ("imagenet_ddp", 1)])
def test_an_elastic_rendezvous_gives_the_same_bits(
    containers: Containers, programs: Programs, tmp_path: Path, volume: Path, name: str, cores: int
) -> None:
    """torchrun's c10d backend numbers the nodes as they come; it needs more ports, which a private network gives."""
    more = SHORT[name]
    job = manifests(f"overlays/{name}")
    for bound in ("requests", "limits"):  # threads follow from the lower one
        job.container["resources"][bound]["cpu"] = str(cores)
    endpoint = f"{job.environment(0)['PET_MASTER_ADDR']}:{job.environment(0)['PET_MASTER_PORT']}"
    env = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": endpoint, "PET_RDZV_ID": "one"}
    for pod in pods(containers, job, containers.network("--internal"), volume, 1, more, env):
        containers.finish(pod)
    found = check_two_nodes(programs, volume / "runs" / name, name, tmp_path / "reference", more)
    assert found["threads"] == cores
    if cores != 1:
        assert reference(programs, name, tmp_path / "one", more, 1)["parameter_hash"] != found["parameter_hash"]


def test_only_the_network_of_the_job_reaches_its_ports(containers: Containers, volume: Path) -> None:
    job = manifests("overlays/manual_allreduce_sgd")
    network = containers.network("--internal")
    first, _ = pods(containers, job, network, volume, 1, ("--epochs", "1000000"))
    eventually(lambda: newest_step(volume / "runs" / "manual_allreduce_sgd") > 0, 90, "a checkpoint")
    ports = json.loads(engine("exec", first, "python", "-c", LISTENING).stdout)
    assert int(job.environment(0)["PET_MASTER_PORT"]) in ports
    probe = ("python", "-c", CONNECT, containers.address(first), json.dumps(ports))
    inside = containers.run("inside", job.container["image"], *probe, flags=("--network", network))
    assert json.loads(inside) == ports
    outside = containers.run("outside", job.container["image"], *probe, flags=("--network", containers.network()))
    assert json.loads(outside) == []


def test_a_mistake_ends_both_nodes_at_once(containers: Containers, volume: Path) -> None:
    job = manifests("overlays/manual_allreduce_sgd")
    both = pods(containers, job, containers.network("--internal"), volume, 1, ("--batch-size", "7"))
    said = [containers.finish(pod, code=None) for pod in both]
    codes = [int(engine("wait", pod).stdout) for pod in both]
    assert 2 in codes, said  # FailJob
    assert set(codes) <= {2, RETRY}, said
    assert "cannot be divided by 2 ranks" in said[codes.index(2)].splitlines()[-1], "the last line is the reason"


def test_the_doctor_sees_both_nodes(containers: Containers, volume: Path) -> None:
    job = manifests("overlays/imagenet_ddp")
    job.container["args"] = ["torchrun", "-m", "common.doctor", "--json"]
    both = pods(containers, job, containers.network("--internal"), volume, 1, ())
    said = [containers.finish(pod) for pod in both]
    report = json.loads(said[0][said[0].index("{") :])
    assert report["world_size"] == 2
    assert report["errors"] == 0
    assert "{" not in said[1]
    assert image("imagenet_ddp") == job.container["image"]


def test_the_compose_file_trains_on_two_nodes(containers: Containers, tmp_path: Path) -> None:
    """The page's command, with fewer steps, to its end."""
    project, file, fewer = f"{containers.token}-compose", ROOT / "docker" / "compose.yaml", tmp_path / "fewer.yaml"
    nodes = yaml.safe_load(file.read_text())["services"]
    short = {name: {"command": [*node["command"], *FEW_STEPS["imagenet_ddp"]]} for name, node in nodes.items()}
    fewer.write_text(yaml.safe_dump({"services": short}))
    provider = ["docker", "compose"] if program() == "docker" else [str(Path(sys.executable).parent / "podman-compose")]
    compose = [*provider, "--project-name", project, "--file", str(file), "--file", str(fewer)]
    try:
        done = subprocess.run(
            [*compose, "up"], env=ENV, cwd=ROOT, capture_output=True, text=True, timeout=here(500), check=False
        )
        said = done.stdout + done.stderr
        assert "world size 2" in said, said
        folder = engine("volume", "inspect", "--format", "{{.Mountpoint}}", f"{project}_out").stdout.strip()
        found = result(Path(folder) / "runs" / "imagenet_ddp")
        assert (found["world_size"], found["nodes"], found["launcher"]) == (2, 2, "torchrun")
        assert found["image_size"] == 32
    finally:
        subprocess.run([*compose, "down", "--volumes"], env=ENV, cwd=ROOT, capture_output=True, check=False)
