"""Measure speed and host waits on one GPU, within six minutes and without network access.

    python -m benchmarks.gpu

The program first checks that the steps of the examples do not wait for the device. It then trains
a network to 99% on MNIST, BERT-base on random tokens, and ResNet-50 on random pixels from host
memory.
"""

import re
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.optim import AdamW
from transformers import BertConfig, BertForSequenceClassification

from benchmarks import harness, imagenet, mnist
from benchmarks.harness import Claim, Measurement, Result, Table, compare, ratio, timed
from common.precision import autocast
from examples.bert_dp.train import Classifier

EXAMPLES = sorted(path.parent.name for path in Path("examples").glob("*/train.py"))
EPOCHS = {"gan_ddp": 3, "resnet_pipeline": 1, "imagenet_ddp": 1}  # default: 2
MNIST_LIMIT = 9.0  # seconds from the start of the command
BERT_FLOORS = {32: 1500.0, 256: 2600.0}  # sequences of 128 tokens per second, by batch size


def host_waits(example: str) -> float:
    """Run an example, and return the average number of host waits per step."""
    flags = ("--epochs", EPOCHS.get(example, 2), "--log-every", 0, "--device", "cuda")
    with tempfile.TemporaryDirectory() as out:
        words = ("python", "-m", "benchmarks.host_waits", example, *flags, "--out", out)
        output = harness.run(words)
    print(output[output.index("host waits") :], flush=True)
    found = re.search(r"host waits: (\d+) in (\d+) steps", output)
    assert found
    return int(found[1]) / int(found[2])


def bert(batch: int) -> Callable[[], float]:
    """Return a function that trains BERT-base in bf16 and returns the sequences per second."""
    device = torch.device("cuda")
    model = BertForSequenceClassification(BertConfig()).to(device)
    classifier = Classifier(model, 0, autocast("bf16", device))
    optimizer = AdamW(model.parameters(), 2e-5, fused=True)
    ids = torch.randint(1, 20_000, (batch, 128), device=device)
    labels = torch.arange(batch, device=device) % 2

    def step() -> None:
        for _ in range(20):
            loss = F.cross_entropy(classifier(ids), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()

    return lambda: 20 * batch / timed(step)


def measure(args: Measurement) -> Result:
    """Measure host waits, then speed; run ResNet-50 once, because compiling it takes a minute."""
    tables, claims = dict[str, Table](), list[Claim]()
    waits = {example: [host_waits(example)] for example in EXAMPLES}
    tables["Host waits per step"] = Table("waits", waits)
    claims += [Claim(f"host waits per step of {n}", v[0], 0.0, "", True) for n, v in waits.items()]
    if (args.data / "mnist").is_dir():
        with tempfile.TemporaryDirectory() as temporary:
            shutil.copytree(args.data / "mnist", Path(temporary, "data"))
            program = partial(mnist.ours, 1, Path(temporary, "data"), 0.99, "cuda")
            program()  # warm-up: data unpacked, bytecode compiled, files cached
            seconds = compare({"mnist_ddp_spawn": program}, 1 if args.quick else args.rounds)
        tables["MNIST to 99%"] = Table("s", seconds)
        value = harness.medians(seconds)["mnist_ddp_spawn"]
        claims.append(Claim("MNIST to 99% on a GPU", value, MNIST_LIMIT, "s", at_most=True))
    for batch, floor in BERT_FLOORS.items():
        speeds = compare({f"batch {batch}": bert(batch)}, args.rounds, "sequences/s")
        tables[f"BERT-base, batch {batch}"] = Table("sequences/s", speeds)
        value = harness.medians(speeds)[f"batch {batch}"]
        claims.append(Claim(f"BERT-base, bf16, batch {batch}", value, floor, "sequences/s"))
    _, _, programs = imagenet.training_programs("cuda", args.quick)
    speeds = compare(programs, 1, "images/s")
    tables["ResNet-50, batch 256"] = Table("images/s", speeds)
    for name, floor in imagenet.GPU_FLOORS.items():
        claims.append(Claim(f"ResNet-50, bf16, {name}", speeds[name][0], floor, "images/s"))
    text = f"ResNet-50, eager, faster than the {imagenet.RECIPE}"
    claims.append(Claim(text, ratio(speeds, "eager", imagenet.RECIPE), 2.0))
    return Result({"device": torch.cuda.get_device_name()}, tables, claims)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("error: torch finds no CUDA device")
    harness.main("gpu", measure)
