"""What every job of k8s/ must obey, as one function from rendered manifests to complaints."""

from collections.abc import Iterator

from common.launch.errors import RETRY
from tests.k8s.pods import folders, hardening, image, pod_security, resources
from tests.k8s.rendered import Manifests

GRACE = 110  # seconds that docker/entrypoint.py gives a job after SIGTERM
FAILURES = [
    {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "In", "values": [2]}},
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {"action": "Ignore", "onExitCodes": {"containerName": "node", "operator": "In", "values": [RETRY, 128 + 15]}},
]
TRAINER = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
QUEUE = "kueue.x-k8s.io/queue-name"


def complaints(job: Manifests) -> list[str]:
    """Everything in which a job breaks a rule; empty if it may be applied."""
    rules = (pod_security, hardening, folders, resources, failures, start, queue, network, rendezvous, image)
    found = []
    for rule in rules:
        try:
            found += [f"{rule.__name__}: {complaint}" for complaint in rule(job)]
        except (KeyError, IndexError, TypeError, ValueError, AssertionError, AttributeError) as error:
            found.append(f"{rule.__name__}: incomplete ({error!r})")
    return found


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
        if budget["spec"]["minAvailable"] != (1 if job.elastic else spec["completions"]):
            yield "the disruption budget is not the number of pods that are needed"
        if budget["spec"]["selector"] != {"matchLabels": job.labels}:
            yield "the disruption budget is for other pods"
    if spec["completions"] > 1 and not job.of("PodDisruptionBudget"):
        yield "a drain may stop all pods for one"


def start(job: Manifests) -> Iterator[str]:
    """What a pod starts."""
    if job.container["command"] != ["python", "/app/docker/entrypoint.py", "--"]:
        yield "signals, orphans and exit codes need docker/entrypoint.py as first process"
    if job.container.get("terminationMessagePolicy") != "FallbackToLogsOnError":
        yield "`kubectl describe pod` does not say why a pod ended"
    if job.container["name"] != "node":
        yield "the failure policy and Kubeflow look for a container `node`"
    args = job.container["args"]
    if args[:2] not in (["torchrun", "-m"], ["python", "-m"]):
        yield "no launcher"
    if job.elastic and args[0] != "torchrun":
        yield "only torchrun lets pods come and go"
    if args[args.index("--resume") + 1] != "auto":
        yield "a new pod does not go on from the checkpoint"
    if job.environment(0)["PET_MAX_RESTARTS"] != ("100" if job.elastic else "0"):
        yield "torchrun's own restarts may hang: the Job starts pods again, but where pods come and go"


def queue(job: Manifests) -> Iterator[str]:
    """Where Kueue is to admit the job, its label is on the object that Kueue reads."""
    labelled = {document["kind"] for document in job.documents if QUEUE in document["metadata"].get("labels", {})}
    read = {"TrainingRuntime": "TrainJob"}.get(job.owner["kind"], job.owner["kind"])
    if labelled and read not in labelled:
        yield f"Kueue does not look at {sorted(labelled)}"
    if "kueue.x-k8s.io/podset" in str(job.job["template"]) and not labelled:
        yield "a topology that nobody reads"


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
        if policy != {"numNodes": nodes, "torch": {}} or not isinstance(job.processes, int):
            yield "Kubeflow would start another number of processes"
        if job.documents[-1] is not train:
            yield "the TrainJob comes before what it needs: the webhook refuses it"
        if any(name in job.environment(0) for name in ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR")):
            yield "Kubeflow sets the rendezvous itself"
        return
    first = f"{job.name}-node-0-0.{job.name}" if kind == "JobSet" else f"{job.name}-0.{job.name}"
    yield from elastic(job, first) if job.elastic else fixed(job, nodes, first)
    if kind == "JobSet":
        return
    (service,) = job.of("Service")
    if not job.pod["subdomain"] == service["metadata"]["name"] == job.name:
        yield "the Service, the subdomain and the Job must have one name"
    if service["spec"]["clusterIP"] != "None" or service["spec"]["publishNotReadyAddresses"] is not True:
        yield "the Service gives no names, or too late"
    if service["spec"]["selector"] != job.labels:
        yield "the Service is for other pods"
    if [port["port"] for port in service["spec"]["ports"]] != [29500]:
        yield "the Service and the pods name different ports"


def fixed(job: Manifests, nodes: int, first: str) -> Iterator[str]:
    """A fixed number of pods, which know their numbers."""
    pods = [job.environment(index) for index in range(nodes)]
    if nodes < 2 or [pod["PET_NNODES"] for pod in pods] != [str(nodes)] * nodes:
        yield "every pod would train alone, or wait for pods that never come"
    if [pod["PET_NODE_RANK"] for pod in pods] != [str(index) for index in range(nodes)]:
        yield "pods do not know their number"
    if {(pod["PET_MASTER_ADDR"], pod["PET_MASTER_PORT"]) for pod in pods} != {(first, "29500")}:
        yield f"the pods do not meet at {first}"


def elastic(job: Manifests, first: str) -> Iterator[str]:
    """Pods that come and go, and are numbered as they come."""
    expected = {
        "PET_NNODES": "1:4",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{first}:29500",
        "PET_RDZV_ID": job.name,
        "PET_RDZV_CONF": "last_call_timeout=10",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    for pod in (job.environment(0), job.environment(1)):
        if {name: pod[name] for name in expected} != expected:
            yield "the pods do not meet, or take long for it"
        if {"PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"} & pod.keys():
            yield "a number or an address that torchrun would have to ignore"
