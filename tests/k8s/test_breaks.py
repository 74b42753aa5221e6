"""Whatever is removed from the manifests is missed, and what must not be in them is seen."""

import copy
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.k8s.policy import GRACE, QUEUE, complaints
from tests.k8s.rendered import REGISTRY, Document, Manifests, manifests


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a document, and of the lists that hold values."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        if isinstance(value, dict | list) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


def without(documents: list[Document], path: tuple[Any, ...]) -> Manifests:
    broken = copy.deepcopy(documents)
    node: Any = broken
    for key in path[:-1]:
        node = node[key]
    del node[path[-1]]
    return Manifests(broken)


@pytest.mark.parametrize(
    "folder",
    [
        "overlays/imagenet_ddp",
        "overlays/imagenet_ddp_gpu",
        "overlays/bert_dp",
        "overlays/imagenet_ddp_elastic",
        "variants/jobset/imagenet_ddp",
        "variants/trainjob/imagenet_ddp_gpu",
    ],
)
def test_whatever_is_removed_is_missed(folder: str) -> None:
    """Each value of the rendered manifests in its turn: hardening, limits, failure policy, names, addresses."""
    job = manifests(folder)
    for path in leaves(job.documents):
        if path[1] == "metadata" or path[1:] in (("apiVersion",), ("kind",)):
            continue
        spare = path[-3:] == ("ports", 0, "name")
        spare |= path[-2] == "args" and path[-1] > 4  # the program's own flags: parsed by another test
        assert spare or complaints(without(job.documents, path)), f"nobody misses {path}"


