"""What the page shows for folders of one's own: two runs at once, and what a cluster asks for."""

import importlib
import re
from pathlib import Path

import pytest
import yaml

from common.launch.args import parse
from examples.your_model import args as template
from tests.conftest import ROOT
from tests.k8s.policy import complaints
from tests.k8s.rendered import EXAMPLES, Manifests, manifests
from tests.k8s.test_cluster import KINDS, own
from tests.k8s.test_manifests import invalid
from tests.k8s.test_names import dangling

PAGE = (ROOT / "k8s" / "README.md").read_text()
SAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
TWICE, CLUSTER = (next(text for text in SAMPLES if word in text) for word in ("second-run", "storageClassName"))


def as_kind(kind: str) -> tuple[str, ...]:
    return (kind,) * (kind != "job")


@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_of_one_overlay_share_nothing(copied: Path, kind: str) -> None:
    """The sample as it is, with each kind in the place of its last component: other names, other pods."""
    text = yaml.safe_load(TWICE)
    assert text["components"][-1] == "../../components/trainjob"
    text["components"][-1:] = [f"../../components/{name}" for name in as_kind(kind)]
    file = copied / "mine" / f"second-{kind}" / "kustomization.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump(text))
    (overlay,) = text["resources"]
    first = manifests(f"{'overlays' if kind == 'job' else f'variants/{kind}'}/{Path(overlay).name}")
    second = manifests(f"mine/second-{kind}", copied)
    assert [problem for document in second.documents for problem in invalid(document)] == []
    assert complaints(second) == []  # so each selector is that of its own pods
    assert dangling(second) == set()
    assert first.labels["training-job"] != second.labels["training-job"]
    names = [{document["metadata"]["name"] for document in job.documents} for job in (first, second)]
    assert names[0] & names[1] == set()
    assert f"training-job={second.labels['training-job']} " in PAGE, "how to read its logs"


def test_the_same_label_is_seen(copied: Path) -> None:
    """A prefix alone: other names, but every selector is for the pods of both."""
    file = copied / "mine" / "prefix" / "kustomization.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("namePrefix: bob-\nresources: [../../overlays/gan_ddp_gpu]\n")
    assert manifests("mine/prefix", copied).labels == manifests("overlays/gan_ddp_gpu").labels


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlay", [f"{name}_gpu" for name in sorted(EXAMPLES)])
def test_one_gpu_per_pod(copied: Path, overlay: str, kind: str) -> None:
    job = own(copied, f"one-{overlay}-{kind}", overlay, ("one-gpu", *as_kind(kind)))
    assert complaints(job) == []
    assert (job.processes, job.container["resources"]["limits"]["nvidia.com/gpu"]) == (1, "1")


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_cluster_asks_for(copied: Path, kind: str) -> None:
    """The page's component: storage class, registry, tracking with its key, a way out to port 443 and nowhere else."""
    file = copied / "mine" / "cluster" / "kustomization.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(CLUSTER)
    for overlay in ("gan_ddp", "imagenet_ddp_gpu"):  # the latter's arguments end with a folder
        job = own(copied, f"cluster-{overlay}-{kind}", overlay, ("../mine/cluster", *as_kind(kind)))
        assert [problem for document in job.documents for problem in invalid(document)] == []
        assert {complaint.partition(":")[0] for complaint in complaints(job)} == {"network"}
        claim = job.of("PersistentVolumeClaim")[0]["spec"]
        assert (claim["storageClassName"], claim["resources"]) == ("shared", {"requests": {"storage": "100Gi"}})
        assert job.pod["imagePullSecrets"] == [{"name": "registry"}]
        assert dangling(job) == {("Secret", "wandb")}  # made by hand
        tracked(job)
        before = manifests(f"overlays/{overlay}").of("NetworkPolicy")[0]["spec"]
        policy = job.of("NetworkPolicy")[0]["spec"]
        assert policy["egress"][:-1] == before["egress"]
        assert policy["ingress"] == before["ingress"]
        (out,) = policy["egress"][-1]["to"]
        assert policy["egress"][-1]["ports"] == [{"protocol": "TCP", "port": 443}]
        assert {"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"} <= set(out["ipBlock"]["except"])


def test_a_training_of_ones_own(copied: Path) -> None:
    """Its image, its module, and flags that the template takes."""
    file = copied / "mine" / "my_training" / "kustomization.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(next(text for text in SAMPLES if "examples.my_training" in text))
    job = manifests("mine/my_training", copied)
    assert [problem for document in job.documents for problem in invalid(document)] == []
    assert [complaint.partition(":")[0] for complaint in complaints(job)] == ["image"], "none of this project"
    (module,) = [word for word in job.container["args"] if word.startswith("examples.")]
    assert (module, job.container["image"]) == ("examples.my_training", "registry.example/me/my_training:1")
    parse(template.Args, job.container["args"][job.container["args"].index(module) + 1 :])
    assert manifests("overlays/mnist_ddp_spawn_gpu").container["args"].index("examples.mnist_ddp_spawn") == 2


def tracked(job: Manifests) -> None:
    """The program takes the arguments, and reads the key from the secret."""
    words = job.container["args"]
    module = words[words.index("-m") + 1]
    flags = parse(importlib.import_module(f"{module}.args").Args, words[words.index(module) + 1 :])
    assert flags.watch.track == "wandb"
    (key,) = [entry for entry in job.container["env"] if entry["name"] == "WANDB_API_KEY"]
    assert key["valueFrom"] == {"secretKeyRef": {"name": "wandb", "key": "key"}}
    command = "kubectl create secret generic wandb --from-literal key="
    assert command in PAGE
