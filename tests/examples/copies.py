"""What the copy of each example consists of."""

from dataclasses import dataclass

EPOCH = ("--epochs", 1)


@dataclass(frozen=True)
class Copy:
    """What belongs to one example: flags, the files of its subject, and the changes that its new data ask for."""

    flags: tuple[object, ...] = EPOCH
    files: tuple[str, ...] = ()
    changes: tuple[tuple[str, str], ...] = ()
    """Texts to replace in train.py and in the files of the subject."""
    methods: tuple[str, ...] = ()
    """Methods of the flags that train.py uses, as names of functions."""
    accuracy: bool = True
    """Whether the copy's accuracy after the epoch is compared, too."""


# Which devices a process uses follows from flags and launcher; in the copy there are two replicas on the CPU.
TWO_REPLICAS = (
    ("from examples.mnist_dataparallel.devices import choose_devices, with_cpu_named\n", ""),
    ("import Args, device_names", "import Args"),
    ("choose_device(place.flags, local_rank)", "choose_device(args.launch, local_rank)"),
    ("    names, visible = device_names(args.devices, args.launch), torch.cuda.device_count()\n", ""),
    ("choose_devices(names, first.type, visible, place.worker(local_rank))", "[first, first]"),
)
WITHOUT_INDICES = (("return ids, self.labels[indices], indices", "return ids, self.labels[indices]"),)
COPIES = {
    "mnist_ddp_spawn": Copy(),
    "imagenet_ddp": Copy(
        (*EPOCH, "--image-size", 32, "--channels-last", "no"),
        ("recipe.py",),
        (("examples.imagenet_ddp.evaluate import", "common.train.evaluate import"),),  # --evaluate stays behind
        accuracy=False,
    ),
    "gan_ddp": Copy(EPOCH, ("networks.py", "rule.py", "samples.py"), accuracy=False),
    "manual_allreduce_sgd": Copy(
        EPOCH,
        (
            *("gradients.py", "averaging.py", "allreduce.py", "buckets.py", "fast_ring.py", "flat.py"),
            *("compress.py", "local.py", "partition.py", "per_rank.py", "shared_memory.py", "shares.py"),
        ),
    ),
    "mnist_dataparallel": Copy(EPOCH, ("eight_steps.py", "engines.py", "explain.py"), TWO_REPLICAS),
    "bert_dp": Copy(
        ("--epochs", 2),
        (
            "classifier.py",
            "data.py",
            "encoding.py",
            "fast_bert.py",
            "model.py",
            "reviews.csv",
            "reviews.py",
            "tokens.py",
        ),
        WITHOUT_INDICES,
        methods=("text.factor",),
        accuracy=False,
    ),
    "your_model": Copy(
        ("--epochs", 3),
        changes=(("labels[part], torch.arange(int(part.sum())))", "labels[part])"),),
    ),
    # The whole of its training goes along: it is the subject. Its evaluation and the check of its parts stay behind,
    # because they end in this project's metrics, and so do the flags of memory layout and compiler.
    "resnet_pipeline": Copy(
        (*EPOCH, "--balance", "even", "-a", "resnet18"),
        (
            *("costs.py", "engine.py", "full_state.py", "grid.py", "messages.py", "model.py", "operations.py"),
            *("partition.py", "pipeline.py", "schedule.py", "split_backward.py", "stages.py", "timeline.py"),
            "v_schedule.py",
        ),
        (
            ("examples.resnet_pipeline.evaluate import", "common.train.evaluate import"),
            ("examples.resnet_pipeline.images import", "common.images.sets import"),
            ("stage.amp.channels_last", "False"),
            ("amp.move(", "amp.prepare("),
            ("amp.compile,", "False,"),
            ("evaluate(local, grid, test_batches, len(data.classes))", "{}"),
        ),
        accuracy=False,
    ),
}
