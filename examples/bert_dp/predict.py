"""bert_dp: classify a sentence, or every row of a csv file, by a trained model.

    python -m examples.bert_dp.predict --text "房间干净，服务热情，下次还来。"
    python -m examples.bert_dp.predict --text "又脏又吵，再也不来了。" --pipeline
    python -m examples.bert_dp.predict --csv reviews.csv --out predictions.csv   # in order
    torchrun --nproc-per-node 2 -m examples.bert_dp.predict --csv reviews.csv    # by two processes

The model is that of --model, by default the one that `examples.bert_dp` has trained.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from common.data.samplers import Shard
from common.launch.args import start
from common.launch.collectives import print0
from common.launch.device import choose_device
from common.launch.place import Place
from common.launch.record import record
from common.launch.rendezvous import JOB
from common.launch.spawn import launch
from common.train.amp import MixedPrecision
from common.train.evaluate import ordered_predictions
from common.train.files import write_atomically
from examples.bert_dp.args import PredictArgs
from examples.bert_dp.classifier import Classifier, local_devices
from examples.bert_dp.model import load
from examples.bert_dp.reviews import plain, read_csv, shorten
from examples.bert_dp.tokens import encode


def main(place: Place, args: PredictArgs) -> None:
    """Start a process per rank."""
    launch(main_worker, place, args)


@record
def main_worker(local_rank: int, place: Place, args: PredictArgs) -> None:
    """Become a rank and predict."""
    place.export(local_rank)
    device, backend = choose_device(args.launch, local_rank)
    dist.init_process_group(backend, init_method=JOB, timeout=args.launch.patience)
    if args.csv:
        predict_file(args, args.csv, device)
    elif args.text and args.pipeline:
        predict_by_pipeline(args, args.text, device)
    elif args.text:
        names, rows = probabilities(args, [args.text], device)
        say(names[int(rows[0].argmax())], rows[0].max().item(), args.text)
    dist.destroy_process_group()


def say(name: str, probability: float, text: str) -> None:
    """Print what one review is, from rank 0."""
    print0(f"{name} {probability:.4f}  {shorten(text)}")


def predict_by_pipeline(args: PredictArgs, text: str, device: torch.device) -> None:
    """Say what one review is, by transformers' own pipeline."""
    from transformers import pipeline  # 3 s, for this flag only

    model, tokenizer = load(args.model)
    classify = pipeline(
        "text-classification", model=model.eval(), tokenizer=tokenizer, device=device
    )
    longest = model.config.max_position_embeddings
    with MixedPrecision(args.amp, device).autocast():
        answer = classify(text, truncation=True, max_length=longest)[0]
    say(answer["label"], answer["score"], text)


def predict_file(args: PredictArgs, file: Path, device: torch.device) -> None:
    """Write a row for each row, in the same order, for any number of processes and devices.

    Every rank calls this; rank 0 writes.
    """
    frame = read_csv(file, args.column)
    texts = frame[plain(args.column)].fillna("").str.strip().tolist()
    known = [row for row, text in enumerate(texts) if text]
    names, rows = probabilities(args, [texts[row] for row in known], device)
    if dist.get_rank() == 0:  # all ranks have all rows; one writes them
        frame["prediction"] = frame["probability"] = ""
        if known:
            best = [names[number] for number in rows.argmax(dim=1).tolist()]
            frame.loc[known, "prediction"] = best
            frame.loc[known, "probability"] = [f"{p:.4f}" for p in rows.amax(dim=1).tolist()]
        table = frame.to_csv(index=False, lineterminator="\n")
        write_atomically(args.out, table.encode())
    missing = len(texts) - len(known)
    empty = f", {missing:,} without a review left empty" if missing else ""
    print0(f"{len(texts):,} rows{empty}: {args.out}")


@torch.inference_mode()
def probabilities(
    args: PredictArgs, texts: list[str], device: torch.device
) -> tuple[dict[int, str], Tensor]:
    """What the model gives each text, in their order, on every rank. Every rank calls this.

    Returns:
        The classes' names, and their probabilities [N, classes].
    """
    bert, tokenizer = load(args.model)
    names = {int(number): name for number, name in (bert.config.id2label or {}).items()}
    longest = bert.config.max_position_embeddings
    data = encode(tokenizer, texts, [0] * len(texts), longest)
    if data.cut:
        print0(
            f"warning: {data.cut:,} of {len(texts):,} reviews have more than {longest} tokens "
            f"and lose their ends"
        )
    amp = MixedPrecision(args.amp, device)
    model: nn.Module = amp.move(Classifier(bert, amp.autocast)).eval()
    if devices := local_devices(args.launch, device):
        model = nn.DataParallel(model, devices)
    shard = Shard(len(data))
    batches = DataLoader(data, args.batch_size, sampler=shard, collate_fn=tuple)
    local_rows = [model(ids.to(device)).softmax(dim=1).cpu() for ids, _, _ in batches]
    rows = torch.cat([torch.empty(0, len(names)), *local_rows])  # a shard may be empty
    return names, ordered_predictions(rows, len(texts))


if __name__ == "__main__":
    start(PredictArgs, "examples.bert_dp.predict:main")
