"""The charts of each result, made from its JSON alone.

A function takes the JSON of the result of its name and returns charts, by the name of the picture
that shows them side by side. Optional parts of a result may be missing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any

from benchmarks.charts import COLOURS, Bars, Chart, Curves, Line, Lines
from benchmarks.latency_bandwidth import Link, ring_seconds

Found = Mapping[str, Any]
Pictures = Mapping[str, Sequence[Chart]]
EIGHT_STEPS = {
    "to the first device, scatter (1, 2)": "12",
    "copy the model (3)": "3",
    "forward, backward in threads (4, 6)": "46",
    "gather, loss (5)": "5",
    "add up gradients (7)": "7",
    "update (8)": "8",
}


def middle(value: Any) -> float:
    """The median of samples; a number stays what it is."""
    return median(value) if isinstance(value, list) else value


def lines(rows: Mapping[Any, Found], scale: float = 1.0, suffix: str = "") -> list[Line]:
    """A line for each way of {x: {way: value or samples}}, times `scale`; of samples the median."""
    ways: dict[str, dict[float, float]] = {}
    for x, values in rows.items():
        for way, value in values.items():
            ways.setdefault(way, {})[int(x)] = scale * middle(value)
    return [
        Line(f"{way}{suffix}", list(points), list(points.values()), colour)
        for (way, points), colour in zip(ways.items(), COLOURS, strict=False)
    ]


def peer_bars(
    title: str,
    unit: str,
    found: Found,
    values: Mapping[str, Any],
    totals: Mapping[str, float] | None = None,
) -> Bars:
    """Bars with each program's ratio to the peer, which is grey."""
    notes, peer = {}, ""
    for name, of in found["medians"].items():
        peer = name if name.startswith("pytorch/examples") else peer
        ratio, share = of.get("peer_ratio"), of.get("peak_share")
        words = [f"{ratio:.3g} times as fast"] if ratio else []
        words += [f"{share:.0%} of the bf16 peak"] if share else []
        notes[name] = ", ".join(words)
    return Bars(title, unit, values, notes, peer, totals or {})


def against(found: Found, name: str) -> str:
    """How many times as fast as its peer a program was; empty without a peer."""
    ratio = found["medians"].get(name, {}).get("peer_ratio")
    return f"{ratio:.3g} times as fast as pytorch/examples" if ratio else ""


def mnist_time_to_accuracy(found: Found) -> Pictures:
    """Where the seconds until the target go."""
    parts = ("startup", "training", "evaluation", "other")
    seconds = {name: {part: of[part] for part in parts} for name, of in found["medians"].items()}
    totals = {name: of["seconds"] for name, of in found["medians"].items()}
    message = against(found, "ours, 1 process")
    title = f"{found['target']:.0%} on MNIST{', ' * bool(message)}{message}"
    unit = f"seconds, medians of {found['rounds']} rounds"
    return {"mnist_time_to_accuracy": [peer_bars(title, unit, found, seconds, totals)]}


def imagenet_throughput(found: Found) -> Pictures:
    """The parts that were measured."""
    what = {  # the message's subject, what it is about, and the unit
        "input": ("ours, uint8", "loading JPEGs", "images/s and core"),
        "training": ("ours, 1 process", "training ResNet-18 on a CPU", "images/s, batch 32"),
        "gpu": ("ours, 1 process", "training ResNet-50 on a GPU", "images/s, batch 256"),
    }
    bars = []
    for part in [part for part in what if part in found]:
        name, subject, unit = what[part]
        if images := found[part].get("images"):
            size = f"{images['median_width']:.0f}x{images['median_height']:.0f}"
            unit += f"; {images['count']:,} images of {size} pixels (median)"
        speeds = {name: of["images_per_second"] for name, of in found[part]["medians"].items()}
        message = against(found[part], name)
        title = f"{subject}{', ' * bool(message)}{message}"
        bars.append(peer_bars(title, unit, found[part], speeds))
    by_workers = found.get("input", {}).get("workers", {})
    return {"imagenet_throughput": [*bars, *loader_processes(by_workers)]}


