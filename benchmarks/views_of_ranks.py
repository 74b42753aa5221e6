"""The charts of what ranks do together: all-reduces, pipelines, steps against ranks, DataParallel.

As in views.py, a function takes the JSON of the result of its name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from statistics import median

from benchmarks.charts import COLOURS, GREY, Bars, Chart, Line, Lines
from benchmarks.latency_bandwidth import Link, ring_seconds
from benchmarks.tables import counted
from benchmarks.views import Found, Pictures, lines, middle

EIGHT_STEPS = {
    "to the first device, scatter (1, 2)": "12",
    "copy the model (3)": "3",
    "forward, backward in threads (4, 6)": "46",
    "gather, loss (5)": "5",
    "add up gradients (7)": "7",
    "update (8)": "8",
}


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
    notes = {way: f"{ratio:.2f} times as fast as DDP" for way, ratio in ratios if way != "ddp"}
    exchanging = {way: ratio for way, ratio in ratios if way != "none"}
    best = max(exchanging, key=exchanging.__getitem__)
    title = f"step of ResNet-18, 2 ranks x {counted(step['batch'], 'image')}: {best} is fastest"
    return {"allreduce": sizes, "allreduce_step": [Bars(title, "ms per step", parts, notes)]}


def all_reduces_by_size(ranks: str, found: Found) -> Lines:
    """Time against size with as many ranks, beside the limits of memory and TCP.

    The tables have two more ways: so many lines would hide one another.
    """
    w, loopback, memory = int(ranks), found["loopback"], median(chain(*found["memory"].values()))
    limits = {  # seconds per byte
        f"memory's limit, {memory / 1e9:.1f} GB/s": (1 + 1 / w) / memory,
        f"TCP's limit, {loopback / 1e9:.1f} GB/s": 2 * (1 - 1 / w) / loopback,
    }
    left_out = ("dist.all_reduce, bounded buffers", "recursive doubling")
    shown = {
        size: {way: seconds for way, seconds in ways.items() if way not in left_out}
        for size, ways in found["seconds"].items()
    }
    drawn, sizes = lines(shown, 1e3), [int(size) for size in found["memory"]]
    for (name, per_byte), colour in zip(limits.items(), COLOURS[7:], strict=False):
        drawn.append(Line(name, sizes, [1e3 * size * per_byte for size in sizes], colour, "--"))
    faster = [ways["shared memory, in place"] for ways in found["times_faster_than_torch"].values()]
    times = f"{min(faster):.1f} to {max(faster):.0f} times"
    title = f"{ranks} ranks: shared memory in place is {times} as fast as gloo"
    return Lines(title, "bytes", "ms per all-reduce", drawn)


def pipeline(found: Found) -> Pictures:
    """Speed-up of the schedules by hand against micro-batches, and where the rest of a step goes.

    Torch's engine is nearly as fast with each schedule: it is in the table, not in the chart.
    """
    each = found["configurations"]
    speedups: dict[int, dict[str, float]] = {}
    for name, of in each.items():
        way, _, count = name.rpartition(" ")
        if way == "alone" or way.startswith("hand"):
            shown = "one core" if way == "alone" else way.removeprefix("hand ")
            speedups.setdefault(int(count), {})[shown] = of["speedup"]
    counts = sorted(speedups)
    name = "P M / (M + P - 1), calculated"
    ideal = Line(name, counts, [2 * m / (m + 1) for m in counts], GREY, ":")
    drawn = [*lines(speedups), ideal]
    best = found["best"]["hand"]
    title = f"two cores are {each[best]['speedup']:.2f} times as fast as one"
    y = "times as fast as one core"
    charts: list[Chart] = [Lines(title, "micro-batches", y, drawn, counts, from_zero=True)]
    shown = ("hand 1f1b", "hand zbv")
    losses, notes = {}, {}
    for name, of in each.items():
        if name.startswith(shown) and "losses" in of:
            way, _, count = name.removeprefix("hand ").rpartition(" ")
            losses[f"{way}, {count} micro-batches"] = of["losses"]
            notes[f"{way}, {count} micro-batches"] = f"measured {of['median_seconds']:.2f}"
    if losses:
        charts.append(Bars(_most_lost(losses), "seconds", losses, notes))
    return {"pipeline": charts}


def _most_lost(losses: Mapping[str, Mapping[str, float]]) -> str:
    """What costs most beside the computing itself, with the fewest micro-batches and the most."""
    found = []
    for name, parts in (next(iter(losses.items())), list(losses.items())[-1]):
        spent = {part: seconds for part, seconds in parts.items() if part != "ideal"}
        found.append(f"{max(spent, key=spent.__getitem__)} ({name})")
    return f"what costs most: {', '.join(found)}"


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
    """Steps that were measured, steps that were calculated for more ranks, and the all-reduces."""
    steps = [measured_steps(found), calculated_steps(found)]
    return {"scaling": steps, "scaling_exchange": [exchange_by_ranks(found)]}


def _networks(found: Found) -> Iterator[tuple[int, list[Found]]]:
    """The calculated rows of each network with the latency that was assumed."""
    rows = [row for row in found["extrapolation"] if row["alpha_from"] == "assumed"]
    for gigabits in sorted({row["gigabits"] for row in rows}):
        yield gigabits, [row for row in rows if row["gigabits"] == gigabits]


def measured_steps(found: Found) -> Lines:
    """Steps against ranks. The two all-reduces by hand take as long as DDP's, and are left out."""
    ways = ("compute", "ddp", "pipeline")
    steps = {rank: {way: of[way] for way in ways} for rank, of in found["steps"].items()}
    drawn = lines(steps, 1e3, ", measured")
    most, cores = max(steps, key=int), found["machine"]["cores"]
    longer = middle(steps[most]["ddp"]) / middle(steps["1"]["ddp"])
    title = (
        f"{most} ranks on {cores} cores: DDP's step takes {longer:.1f} times as long as 1 rank's"
    )
    return Lines(title, "ranks", "ms per step", drawn, list(map(int, steps)), from_zero=True)


