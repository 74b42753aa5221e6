"""The charts of what grows with ranks, samples and bytes: docs/en/scale.md shows them.

As in views.py, a function takes the JSON of the result of its name.
"""

from dataclasses import replace

from benchmarks.charts import COLOURS, Bars, Chart, Line, Lines
from benchmarks.tables import counted
from benchmarks.views import Found, Pictures, lines


def meeting(found: Found) -> Pictures:
    """Seconds, questions to the store, and its own time, by the number of ranks."""
    medians = {ranks: of["medians"] for ranks, of in found["sizes"].items()}
    ticks = [int(ranks) for ranks in medians]
    most = max(medians, key=int)
    charts: list[Chart] = []
    for figure, what, y in (
        ("meet", "in {:.2g} s", "seconds after the last start"),
        ("questions", "with {:.0f} questions per rank", "questions to the store per rank"),
    ):
        rows = {ranks: of[figure] for ranks, of in medians.items()}
        title = f"{most} ranks meet {what.format(rows[most]['job://'])}"
        charts.append(Lines(title, "ranks", y, lines(rows), ticks))
    more = {int(ranks): of["store"] for ranks, of in found.get("calculated", {}).items()}
    if more:
        (drawn, *_) = lines({ranks: of["store"] for ranks, of in medians.items()})
        xs, ys = [drawn.xs[-1], *more], [drawn.ys[-1], *more.values()]
        further = Line("calculated", xs, ys, COLOURS[1], "--")
        title = f"{xs[-1]:,} ranks: {ys[-1]:.2g} s of a core of rank 0's host, calculated"
        both = [replace(drawn, name="measured"), further]
        y = "seconds of the store's thread"
        charts.append(Lines(title, "ranks", y, both, [*ticks, xs[-1]]))
    ends = {ranks: of["end"] for ranks, of in medians.items()}
    title = f"{most} ranks meet one mistake: all end within {ends[most]['job://']:.1f} s"
    y = "seconds until all have come to their end"
    return {"meeting": charts, "meeting_end": [Lines(title, "ranks", y, lines(ends), ticks)]}


def starting(found: Found) -> Pictures:
    """Seconds of a short run by its ranks; where those of a world of one go."""
    rows = {
        int(ranks): {"by the clock": seconds, "of all cores": found["cpu"]["medians"][ranks]}
        for ranks, seconds in found["seconds"]["medians"].items()
        if ranks.isdigit()
    }
    most = max(rows)
    title = f"a run of {counted(most, 'rank')} takes {rows[most]['by the clock']:.1f} s"
    y = "seconds of a run of twelve steps"
    grown = Lines(title, "ranks", y, lines(rows), [*rows], from_zero=True)
    parts = {name: value for name, value in found["places"].items() if name != "whole"}
    first = next(iter(parts))
    whole = found["places"]["whole"]
    title = f"A world of one: {whole:.1f} s, {parts[first] / whole:.0%} of them for {first}"
    bars = Bars(
        title, "seconds", {name.partition("  #")[0]: value for name, value in parts.items()}
    )
    return {"starting": [grown, bars]}


def bookkeeping(found: Found) -> Pictures:
    """What `Run` adds to a step, by the number of ranks."""
    added = {counted(int(ranks), "rank"): of["added"] for ranks, of in found["ranks"].items()}
    percent = [of["percent_of_the_step"] for of in found["ranks"].values()]
    step = found["milliseconds_of_a_step"]
    title = f"Run adds {min(percent):.1f} to {max(percent):.1f} % to a step of {step:g} ms"
    bars = Bars(title, "microseconds of the processor per step", added)
    return {"bookkeeping": [bars]}


def million(found: Found) -> Pictures:
    """Seconds and memory of a start by the number of images; memory of an order by samples."""
    sizes = {size: of["one process"] for size, of in found["folder"].items()}
    ticks, most = [int(size) for size in sizes], max(sizes, key=int)

    def rows(figure: str, least: float = 0.0) -> dict[str, dict[str, float]]:
        return {
            size: {way: max(least, one["medians"][figure]) for way, one in of.items()}
            for size, of in sizes.items()
        }

    largest = {way: one["medians"] for way, one in sizes[most].items()}
    first, *_, theirs = largest.values()
    later = largest.get("ours, second start", first)
    charts = [
        Lines(
            f"{int(most):,} images are listed in {first['seconds']:.1f} s, later in "
            f"{later['seconds']:.2g} s",
            "images",
            "seconds until the list is there",
            lines(rows("seconds")),
            ticks,
        ),
        Lines(
            f"A rank keeps {later['kept_mb']:.2g} MB of its own, torchvision's "
            f"{theirs['kept_mb']:.0f} MB",
            "images",
            "MB of a rank that it shares with nobody",
            lines(rows("kept_mb", 0.1)),
            ticks,
        ),
    ]
    orders = {
        samples: {way: max(0.1, one["mb"]) for way, one in of.items()}
        for samples, of in found["order"].items()
    }
    longest = max(orders, key=int)
    title = f"The order of {int(longest):,} samples takes {orders[longest]['computed']:.2g} MB"
    y = "MB until the first batch"
    charts.append(Lines(title, "samples", y, lines(orders), [int(one) for one in orders]))
    return {"million": charts}


def pixel_cache(found: Found) -> Pictures:
    """Seconds to decode a folder into a cache, by its images."""
    sizes = {size: of["medians"] for size, of in found["sizes"].items()}
    most = max(sizes, key=int)
    rows = {size: {way: one["seconds"] for way, one in of.items()} for size, of in sizes.items()}
    title = (
        f"{int(most):,} images are decoded in {rows[most]['all cores']:.0f} s, "
        f"opened in {rows[most]['there already']:.2g} s"
    )
    ticks = [int(size) for size in sizes]
    return {"pixel_cache": [Lines(title, "images", "seconds", lines(rows), ticks)]}


def at_scale(found: Found) -> Pictures:
    """Milliseconds of an all-reduce of the largest model, a chart for each kind of cluster."""
    model = max(found["gradient_bytes"], key=found["gradient_bytes"].get)
    charts = []
    for cluster, of in found["clusters"].items():
        seconds = of["seconds"][model]
        drawn = [replace(line, dashes="--") for line in lines(seconds, 1e3)]
        least, most = min(seconds, key=int), max(seconds, key=int)
        best = min(seconds[most], key=seconds[most].get)
        times, network = seconds[most]["flat ring"] / seconds[most][best], cluster.split(" and ")[1]
        title = f"{network}, {int(most):,} GPUs: {best}, {times:.2g} times as fast as one ring"
        y, ticks = f"ms per all-reduce of {model}'s gradients", [int(least), 64, 512, int(most)]
        charts.append(Lines(title, "GPUs, in nodes of 8", y, drawn, ticks))
    return {"at_scale": charts}


def large_states(found: Found) -> Pictures:
    """How long one rank's training waits for a checkpoint, and when it is on the disk, by size."""
    sizes = {float(size.split()[0]): of for size, of in found["ranks"]["1"].items()}
    ways = {"until_on_disk": "on the disk", "training_waits": "training waits"}
    ways |= {"copy": "a copy in memory"}
    drawn = [
        Line(name, [*sizes], [of[way] for of in sizes.values()], colour)
        for (way, name), colour in zip(ways.items(), COLOURS, strict=False)
    ]
    most = max(sizes)
    times = sizes[most]["training_waits"] / sizes[most]["copy"]
    title = f"{most:g} GB: training waits {times:.2g} times as long as a copy in memory takes"
    return {"large_states": [Lines(title, "GB of parameters", "seconds", drawn, [*sizes])]}