def loader_processes(found: Found) -> Iterator[Lines]:
    """Images per second by several loader processes on all cores, if that was measured."""
    if found:
        ratios = [of["medians"]["ours, uint8"]["peer_ratio"] for of in found.values()]
        title = f"1 to 8 loader processes: {min(ratios):.3g} to {max(ratios):.3g} times as fast"
        rows = {
            workers: {name: each["images_per_second"] for name, each in of["medians"].items()}
            for workers, of in found.items()
        }
        ticks = [int(workers) for workers in found]
        yield Lines(title, "loader processes", "images/s", lines(rows), ticks, True)


def allreduce(found: Found) -> Pictures:
    """Time against size with the machine's limits, and the training step."""
    sizes = [all_reduces_by_size(ranks, of) for ranks, of in found["sizes"].items()]
    step = found.get("step")
    if not step:
        return {"allreduce": sizes}
    steps = {way: 1e3 * median(values) for way, values in step["seconds"].items()}
    alone = steps["none"]
    parts = {
        way: {"computing": min(alone, ms), "waiting for the exchange": max(0.0, ms - alone)}
        for way, ms in steps.items()
    }
    ratios = step["times_faster_than_ddp"].items()
    notes = {way: f"{ratio:.2f} times DDP's speed" for way, ratio in ratios}
    exchanging = {way: ratio for way, ratio in ratios if way != "none"}
    best = max(exchanging, key=exchanging.__getitem__)
    title = f"step of ResNet-18, 2 ranks x {step['batch']} image(s): {best} is fastest"
    return {"allreduce": sizes, "allreduce_step": [Bars(title, "ms per step", parts, notes)]}


def all_reduces_by_size(ranks: str, found: Found) -> Lines:
    """Time against size with as many ranks, beside the limits of memory and TCP."""
    w, loopback, memory = int(ranks), found["loopback"], median(chain(*found["memory"].values()))
    limits = {  # seconds per byte
        f"limit of memory, {memory / 1e9:.1f} GB/s per rank": (1 + 1 / w) / memory,
        f"ring over plain TCP, {loopback / 1e9:.1f} GB/s": 2 * (1 - 1 / w) / loopback,
    }
    drawn, sizes = lines(found["seconds"], 1e3), [int(size) for size in found["memory"]]
    for (name, per_byte), colour in zip(limits.items(), COLOURS[7:], strict=False):
        drawn.append(Line(name, sizes, [1e3 * size * per_byte for size in sizes], colour, "--"))
    faster = [ways["shared memory, in place"] for ways in found["times_faster_than_torch"].values()]
    title = (
        f"{ranks} ranks: shared memory in place {min(faster):.1f} to {max(faster):.0f} times gloo"
    )
    return Lines(title, "bytes", "ms per all-reduce", drawn)


def pipeline(found: Found) -> Pictures:
    """Speed-up against micro-batches, and where the rest of a step goes."""
    each = found["configurations"]
    speedups: dict[int, dict[str, float]] = {}
    for name, of in each.items():
        kind, count = name.rsplit(" ", 1)
        speedups.setdefault(int(count), {})[kind] = of["speedup"]
    counts = sorted(speedups)
    ideal = Line("P M / (M + P - 1)", counts, [2 * m / (m + 1) for m in counts], COLOURS[-1], ":")
    drawn = [*lines(speedups), ideal]
    fastest = each[found["best"]["hand"]]["speedup"]
    title, x = f"two cores are {fastest:.2f} times as fast as one", "micro-batches"
    charts: list[Chart] = [Lines(title, x, "times one core", drawn, counts, from_zero=True)]
    losses = {name: of["losses"] for name, of in each.items() if "losses" in of and "1f1b" in name}
    if losses:
        notes = {name: f"measured {each[name]['median_seconds']:.2f}" for name in losses}
        charts.append(Bars("where the seconds of a step go", "seconds", losses, notes))
    return {"pipeline": charts}


def pipeline_memory(found: Found) -> Pictures:
    """Activations that the stages keep."""
    stages = [f"stage {number}, from {name}" for number, name in enumerate(found["stages"])]
    kept, notes = {}, {}
    for name, held in found["bytes"].items():
        kept[name] = {stage: one / 2**20 for stage, one in zip(stages, held, strict=True)}
        notes[name] = f"first stage {held[0] / 2**20:.0f}"
    ratio = found["bytes"]["GPipe"][0] / found["bytes"]["1F1B"][0]
    title = f"GPipe keeps {ratio:.1f} times the activations of 1F1B in the first stage"
    unit = f"MiB at most, batch {found['batch_size']} in 8 micro-batches"
    return {"pipeline_memory": [Bars(title, unit, kept, notes)]}


