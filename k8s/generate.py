"""Writes the kustomizations of all examples, from the table below: so no two of them can drift apart.

    python k8s/generate.py           # writes k8s/overlays and k8s/variants
    python k8s/generate.py --check   # says which of them differ, and writes nothing

For each example there is an overlay on CPUs and one on GPUs, two pods in each, and each of them as a JobSet and as a
TrainJob. What they consist of is in components/. It imports the standard library only.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
# The pods of a job may be lost while their logs are read, and those that have ended stay in the list.
LOGS = "--prefix --follow --tail=-1 --ignore-errors --max-log-requests 99"
ON_GPUS = (
    "Needs: nodes with 4 GPUs, NVIDIA's device plugin, and its driver from version 580 on (the images have CUDA 13).",
)
WITH_IMAGES = ("Needs: a claim `training-data` with train/CLASS/* and val/CLASS/*.",)
WITH_ALL = (
    "Needs: nccl must be able to lock memory: the container runtime's memlock limit has to be unlimited.",
    "Needs: the names of your cluster in components/rdma, nccl, gpu-product and topology; Kueue with a LocalQueue",
    "       `training` whose flavor has a topology; a PriorityClass `training`.",
)
IMAGES = (
    "Image: the name localhost/... is that of an image loaded into the nodes; no registry has it. Name yours in a",
    "       folder of your own (k8s/README.md).",
)
WITHOUT_KUEUE = ("Two jobs of which each has a part of its pods block each other; components/kueue admits whole jobs.",)
COMMON = ("shared-memory", "checkpoint-volume", "multi-node", "network-policy", "disruption-budget")


@dataclass(frozen=True)
class Overlay:
    """One job.

    Attributes:
        name: the folder's, and with dashes the job's.
        about: what it shows, after the example's name.
        command: the launcher and what follows the program's name.
        devices: the component `cpu` or `gpu`.
        more: further components, in their order, after those that all have.
        notes: what the cluster has to have, for the header.
        processes: of a pod, if it is not what the component of the devices says.
        memory: of /dev/shm, if it is not what the component says, and why.
    """

    name: str
    about: str
    command: tuple[str, ...]
    devices: str = "cpu"
    more: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    processes: str = ""
    memory: str = ""

    @property
    def example(self) -> str:
        """The example's name, which is the image's, too."""
        return self.name.partition("_gpu")[0].removesuffix("_elastic")

    @property
    def label(self) -> str:
        """The name as Kubernetes wants it."""
        return self.name.replace("_", "-")


def both(
    name: str, about: str, launcher: str, gpu: str = "", one: bool = False, flags: tuple[str, ...] = ()
) -> Iterator[Overlay]:
    """The overlays of an example on CPUs and on GPUs.

    Args:
        name: the example's.
        about: what the pods do.
        launcher: torchrun, or python for programs that start their processes themselves.
        gpu: what is different with 4 GPUs in a pod.
        one: one process uses all devices of a pod.
        flags: more flags with GPUs.
    """
    command = (launcher, "-m", f"examples.{name}", "--resume", "auto")
    processes = "one process for all devices of the pod" * one
    yield Overlay(name, f"{about}, on two nodes", command, processes=processes)
    on_gpus = f"{about}, on two nodes of 4 GPUs{gpu}"
    notes = (*ON_GPUS, *WITHOUT_KUEUE)
    yield Overlay(f"{name}_gpu", on_gpus, (*command, *flags), "gpu", (), notes, processes)


def overlays() -> list[Overlay]:
    """All jobs."""
    averaging = "DataParallel within a pod, averaging between the pods"
    found = [
        *both("mnist_ddp_spawn", "the program starts its processes itself, as PET_* say", "python"),
        *both("manual_allreduce_sgd", "with the hand-written ring", "torchrun"),
        *both("gan_ddp", "a GAN with DDP", "torchrun"),
        *both("mnist_dataparallel", averaging, "python", one=True),
        *both("bert_dp", averaging, "python", one=True),
        *both(
            "resnet_pipeline",
            "a stage per process",
            "torchrun",
            ": a pipeline of 4 stages in each pod, and two replicas of it",
            flags=("--stages", "4"),
        ),
    ]
    command = ("torchrun", "-m", "examples.imagenet_ddp", "--resume", "auto")
    folder = (*command, "-a", "resnet50", "-b", "2048", "/data")
    memory = "16Gi} # batches of 256 images that loader workers hand over to 4 processes"
    notes = (*ON_GPUS, *WITH_IMAGES)
    cluster = ("rdma", "nccl", "gpu-product", "priority", "kueue", "topology", "deadline")
    rdma = "on two nodes of 4 GPUs in one rack, with RDMA, admitted by Kueue"
    return [
        *found,
        Overlay("imagenet_ddp", "on two nodes, on images that it draws", command),
        Overlay("imagenet_ddp_elastic", "on 1 to 4 nodes that come and go", command, "cpu", ("drain", "elastic")),
        Overlay(
            "imagenet_ddp_gpu",
            "on two nodes of 4 GPUs, on a volume of images",
            folder,
            "gpu",
            ("data-volume",),
            (*notes, *WITHOUT_KUEUE),
            memory=memory,
        ),
        Overlay(
            "imagenet_ddp_gpu_rdma", rdma, folder, "gpu", ("data-volume", *cluster), (*notes, *WITH_ALL), memory=memory
        ),
    ]


def header(overlay: Overlay, folder: str, kind: str) -> str:
    """The comment on top: what it is, what it needs, and the five commands."""
    job, containers = f"{kind}/{overlay.label}-train", "" if kind == "job" else "--all-containers "
    first = f"{overlay.example}: {overlay.about}."
    if kind != "job":
        kinds = {"jobset": ("JobSet", "the JobSet controller"), "trainjob": ("TrainJob", "Kubeflow Trainer")}
        first = f"The Job of overlays/{overlay.name} as a {kinds[kind][0]}; the cluster needs {kinds[kind][1]}."
    lines = [
        "Written by k8s/generate.py.",
        "",
        first,
        *overlay.notes,
        *IMAGES,
        "",
        f"Apply:   kubectl apply -k k8s/{folder}",
        f"Watch:   kubectl get {job} --watch",
        f"Logs:    kubectl logs --selector training-job={overlay.label} {containers}{LOGS}",
        f"Stop:    kubectl delete {job} # the checkpoints stay, and the next apply continues from them",
        f"Delete:  kubectl delete -k k8s/{folder} # all, with the claim of the checkpoints",
    ]
    if kind == "job" and "elastic" in overlay.more:
        lines.append(f"Resize:  kubectl patch {job} --type merge --patch")
        lines.append('         \'{"spec": {"completions": 4, "parallelism": 4}}\'')
    elif kind == "job":
        lines += ["", "A Job cannot be changed: delete it before another image or other arguments are applied."]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def patch(overlay: Overlay) -> str:
    """What the job says for itself: its arguments, and what differs from the components."""
    words = ", ".join(f'"{word}"' if word.isdigit() else word for word in overlay.command)
    env = f'                env: [{{name: PET_NPROC_PER_NODE, value: "1"}}] # {overlay.processes}\n'
    text = f"""patches:
  - patch: |
      apiVersion: batch/v1
      kind: Job
      metadata:
        name: train
      spec:
        template:
          spec:
            containers:
              - name: node
{env if overlay.processes else ""}                args: [{words}]
"""
    if overlay.memory:
        text += "            volumes:\n              - name: shared-memory\n"
        text += f"                emptyDir: {{sizeLimit: {overlay.memory}\n"
    return text


def job(overlay: Overlay) -> str:
    """The kustomization of a Job."""
    names = (overlay.devices, *COMMON, *overlay.more)
    components = "".join(f"  - ../../components/{name}\n" for name in names)
    return f"""{header(overlay, f"overlays/{overlay.name}", "job")}apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namePrefix: {overlay.label}-
