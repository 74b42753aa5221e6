"""Every overlay renders, is valid, follows the policy, and starts what it should."""

import copy
import importlib
import re
import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import tyro
import yaml
from kubeflow_trainer_api import models
from torch.distributed.run import config_from_args, parse_args

from tests.deploy.policy import QUEUE, complaints
from tests.deploy.rendered import EXAMPLES, OVERLAYS, ROOT, Document, Manifests, manifests

VERSIONS = ("1.29", "1.36")  # the first with all fields that are used, and the newest
CUSTOM = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}
VARIANTS = ("imagenet_ddp_elastic", "imagenet_ddp_jobset", "imagenet_ddp_trainjob")
STATIC = [name for name in OVERLAYS if name not in VARIANTS]
PAGES = [(ROOT / "k8s" / name).read_text() for name in ("README.md", "README.zh-CN.md")]
SAMPLES = re.findall(r"```yaml\n(.*?)```", PAGES[0], re.DOTALL)


def invalid(document: Document) -> list[str]:
    """Return how a document differs from the schema of its kind."""
    if model := CUSTOM.get(document["kind"]):
        parsed = model.from_dict(copy.deepcopy(document))
        return [] if parsed and parsed.to_dict() == document else ["unknown fields"]
    found = []
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{version}: {error}")
    return found


def problems(job: Manifests) -> list[str]:
    return complaints(job) + [text for document in job.documents for text in invalid(document)]


