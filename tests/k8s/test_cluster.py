"""What a real cluster showed, of every combination that the pages suggest."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.k8s.pods import pod_security
from tests.k8s.policy import QUEUE, complaints
from tests.k8s.rendered import EXAMPLES, Manifests, manifests
from tests.k8s.test_manifests import ALL, OVERLAYS, VARIANTS, invalid

PAGE = (ROOT / "k8s" / "README.md").read_text()
# What may be added to an overlay, and the rules of tests/k8s/policy.py that then speak, if any do.
ADDED = {
    "data-volume": "folders",  # of a program that does not read /data
    "deadline": "",
    "dns-node-cache": "network",
    "dns-openshift": "network",
    "openshift": "hardening network",
    "drain": "failures",
    "gpu-product": "",
    "kueue": "",
    "nccl": "",
    "nodes": "",
    "one-gpu": "",
    "priority": "",
    "rdma": "",
    "second-run": "",
}
KINDS = ("job", "jobset", "trainjob")


def own(copied: Path, name: str, overlay: str, components: tuple[str, ...]) -> Manifests:
    """A folder as the page shows it: an overlay, components, and the order for a TrainJob."""
    folder = copied / "mine" / name
    folder.mkdir(parents=True)
    text = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "sortOptions": {"order": "fifo"},
        "resources": [f"../../overlays/{overlay}"],
        "components": [f"../../components/{name}" for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return manifests(f"mine/{name}", copied)


@pytest.mark.parametrize(("kind", "component"), list(itertools.product(KINDS, ADDED)))
def test_every_component_fits_every_kind(copied: Path, kind: str, component: str) -> None:
    names = (component, kind) if kind != "job" else (component,)
    job = own(copied, f"{kind}-{component}", "gan_ddp_gpu", names)
    assert [problem for document in job.documents for problem in invalid(document)] == []
    assert {complaint.partition(":")[0] for complaint in complaints(job)} == set(ADDED[component].split())
    assert str(job.documents) != str(manifests(f"{'overlays' if kind == 'job' else f'variants/{kind}'}/gan_ddp_gpu"))


TOGETHER = ("drain", "dns-node-cache", "gpu-product", "rdma", "nccl", "priority", "kueue", "topology", "deadline")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlay", [f"{name}{devices}" for name in sorted(EXAMPLES) for devices in ("", "_gpu")])
def test_all_components_fit_every_overlay_at_once(copied: Path, overlay: str, kind: str) -> None:
    job = own(copied, f"all-{kind}-{overlay}", overlay, (*TOGETHER, *[kind] * (kind != "job")))
    assert [problem for document in job.documents for problem in invalid(document)] == []
    assert {complaint.partition(":")[0] for complaint in complaints(job)} == {"failures", "network"}
    read = {"job": "Job", "jobset": "JobSet", "trainjob": "TrainJob"}[kind]
    assert job.of(read)[0]["metadata"]["labels"][QUEUE] == "training"
    assert job.documents[-1]["kind"] == "TrainJob" or kind != "trainjob"
    assert job.job["template"]["metadata"]["annotations"]
    assert {"nodeSelector", "priorityClassName"} <= job.pod.keys()
    assert "activeDeadlineSeconds" in job.job
    assert "NCCL_DEBUG" in job.environment(0)
    assert job.processes == manifests(f"overlays/{overlay}").processes


@pytest.mark.parametrize("overlay", ["gan_ddp", "manual_allreduce_sgd_gpu", "imagenet_ddp_gpu"])
def test_other_jobs_can_be_elastic(copied: Path, overlay: str) -> None:
    job = own(copied, f"elastic-{overlay}", overlay, ("drain", "elastic", "kueue", "nccl"))
    assert [problem for document in job.documents for problem in invalid(document)] == []
    assert complaints(job) == []
    assert job.elastic


@pytest.mark.parametrize(("overlay", "kind"), [("bert_dp", "job"), ("gan_ddp", "jobset"), ("gan_ddp", "trainjob")])
def test_what_cannot_be_elastic_is_seen(copied: Path, overlay: str, kind: str) -> None:
    """Programs that start their processes themselves, and kinds whose controllers set the rendezvous."""
    job = own(copied, f"elastic-{kind}", overlay, ("drain", "elastic", *[kind] * (kind != "job")))
    assert complaints(job)


def test_every_component_is_used_or_described() -> None:
    used = "".join((ROOT / "k8s" / folder / "kustomization.yaml").read_text() for folder in ALL)
    names = {path.name for path in (ROOT / "k8s" / "components").iterdir()}
    unused = {name for name in names if f"components/{name}\n" not in used}
    assert unused == {"dns-node-cache", "dns-openshift", "nodes", "one-gpu", "openshift", "second-run"}
    assert names <= set(re.findall(r"`([\w-]+)`", PAGE))
    assert ADDED.keys() <= names


def test_the_page_shows_a_folder_that_renders(copied: Path) -> None:
    text = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]  # the others: tests/k8s/test_own.py
    (copied / "mine" / "page").mkdir(parents=True)
    (copied / "mine" / "page" / "kustomization.yaml").write_text(text)
    job = manifests("mine/page", copied)
    assert [problem for document in job.documents for problem in invalid(document)] == []
    assert complaints(job) == ["image: registry.example/me/gan_ddp:7 is not in the bake file"]  # their own
    assert [document["kind"] for document in job.documents][-1] == "TrainJob"
    assert job.of("TrainJob")[0]["metadata"]["labels"][QUEUE] == "training"
    assert job.processes == 4


@pytest.mark.parametrize("folder", [f"variants/{name}" for name in VARIANTS if name.startswith("trainjob")])
def test_the_runtime_comes_before_the_job(folder: str, copied: Path) -> None:
    """Trainer's webhook refuses a TrainJob whose runtime is not there; the order of the file is that of the calls."""
    kinds = [document["kind"] for document in manifests(folder).documents]
    assert kinds.index("TrainingRuntime") < kinds.index("TrainJob")
    assert kinds[-1] == "TrainJob"
    if folder.endswith("/gan_ddp"):  # once: this is seen if the line is lost
        file = copied / folder / "kustomization.yaml"
        file.write_text(re.sub(r"sortOptions.*\n", "", file.read_text()))
        assert any("webhook" in complaint for complaint in complaints(manifests(folder, copied)))