def scaling(found: Found) -> Pictures:
    """Measured, and calculated for more ranks."""
    return {"scaling": [steps_by_ranks(found), exchange_by_ranks(found)]}


def _networks(found: Found) -> Iterator[tuple[int, list[Found]]]:
    """The calculated rows of each network with the latency that was assumed."""
    rows = [row for row in found["extrapolation"] if row["alpha_from"] == "assumed"]
    for gigabits in sorted({row["gigabits"] for row in rows}):
        yield gigabits, [row for row in rows if row["gigabits"] == gigabits]


def steps_by_ranks(found: Found) -> Lines:
    """Steps against ranks."""
    drawn = lines(found["steps"], 1e3, ", measured")
    colours = {line.name.partition(",")[0]: line.colour for line in drawn}
    for way in ("flat", "ddp", "pipeline"):
        for (gigabits, rows), dashes in zip(_networks(found), (":", "--"), strict=False):
            seconds = {row["ranks"]: 1e3 * row["seconds"][way] for row in rows}
            name = f"{way}, {gigabits} Gb/s, calculated"
            drawn.append(Line(name, [*seconds], [*seconds.values()], colours[way], dashes))
    ticks = sorted({int(rank) for line in drawn for rank in line.xs})
    most, cores = max(found["steps"], key=int), found["machine"]["cores"]
    longer = middle(found["steps"][most]["ddp"]) / middle(found["steps"]["1"]["ddp"])
    title = f"{most} ranks on {cores} core(s): a step of DDP takes {longer:.1f} times as long as 1"
    return Lines(title, "ranks", "ms per step", drawn, ticks, from_zero=True)


def exchange_by_ranks(found: Found) -> Lines:
    """All-reduces of the gradients against ranks: measured, by the fit, for other networks."""
    size, measured = found["gradient_bytes"], {}
    for ranks, sizes in found["all_reduce"].items():
        measured[ranks] = sizes[min(sizes, key=lambda one: abs(int(one) - size))]
    drawn = lines(measured, 1e3, ", measured")
    more = sorted({row["ranks"] for row in found["extrapolation"]})
    ranks = [*map(int, measured), *more]
    calculated: list[tuple[str, Link, list[int], str]] = []
    for way, of in found["fit"].items():
        calculated.append((f"{way}, by the fit", Link(of["alpha"], of["beta"]), ranks, ":"))
    for gigabits, (row, *_) in _networks(found):
        link = Link.network(gigabits, row["alpha"])
        name = f"{gigabits} Gb/s, {1e6 * link.alpha:g} µs, calculated"
        calculated.append((name, link, more, "--"))
    for (name, link, xs, dashes), colour in zip(calculated, COLOURS, strict=False):
        seconds = [1e3 * ring_seconds(n, size, link) for n in xs]
        drawn.append(Line(name, xs, seconds, colour, dashes))
    error = found["fit"]["dist.all_reduce"]["median_error"]
    title = f"all-reduce of the gradients: the fit is off by {error:.0%} (median)"
    return Lines(title, "ranks", "ms per all-reduce", drawn, ranks)


def dataparallel(found: Found) -> Pictures:
    """Speed against batch size, and the shares of the eight steps."""
    batches = found["batches"]
    drawn = lines({batch: of["times_one_device"] for batch, of in batches.items()})
    x, y, ticks = "global batch, images", "times one device", list(map(int, batches))
    by_hand = {b: of["times_one_device"].get("eight steps by hand", 0) for b, of in batches.items()}
    pays = min((int(batch) for batch, times in by_hand.items() if times > 1), default=None)
    title = f"two devices pay from a batch of {pays}" if pays else "speed against batch"
    charts: list[Chart] = [Lines(title, x, y, drawn, ticks, from_zero=True)]
    shares = {}
    for batch, of in batches.items():
        if "steps" in of:
            spent = {step: median(values) for step, values in of["steps"].items()}
            shares[f"batch {batch}"] = {
                part: 100 * sum(spent[step] for step in steps) / sum(spent.values())
                for part, steps in EIGHT_STEPS.items()
            }
    if shares:
        charts.append(Bars("the eight steps by hand", "% of an iteration", shares))
    return {"mnist_dataparallel": charts}


