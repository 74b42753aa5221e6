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

Found = Mapping[str, Any]
Pictures = Mapping[str, Sequence[Chart]]


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


def bert_throughput(found: Found) -> Pictures:
    """Each step from the naive recipe to ours; DataParallel and accumulation by batch size."""
    charts: Pictures = {}
    if "speed" in found:
        speed, ratios = found["speed"]["sequences_per_second"], found["speed"]["ratio"]
        notes = {name: f"{ratio:.2f} times as fast" for name, ratio in ratios.items() if ratio != 1}
        fastest = list(ratios.values())[-1]
        title = f"training on reviews: {fastest:.2f} times as fast as the naive recipe"
        bars = Bars(title, "sequences/s", speed, notes, next(iter(speed)))
        charts["bert_throughput"] = [bars]
    if "batch" in found:
        by_batch = {batch: of["ratio"] for batch, of in found["batch"]["batches"].items()}
        drawn, ticks = lines(by_batch), list(map(int, by_batch))
        most, ratios = list(by_batch.items())[-1]
        times = ratios["DataParallel"]
        title = f"batch {most}: DataParallel is {times:.2f} times as fast as one device"
        x, y = "global batch, reviews", "times as fast as one device"
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
    accuracies = Curves(words, "step", "test accuracy", drawn["accuracy"], step, "")
    return {"same_training": [losses, accuracies]}


def fewer_bytes(found: Found) -> Pictures:
    """Errors against bytes; a line for each way by hand, with a point for each of its settings."""
    points: dict[str, list[tuple[float, float]]] = {}
    for name, of in found["ways"].items():
        if name.startswith("torch"):  # on the same points as those by hand
            continue
        kind = re.sub(r"(\S+?),? .*", r"\1", name)
        middle = of["medians"]
        point = middle["bytes_per_step"] / 1e3, 100 * (1 - middle["accuracy"])
        points.setdefault(kind, []).append(point)
    drawn = []
    for (kind, of), colour in zip(points.items(), chain(COLOURS, COLOURS), strict=False):
        xs, ys = zip(*sorted(of), strict=True)
        drawn.append(Line(kind, xs, ys, colour))
    ways = {name: of["medians"] for name, of in found["ways"].items()}
    by_bytes = sorted(ways, key=lambda name: ways[name]["bytes_per_step"])
    least, whole = by_bytes[0], by_bytes[-1]
    title = f"{least}: {ways[least]['times_fewer_bytes']:.0f} times fewer bytes, "
    accuracy, usual = (f"{ways[name]['accuracy']:.1%}" for name in (least, whole))
    same = accuracy == usual
    title += f"the same {accuracy}" if same else f"{accuracy} instead of {usual}"
    title += " accuracy"
    x = f"kB that each of {found['ranks']} ranks sends per step"
    return {"fewer_bytes": [Lines(title, x, "errors on the test set, %", drawn, from_zero=True)]}


def unequal_shares(found: Found) -> Pictures:
    """A step with equal and with unequal shares; and with delays, by how often the ranks meet."""
    shares = found["shares"]
    times = shares["times_equal_shares"]
    notes = {name: f"{ratio:.2f} times as fast" for name, ratio in times.items() if ratio != 1}
    title = f"one of two cores loaded: --shares auto is {times['--shares auto']:.2f} times as fast"
    charts: list[Chart] = [Bars(title, "ms per step", shares["medians"], notes)]
    delays = {who: of["medians"] for who, of in found["delays"].items()}
    bars = {f"{who}, {name}": ms for who, of in delays.items() for name, ms in of.items()}
    each = [(name, ms) for name, ms in list(delays.values())[-1].items() if name != "no delays"]
    (often, most), (seldom, least) = each[0], each[-1]
    title = "local SGD with delays in each rank: "
    title += f"a meeting {seldom} steps is {most / least:.2f} times as fast as {often}"
    charts.append(Bars(title, "ms per step", bars))
    return {"unequal_shares": charts}


def lost_ranks(found: Found) -> Pictures:
    """Seconds that the others lose with each rank that is killed."""
    lost, joins = "without the lost rank, median", "newcomer joins, median"
    ways = {name: of for name, of in found["ways"].items() if lost in of}
    seconds = {
        name: {"without the lost rank": of[lost], "a newcomer joins": of.get(joins, 0.0)}
        for name, of in ways.items()
    }
    kills = found["ways"]["survive"]["kills"]
    same = "the same bits" if found["other_parameters"] == 0 else "other bits"
    title = (
        f"{kills} ranks killed: {same} as a replay, {ways['survive'][lost]:.2g} s lost with each"
    )
    return {"lost_ranks": [Bars(title, "seconds, medians", seconds)]}
