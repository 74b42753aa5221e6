"""What every pod of k8s/ must obey, as rules from rendered manifests to complaints."""

import json
import math
from collections.abc import Iterator

from tests.conftest import ROOT
from tests.k8s.rendered import Manifests, quantity

DATA_PARALLEL = ("bert_dp", "mnist_dataparallel")  # one process drives all GPUs of a pod
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
# A node that falls silent: its pods are given up after a minute.
SILENT = [
    {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}
    for state in ("not-ready", "unreachable")
]
GPU_NODE = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


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
    for name in ("cpu", "memory"):
        if asked[name] != limits[name] or quantity(asked["cpu"]) % 1:
            yield f"{name}: not Guaranteed in whole cores, so others take the cores that threads wait for"
    if job.environment(0)["CPU_REQUEST"] != str(math.ceil(quantity(asked["cpu"]))):
        yield "threads do not follow the request where it is below the limit"
    if "nvidia.com/gpu" in asked:
        yield "GPUs go into the limits only"
    rdma = {name: count for name, count in (asked | limits).items() if name.startswith("rdma/")}
    if any(asked.get(name) != count or limits.get(name) != count for name, count in rdma.items()):
        yield "RDMA devices: request and limit differ"
    gpus = int(limits.get("nvidia.com/gpu", 0))
    if job.environment(0).get("NVIDIA_VISIBLE_DEVICES") != (None if gpus else "void"):
        yield "the image's `all` gives a pod that asks for none the GPUs of its node, or a pod's own are hidden"
    one = job.container["image"].rpartition("/")[2].partition(":")[0] in DATA_PARALLEL or not gpus
    if job.processes != (1 if one else gpus):
        yield f"{gpus} GPUs for another number of processes"
    if job.pod["tolerations"] != SILENT + [GPU_NODE] * bool(gpus):
        yield "pods stay on a dead node for minutes, or nodes with GPUs refuse them"


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