def calculated_steps(found: Found) -> Lines:
    """Steps of many ranks on the slower of the assumed networks."""
    gigabits, rows = next(_networks(found))
    ways = {"ddp": COLOURS[1], "pipeline": COLOURS[2], "flat": COLOURS[3]}
    drawn = []
    for way, colour in ways.items():
        seconds = {row["ranks"]: 1e3 * row["seconds"][way] for row in rows}
        name = f"{way}, calculated"
        drawn.append(Line(name, [*seconds], [*seconds.values()], colour, "--"))
    ticks = [row["ranks"] for row in rows]
    longer = rows[-1]["seconds"]["flat"] / rows[-1]["seconds"]["ddp"] - 1
    title = f"{ticks[-1]} ranks, {gigabits} Gb/s: an all-reduce after backward costs {longer:.0%}"
    return Lines(title, "ranks", "ms per step", drawn, ticks, from_zero=True)


def exchange_by_ranks(found: Found) -> Lines:
    """Torch's all-reduces of the gradients against ranks: measured, by the fit, other networks."""
    way, size, measured = "dist.all_reduce", found["gradient_bytes"], {}
    for ranks, sizes in found["all_reduce"].items():
        near = sizes[min(sizes, key=lambda one: abs(int(one) - size))]
        measured[ranks] = {way: near[way]}
    (line,) = lines(measured, 1e3)
    drawn = [replace(line, name="measured")]
    more = sorted({row["ranks"] for row in found["extrapolation"]})
    ranks, fit = [*map(int, measured), *more], found["fit"][way]
    here = Link(fit["alpha"], fit["beta"])
    calculated = [("by the fit, calculated", here, ranks, ":")]
    for gigabits, (row, *_) in _networks(found):
        link = Link.network(gigabits, row["alpha"])
        name = f"{gigabits} Gb/s, {1e6 * link.alpha:g} µs, calculated"
        calculated.append((name, link, more, "--"))
    for (name, link, xs, dashes), colour in zip(calculated, COLOURS, strict=False):
        seconds = [1e3 * ring_seconds(n, size, link) for n in xs]
        drawn.append(Line(name, xs, seconds, colour, dashes))
    title = f"all-reduce of the gradients: the fit is off by {fit['median_error']:.0%} (median)"
    return Lines(title, "ranks", f"ms per {way}", drawn, ranks)


def dataparallel(found: Found) -> Pictures:
    """Speed against batch size, and the shares of the eight steps."""
    batches = found["batches"]
    drawn = lines({batch: of["times_one_device"] for batch, of in batches.items()})
    x, y, ticks = "global batch, images", "times as fast as one device", list(map(int, batches))
    by_hand = {b: of["times_one_device"].get("eight steps by hand", 0) for b, of in batches.items()}
    pays = min((int(batch) for batch, times in by_hand.items() if times > 1), default=None)
    title = f"two devices pay from a batch of {pays}" if pays else "speed against batch"
    charts: list[Chart] = [Lines(title, x, y, drawn, ticks, from_zero=True)]
    shares = {}
    for batch, of in batches.items():
        if "steps" in of:
            spent = {step: median(values) for step, values in of["steps"].items()}
            shares[f"batch {int(batch):,}"] = {
                part: 100 * sum(spent[step] for step in steps) / sum(spent.values())
                for part, steps in EIGHT_STEPS.items()
            }
    if shares:
        computing = [of["forward, backward in threads (4, 6)"] for of in shares.values()]
        least, most = min(computing), max(computing)
        title = f"eight steps by hand: computing takes {least:.0f} to {most:.0f} % of an iteration"
        charts.append(Bars(title, "% of an iteration", shares))
    return {"mnist_dataparallel": charts}
