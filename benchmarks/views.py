"""The charts of each result, made from its JSON alone.

A function takes the JSON of the result of its name and returns charts, by the name of the picture
that shows them side by side. Optional parts of a result may be missing.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any

from benchmarks.charts import COLOURS, Bars, Chart, Line, Lines
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
    """A line for each way.

    Args:
        rows: {x: {way: value or samples}}; of samples the median is drawn.
        scale: what to multiply values with.
        suffix: of the lines' names.
    """
    ways: dict[str, dict[float, float]] = {}
    for x, values in rows.items():
        for way, value in values.items():
            ways.setdefault(way, {})[int(x)] = scale * middle(value)
    return [
        Line(f"{way}{suffix}", list(points), list(points.values()), colour)
        for (way, points), colour in zip(ways.items(), COLOURS, strict=False)
    ]


def peer_bars(title: str, unit: str, found: Found, values: Mapping[str, Any]) -> Bars:
    """Bars with each program's ratio to the peer, which is grey."""
    notes, peer = {}, ""
    for name, of in found["medians"].items():
        peer = name if name.startswith("pytorch/examples") else peer
        ratio, share = of.get("peer_ratio"), of.get("peak_share")
        words = [f"{ratio:.2f} times the peer's speed"] if ratio else []
        words += [f"{share:.0%} of the bf16 peak"] if share else []
        notes[name] = ", ".join(words)
    return Bars(title, unit, values, notes, peer)


def mnist_time_to_accuracy(found: Found) -> Pictures:
    """Where the seconds until the target go."""
    parts = ("startup", "training", "evaluation", "other")
    seconds = {name: {part: of[part] for part in parts} for name, of in found["medians"].items()}
    title = f"time to {found['target']:.0%} test accuracy, medians of {found['rounds']}"
    return {"mnist_time_to_accuracy": [peer_bars(title, "seconds", found, seconds)]}


def imagenet_throughput(found: Found) -> Pictures:
    """The parts that were measured."""
    titles = {
        "input": "input: images/s per core",
        "training": "training, ResNet-18, batch 32, CPU: images/s",
        "gpu": "training, ResNet-50, batch 256, GPU: images/s",
    }
    bars = []
    for part, title in titles.items():
        if part in found:
            medians = found[part]["medians"].items()
            speeds = {name: of["images_per_second"] for name, of in medians}
            bars.append(peer_bars(title, "images/s", found[part], speeds))
    return {"imagenet_throughput": bars}


def allreduce(found: Found) -> Pictures:
    """Time against size with the machine's limits, and the training step."""
    sizes: list[Chart] = []
    for ranks, of in found["sizes"].items():
        drawn, w = lines(of["seconds"], 1e3), int(ranks)
        memory = median(chain(*of["memory"].values()))
        limits = {
            f"limit of memory, {memory / 1e9:.1f} GB/s per rank": (1 + 1 / w) / memory,
            f"ring over plain TCP, {of['loopback'] / 1e9:.1f} GB/s": 2
            * (1 - 1 / w)
            / of["loopback"],
        }
        ends = [int(size) for size in of["memory"]]
        for (name, per_byte), colour in zip(limits.items(), COLOURS[7:], strict=False):
            drawn.append(Line(name, ends, [1e3 * end * per_byte for end in ends], colour, "--"))
        sizes.append(Lines(f"{ranks} ranks", "bytes", "ms per all-reduce", drawn))
    if not found.get("step"):
        return {"allreduce": sizes}
    steps = {way: 1e3 * median(values) for way, values in found["step"]["seconds"].items()}
    alone = steps["none"]
    parts = {
        way: {"computing": min(alone, ms), "waiting for the exchange": max(0.0, ms - alone)}
        for way, ms in steps.items()
    }
    ratios = found["step"]["times_faster_than_ddp"].items()
    notes = {way: f"{ratio:.2f} times DDP's speed" for way, ratio in ratios}
    title = f"training step of ResNet-18, 2 ranks x {found['step']['batch']} images"
    return {"allreduce": sizes, "allreduce_step": [Bars(title, "ms per step", parts, notes)]}


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
    title, x = f"times as fast as {found['baseline']}", "micro-batches"
    charts: list[Chart] = [Lines(title, x, "times one core", drawn, counts, from_zero=True)]
    losses = {name: of["losses"] for name, of in each.items() if "losses" in of and "1f1b" in name}
    if losses:
        notes = {name: f"measured {each[name]['median_seconds']:.2f}" for name in losses}
        charts.append(Bars("where the seconds of a step go", "seconds", losses, notes))
    return {"pipeline": charts}


