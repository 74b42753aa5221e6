"""Rules for every job of k8s/: functions from rendered manifests to complaints."""

import json
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Any

import yaml

from common.launch import LOST
from tests.deploy.rendered import EXAMPLES, REGISTRY, TAG, Manifests, quantity

POLICY = Template(Path(__file__).with_name("policy.yaml").read_text())
ONE_RANK_PER_POD = ("bert_dp", "mnist_dataparallel")  # DataParallel uses all GPUs of a pod
QUEUE = "kueue.x-k8s.io/queue-name"
# Fields that are not in policy.yaml.
POD = ("containers", "subdomain", "terminationGracePeriodSeconds")
POD += ("nodeSelector", "priorityClassName", "imagePullSecrets")
JOB = ("completions", "parallelism", "template", "ttlSecondsAfterFinished", "activeDeadlineSeconds")


def complaints(job: Manifests) -> list[str]:
    """Return every rule that a job breaks, with a reason."""
    found = []
    for rule in (same, resources, exits, program, kueue, network, rendezvous, trainer):
        try:
            found += [f"{rule.__name__}: {complaint}" for complaint in rule(job)]
        except (KeyError, IndexError, TypeError, ValueError, AssertionError, AttributeError) as e:
            found.append(f"{rule.__name__}: incomplete ({e!r})")
    return found


def policy(job: Manifests, index: int = 0) -> dict[str, Any]:
    """Return policy.yaml for a pod of a job."""
    (claim,) = job.of("PersistentVolumeClaim")
    pod = f"{job.name}-node-0-0" if job.set else f"{job.name}-0"
    names = {"claim": claim["metadata"]["name"], "shared_memory": "16Gi" if job.gpus else "1Gi"}
    names |= {"name": job.name, "first": f"{pod}.{job.name}", "index": index, "lost": LOST}
    text = POLICY.substitute(names, labels=job.labels, nodes=job.job["completions"])
    return yaml.load(text, yaml.CSafeLoader)


def differs(actual: dict[str, Any], expected: dict[str, Any], *others: str) -> Iterator[str]:
    """Yield the fields that differ from what is expected, but not those among others."""
    for field in (expected.keys() | actual.keys()) - {*others}:
        if in_any_order(actual.get(field)) != in_any_order(expected.get(field)):
            yield f"{field} is {actual.get(field)}"


def in_any_order(field: Any) -> Any:
    """Sort volumes and mounts, because Kustomize puts merged ones first."""
    if isinstance(field, list) and all(isinstance(item, dict) and "name" in item for item in field):
        return sorted(field, key=lambda item: json.dumps(item, sort_keys=True))
    return field


def same(job: Manifests) -> Iterator[str]:
    """What every job has: hardening, volumes, failure policy, spreading."""
    expected = policy(job)
    if "/data" in job.container["args"]:
        expected["pod"]["volumes"].append(expected["data"]["volume"])
        expected["container"]["volumeMounts"].append(expected["data"]["mount"])
    if job.gpus:
        expected["pod"]["tolerations"].append(expected["gpu"])
    yield from differs(job.pod, expected["pod"], *POD)
    yield from differs(job.container, expected["container"], "args", "env", "image", "resources")
    yield from differs(job.job, expected["job"], *JOB)
    if job.set:
        yield from differs(job.set, expected["jobset"], "replicatedJobs", "ttlSecondsAfterFinished")
    (claim,) = job.of("PersistentVolumeClaim")
    if claim["spec"]["accessModes"] != ["ReadWriteMany"]:
        yield "the pods do not share their checkpoints"
    if quantity(claim["spec"]["resources"]["requests"]["storage"]) < 2**30:
        yield "no room for checkpoints"


def resources(job: Manifests) -> Iterator[str]:
    """Guaranteed pods whose threads fit on their cores; one rank per GPU, or per pod."""
    requests, limits = (job.container["resources"][kind] for kind in ("requests", "limits"))
    env = job.environment(0)
    for name in (requests.keys() | limits.keys()) - {"ephemeral-storage", "nvidia.com/gpu"}:
        if requests[name] != limits[name]:
            yield f"{name}: the request differs from the limit"
    if {"cpu", "memory"} - limits.keys() or "nvidia.com/gpu" in requests:
        yield "no limit on cores or memory, or GPUs that are not in the limits"
    if not 0 < quantity(requests["ephemeral-storage"]) <= quantity(limits["ephemeral-storage"]):
        yield "no limit on the disk"
    devices = job.gpus if job.gpus and job.processes == 1 else job.processes  # DataParallel
    if devices * int(env["OMP_NUM_THREADS"]) != quantity(limits["cpu"]):
        yield f"{devices} x {env['OMP_NUM_THREADS']} threads on {limits['cpu']} cores"
    if env.get("NVIDIA_VISIBLE_DEVICES") != (None if job.gpus else "void"):
        yield "a pod without GPUs sees those of its node, or a pod with GPUs does not see them"
    one = job.example in ONE_RANK_PER_POD or not job.gpus
    if job.processes != (1 if one else job.gpus):
        yield f"{job.processes} ranks on {job.gpus} GPUs"