@pytest.mark.parametrize("name", [name for name in OVERLAYS if "_gpu" in name])
def test_a_trainjob_starts_a_process_per_gpu(name: str) -> None:
    one = {"bert_dp", "mnist_dataparallel"}
    for folder in (f"overlays/{name}", f"variants/jobset/{name}", f"variants/trainjob/{name}"):
        assert manifests(folder).processes == (1 if name.removesuffix("_gpu") in one else 4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_cluster_decides_where_and_when(kind: str) -> None:
    """Of the overlay that shows everything: queue, rack, product, priority, an end, nccl's settings."""
    job = manifests(f"{'overlays' if kind == 'job' else f'variants/{kind}'}/imagenet_ddp_gpu_rdma")
    read = {"job": "Job", "jobset": "JobSet", "trainjob": "TrainJob"}[kind]
    assert job.of(read)[0]["metadata"]["labels"][QUEUE] == "training"
    rack = {"kueue.x-k8s.io/podset-required-topology": "topology.kubernetes.io/rack"}
    assert job.job["template"]["metadata"]["annotations"] == rack
    assert job.pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}
    assert job.pod["priorityClassName"] == "training"
    assert job.job["activeDeadlineSeconds"] == 7 * 24 * 3600
    nccl = {name for name in job.environment(0) if name.startswith("NCCL_")}
    assert nccl == {"NCCL_SOCKET_IFNAME", "NCCL_NET_GDR_LEVEL", "NCCL_DEBUG"}


@pytest.mark.parametrize("name", [name for name in OVERLAYS if not name.endswith("_rdma")])
def test_nothing_of_one_cluster_is_set_for_all(name: str) -> None:
    job = manifests(f"overlays/{name}")
    assert not [variable for variable in job.environment(0) if variable.startswith(("NCCL_", "GLOO_"))]
    assert not {"nodeSelector", "priorityClassName"} & job.pod.keys()
    assert QUEUE not in str(job.documents)


