"""A BERT of full size, in the layout of bert-base-chinese: memory and seconds of every program.

    python -m benchmarks.bert_base --csv FILE --vocab vocab.txt

The weights are random, so nothing is said about accuracy: the folder has the files, names and
shapes of the public one, 12 layers x 768. Each program trains once on a few reviews, the next one
predicts, each in a process of its own. Memory is the most that the process has had at once.
Processor seconds are those of all its threads: other programs on the machine change them less than
seconds by the clock.
"""

import csv
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors.torch import save_file
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertForPreTraining
from tyro.conf import arg

from benchmarks import harness
from common.launch.errors import UserError
from common.launch.flags import MustExist, at_least
from examples.bert_dp.reviews import read_reviews
from examples.bert_dp.tokens import read_vocabulary

# What the public config.json says besides the sizes.
CONFIG: dict[str, Any] = {
    "architectures": ["BertForMaskedLM"],
    "model_type": "bert",
    "directionality": "bidi",
    "hidden_act": "gelu",
    "attention_probs_dropout_prob": 0.1,
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "pooler_type": "first_token_transform",
    "type_vocab_size": 2,
}
OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    csv: Annotated[Path, MustExist()]
    """Labelled reviews."""
    vocab: Annotated[Path, MustExist()]
    """vocab.txt of a BERT."""
    reviews: Annotated[int, arg(metavar="N")] = 80
    """Reviews to train on and to predict, drawn from --csv: half of each label."""
    layers: int = 12
    """Layers of the model."""
    hidden: int = 768
    """Its width, a multiple of 64."""
    out: Path = Path("benchmarks/results")
    """Folder for the measurements (.json)."""

    def __post_init__(self) -> None:
        at_least(1, layers=self.layers)
        at_least(20, reviews=self.reviews)
        if self.hidden < 64 or self.hidden % 64:
            raise UserError(f"--hidden {self.hidden}: give a multiple of 64")


def write_folder(
    folder: Path, vocab: Path, layers: int = 12, hidden: int = 768, *, parts: str = "pooler head"
) -> dict[str, torch.Tensor]:
    """Write a BERT with random weights as the public bert-base-chinese is written.

    LayerNorm has its old names, gamma and beta; the vocabulary is a vocab.txt; the head is that of
    pre-training, so that the classifier is absent.

    Args:
        folder: is made.
        vocab: is copied there.
        layers: of the model.
        hidden: its width.
        parts: what the file has besides the encoder, "pooler" and "head"; with "bare" the names
            do not begin with "bert.", as those of a `BertModel`.

    Returns:
        What the file has, by today's names of `BertForSequenceClassification`.
    """
    sizes: dict[str, Any] = {
        "vocab_size": len(read_vocabulary(vocab)),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "intermediate_size": 4 * hidden,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes, indent=2) + "\n")
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}\n')
    shutil.copyfile(vocab, folder / "vocab.txt")
    torch.manual_seed(0)
    model = BertForPreTraining(BertConfig(**CONFIG, **sizes))
    tied = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
    state = {name: value for name, value in model.state_dict().items() if name not in tied}
    for part, names in {"pooler": "bert.pooler.", "head": "cls."}.items():
        if part not in parts:
            state = {name: value for name, value in state.items() if not name.startswith(names)}
    for name, value in state.items():
        if "LayerNorm" in name:  # not ones and zeros, which a reader that misses them would have
            torch.nn.init.normal_(value, 1.0 if name.endswith("weight") else 0.0, 0.02)
    written = {}
    for name, value in state.items():
        for new, old in OLD_NAMES.items():
            name = name.replace(new, old)
        written[name.removeprefix("bert.") if "bare" in parts else name] = value.contiguous()
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    return {name: value for name, value in state.items() if not name.startswith("cls.")}


def draw_reviews(file: Path, source: Path, count: int) -> None:
    """Write a csv file of so many reviews, half of each label.

    Raises:
        UserError: there are too few.
    """
    reviews, drawn = read_reviews(source), random.Random(0)  # noqa: S311 - no secret
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(("label", "review"))
        for label in (0, 1):
            texts = [
                text
                for text, one in zip(reviews.texts, reviews.labels, strict=True)
                if one == label
            ]
            if len(texts) < count // 2:
                raise UserError(f"--reviews {count}: {source} has {len(texts)} with label {label}")
            writer.writerows((label, text) for text in drawn.sample(texts, count // 2))


def observed(words: list[str], folder: Path) -> dict[str, Any]:
    """Run a program of bert_dp in a folder; its memory, and its seconds.

    Raises:
        UserError: it failed; its own lines say why.
    """
    began = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(harness.ROOT), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, "-m", *words], cwd=folder, env=environment, stdout=subprocess.DEVNULL
    )
    peak = 0
    while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
        peak = high_water(process.pid) or peak
        time.sleep(0.2)
    process.returncode = os.waitstatus_to_exitcode(ended[1])
    if process.returncode:
        raise UserError(f"{' '.join(words)} ended with exit code {process.returncode}")
    used = ended[2]
    return {
        "seconds": round(time.monotonic() - began, 1),
        "processor_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_memory_gb": round(peak * 1024 / 1e9, 2),
    }


def high_water(process: int) -> int:
    """The most memory in KiB that a process has had, 0 if it has ended.

    Not `ru_maxrss`: that counts the memory of this program, which has started it, too.
    """
    with suppress(OSError):
        status = Path(f"/proc/{process}/status").read_text()
        if found := re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE):
            return int(found[1])
    return 0


def size_gb(folder: Path) -> float:
    """What the files of a folder take."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return round(sum(file.stat().st_size for file in files) / 1e9, 2)


def main(args: Args) -> None:
    """Train and predict with each program, one after the other."""
    about = harness.facts("torch", "transformers")
    flags = ["--csv", "reviews.csv", "--epochs", "1", "-b", "32", "--device", "cpu"]
    ways = {
        "train.py": ["examples.bert_dp"],
        "train.py --fast": ["examples.bert_dp", "--fast"],
        "train.py --replicas 2": ["examples.bert_dp", "--replicas", "2"],
        "trainer.py": ["examples.bert_dp.trainer"],
        "trainer_robust.py": ["examples.bert_dp.trainer_robust"],
    }
    programs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        state = write_folder(folder / "bert", args.vocab, args.layers, args.hidden)
        draw_reviews(folder / "reviews.csv", args.csv, args.reviews)
        for number, (name, words) in enumerate(ways.items()):
            out = f"out{number}"
            programs[name] = observed([*words, "--model", "bert", *flags, "--out", out], folder)
            programs[name]["left_gb"] = size_gb(folder / out)
            print(f"{name}: {programs[name]}", flush=True)
            if number:
                shutil.rmtree(folder / out)
        told = json.loads((folder / "out0/result.json").read_text())
        words = ["examples.bert_dp.predict", "--model", "out0/model", "--csv", "reviews.csv"]
        programs["predict.py"] = observed([*words, "--device", "cpu"], folder)
        model = {
            "layers": args.layers,
            "hidden": args.hidden,
            "parameters": told["parameters"],
            "folder_gb": size_gb(folder / "bert"),
            "tensors_from_the_folder": len(state),
        }
    inputs = {"reviews": args.reviews, "train_samples": told["train_samples"], "batch_size": 32}
    inputs |= {"max_length": 128, "steps": told["steps"], "precision": told["precision"]}
    result = about | {"model": model, "input": inputs, "programs": programs}
    harness.save("bert_base", result, args.out)


if __name__ == "__main__":
    harness.program(Args, main, __doc__)