def exits(job: Manifests) -> Iterator[str]:
    """How many pods, how much time to save, and who may evict."""
    if job.job["parallelism"] != job.job["completions"]:
        yield "not all pods run at the same time"
    shutdown = int(job.environment(0)["PET_SHUTDOWN_TIMEOUT"])
    if not 30 < shutdown < job.pod["terminationGracePeriodSeconds"]:
        yield "torchrun's time to save does not fit into the pod's"
    spec = job.owner["spec"]
    if job.owner["kind"] != "TrainingRuntime" and spec["ttlSecondsAfterFinished"] < 3600:
        yield "the logs are deleted before a user can read them"
    (budget,) = job.of("PodDisruptionBudget")
    least = 1 if job.elastic else job.job["completions"]
    if budget["spec"] != {"minAvailable": least, "selector": {"matchLabels": job.labels}}:
        yield "the disruption budget is for other pods, or another number"


def program(job: Manifests) -> Iterator[str]:
    """The image is one of the project and contains the program, which resumes."""
    if job.container["image"] != f"{REGISTRY}/{job.example}:{TAG}" or job.example not in EXAMPLES:
        yield f"{job.container['image']} is not built by the project for {job.example}"
    if job.container["args"][:4] != ["-m", f"examples.{job.example}", "--resume", "auto"]:
        yield "another program, or one that does not resume"


def kueue(job: Manifests) -> Iterator[str]:
    """The label of the queue is on the object that Kueue reads."""
    labeled = {d["kind"] for d in job.documents if QUEUE in d["metadata"].get("labels", {})}
    if labeled and job.owner["kind"].replace("TrainingRuntime", "TrainJob") not in labeled:
        yield f"Kueue does not look at {sorted(labeled)}"


def network(job: Manifests) -> Iterator[str]:
    """Only the pods of this job reach each other; they reach DNS, and have names there."""
    if set(job.labels) != {"app.kubernetes.io/part-of", "training-job"}:
        yield "the pods have the labels of other jobs"
    (network_policy,) = job.of("NetworkPolicy")
    yield from differs(network_policy["spec"], policy(job)["network_policy"])
    services = [(s["metadata"]["name"], s["spec"]) for s in job.of("Service")]
    if services != ([] if job.set else [(job.name, policy(job)["service"])]):
        yield "the Service has another name or selects other pods, or JobSet creates a second one"
    if job.pod.get("subdomain") != (None if job.set else job.name):
        yield "the pods do not get the names of the Service"


def rendezvous(job: Manifests) -> Iterator[str]:
    """The pods know their numbers and where to meet."""
    kind = "trainer" if job.of("TrainJob") else "elastic" if job.elastic else "static"
    for index in range(job.job["completions"]):
        env = job.environment(index)
        own = {name: env[name] for name in env if name.startswith(("PET_", "TORCH"))}
        others = ("PET_SHUTDOWN_TIMEOUT", "PET_NPROC_PER_NODE")[: 1 if kind == "trainer" else 2]
        yield from differs(own, policy(job, index)[kind], *others)


def trainer(job: Manifests) -> Iterator[str]:
    """What Kubeflow Trainer needs."""
    if job.owner["kind"] != "TrainingRuntime":
        return
    (train,) = job.of("TrainJob")
    if job.documents.index(train) < job.documents.index(job.owner):
        yield "the webhook refuses a TrainJob before its runtime"
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
    yield from differs(train["spec"], {"runtimeRef": runtime}, "trainer")
    labels = job.owner["metadata"]["labels"]
    yield from differs(train["metadata"], {"name": job.name, "labels": labels})
    nodes = {"numNodes": job.job["completions"], "torch": {}}
    yield from differs(job.owner["spec"], {"mlPolicy": nodes}, "template")
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    if job.set["replicatedJobs"][0]["template"]["metadata"]["labels"] != step:
        yield "Trainer does not find the pods"
    if not isinstance(job.processes, int):
        yield "numProcPerNode is a number"
