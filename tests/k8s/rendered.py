"""The manifests as `kubectl kustomize` renders them, and what a pod of them gets."""

import functools
import math
import os
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import ROOT

Document = dict[str, Any]
EXAMPLES = {
    "mnist_ddp_spawn",
    "imagenet_ddp",
    "manual_allreduce_sgd",
    "resnet_pipeline",
    "mnist_dataparallel",
    "bert_dp",
    "gan_ddp",
}
TEMPLATES = {"your_model"}  # to be copied: no image, no manifests
BUILT = sorted({path.parent.name for path in (ROOT / "examples").glob("*/train.py")} - TEMPLATES)
REGISTRY = "localhost/distributed-training-examples"
UNITS = {"m": 1e-3, "": 1.0, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
INDEX = "metadata.labels['batch.kubernetes.io/job-completion-index']"
JOB = "metadata.labels['batch.kubernetes.io/job-name']"
JOBSET = "metadata.labels['jobset.sigs.k8s.io/jobset-name']"


def quantity(text: Any) -> float:
    """A Kubernetes quantity as a number: `500m` is 0.5."""
    digits = str(text).rstrip("KMGTim")
    return float(digits) * UNITS[str(text)[len(digits) :]]


@dataclass
class Manifests:
    """The rendered documents of one job, whatever kind holds its pod template."""

    documents: list[Document]

    def of(self, kind: str) -> list[Document]:
        return [document for document in self.documents if document["kind"] == kind]

    @cached_property
    def owner(self) -> Document:
        """The Job, JobSet or TrainingRuntime."""
        (owner,) = self.of("Job") + self.of("JobSet") + self.of("TrainingRuntime")
        return owner

    @property
    def set(self) -> dict[str, Any]:
        """The spec of the JobSet; empty for a Job."""
        spec = self.owner["spec"]
        kind = self.owner["kind"]
        return {} if kind == "Job" else spec if kind == "JobSet" else spec["template"]["spec"]

    @cached_property
    def job(self) -> dict[str, Any]:
        """The spec of the Job."""
        if not self.set:
            return self.owner["spec"]
        (replicated,) = self.set["replicatedJobs"]
        assert replicated["name"] == "node"
        assert replicated["replicas"] == 1
        return replicated["template"]["spec"]

    @property
    def pod(self) -> dict[str, Any]:
        return self.job["template"]["spec"]

    @property
    def labels(self) -> dict[str, str]:
        return self.job["template"].get("metadata", {}).get("labels", {})

    @property
    def container(self) -> dict[str, Any]:
        (container,) = self.pod["containers"]
        return container

    @property
    def name(self) -> str:
        return self.owner["metadata"]["name"]

    def environment(self, index: int) -> dict[str, str]:
        """The environment of a pod, as the kubelet makes it: references resolved in order, unknown ones left alone."""
        labels = {INDEX: str(index), JOB: self.name, JOBSET: self.name}
        env: dict[str, str] = {}
        for entry in self.container.get("env", []):
            value = entry["value"] if "value" in entry else self._reference(entry["valueFrom"], labels)
            for known, text in env.items():
                value = value.replace(f"$({known})", text)
            env[entry["name"]] = value
        return env

    def _reference(self, reference: dict[str, Any], labels: dict[str, str]) -> str:
        """A label, what a secret holds (here its name), or a request or limit in whole cores, rounded up."""
        if "secretKeyRef" in reference:
            return reference["secretKeyRef"]["name"]
        if "fieldRef" in reference:
            return labels[reference["fieldRef"]["fieldPath"]]
        what = reference["resourceFieldRef"]
        assert what["containerName"] == self.container["name"]
        kind, _, name = what["resource"].partition(".")
        return str(math.ceil(quantity(self.container["resources"][kind][name])))

    def mount(self, path: str) -> dict[str, Any]:
        """The volume that is mounted at a path; empty if there is none."""
        names = [mount["name"] for mount in self.container.get("volumeMounts", []) if mount.get("mountPath") == path]
        volumes = [volume for volume in self.pod.get("volumes", []) if volume.get("name") in names]
        return volumes[0] if volumes else {}

    @property
    def elastic(self) -> bool:
        """Whether pods may come and go."""
        return ":" in self.environment(0).get("PET_NNODES", "")

    @property
    def processes(self) -> int:
        """How many processes a pod starts; of a TrainJob, which sets the variable itself, what it says."""
        if self.owner["kind"] == "TrainingRuntime":
            (train,) = self.of("TrainJob")
            return train["spec"]["trainer"]["numProcPerNode"]
        return int(self.environment(0)["PET_NPROC_PER_NODE"])


@functools.cache
def rendered(folder: str, root: Path = ROOT / "k8s") -> str:
    env = os.environ | {"GOGC": "off"}  # its garbage collector would take a third of its time
    command = ["kubectl", "kustomize", str(root / folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def manifests(folder: str, root: Path = ROOT / "k8s") -> Manifests:
    return Manifests(list(yaml.load_all(rendered(folder, root), yaml.CSafeLoader)))  # ten times faster than in Python