def bert_throughput(found: Found) -> Pictures:
    """Each step from the naive recipe to ours; DataParallel and accumulation by batch size."""
    charts: Pictures = {}
    if "speed" in found:
        speed, ratios = found["speed"]["sequences_per_second"], found["speed"]["ratio"]
        notes = {name: f"{value:.2f} times the naive recipe" for name, value in ratios.items()}
        title = f"training on reviews, {list(ratios.values())[-1]:.2f} times the naive recipe"
        bars = Bars(title, "sequences/s", speed, notes, next(iter(speed)))
        charts["bert_throughput"] = [bars]
    if "batch" in found:
        by_batch = {batch: of["ratio"] for batch, of in found["batch"]["batches"].items()}
        drawn, ticks = lines(by_batch), list(map(int, by_batch))
        title = "a step of BERT on several devices and on one, by batch"
        x, y = "global batch, reviews", "times one device"
        charts["bert_dataparallel"] = [Lines(title, x, y, drawn, ticks, from_zero=True)]
    return charts


def same_training(found: Found) -> Pictures:
    """The curves of one rank, of two, and of two that were killed and resumed, on one another."""
    runs, step = found["runs"], found["resumed_from_step"]
    looks = {"1 rank": ("#f6c48f", "-"), "2 ranks": ("#0072b2", "-")}
    looks["2 ranks, resumed"] = ("#000000", "--")
    steps = len(runs["1 rank"]["loss"])
    same = found["resumed_differs_in"] == 0
    drawn: dict[str, list[Line]] = {"loss": [], "accuracy": []}
    for name, (colour, dashes) in looks.items():
        label = f"2 ranks, killed after step {step} and resumed" if "resumed" in name else name
        for of, lines in drawn.items():
            ys = runs[name][of]
            xs = [(number + 1) * steps / len(ys) for number in range(len(ys))]
            lines.append(Line(label, xs, ys, colour, dashes))
    event = f"SIGKILL, then --resume auto:\n{'the same bits' if same else 'other bits'} as without"
    apart = f"training loss: 1 and 2 ranks differ by {found['loss_2_ranks_minus_1']:.0e} at most"
    equal = found["accuracy_2_ranks_minus_1"] == 0
    words = f"test accuracy: {'equal after every epoch' if equal else 'by epoch'}"
    losses = Curves(apart, "step", "loss of a batch", drawn["loss"], step, event)
    return {"same_training": [losses, Curves(words, "step", "share", drawn["accuracy"], step, "")]}


def meeting(found: Found) -> Pictures:
    """Seconds, and questions to the store, by the number of ranks."""
    medians = {ranks: of["medians"] for ranks, of in found["sizes"].items()}
    ticks = [int(ranks) for ranks in medians]
    most = max(medians, key=int)
    charts = []
    for figure, what, y in (
        ("meet", "{:.2g} s", "seconds after the last start"),
        ("questions", "{:.0f} questions per rank", "questions to the store per rank"),
    ):
        rows = {ranks: of[figure] for ranks, of in medians.items()}
        title = f"{most} ranks meet: {what.format(rows[most]['job://'])}"
        charts.append(Lines(title, "ranks", y, lines(rows), ticks))
    return {"meeting": charts}


def fewer_bytes(found: Found) -> Pictures:
    """Errors against bytes; a line for each way, with a point for each of its settings."""
    points: dict[str, list[tuple[float, float]]] = {}
    for name, of in found["ways"].items():
        kind = re.sub(r"(torch, )?(\S+?),? .*", r"\1\2", name)
        middle = of["medians"]
        point = middle["bytes_per_step"] / 1e3, 100 * (1 - middle["accuracy"])
        points.setdefault(kind, []).append(point)
    drawn = []
    for (kind, of), colour in zip(points.items(), chain(COLOURS, COLOURS), strict=False):
        xs, ys = zip(*sorted(of), strict=True)
        drawn.append(Line(kind, xs, ys, colour))
    middle = found["ways"]["powersgd, rank 4"]["medians"]
    title = f"PowerSGD of rank 4: {middle['times_fewer_bytes']:.2g} times fewer bytes"
    title += f", accuracy {middle['accuracy']:.1%}"
    x = f"kB that each of {found['ranks']} ranks sends per step"
    return {"fewer_bytes": [Lines(title, x, "errors on the test set, %", drawn)]}
