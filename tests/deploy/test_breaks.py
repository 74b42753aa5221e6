"""Whatever is removed from the manifests breaks a rule, and so does what must not be in them."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.policy import QUEUE, complaints
from tests.deploy.rendered import REGISTRY, Manifests, manifests


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values in a document."""
    if not node or not isinstance(node, dict | list):
        yield path
    else:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from leaves(value, (*path, key))


SUFFIXES = ("_gpu", "_elastic", "_jobset", "_trainjob")


@pytest.mark.parametrize("name", ["bert_dp", *(f"imagenet_ddp{suffix}" for suffix in SUFFIXES)])
def test_whatever_is_removed_breaks_a_rule(name: str) -> None:
    """Each value in turn, but the example's own flags: test_manifests.py parses those."""
    for path in leaves(manifests(name).documents):
        own_flag = path[-2] == "args" and path[-1] > 3
        if path[1] in ("metadata", "apiVersion", "kind") or own_flag:
            continue
        job = manifests(name)
        node: Any = job.documents
        for key in path[:-1]:
            node = node[key]
        del node[path[-1]]
        assert complaints(job), f"no rule needs {path}"


# Where (an attribute of Manifests or a kind, then keys), and what is put there.
BREAKS = {
    "pod": {"hostNetwork": True},
    "pod serviceAccountName": "admin",
    "pod terminationGracePeriodSeconds": 60,
    "pod volumes 0": {"name": "tmp", "hostPath": {"path": "/"}},
    "pod securityContext runAsUser": 0,
    "container securityContext capabilities add": ["IPC_LOCK"],
    "container volumeMounts 0 mountPath": "/app",
    "container resources requests cpu": "16",
    "container resources requests nvidia.com/gpu": "4",
    "container resources limits nvidia.com/gpu": "8",
    "container image": f"{REGISTRY}/imagenet_ddp:latest",
    "container args 1": "examples.gan_ddp",
    "container args 3": "no",
    "container env OMP_NUM_THREADS": "32",
    "container env NVIDIA_VISIBLE_DEVICES": "void",
    "container env PET_NNODES": "1",
    "container env PET_MASTER_ADDR": "127.0.0.1",
    "container env PET_SHUTDOWN_TIMEOUT": "120",
    "job successPolicy": {"rules": [{"succeededCount": 1}]},
    "job parallelism": 1,
    "job podReplacementPolicy": "TerminatingOrFailed",
    "job podFailurePolicy rules 0 onExitCodes values": [1],
    "job podFailurePolicy rules 2 onExitCodes values": [1, 75, 143],
    "Service metadata name": "other",
    "PodDisruptionBudget spec minAvailable": 1,
    "PersistentVolumeClaim spec accessModes": ["ReadWriteOnce"],
    "PersistentVolumeClaim metadata labels": {QUEUE: "training"},
    "NetworkPolicy spec ingress 0 from": [{"podSelector": {}}],
    "NetworkPolicy spec egress": [{}],
}
OF_A_TRAINJOB = {
    "TrainJob spec trainer numProcPerNode": 4,
    "TrainJob spec runtimeRef name": "other",
    "TrainingRuntime spec mlPolicy numNodes": 1,
    "TrainingRuntime metadata labels": {QUEUE: "training"},
    "container env PET_MAX_RESTARTS": "3",
}


def put(job: Manifests, where: str, value: Any) -> None:
    first, *keys = where.split()
    node: Any = getattr(job, first) if hasattr(job, first) else job.of(first)[0]
    if keys[:1] == ["env"]:
        node["env"] = [entry for entry in node["env"] if entry["name"] != keys[1]]
        keys, value = ["env"], [*node["env"], {"name": keys[1], "value": value}]
    for key in keys[:-1]:
        node = node[int(key) if key.isdigit() else key]
    if keys:
        node[int(keys[-1]) if keys[-1].isdigit() else keys[-1]] = value
    else:
        node.update(value)


@pytest.mark.parametrize("where", BREAKS)
def test_a_break_of_a_job(where: str) -> None:
    job = manifests("imagenet_ddp_gpu")
    put(job, where, BREAKS[where])
    assert complaints(job)


@pytest.mark.parametrize("where", OF_A_TRAINJOB)
def test_a_break_of_a_trainjob(where: str) -> None:
    job = manifests("imagenet_ddp_trainjob")
    put(job, where, OF_A_TRAINJOB[where])
    assert complaints(job)


def test_a_trainjob_before_its_runtime() -> None:
    job = manifests("imagenet_ddp_trainjob")
    job.documents.insert(0, job.documents.pop())
    assert complaints(job)