resources:
  - ../../base
components:
{components}labels:
  - pairs:
      training-job: {overlay.label} # the job's own pods: Service, NetworkPolicy and budget select by it
    includeSelectors: true
    includeTemplates: true
images:
  - name: example
    newName: localhost/distributed-training-examples/{overlay.example}
    newTag: 0.1.0
{patch(overlay)}"""


def variant(overlay: Overlay, kind: str) -> str:
    """The kustomization of the same pods as a JobSet or a TrainJob."""
    order = "sortOptions: {order: fifo} # the runtime before the job, which is refused without it\n"
    return f"""{header(overlay, f"variants/{kind}/{overlay.name}", kind)}apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
{order if kind == "trainjob" else ""}resources:
  - ../../../overlays/{overlay.name}
components:
  - ../../../components/{kind}
"""


def files() -> dict[str, str]:
    """Every generated file, by its path below k8s/."""
    found = {}
    for overlay in overlays():
        found[f"overlays/{overlay.name}/kustomization.yaml"] = job(overlay)
        for kind in ("jobset", "trainjob") * ("elastic" not in overlay.more):
            found[f"variants/{kind}/{overlay.name}/kustomization.yaml"] = variant(overlay, kind)
    return dict(sorted(found.items()))


def main() -> int:
    """Write the files, or compare them."""
    flags = argparse.ArgumentParser("generate.py", description=(__doc__ or "").split("\n")[0])
    flags.add_argument("--check", action="store_true", help="only say what differs")
    check, wanted = flags.parse_args().check, files()
    there = {str(path.relative_to(HERE)) for top in ("overlays", "variants") for path in HERE.glob(f"{top}/**/*.yaml")}
    for path in sorted(there - wanted.keys()):
        print(f"k8s/{path} is not in the table of k8s/generate.py: delete it, or add it there")
    different = [path for path, text in wanted.items() if path not in there or (HERE / path).read_text() != text]
    for path in different:
        print(f"k8s/{path} {'differs from k8s/generate.py' if check else 'written'}")
        if not check:
            (HERE / path).parent.mkdir(parents=True, exist_ok=True)
            (HERE / path).write_text(wanted[path])
    return int(bool(there - wanted.keys()) or (check and bool(different)))


if __name__ == "__main__":
    sys.exit(main())
