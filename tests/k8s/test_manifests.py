"""Every manifest renders, is valid, obeys the policy, and starts what it should; what is removed is missed."""

import copy
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
from kubeflow_trainer_api import models
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, parse_args

from common.launch.args import parse
from common.launch.errors import RETRY
from common.launch.resolve import resolve
from tests.conftest import ROOT
from tests.e2e.engine import load
from tests.k8s.policy import GRACE, complaints
from tests.k8s.rendered import BUILT, EXAMPLES, Document, Manifests, manifests

OVERLAYS = sorted(path.name for path in (ROOT / "k8s" / "overlays").iterdir())
VARIANTS = sorted(f"{path.parent.name}/{path.name}" for path in (ROOT / "k8s" / "variants").glob("*/*"))
ALL = [f"overlays/{name}" for name in OVERLAYS] + [f"variants/{name}" for name in VARIANTS]
VERSIONS = ("1.29", "1.36")  # the first with all fields that are used, and the one on which the manifests were run
CUSTOM = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}


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
    """On CPUs and on GPUs, as Job, JobSet and TrainJob; and one that shows everything, one that is elastic."""
    names = {f"{name}{devices}" for name in EXAMPLES for devices in ("", "_gpu")} | {"imagenet_ddp_gpu_rdma"}
    assert set(OVERLAYS) == names | {"imagenet_ddp_elastic"}
    assert set(VARIANTS) == {f"{kind}/{name}" for kind in ("jobset", "trainjob") for name in names}
    assert set(BUILT) <= EXAMPLES
    for name in names:
        job = manifests(f"overlays/{name}")
        assert ("nvidia.com/gpu" in job.container["resources"]["limits"]) == ("_gpu" in name)
        assert job.job["completions"] == 2, "each example runs on several nodes"


def test_what_is_generated_is_in_step(tmp_path: Path) -> None:
    """A line that is changed by hand, and a folder that nobody generates, are named."""
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    check = [sys.executable, str(tmp_path / "k8s" / "generate.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    file = tmp_path / "k8s" / "overlays" / "gan_ddp" / "kustomization.yaml"
    file.write_text(file.read_text().replace("components/cpu", "components/gpu"))
    shutil.copytree(tmp_path / "k8s" / "overlays" / "gan_ddp", tmp_path / "k8s" / "overlays" / "mine")
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "k8s/overlays/gan_ddp/kustomization.yaml differs from k8s/generate.py" in done.stdout
    assert "k8s/overlays/mine/kustomization.yaml is not in the table" in done.stdout


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


@pytest.mark.parametrize("folder", ALL)
def test_the_header_says_how_to_use_it(folder: str) -> None:
    text = (ROOT / "k8s" / folder / "kustomization.yaml").read_text()
    job = manifests(folder)
    kind = {"Job": "job", "JobSet": "jobset", "TrainingRuntime": "trainjob"}[job.owner["kind"]]
    assert f"# Apply:   kubectl apply -k k8s/{folder}\n" in text
    assert job.container["image"].startswith("localhost/"), "else a node would ask a registry for somebody's image"
    assert "# Image: the name localhost/... " in text
    assert f"# Watch:   kubectl get {kind}/{job.name} --watch\n" in text
    stop, delete = f"# Stop:    kubectl delete {kind}/{job.name} ", f"# Delete:  kubectl delete -k k8s/{folder} "
    assert 0 < text.find(stop) < text.find(delete), "the one that keeps the checkpoints comes first"
    (logs,) = re.findall(r"^# Logs: +(.*)", text, re.MULTILINE)
    assert logs.startswith(f"kubectl logs --selector training-job={job.labels['training-job']} ")
    # Without the first, a node that is gone hides the logs of all; without the second, the sixth pod does.
    assert "--ignore-errors" in logs
    assert "--max-log-requests 99" in logs
    if "nvidia.com/gpu" in job.container["resources"]["limits"] and kind == "job":
        assert "driver from version 580" in text
    if any(name.startswith("rdma/") for name in job.container["resources"]["limits"]):
        assert "memlock" in text


def test_the_pages_commands_are_those_of_the_header() -> None:
    header = (ROOT / "k8s" / "overlays" / "imagenet_ddp" / "kustomization.yaml").read_text()
    commands = re.findall(r"^# \w+: +(kubectl [^#\n]*[^# \n])", header, re.MULTILINE)
    assert len(commands) == 5
    page = (ROOT / "k8s" / "README.md").read_text()
    assert re.findall(r"^kubectl .*", page, re.MULTILINE)[:5] == commands


@pytest.mark.parametrize("name", [name for name in OVERLAYS if name != "imagenet_ddp_elastic"])
def test_the_arguments_are_those_of_the_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They parse, and the world that results has pods x processes ranks, whose number divides the batch."""
    job = manifests(f"overlays/{name}")
    words = job.container["args"]
    module = words[words.index("-m") + 1]
    flags = parse(importlib.import_module(f"{module}.args").Args, words[words.index(module) + 1 :])
    nodes = job.job["completions"]
    for node in range(nodes):
        env = job.environment(node)
        if words[0] == "torchrun":
            config = torchrun(job, node, monkeypatch)
            assert config.rdzv_backend == "static"
            assert config.rdzv_configs["rank"] == node
            assert (config.max_restarts, config.min_nodes, config.max_nodes) == (0, nodes, nodes)
            assert config.rdzv_endpoint == f"{env['PET_MASTER_ADDR']}:{env['PET_MASTER_PORT']}"
            world = config.max_nodes * config.nproc_per_node
        else:
            assert words[0] == "python"
            place = resolve(flags.launch, env, lambda: 0)
            assert (place.num_nodes, place.node_rank) == (nodes, node)
            world = place.world_size
        assert world == nodes * job.processes
        batch = getattr(flags, "batch_size", None)
        assert batch is None or batch % world == 0


def torchrun(job: Manifests, node: int, monkeypatch: pytest.MonkeyPatch) -> LaunchConfig:
    """What torchrun makes of a pod's environment and arguments."""
    words = job.container["args"]
    for variable, value in job.environment(node).items():
        monkeypatch.setenv(variable, value)
    if "nvidia.com/gpu" not in job.container["resources"]["limits"]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config, _, rest = config_from_args(parse_args(words[1:]))
    assert rest[-len(words[2:]) :] == words[2:]
    return config


@pytest.mark.parametrize("node", [0, 1])
def test_pods_of_the_elastic_job_may_come_and_go(node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job = manifests("overlays/imagenet_ddp_elastic")
    config = torchrun(job, node, monkeypatch)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", f"{job.name}-0.{job.name}:29500")
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 4, 1)
    assert config.max_restarts > 0
    assert config.rdzv_configs["last_call_timeout"] == "10"
    text = (ROOT / "k8s" / "overlays" / "imagenet_ddp_elastic" / "kustomization.yaml").read_text()
    assert f"kubectl patch job/{job.name} " in text, "how to resize it"


def test_the_time_of_grace_is_that_of_the_entrypoint() -> None:
    help_text = subprocess.run(
        ["python3", ROOT / "docker" / "entrypoint.py", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert f"(default: {GRACE})" in help_text
    assert load("docker/entrypoint.py").RETRY == RETRY