def pipeline_memory(found: Found) -> Pictures:
    """Activations that the stages keep."""
    stages = [f"stage {number}, from {name}" for number, name in enumerate(found["stages"])]
    kept = {
        name: dict(zip(stages, (one / 2**20 for one in held), strict=True))
        for name, held in found["bytes"].items()
    }
    notes = {name: f"first stage {held[stages[0]]:.0f}" for name, held in kept.items()}
    title = f"activations kept at most, batch {found['batch_size']} in 8 micro-batches"
    return {"pipeline_memory": [Bars(title, "MiB", kept, notes)]}


def scaling(found: Found) -> Pictures:
    """Measured, and calculated for more ranks."""
    return {"scaling": [steps_by_ranks(found), exchange_by_ranks(found)]}


def _networks(found: Found) -> dict[int, list[Found]]:
    """The calculated rows of each network with the latency that was assumed."""
    networks: dict[int, list[Found]] = {}
    for row in found["extrapolation"]:
        if row["alpha_from"] == "assumed":
            networks.setdefault(row["gigabits"], []).append(row)
    return networks


def steps_by_ranks(found: Found) -> Lines:
    """Steps against ranks."""
    drawn = lines(found["steps"], 1e3, ", measured")
    colours = {line.name.partition(",")[0]: line.colour for line in drawn}
    for way in ("flat", "ddp", "pipeline"):
        for (gigabits, rows), dashes in zip(_networks(found).items(), (":", "--"), strict=False):
            ranks, seconds = [row["ranks"] for row in rows], [row["seconds"][way] for row in rows]
            name = f"{way}, {gigabits} Gb/s, calculated"
            drawn.append(Line(name, ranks, [1e3 * one for one in seconds], colours[way], dashes))
    ticks = sorted({int(rank) for line in drawn for rank in line.xs})
    title = "time per step against ranks"
    return Lines(title, "ranks", "ms per step", drawn, ticks, from_zero=True)


def exchange_by_ranks(found: Found) -> Lines:
    """All-reduces of the gradients against ranks: measured, by the fit, for other networks."""
    size, more = found["gradient_bytes"], sorted({row["ranks"] for row in found["extrapolation"]})

    def calculated(name: str, ranks: Sequence[int], link: Link, colour: str, dashes: str) -> Line:
        seconds = [1e3 * ring_seconds(n, size, link) for n in ranks]
        return Line(name, ranks, seconds, colour, dashes)

    def nearest(sizes: Found) -> Any:
        return sizes[min(sizes, key=lambda one: abs(int(one) - size))]

    measured = {ranks: nearest(sizes) for ranks, sizes in found["all_reduce"].items()}
    drawn = lines(measured, 1e3, ", measured")
    ranks = [*map(int, measured), *more]
    for (way, of), colour in zip(found["fit"].items(), COLOURS, strict=False):
        link = Link(of["alpha"], of["beta"])
        drawn.append(calculated(f"{way}, by the fit", ranks, link, colour, ":"))
    for (gigabits, rows), colour in zip(_networks(found).items(), COLOURS[2:], strict=False):
        link = Link.network(gigabits, rows[0]["alpha"])
        name = f"{gigabits} Gb/s, {1e6 * link.alpha:g} µs, calculated"
        drawn.append(calculated(name, more, link, colour, "--"))
    title = "all-reduce of the gradients against ranks"
    return Lines(title, "ranks", "ms per all-reduce", drawn, ranks)


def dataparallel(found: Found) -> Pictures:
    """Speed against batch size, and the shares of the eight steps."""
    batches = found["batches"]
    drawn = lines({batch: of["times_one_device"] for batch, of in batches.items()})
    x, y, ticks = "global batch, images", "times one device", list(map(int, batches))
    charts: list[Chart] = [Lines("speed against batch", x, y, drawn, ticks, from_zero=True)]
    shares = {}
    for batch, of in batches.items():
        spent = {step: median(values) for step, values in of.get("steps", {}).items()}
        if spent:
            shares[f"batch {batch}"] = {
                part: 100 * sum(spent[step] for step in steps) / sum(spent.values())
                for part, steps in EIGHT_STEPS.items()
            }
    if shares:
        charts.append(Bars("the eight steps by hand", "% of an iteration", shares))
    return {"mnist_dataparallel": charts}


def bert_throughput(found: Found) -> Pictures:
    """Each step from the naive recipe to ours."""
    speed, ratios = found["speed"]["sequences_per_second"], found["speed"]["ratio"]
    notes = {name: f"{value:.2f} times the naive recipe" for name, value in ratios.items()}
    bars = Bars("training on real reviews", "sequences/s", speed, notes, next(iter(speed)))
    return {"bert_throughput": [bars]}