@pytest.mark.parametrize("kind", KINDS)
def test_another_number_of_nodes(copied: Path, kind: str) -> None:
    """All that depends on it follows: pods, rendezvous, budget, Kubeflow's numNodes."""
    job = own(copied, f"four-{kind}", "gan_ddp_gpu", ("nodes", *[kind] * (kind != "job")))
    assert (job.job["completions"], job.of("PodDisruptionBudget")[0]["spec"]["minAvailable"]) == (4, 4)
    assert complaints(job) == []
    if kind == "trainjob":
        assert job.owner["spec"]["mlPolicy"]["numNodes"] == 4
    else:
        assert job.environment(3)["PET_NNODES"] == "4"


EGRESS = {
    "dns-node-cache": ({"ipBlock": {"cidr": "169.254.20.10/32"}}, 53),
    "dns-openshift": ({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "openshift-dns"}}}, 5353),
}


@pytest.mark.parametrize("component", EGRESS)
def test_dns_of_other_clusters(copied: Path, component: str) -> None:
    """One rule more, for name servers only; the others stay."""
    job, to = own(copied, f"alone-{component}", "gan_ddp", (component,)), EGRESS[component]
    before: list[Any] = manifests("overlays/gan_ddp").of("NetworkPolicy")[0]["spec"]["egress"]
    ports = [{"protocol": protocol, "port": to[1]} for protocol in ("UDP", "TCP")]
    assert job.of("NetworkPolicy")[0]["spec"]["egress"] == [*before, {"to": [to[0]], "ports": ports}]


@pytest.mark.parametrize("kind", KINDS)
def test_openshift_chooses_the_user(copied: Path, kind: str) -> None:
    """Its default rule, restricted-v2, refuses fixed ids; all else of Pod Security stays, and its DNS is allowed."""
    job = own(copied, f"openshift-alone-{kind}", "gan_ddp", ("openshift", *[kind] * (kind != "job")))
    before = manifests(f"{'overlays' if kind == 'job' else f'variants/{kind}'}/gan_ddp")
    fixed = {"runAsUser", "runAsGroup", "fsGroup"}
    context = before.pod["securityContext"]
    assert fixed <= context.keys()
    assert job.pod["securityContext"] == {name: value for name, value in context.items() if name not in fixed}
    assert list(pod_security(job)) == []
    ports = [{"protocol": protocol, "port": 5353} for protocol in ("UDP", "TCP")]
    assert job.of("NetworkPolicy")[0]["spec"]["egress"][-1] == {"to": [EGRESS["dns-openshift"][0]], "ports": ports}


def test_gpus_that_are_added_are_seen(copied: Path) -> None:
    """`gpu` after `cpu` takes back what hides the GPUs of a node."""
    job = own(copied, "gpu-after-cpu", "gan_ddp", ("gpu",))
    assert "NVIDIA_VISIBLE_DEVICES" not in job.environment(0)
    assert complaints(job) == []


def test_a_drain_that_goes_on(copied: Path) -> None:
    job = own(copied, "drained", "gan_ddp", ("drain",))
    assert [budget["spec"]["minAvailable"] for budget in job.of("PodDisruptionBudget")] == [1]


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_the_page_of_each_example_shows_its_own_commands(name: str) -> None:
    for page in ("README.md", "README.zh-CN.md"):
        text = (ROOT / "examples" / name / page).read_text()
        runs = re.findall(r"^docker run .*distributed-training-examples/(\S+)", text, re.MULTILINE)
        assert runs == [f"{name}:0.1.0"] * 2, "on CPUs and on GPUs"
        applied = re.findall(r"^kubectl apply -k (\S+)", text, re.MULTILINE)
        assert applied[:2] == [f"k8s/overlays/{name}", f"k8s/overlays/{name}_gpu"]
        assert all((ROOT / folder).is_dir() for folder in applied)


def test_the_page_names_what_there_is() -> None:
    """Every folder, and the flow with the flags that a cluster needs."""
    for folder in re.findall(r"k8s/(?:overlays|variants|components)/[\w/-]+", PAGE):
        assert folder.startswith("k8s/mine/") or (ROOT / folder.replace("/NAME", "/gan_ddp")).exists(), folder
    logs = re.findall(r"^kubectl logs .*", PAGE, re.MULTILINE)
    assert logs
    assert all("--ignore-errors --max-log-requests 99" in command for command in logs)