def at(documents: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        documents = documents[key]
    return documents


BREAKS: dict[str, Callable[[Manifests], Any]] = {
    "host network": lambda job: job.pod.update(hostNetwork=True),
    "host processes": lambda job: job.pod.update(hostPID=True),
    "host path": lambda job: job.pod["volumes"].append({"name": "host", "hostPath": {"path": "/"}}),
    "host port": lambda job: job.container.update(ports=[{"containerPort": 1, "hostPort": 1}]),
    "privileged": lambda job: job.container["securityContext"].update(privileged=True),
    "root": lambda job: job.pod["securityContext"].update(runAsUser=0),
    "root container": lambda job: job.container["securityContext"].update(runAsUser=0),
    "a capability": lambda job: job.container["securityContext"]["capabilities"].update(add=["IPC_LOCK"]),
    "no seccomp": lambda job: job.pod["securityContext"].update(seccompProfile={"type": "Unconfined"}),
    "a sidecar as root": lambda job: job.pod.update(initContainers=[{"name": "x", "image": "x"}]),
    "a token": lambda job: job.pod.update(serviceAccountName="admin"),
    "a writable folder": lambda job: job.container["volumeMounts"].append({"name": "tmp", "mountPath": "/app"}),
    "shared memory on disk": lambda job: job.mount("/dev/shm")["emptyDir"].update(medium=""),
    "too much shared memory": lambda job: job.mount("/dev/shm")["emptyDir"].update(sizeLimit="1Ti"),
    "names of no DNS server": lambda job: job.of("NetworkPolicy")[0]["spec"]["egress"][1]["ports"].pop(0),
    "pods on one node": lambda job: job.pod.pop("topologySpreadConstraints"),
    "no second try": lambda job: job.job.update(backoffLimitPerIndex=0),
    "checkpoints for one node": lambda job: job.of("PersistentVolumeClaim")[0]["spec"].update(
        accessModes=["ReadWriteOnce"]
    ),
    "requests above limits": lambda job: job.container["resources"]["requests"].update(memory="1Ti"),
    "requested GPUs": lambda job: job.container["resources"]["requests"].update({"nvidia.com/gpu": "1"}),
    "another number of GPUs": lambda job: job.container["resources"]["limits"].update({"nvidia.com/gpu": "3"}),
    "mistakes repeated": lambda job: job.job["podFailurePolicy"]["rules"].pop(0),
    "other codes ignored": lambda job: job.job["podFailurePolicy"]["rules"][2]["onExitCodes"].update(
        values=[1, 75, 143]
    ),
    "too little time": lambda job: job.pod.update(terminationGracePeriodSeconds=GRACE),
    "a success policy": lambda job: job.job.update(successPolicy={"rules": [{"succeededCount": 1}]}),
    "pods alone": lambda job: entry(job, "PET_NNODES").update(value="1"),
    "a number too few": lambda job: job.job.update(parallelism=1),
    "another first node": lambda job: entry(job, "PET_MASTER_ADDR").update(value="127.0.0.1"),
    "name after its use": lambda job: job.container["env"].append(job.container["env"].pop(0)),
    "another name of the Service": lambda job: job.of("Service")[0]["metadata"].update(name="other"),
    "a Service with an address": lambda job: job.of("Service")[0]["spec"].update(clusterIP="10.0.0.1"),
    "a budget that allows a loss": lambda job: job.of("PodDisruptionBudget")[0]["spec"].update(minAvailable=1),
    "open to all": lambda job: job.of("NetworkPolicy")[0]["spec"].update(ingress=[{}]),
    "open to the namespace": lambda job: job.of("NetworkPolicy")[0]["spec"]["ingress"][0]["from"].append(
        {"podSelector": {}}
    ),
    "open to the world": lambda job: job.of("NetworkPolicy")[0]["spec"]["egress"].append({}),
    "no policy": lambda job: job.documents.remove(job.of("NetworkPolicy")[0]),
    "an image of no version": lambda job: job.container.update(image=f"{REGISTRY}/imagenet_ddp:latest"),
    "an unknown image": lambda job: job.container.update(image=f"{REGISTRY}/imagenet:0.1.0"),
    "another program": lambda job: job.container.update(image=f"{REGISTRY}/gan_ddp:0.1.0"),
    "another first process": lambda job: job.container.update(command=["sh", "-c"]),
    "five minutes on a dead node": lambda job: job.pod["tolerations"].pop(0),
    "GPUs of others": lambda job: entry(job, "NVIDIA_VISIBLE_DEVICES").update(value="all"),
    "cores of others": lambda job: job.container["resources"]["requests"].update(cpu="500m"),
    "a topology without a queue": lambda job: job.job["template"]["metadata"].update(
        annotations={"kueue.x-k8s.io/podset-required-topology": "rack"}
    ),
    "no resuming": lambda job: job.container["args"].__setitem__(-1, "no"),
}


OF_A_TRAINJOB: dict[str, Callable[[Manifests], Any]] = {
    "the job before its runtime": lambda job: job.documents.insert(0, job.documents.pop()),
    "idle GPUs": lambda job: job.of("TrainJob")[0]["spec"]["trainer"].update(numProcPerNode=1),
    "a number that Kubeflow refuses": lambda job: job.of("TrainJob")[0]["spec"]["trainer"].update(numProcPerNode="4"),
    "a queue where Kueue does not look": lambda job: job.of("TrainingRuntime")[0]["metadata"]["labels"].update(
        {QUEUE: "training"}
    ),
}


@pytest.mark.parametrize("name", OF_A_TRAINJOB)
def test_what_must_not_be_in_a_trainjob_is_seen(name: str) -> None:
    job = Manifests(copy.deepcopy(manifests("variants/trainjob/imagenet_ddp_gpu").documents))
    assert not complaints(job)
    OF_A_TRAINJOB[name](job)
    assert complaints(job)


def entry(job: Manifests, name: str) -> dict[str, Any]:
    return next(item for item in job.container["env"] if item["name"] == name)


@pytest.mark.parametrize("name", BREAKS)
def test_what_must_not_be_is_seen(name: str) -> None:
    job = Manifests(copy.deepcopy(manifests("overlays/imagenet_ddp").documents))
    BREAKS[name](job)
    assert complaints(job)


WORDS = [
    "runAs",
    "fsGroup",
    "seccomp",
    "RuntimeDefault",
    "automount",
    "ServiceLinks",
    "allowPrivilege",
    "readOnlyRoot",
    "capabilities:",
    "drop:",
    "restartPolicy",
    "terminationGrace",
    "sizeLimit",
]
SOURCE = (ROOT / "k8s" / "base" / "job.yaml").read_text()
HARDENING = [line for line in SOURCE.splitlines() if any(word in line for word in WORDS)]


def test_each_hardening_line_of_the_source_is_missed(tmp_path: Path) -> None:
    assert len(HARDENING) >= 16
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    file = tmp_path / "k8s" / "base" / "job.yaml"
    for line in HARDENING:
        file.write_text(SOURCE.replace(line + "\n", "", 1))
        done = subprocess.run(
            ["kubectl", "kustomize", str(tmp_path / "k8s" / "overlays" / "imagenet_ddp")],
            capture_output=True,
            text=True,
            check=False,
        )
        seen = done.returncode != 0 or complaints(Manifests(list(yaml.safe_load_all(done.stdout))))
        assert seen, f"nobody misses {line}"
