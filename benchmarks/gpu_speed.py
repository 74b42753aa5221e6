"""How fast a GPU trains, and what makes the host wait for it."""

import csv
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.gpu_checks import TRAININGS, Check, Failed, Machine, result

# A line of the log, as `common.train.meters` writes it.
RATE = re.compile(r"([\d.]+) (\w+)/s, waited (\d+)% for input")
# as `benchmarks.host_waits` prints it
WAIT = re.compile(r"host wait: (\d+) x (.*), at (\d+) different steps")
RESNET = ("--dummy", "--epochs", "1")
REAL = {  # name: flags
    "ResNet-50, bf16": ("-a", "resnet50", "-b", "256", "--dummy-images", str(256 * 82)),
    "ResNet-50, bf16, compiled": (
        *("-a", "resnet50", "-b", "256", "--dummy-images", str(256 * 82), "--compile"),
    ),
}
TOY = {"ResNet-18": ("-a", "resnet18", "-b", "12", "--dummy-images", "48", "--image-size", "32")}


class Places(NamedTuple):
    """Data, and another program, that may be there."""

    images: Path | None = None
    mnist: Path | None = None
    peer: Path | None = None


def speed(
    places: Places, machine: Machine, examples: tuple[str, ...]
) -> Iterator[tuple[str, str, Check]]:
    """The measurements, of one device: group, name, check."""
    for name in examples[:1] if machine.dry else examples:
        yield name, f"{name}: the host waits for the device", partial(waits, machine, name)
    if "imagenet_ddp" in examples:
        for what, flags in (TOY if machine.dry else REAL).items():
            words = ("examples.imagenet_ddp", *RESNET, "-p", "2" if machine.dry else "10", *flags)
            yield "imagenet_ddp", f"{what}, made-up images", partial(rate, machine, what, *words)
    if "bert_dp" in examples:
        for size in (6,) if machine.dry else (32, 256):
            check = partial(bert, machine, size)
            yield "bert_dp", f"BERT, 128 tokens, batches of {size}", check
    if "mnist_ddp_spawn" in examples and not machine.dry:
        yield "mnist_ddp_spawn", "handwritten digits", partial(digits, machine)
    peer = () if places.peer is None else ("--peer", str(places.peer))
    if places.images is not None:
        words = ("imagenet_throughput", "--part", "training" if machine.dry else "gpu")
        flags = ("--data", str(places.images), "--rounds", "1", *peer)
        check = partial(measured, machine, "images_per_second", *words, *flags)
        yield "images", "ResNet-50 beside the peer, images/s", check
    if places.mnist is not None:
        flags = ("mnist_time_to_accuracy", "--data-dir", str(places.mnist), *peer)
        check = partial(measured, machine, "seconds", *flags)
        yield "mnist", "MNIST to 99 %, from the command, seconds", check


def rate(machine: Machine, label: str, *words: str) -> str:
    """The median rate of a training; the first line of its log, with its start-up, is left out."""
    label = re.sub(r"\W+", "-", label)
    out = machine.out / label
    said = machine.run(label, *words, "--device", machine.device, "--out", str(out))
    found = RATE.findall(said)[1:]
    if not found:
        raise Failed(f"{label}: there are no two lines with a rate in its log")
    waited = max(int(share) for _, _, share in found)
    per_second = median(float(number) for number, _, _ in found)
    about = f"{result(out)['precision']}, waited up to {waited}% for input"
    return f"{per_second:,.1f} {found[0][1]}/s, {about}"


def bert(machine: Machine, size: int) -> str:
    """BERT-base (a toy on a CPU) on made-up reviews of 128 tokens, 32 steps an epoch."""
    file = machine.out / f"reviews-{size}.csv"
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(("label", "review"))
        for number in range(40 * size):  # a fifth is for evaluation
            # The first two make each review unique: one that is repeated would be left out.
            codes = (number % 900, number // 900, *range(number, number + 124 * 13, 13))
            review = "".join(chr(0x4E00 + code % 900) for code in codes)
            writer.writerow((number % 2, review))
    model = ("1", "64") if machine.dry else ("12", "768")
    flags = ("--csv", str(file), "-b", str(size), "--fast", "--epochs", "2", "--log-step", "8")
    shape = ("--layers", model[0], "--hidden", model[1])
    return rate(machine, f"bert-{size}", "examples.bert_dp", *flags, *shape)


def digits(machine: Machine) -> str:
    """The default recipe, on the digits that come with scikit-learn."""
    out = machine.out / "digits"
    machine.run("digits", "examples.mnist_ddp_spawn", "--device", "cuda", "--out", str(out))
    found = result(out)
    spent = ", ".join(f"{name} {found['seconds'][name]:.2f}" for name in ("startup", "train"))
    return f"accuracy {found['metrics']['accuracy']:.4f}; seconds: {spent}"


def measured(machine: Machine, figure: str, name: str, *flags: str) -> str:
    """The medians that a benchmark has found, by program."""
    machine.run(name, f"benchmarks.{name}", *flags, "--out", str(machine.out))
    found = json.loads((machine.out / f"{name}.json").read_text())
    part = next((found[part] for part in ("gpu", "training") if part in found), found)
    medians = part["medians"].items()
    return "; ".join(f"{program} {values[figure]}" for program, values in medians)


def waits(machine: Machine, name: str) -> str:
    """The calls after which the host waited for the device; none may come with every step."""
    label = f"{name}-waits"
    out = machine.out / label
    flags = (*TRAININGS[name], "--epochs", "4", "--device", machine.device, "--out", str(out))
    said = machine.run(label, "benchmarks.host_waits", f"examples.{name}", *flags)
    rows, steps = WAIT.findall(said), result(out)["steps"]
    # Four ends of epochs and a timeline of five steps are 9 of the 12 steps of resnet_pipeline.
    often = [f"{count} x {place}" for count, place, at in rows if int(at) > 0.8 * steps]
    if often:
        raise Failed(f"in {steps} steps: {'; '.join(often)}")
    return f"{sum(int(count) for count, *_ in rows)} in {steps} steps, none of them at every step"
