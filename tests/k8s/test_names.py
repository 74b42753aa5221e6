"""Names under a prefix and a suffix of one's own: whatever a pod refers to is still an object of its job."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.policy import complaints
from tests.k8s.rendered import Manifests, manifests
from tests.k8s.test_manifests import ALL

THERE = {("PersistentVolumeClaim", "training-data")}  # what the cluster has already: components/data-volume
# Where a pod names another object, and of which kind.
FIELDS = {
    "claimName": "PersistentVolumeClaim",
    "configMapKeyRef": "ConfigMap",
    "configMapRef": "ConfigMap",
    "secretKeyRef": "Secret",
    "secretRef": "Secret",
    "secretName": "Secret",
    "serviceAccountName": "ServiceAccount",
    "subdomain": "Service",
}


def references(node: Any) -> Iterator[tuple[str, str]]:
    """Kind and name of every object that a rendered document refers to."""
    if isinstance(node, list):
        for item in node:
            yield from references(item)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in FIELDS:
                yield FIELDS[key], value["name"] if isinstance(value, dict) else value
            elif key == "runtimeRef":
                yield value["kind"], value["name"]
            else:
                yield from references(value)


def meeting_point(job: Manifests) -> str:
    """The host where the pods meet; empty for a TrainJob, of which Kubeflow sets it."""
    env = job.environment(1)
    return env.get("PET_MASTER_ADDR", env.get("PET_RDZV_ENDPOINT", "")).partition(":")[0]


def dangling(job: Manifests) -> set[tuple[str, str]]:
    """References to what neither the rendering nor the cluster has."""
    objects = {(document["kind"], document["metadata"]["name"]) for document in job.documents}
    if job.owner["kind"] == "JobSet":  # its controller makes a Service of its name, and pods NAME-node-0-NUMBER
        objects.add(("Service", job.name))
    found = {reference for document in job.documents for reference in references(document)}
    if host := meeting_point(job):
        pod, _, service = host.partition(".")
        first = f"{job.name}-node-0-0" if job.owner["kind"] == "JobSet" else f"{job.name}-0"
        found |= {("Service", service)} | {("Pod", pod)} - {("Pod", first)}
    return found - objects - THERE


@pytest.mark.parametrize("folder", ALL)
def test_names_follow_a_prefix_and_a_suffix(copied: Path, folder: str) -> None:
    """Else the pods of one user would mount the volume of another, or a TrainJob would run another's pods."""
    file = copied / "mine" / folder / "kustomization.yaml"
    file.parent.mkdir(parents=True)
    text = {
        "namePrefix": "bob-",
        "nameSuffix": "-2",
        "sortOptions": {"order": "fifo"},
        "resources": [str(Path("../" * len(file.parent.relative_to(copied).parts)) / folder)],
    }
    file.write_text(yaml.safe_dump(text))
    before, job = manifests(folder), manifests(f"mine/{folder}", copied)
    assert job.name == f"bob-{before.name}-2"
    assert dangling(job) == dangling(before) == set()
    found = [reference for document in job.documents for reference in references(document)]
    assert ("PersistentVolumeClaim", job.of("PersistentVolumeClaim")[0]["metadata"]["name"]) in found
    assert meeting_point(job) or job.of("TrainJob")
    assert complaints(job) == []
