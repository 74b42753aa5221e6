"""bert_dp: what a trained model says about a sentence, or about every row of a csv file.

python -m examples.bert_dp.predict --text "房间干净，服务热情，下次还来。"
python -m examples.bert_dp.predict --text "又脏又吵，再也不来了。" --pipeline       # by transformers.pipeline
python -m examples.bert_dp.predict --csv reviews.csv --out predictions.csv      # the rows in their order
torchrun --nproc-per-node 2 -m examples.bert_dp.predict --csv reviews.csv       # the same file, by two processes
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, arg

from common.errors import UserError
from common.flags import at_least, begin, leave
from common.launcher import Launch, Place
from common.precision import Precision
from examples.bert_dp.options import SLOW


@dataclass(frozen=True)
class Args:
    """The flags of this program."""

    model: Annotated[Path, arg(metavar="DIR")] = Path("runs/bert_dp/model")
    """Folder that train.py or trainer.py has written, or any local BERT for classification."""
    text: str | None = None
    """One review."""
    csv: Annotated[Path | None, arg(metavar="FILE")] = None
    """Reviews, in a column of that name; other columns are passed on."""
    out: Path = Path("predictions.csv")
    """File for the rows of --csv with two columns more: prediction, probability."""
    pipeline: bool = False
    """Let transformers.pipeline predict --text."""
    batch_size: Annotated[int, arg(aliases=["-b"], metavar="N")] = 64
    """Reviews at once per process: it changes the speed, not the result."""
    launch: OmitArgPrefixes[Launch] = Launch()
    numbers: OmitArgPrefixes[Precision] = Precision(precision="fp32", channels_last="no")

    def __post_init__(self) -> None:
        at_least(1, batch_size=self.batch_size)
        if (self.text is None) == (self.csv is None):
            raise UserError("give --text or --csv, one of them")
        if self.text is not None and not self.text.strip():
            raise UserError("--text is empty: give a review")
        if self.pipeline and self.text is None:
            raise UserError("--pipeline is for --text")
        if self.numbers.channels_last != "no" or self.numbers.compile:
            raise UserError("--channels-last is for images, and --compile for inputs of one shape: leave them out here")


if __name__ == "__main__":  # before the heavy imports: --help and mistakes answer at once, workers start meanwhile
    args, place = begin(Args, __doc__, preload_also=SLOW)

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from common.checkpoint import write_atomically
from common.data import Shard
from common.distributed import World, from_main, launch, say, taking_part
from common.metrics import ordered_predictions
from examples.bert_dp.classifier import Classifier, data_parallel, load, local_devices
from examples.bert_dp.reviews import read_csv, shorten
from examples.bert_dp.tokens import encode


def main_worker(local_rank: int, place: Place, args: Args) -> None:
    """One process of the job."""
    with taking_part(place, local_rank) as world:
        dist.init_process_group(
            world.group_backend, store=world.store, rank=world.rank, world_size=world.size, timeout=world.timeout
        )
        if args.csv:
            predict_file(args, args.csv, world)
        elif args.text:
            predict_text(args, args.text, world)


def predict_text(args: Args, text: str, world: World) -> None:
    """Say what one review is."""
    if args.pipeline:
        from transformers import pipeline  # 3 s

        model, tokenizer = load(args.model)
        classify = pipeline("text-classification", model=model.eval(), tokenizer=tokenizer, device=world.device)
        found = classify(text, truncation=True, max_length=model.config.max_position_embeddings)[0]
        name, probability = found["label"], found["score"]
    else:
        names, rows = probabilities(args, [text], world)
        name, probability = names[int(rows[0].argmax())], rows[0].max().item()
    say(world, f"{name} {probability:.4f}  {shorten(text)}")


def predict_file(args: Args, file: Path, world: World) -> None:
    """Write a row for each row, in the same order, whatever the number of processes and devices."""
    frame = read_csv(file, "review")
    texts = frame["review"].fillna("").str.strip().tolist()
    known = [row for row, text in enumerate(texts) if text]
    names, rows = probabilities(args, [texts[row] for row in known], world)

    def write() -> None:
        frame["prediction"] = frame["probability"] = ""
        if known:
            frame.loc[known, "prediction"] = [names[number] for number in rows.argmax(dim=1).tolist()]
            frame.loc[known, "probability"] = [f"{value:.4f}" for value in rows.amax(dim=1).tolist()]
        write_atomically(args.out, frame.to_csv(index=False, lineterminator="\n").encode())

    from_main(world, write)
    without = f", {len(texts) - len(known):,} without a review left empty" if len(known) < len(texts) else ""
    say(world, f"{len(texts):,} rows{without}: {args.out}")


@torch.inference_mode()
def probabilities(args: Args, texts: list[str], world: World) -> tuple[dict[int, str], Tensor]:
    """What the model gives each text, in their order, on every rank.

    Returns:
        The classes' names, and their probabilities [N, classes].
    """
    bert, tokenizer = load(args.model)
    names = {int(number): name for number, name in (bert.config.id2label or {}).items()}
    most = bert.config.max_position_embeddings
    data = encode(tokenizer, texts, [0] * len(texts), most)
    if data.cut:
        say(world, f"warning: {data.cut:,} of {len(texts):,} reviews have more than {most} tokens and lose their ends")
    numerics = args.numbers.on(world.device)
    model = data_parallel(numerics.prepare(Classifier(bert, numerics)).eval(), local_devices(world))
    shard = Shard(len(data), world.rank, world.size)
    batches = DataLoader(data, args.batch_size, sampler=shard, collate_fn=tuple)
    found = [model(ids.to(world.device)).softmax(dim=1).cpu() for ids, _, _ in batches]
    rows = torch.cat([torch.empty(0, len(names)), *found])
    return names, ordered_predictions(rows, len(texts), world)


if __name__ == "__main__":
    leave(launch(main_worker, place, args))