@pytest.fixture(scope="module")
def k8s(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the manifests, for overlays of a user."""
    return shutil.copytree(ROOT / "k8s", tmp_path_factory.mktemp("copy") / "k8s")


def overlay(k8s: Path, name: str, content: dict[str, Any], base: str = "") -> Manifests:
    """Write an overlay, of another one if `base` is given, and render it."""
    if base:
        content |= {"resources": [f"../{base}"]}
    (k8s / "overlays" / name).mkdir()
    (k8s / "overlays" / name / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return manifests(name, k8s)


def variant(kind: str) -> dict[str, Any]:
    file = ROOT / "k8s" / "overlays" / f"imagenet_ddp_{kind}" / "kustomization.yaml"
    return yaml.safe_load(file.read_text())


def test_every_example_has_its_overlays() -> None:
    programs = {path.parent.name for path in (ROOT / "examples").glob("*/__main__.py")}
    assert set(EXAMPLES) == programs - {"your_model"}
    assert set(STATIC) == {f"{name}{suffix}" for name in EXAMPLES for suffix in ("", "_gpu")}
    assert set(VARIANTS) <= set(OVERLAYS)


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_is_valid(name: str) -> None:
    job = manifests(name)
    assert problems(job) == []
    assert (job.job["completions"], bool(job.gpus)) == (2, name.endswith("_gpu"))
    file = ROOT / "k8s" / "overlays" / name / "kustomization.yaml"
    assert len(file.read_text().splitlines()) <= 25


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
@pytest.mark.parametrize("name", STATIC)
def test_another_word_in_the_variants(k8s: Path, kind: str, name: str) -> None:
    """Their comment says: change this word."""
    job = overlay(k8s, f"{name}_as_{kind}", variant(kind), name)
    assert problems(job) == []
    assert job.processes == manifests(name).processes


@pytest.mark.parametrize("name", [*STATIC, "imagenet_ddp_elastic"])
def test_torchrun_and_the_example_accept_the_arguments(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = manifests(name)
    for node in range(2):
        for variable, value in job.environment(node).items():
            monkeypatch.setenv(variable, value)
        config, _, words = config_from_args(parse_args(job.container["args"]))
        nodes = (config.min_nodes, config.max_nodes, config.max_restarts)
        assert config.rdzv_endpoint == f"{job.name}-0.{job.name}:29500"
        assert config.shutdown_timeout == 100
        if job.elastic:
            assert (config.rdzv_backend, nodes) == ("c10d", (1, 4, 100))
        else:
            assert (config.rdzv_backend, nodes) == ("static", (2, 2, 0))
            assert config.rdzv_configs["rank"] == node
    module, *flags = words[words.index("-m") + 1 :]
    args = tyro.cli(importlib.import_module(f"{module}.args").Args, args=flags)
    assert args.batch_size % (2 * config.nproc_per_node) == 0


def references(node: object) -> set[tuple[str, str]]:
    """Return kind and name of every object that a document refers to."""
    if isinstance(node, dict):
        kinds = {"claimName": "PersistentVolumeClaim", "subdomain": "Service"}
        found = {(kind, node[key]) for key, kind in kinds.items() if key in node}
        found |= {(r["kind"], r["name"]) for r in [node.get("runtimeRef")] if r}
        return found.union(*map(references, node.values()))
    return set[tuple[str, str]]().union(*map(references, node if isinstance(node, list) else []))


@pytest.mark.parametrize("name", ["imagenet_ddp_gpu", *VARIANTS])
def test_names_follow_a_prefix(k8s: Path, name: str) -> None:
    """Otherwise the pods of one user mount the volume of another one."""
    own = {"namePrefix": "bob-", "nameSuffix": "-2", "sortOptions": {"order": "fifo"}}
    job = overlay(k8s, f"{name}_of_bob", own, name)
    objects = {(document["kind"], document["metadata"]["name"]) for document in job.documents}
    assert references(job.documents) - {("PersistentVolumeClaim", "training-data")} <= objects
    assert job.name == f"bob-{manifests(name).name}-2"
    assert problems(job) == []


# What the page suggests for a copied overlay.
CHANGES = {
    "kueue": "labels: [{pairs: {kueue.x-k8s.io/queue-name: training}}]",
    "rdma": "components: [../../components/rdma]",
    "patches": "patches:\n" + next(text for text in SAMPLES if "storageClassName" in text),
}


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_valid(k8s: Path, change: str, kind: str) -> None:
    """Also of an overlay from which a JobSet or TrainJob is made."""
    job = overlay(k8s, f"{change}_of_{kind}", yaml.safe_load(CHANGES[change]), "gan_ddp_gpu")
    if kind != "job":
        job = overlay(k8s, f"{change}_{kind}", variant(kind), f"{change}_of_{kind}")
    assert problems(job) == []
    if change == "kueue":
        (queued,) = job.of({"job": "Job", "jobset": "JobSet", "trainjob": "TrainJob"}[kind])
        assert queued["metadata"]["labels"][QUEUE] == "training"
    if change == "patches":
        assert (job.job["completions"], job.job["activeDeadlineSeconds"]) == (4, 604800)


def test_the_page_shows_a_copied_overlay(k8s: Path) -> None:
    """Only the name, twice, the image and the arguments differ from the shipped one."""
    sample = next(text for text in SAMPLES if "namePrefix" in text)
    job = overlay(k8s, "mine", yaml.safe_load(sample))
    assert {text.partition(":")[0] for text in problems(job)} == {"program"}, "not of this project"
    (name,) = re.findall(r"cp -r k8s/overlays/(\w+) ", PAGES[0])
    shipped = (ROOT / "k8s/overlays" / name / "kustomization.yaml").read_text().splitlines()
    assert sum(a != b for a, b in zip(shipped, sample.splitlines(), strict=True)) == 4


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_the_page_name_what_exists(page: str) -> None:
    """`kubectl logs` counts pods that have ended, and fails as a whole if a node is dead."""
    for folder in re.findall(r"k8s/overlays/\w+|`base/[\w.-]+`|`components/\w+`", page):
        path = ROOT / "k8s" / folder.strip("`").removeprefix("k8s/")
        assert path.exists() or path.name == "mine"
    (logs,) = re.findall(r"^kubectl logs .*", page, re.MULTILINE)
    assert "--ignore-errors --max-log-requests 99" in logs
    assert set(re.findall(r" job/([\w-]+)", page)) <= {manifests(name).name for name in OVERLAYS}
