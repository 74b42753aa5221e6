"""What every job of k8s/ must obey, as one function from rendered manifests to complaints."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from common.launch.errors import RETRY
from tests.conftest import ROOT

Document = dict[str, Any]
DATA_PARALLEL = ("bert_dp", "mnist_dataparallel")  # one process drives all GPUs of a pod
GRACE = 110  # seconds that docker/entrypoint.py gives a job after SIGTERM
ALLOWED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
FAILURES = [
    {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "In", "values": [2]}},
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {"action": "Ignore", "onExitCodes": {"containerName": "node", "operator": "In", "values": [RETRY, 128 + 15]}},
]
UNITS = {"m": 1e-3, "": 1.0, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
INDEX = "metadata.labels['batch.kubernetes.io/job-completion-index']"
JOB = "metadata.labels['batch.kubernetes.io/job-name']"
TRAINER = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
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
            value = entry["value"] if "value" in entry else labels[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            for known, text in env.items():
                value = value.replace(f"$({known})", text)
            env[entry["name"]] = value
        return env

    def mount(self, path: str) -> dict[str, Any]:
        """The volume that is mounted at a path; empty if there is none."""
        names = [mount["name"] for mount in self.container.get("volumeMounts", []) if mount.get("mountPath") == path]
        volumes = [volume for volume in self.pod.get("volumes", []) if volume.get("name") in names]
        return volumes[0] if volumes else {}


def complaints(job: Manifests) -> list[str]:
    """Everything in which a job breaks a rule; empty if it may be applied."""
    rules = (pod_security, hardening, folders, resources, failures, start, network, rendezvous, image)
    found = []
    for rule in rules:
        try:
            found += [f"{rule.__name__}: {complaint}" for complaint in rule(job)]
        except (KeyError, IndexError, TypeError, ValueError, AssertionError, AttributeError) as error:
            found.append(f"{rule.__name__}: incomplete ({error!r})")
    return found


def pod_security(job: Manifests) -> Iterator[str]:
    """The rules of Pod Security `restricted`."""
    pod = job.pod
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield f"{field} is set"
    if pod["securityContext"]["runAsNonRoot"] is not True:
        yield "the pod may run as root"
    if pod["securityContext"]["seccompProfile"]["type"] != "RuntimeDefault":
        yield "no seccomp profile"
    for volume in pod["volumes"]:
        if set(volume) - {"name"} - ALLOWED_VOLUMES or "name" not in volume or len(volume) != 2:
            yield f"volume {volume} is of a kind that is not allowed"
    for container in pod["containers"] + pod.get("initContainers", []):
        context = container["securityContext"]
        if context["allowPrivilegeEscalation"] is not False or context.get("privileged"):
            yield "privileges can be raised"
        if context["capabilities"] != {"drop": ["ALL"]}:
            yield "capabilities are kept"
        if context.get("runAsNonRoot") is False or context.get("runAsUser") == 0 or "seccompProfile" in context:
            yield "the container undoes what the pod sets"
        if any("hostPort" in port for port in container.get("ports", [])):
            yield "a port of the host is taken"


def hardening(job: Manifests) -> Iterator[str]:
    """What goes beyond Pod Security."""
    context = job.pod["securityContext"]
    if min(context["runAsUser"], context["runAsGroup"], context["fsGroup"]) < 10_000:
        yield "user and groups must not be any of a host's"
    if context["fsGroupChangePolicy"] != "OnRootMismatch":
        yield "a large volume would be walked through before each start"
    if job.container["securityContext"]["readOnlyRootFilesystem"] is not True:
        yield "the root file system can be written"
    if job.pod["automountServiceAccountToken"] is not False or "serviceAccountName" in job.pod:
        yield "the pod gets a token of the cluster"
    if job.pod["enableServiceLinks"] is not False:
        yield "addresses of all services of the namespace are put into the environment"


def folders(job: Manifests) -> Iterator[str]:
    """What can be written: limited folders, and a volume for what must outlive the pod."""
    if quantity(job.mount("/tmp")["emptyDir"]["sizeLimit"]) <= 0:
        yield "/tmp has no size"
    shared = job.mount("/dev/shm")["emptyDir"]
    memory = quantity(job.container["resources"]["limits"]["memory"])
    least = max(2**28, int(job.container["resources"]["limits"].get("nvidia.com/gpu", 0)) * 2**28)
    if shared["medium"] != "Memory" or not least <= quantity(shared["sizeLimit"]) <= memory / 2:
        yield "/dev/shm is not memory, or too small, or too large for the memory limit"
    claims = {claim["metadata"]["name"]: claim["spec"] for claim in job.of("PersistentVolumeClaim")}
    claim = claims[job.mount("/out")["persistentVolumeClaim"]["claimName"]]
    modes = ["ReadWriteMany"] if job.job["completions"] > 1 else ["ReadWriteOnce"]
    if claim["accessModes"] != modes or quantity(claim["resources"]["requests"]["storage"]) < 2**30:
        yield "the checkpoints' volume cannot be shared by all nodes, or need not be, or is too small"
    for mount in job.container["volumeMounts"]:
        if mount["mountPath"] not in ("/tmp", "/out", "/dev/shm", "/data"):
            yield f"{mount['mountPath']} can be written"
    data = [mount for mount in job.container["volumeMounts"] if mount["mountPath"] == "/data"]
    claim = {"claimName": "training-data", "readOnly": True}
    if any(not mount.get("readOnly") or job.mount("/data")["persistentVolumeClaim"] != claim for mount in data):
        yield "the data can be written, or are not those of the claim that exists"
    if ("/data" in job.container["args"]) != bool(data):
        yield "/data is mounted and not used, or used and not mounted"


def resources(job: Manifests) -> Iterator[str]:
    """Requests and limits; a GPU, which cannot be overcommitted, stands in the limits only."""
    asked, limits = job.container["resources"]["requests"], job.container["resources"]["limits"]
    for name in ("cpu", "memory", "ephemeral-storage"):
        if not 0 < quantity(asked[name]) <= quantity(limits[name]):
            yield f"{name}: requests {asked[name]}, limit {limits[name]}"
    if "nvidia.com/gpu" in asked:
        yield "GPUs go into the limits only"
    rdma = {name: count for name, count in (asked | limits).items() if name.startswith("rdma/")}
    if any(asked.get(name) != count or limits.get(name) != count for name, count in rdma.items()):
        yield "RDMA devices: request and limit differ"
    gpus = int(limits.get("nvidia.com/gpu", 0))
    runtime = job.owner["kind"] == "TrainingRuntime"
    processes = 1 if job.container["image"].rpartition("/")[2].partition(":")[0] in DATA_PARALLEL else gpus
    if gpus and not runtime and int(job.environment(0)["PET_NPROC_PER_NODE"]) != processes:
        yield f"{gpus} GPUs for another number of processes"
    taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    if job.pod.get("tolerations", []) != [taint] * bool(gpus):
        yield "nodes with GPUs refuse pods that do not tolerate their taint"


def failures(job: Manifests) -> Iterator[str]:
    """Which ends count, and how much time there is to save."""
    spec = job.job
    if spec["podFailurePolicy"]["rules"] != FAILURES:
        yield "a user's mistake, a lost node and a failure are not told apart"
    if spec["completionMode"] != "Indexed" or spec["parallelism"] != spec["completions"]:
        yield "not all pods run at once with a number each"
    if spec["backoffLimitPerIndex"] < 1 or spec["maxFailedIndexes"] != 0:
        yield "a pod is not started again, or the job goes on without it"
    if spec["podReplacementPolicy"] != "Failed" or job.pod["restartPolicy"] != "Never":
        yield "two pods could write one checkpoint"
    if {"successPolicy", "backoffLimit"} & spec.keys():
        yield "pods would be ended while they save"
    if not GRACE < job.pod["terminationGracePeriodSeconds"] <= 300:
        yield "the time to save is shorter than that of docker/entrypoint.py"
    if not 30 < int(job.environment(0)["PET_SHUTDOWN_TIMEOUT"]) < GRACE:
        yield "torchrun's time to save does not fit into the pod's"
    ttl = job.owner["spec"] if job.owner["kind"] != "TrainingRuntime" else {"ttlSecondsAfterFinished": 3600}
    if ttl["ttlSecondsAfterFinished"] < 3600:
        yield "the job is gone before anybody has read its logs"
    for budget in job.of("PodDisruptionBudget"):
        if budget["spec"]["minAvailable"] != spec["completions"]:
            yield "the disruption budget is not the number of pods"
        if budget["spec"]["selector"] != {"matchLabels": job.labels}:
            yield "the disruption budget is for other pods"
    if spec["completions"] > 1 and not job.of("PodDisruptionBudget"):
        yield "a drain may stop all pods for one"


def start(job: Manifests) -> Iterator[str]:
    """What a pod starts."""
    if job.container["command"] != ["python", "/app/docker/entrypoint.py", "--"]:
        yield "signals, orphans and exit codes need docker/entrypoint.py as first process"
    if job.container["name"] != "node":
        yield "the failure policy and Kubeflow look for a container `node`"
    args = job.container["args"]
    if args[:2] not in (["torchrun", "-m"], ["python", "-m"]):
        yield "no launcher"
    if args[args.index("--resume") + 1] != "auto":
        yield "a new pod does not go on from the checkpoint"
    if job.environment(0)["PET_MAX_RESTARTS"] != "0":
        yield "torchrun's own restarts may hang: the Job starts pods again"


def network(job: Manifests) -> Iterator[str]:
    """Only the job's own pods reach each other, and they reach DNS."""
    if set(job.labels) != {"app.kubernetes.io/part-of", "training-job"}:
        yield "the pods of this job cannot be told from others"
    own = {"podSelector": {"matchLabels": job.labels}}
    dns = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
        "podSelector": {"matchExpressions": [{"key": "k8s-app", "operator": "In", "values": ["kube-dns", "coredns"]}]},
    }
    ports = [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]
    (policy,) = job.of("NetworkPolicy")
    expected = {
        **own,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [own]}],
        "egress": [{"to": [own]}, {"to": [dns], "ports": ports}],
    }
    if policy["spec"] != expected:
        yield "the network policy lets others in, or out"


