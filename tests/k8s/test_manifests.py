"""Every manifest renders, is valid, obeys the policy, and starts what it should; what is removed is missed."""

import copy
import functools
import importlib
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models
from torch.distributed.run import config_from_args, parse_args

from common.launch.args import parse
from common.launch.errors import RETRY
from common.launch.resolve import resolve
from tests.conftest import ROOT
from tests.e2e.engine import load
from tests.k8s.policy import GRACE, Document, Manifests, complaints

OVERLAYS = sorted(path.name for path in (ROOT / "k8s" / "overlays").iterdir())
VARIANTS = sorted(f"{path.parent.name}/{path.name}" for path in (ROOT / "k8s" / "variants").glob("*/*"))
ALL = [f"overlays/{name}" for name in OVERLAYS] + [f"variants/{name}" for name in VARIANTS]
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
REGISTRY = "distributed-training-examples"
VERSIONS = ("1.29", "1.36")  # the first with all fields that are used, and the one on which the manifests were run
CUSTOM = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}


@functools.cache
def rendered(folder: str, root: Path = ROOT / "k8s") -> str:
    done = subprocess.run(["kubectl", "kustomize", str(root / folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def manifests(folder: str, root: Path = ROOT / "k8s") -> Manifests:
    return Manifests(list(yaml.safe_load_all(rendered(folder, root))))


def invalid(document: Document) -> list[str]:
    """In which a document differs from the schema of its kind."""
    if document["kind"] in CUSTOM:
        model = CUSTOM[document["kind"]].from_dict(copy.deepcopy(document))
        return [] if model and model.to_dict() == document else ["fields that the kind does not have"]
    found = []
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{version}: {error}")
    return found


def test_every_example_has_its_manifests() -> None:
    assert set(OVERLAYS) == EXAMPLES | {"imagenet_ddp_gpu"}
    assert set(VARIANTS) == {f"{kind}/{name}" for kind in ("jobset", "trainjob") for name in EXAMPLES}
    assert set(BUILT) <= EXAMPLES


@pytest.mark.parametrize("folder", ALL)
def test_it_is_valid_and_obeys_the_policy(folder: str) -> None:
    job = manifests(folder)
    assert [problem for document in job.documents for problem in invalid(document)] == []
    assert complaints(job) == []
    names = [(document["kind"], document["metadata"]["name"]) for document in job.documents]
    assert len(set(names)) == len(names)
    assert {"namespace"} & {key for document in job.documents for key in document["metadata"]} == set()


@pytest.mark.parametrize("kind", ["Job", *CUSTOM])
def test_an_unknown_field_is_seen(kind: str) -> None:
    folder = {"Job": "overlays/imagenet_ddp", "JobSet": "variants/jobset/imagenet_ddp"}
    (document,) = manifests(folder.get(kind, "variants/trainjob/imagenet_ddp")).of(kind)
    assert not invalid(document)
    broken = copy.deepcopy(document)
    broken["spec"]["replicas_"] = 1
    assert invalid(broken)


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
        "variants/jobset/imagenet_ddp",
        "variants/trainjob/imagenet_ddp",
    ],
)
def test_whatever_is_removed_is_missed(folder: str) -> None:
    """Each value of the rendered manifests in its turn: hardening, limits, failure policy, names, addresses."""
    job = manifests(folder)
    for path in leaves(job.documents):
        if path[1] == "metadata" or path[1:] in (("apiVersion",), ("kind",)):
            continue
        spare = path[-3:] == ("ports", 0, "name") or "NCCL_" in str(at(job.documents, path[:-1]))
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
    "no resuming": lambda job: job.container["args"].__setitem__(-1, "no"),
}


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


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_moves_to_gpus_by_one_word(name: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    file = tmp_path / "k8s" / "overlays" / name / "kustomization.yaml"
    file.write_text(file.read_text().replace("components/cpu", "components/gpu"))
    job = manifests(f"overlays/{name}", tmp_path / "k8s")
    assert complaints(job) == []
    assert 120 % (job.job["completions"] * int(job.environment(0)["PET_NPROC_PER_NODE"])) == 0, "the batch of most"
    assert [problem for document in job.documents for problem in invalid(document)] == []
    assert job.container["resources"]["limits"]["nvidia.com/gpu"] == "4"


def test_every_component_is_used() -> None:
    used = "".join(path.read_text() for path in (ROOT / "k8s").glob("[ov]*/**/kustomization.yaml"))
    names = [path.name for path in (ROOT / "k8s" / "components").iterdir()]
    assert [name for name in names if f"components/{name}\n" not in used] == []


@pytest.mark.parametrize("folder", ALL)
def test_the_header_says_how_to_use_it(folder: str) -> None:
    text = (ROOT / "k8s" / folder / "kustomization.yaml").read_text()
    job = manifests(folder)
    kind = {"Job": "job", "JobSet": "jobset", "TrainingRuntime": "trainjob"}[job.owner["kind"]]
    assert f"# Apply:   kubectl apply -k k8s/{folder}\n" in text
    assert f"# Watch:   kubectl get {kind}/{job.name} --watch\n" in text
    assert f"# Delete:  kubectl delete -k k8s/{folder}" in text
    assert f"# Logs:    kubectl logs --selector training-job={job.labels['training-job']} " in text


def test_the_readmes_commands_are_those_of_the_header() -> None:
    header = (ROOT / "k8s" / "overlays" / "imagenet_ddp" / "kustomization.yaml").read_text()
    commands = re.findall(r"^# \w+: +(kubectl [^#\n]*[^# \n])", header, re.MULTILINE)
    assert len(commands) == 4
    assert re.findall(r"^kubectl .*", (ROOT / "README.md").read_text(), re.MULTILINE) == commands


@pytest.mark.parametrize("name", [name for name in OVERLAYS if name.removesuffix("_gpu") in BUILT])
def test_the_arguments_are_those_of_the_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They parse, and the world that results has pods x processes ranks, whose number divides the batch."""
    job = manifests(f"overlays/{name}")
    words = job.container["args"]
    module = words[words.index("-m") + 1]
    flags = parse(importlib.import_module(f"{module}.args").Args, words[words.index(module) + 1 :])
    nodes = job.job["completions"]
    for node in range(nodes):
        env = job.environment(node)
        expected = nodes * int(env["PET_NPROC_PER_NODE"])
        if words[0] == "torchrun":
            for variable, value in env.items():
                monkeypatch.setenv(variable, value)
            if "nvidia.com/gpu" not in job.container["resources"]["limits"]:
                monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
            config, _, rest = config_from_args(parse_args(words[1:]))
            assert config.rdzv_backend == "static"
            assert config.rdzv_configs["rank"] == node
            assert rest[-len(words[2:]) :] == words[2:]
            assert (config.max_restarts, config.min_nodes, config.max_nodes) == (0, nodes, nodes)
            world = config.max_nodes * config.nproc_per_node
            if nodes > 1:
                assert config.rdzv_endpoint == f"{env['PET_MASTER_ADDR']}:{env['PET_MASTER_PORT']}"
        else:
            assert words[0] == "python"
            place = resolve(flags.launch, env, lambda: 0)
            assert (place.num_nodes, place.node_rank) == (nodes, node)
            world = place.world_size
        assert world == expected
        batch = getattr(flags, "batch_size", None)
        assert batch is None or batch % world == 0


def test_the_time_of_grace_is_that_of_the_entrypoint() -> None:
    help_text = subprocess.run(
        ["python3", ROOT / "docker" / "entrypoint.py", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert f"(default: {GRACE})" in help_text
    assert load("docker/entrypoint.py").RETRY == RETRY
