"""The manifests as `kubectl kustomize` renders them, and what a pod of them gets."""

import functools
import math
import os
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
Document = dict[str, Any]
EXAMPLES = sorted(path.parent.name for path in (ROOT / "docker").glob("*/Dockerfile"))
EXAMPLES.remove("base")
OVERLAYS = sorted(path.name for path in (ROOT / "k8s" / "overlays").iterdir())
REGISTRY = "localhost/distributed-training-examples"
TAG = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
UNITS = {"": 1.0, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(text: Any) -> float:
    """Convert a Kubernetes quantity to a number: `500m` is 0.5."""
    digits = str(text).rstrip("KMGTim")
    return float(digits) * UNITS[str(text)[len(digits) :]]


@dataclass
class Manifests:
    """The documents of one job, a Job, a JobSet or a TrainJob with its TrainingRuntime."""

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
        spec, kind = self.owner["spec"], self.owner["kind"]
        return {} if kind == "Job" else spec if kind == "JobSet" else spec["template"]["spec"]

    @property
    def job(self) -> dict[str, Any]:
        """The spec of the Job."""
        if not self.set:
            return self.owner["spec"]
        (replicated,) = self.set["replicatedJobs"]
        assert (replicated["name"], replicated["replicas"]) == ("node", 1)
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
    def example(self) -> str:
        return self.container["args"][1].removeprefix("examples.")

    @property
    def name(self) -> str:
        return self.owner["metadata"]["name"]

    @property
    def gpus(self) -> int:
        return int(self.container["resources"]["limits"].get("nvidia.com/gpu", 0))

    @property
    def elastic(self) -> bool:
        return ":" in self.environment(0).get("PET_NNODES", "")

    @property
    def processes(self) -> int:
        """The number of ranks per pod."""
        if self.owner["kind"] == "TrainingRuntime":
            (train,) = self.of("TrainJob")
            return train["spec"]["trainer"]["numProcPerNode"]
        return int(self.environment(0)["PET_NPROC_PER_NODE"])

    def environment(self, index: int) -> dict[str, str]:
        """Return a pod's environment as the kubelet makes it: $(NAME) needs NAME above."""
        labels = {
            "batch.kubernetes.io/job-completion-index": str(index),
            "batch.kubernetes.io/job-name": self.name,
            "jobset.sigs.k8s.io/jobset-name": self.name,
        }
        env = dict[str, str]()
        for entry in self.container.get("env", []):
            value = entry["value"] if "value" in entry else self._source(entry["valueFrom"], labels)
            for name, known in env.items():
                value = value.replace(f"$({name})", known)
            env[entry["name"]] = value
        return env

    def _source(self, source: dict[str, Any], labels: dict[str, str]) -> str:
        if "fieldRef" in source:
            return labels[source["fieldRef"]["fieldPath"].split("'")[1]]
        reference = source["resourceFieldRef"]
        assert reference["containerName"] == self.container["name"]
        kind, _, name = reference["resource"].partition(".")
        return str(math.ceil(quantity(self.container["resources"][kind][name])))


@functools.cache
def rendered(folder: Path) -> str:
    env = os.environ | {"GOGC": "off"}  # its garbage collector takes a third of the time
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def manifests(overlay: str, root: Path = ROOT / "k8s") -> Manifests:
    """Return a new copy of the manifests of an overlay."""
    text = rendered(root / "overlays" / overlay)
    return Manifests(list(yaml.load_all(text, yaml.CSafeLoader)))  # ten times faster than in Python