def rendezvous(job: Manifests) -> Iterator[str]:
    """All pods form one job, and know where to meet."""
    nodes, kind = job.job["completions"], job.owner["kind"]
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"app.kubernetes.io/part-of": job.labels["app.kubernetes.io/part-of"]}},
        "matchLabelKeys": ["batch.kubernetes.io/job-name"],
    }
    if nodes > 1 and job.pod["topologySpreadConstraints"] != [spread]:
        yield "the pods would crowd on one machine"
    if job.set and job.set["network"] != {"enableDNSHostnames": True, "publishNotReadyAddresses": True}:
        yield "the JobSet gives no names"
    if job.set and job.set["failurePolicy"] != {"maxRestarts": 0}:
        yield "the JobSet starts all again, though the Job counts failures"
    if kind == "TrainingRuntime":
        if job.set["replicatedJobs"][0]["template"]["metadata"]["labels"] != TRAINER:
            yield "Kubeflow does not find the pods that train"
        (train,) = job.of("TrainJob")
        policy = job.owner["spec"]["mlPolicy"]
        reference = {"apiGroup": "trainer.kubeflow.org", "kind": kind, "name": job.name}
        if train["spec"]["runtimeRef"] != reference or train["metadata"]["name"] != job.name:
            yield "the TrainJob runs something else"
        if policy != {"numNodes": nodes, "torch": {}} or train["spec"]["trainer"] != {"numProcPerNode": 1}:
            yield "Kubeflow would start another number of processes"
        if any(name in job.environment(0) for name in ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR")):
            yield "Kubeflow sets the rendezvous itself"
        return
    if [job.environment(index)["PET_NNODES"] for index in range(nodes)] != [str(nodes)] * nodes:
        yield "every pod would train alone, or wait for pods that never come"
    if int(job.environment(0)["PET_NPROC_PER_NODE"]) < 1:
        yield "no process in a pod"
    if nodes == 1:
        return
    if [job.environment(index)["PET_NODE_RANK"] for index in range(nodes)] != [str(index) for index in range(nodes)]:
        yield "pods do not know their number"
    first = f"{job.name}-node-0-0.{job.name}" if kind == "JobSet" else f"{job.name}-0.{job.name}"
    if job.environment(1)["PET_MASTER_ADDR"] != first:
        yield f"the pods do not meet at {first}"
    if kind == "JobSet":
        return
    (service,) = job.of("Service")
    if not job.pod["subdomain"] == service["metadata"]["name"] == job.name:
        yield "the Service, the subdomain and the Job must have one name"
    if service["spec"]["clusterIP"] != "None" or service["spec"]["publishNotReadyAddresses"] is not True:
        yield "the Service gives no names, or too late"
    if service["spec"]["selector"] != job.labels:
        yield "the Service is for other pods"
    if [str(port["port"]) for port in service["spec"]["ports"]] != [job.environment(0)["PET_MASTER_PORT"]]:
        yield "the Service and the pods name different ports"


def image(job: Manifests) -> Iterator[str]:
    """The image is one that this project builds, in one version, and holds the program."""
    bake = json.loads((ROOT / "docker" / "docker-bake.json").read_text())
    name, _, tag = job.container["image"].rpartition(":")
    registry, _, example = name.rpartition("/")
    variables = {key: variable["default"] for key, variable in bake["variable"].items()}
    if (registry, tag) != (variables["REGISTRY"], variables["TAG"]) or example not in bake["group"]["default"][
        "targets"
    ]:
        yield f"{job.container['image']} is not in the bake file"
    args = job.container["args"]
    if args[args.index("-m") + 1] != f"examples.{example}":
        yield f"the image {example} does not hold the program"
    if job.container["imagePullPolicy"] != "IfNotPresent":
        yield "an image of a fixed version is pulled again and again"
