"""What each benchmark is for: how it is started, what it needs, the claims it supports and the charts of its results.

A benchmark that is not named here runs with its defaults, and its results get a table of whatever numbers they hold.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from matplotlib.figure import Figure

from benchmarks import charts
from benchmarks.charts import Line
from benchmarks.latency_bandwidth import FORMULAS, SYMBOLS

Found = Mapping[str, Any]
RESNET18 = "46758048"  # bytes of its gradients, as allreduce.json has them
PEER = "pytorch/examples"


@dataclass(frozen=True)
class Claim:
    """Something that a benchmark shows, or not.

    Args:
        text: what should be so.
        goal: the least, or if `most` the largest, value with which it is.
        value: finds the measured value in the results.
        unit: of the values.
        most: the goal is an upper bound.
    """

    text: str
    goal: float
    value: Callable[[Found], float | None]
    unit: str = "times"
    most: bool = False

    def measured(self, found: Found) -> float | None:
        """The value, or None where the results do not have it."""
        try:
            value = self.value(found)
        except (KeyError, IndexError, TypeError, ValueError):  # ValueError: the least of nothing
            return None
        return None if value is None else float(value)

    def met(self, value: float) -> bool:
        """Whether a value meets the goal."""
        return value <= self.goal if self.most else value >= self.goal


@dataclass(frozen=True)
class Table:
    """A table of the report."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class View:
    """What the report shows of one result: (title, chart), tables, and a text below."""

    charts: list[tuple[str, Figure]]
    tables: list[Table]
    text: str = ""


@dataclass(frozen=True)
class Benchmark:
    """One result file, and how it is made.

    Args:
        result: name of the file in the folder of results, without .json.
        title: what is compared.
        module: of the program.
        flags: what it is given; `{peer}` and other words in braces are the places that the user names.
        quick: more flags, for a run in seconds that only shows that it works.
        needs: places without which it cannot run.
        peer: the program that it compares with, if a checkout of it is given.
        claims: what it is to show.
        view: draws its results; None for a table of the numbers.
        out_is_file: `--out` names the file and not the folder of the results.
    """

    result: str
    title: str
    module: str
    flags: str = ""
    quick: str = ""
    needs: tuple[str, ...] = ()
    peer: str = ""
    claims: tuple[Claim, ...] = ()
    view: Callable[[Found], View] | None = None
    out_is_file: bool = False

    @property
    def command(self) -> str:
        """How to repeat it, with the places in capitals."""
        words = (
            "python -m benchmarks.",
            self.module,
            " " * bool(self.flags),
            self.flags,
            " --peer {peer}" * bool(self.peer),
        )
        return "".join(words).format_map(Capitals())


class Capitals(dict[str, str]):
    """Each place by its name in capitals."""

    def __missing__(self, name: str) -> str:
        return name.upper()


# --------------------------------------------------------------------------------------------------------- the views


def against_peer(found: Found, value: str, unit: str) -> View:
    """Results with `medians`: name -> figures, among them `peer_ratio`, `peer_ratio_per_round` and `goal`."""
    medians = {name: each for name, each in found["medians"].items() if each.get(value) is not None}
    notes = {
        name: f"{each['peer_ratio']:.2f} times the peer" for name, each in medians.items() if each.get("peer_ratio")
    }
    grey = next((name for name in medians if name.startswith(PEER)), "")
    chart = charts.bars({name: each[value] for name, each in medians.items()}, unit, notes, grey)
    rows = [
        (
            name, f"{each[value]:.4g}", f"{each['peer_ratio']:.2f}" if each.get("peer_ratio") else "-",
            ", ".join("-" if one is None else f"{one:.2f}" for one in each.get("peer_ratio_per_round", [])) or "-",
        )
        for name, each in medians.items()
    ]  # fmt: skip
    return View([(unit, chart)], [Table("", ("program", unit, "ratio to the peer", "in each round"), rows)])


def mnist(found: Found) -> View:
    """Seconds until the target is reached."""
    return against_peer(
        found, "seconds", f"seconds to {found['target']:.0%} test accuracy, median of {found['rounds']}"
    )


def imagenet(found: Found) -> View:
    """The parts that were measured."""
    units = {
        "input": "input: images/s per core",
        "training": "training, CPU: images/s",
        "gpu": "training, GPU: images/s",
    }
    views = [against_peer(found[part], "images_per_second", unit) for part, unit in units.items() if part in found]
    return View([chart for view in views for chart in view.charts], [table for view in views for table in view.tables])


def allreduce(found: Found) -> View:
    """Time against size, and the training step."""
    drawn, tables = [], []
    for ranks, sizes in found["sizes"].items():
        seconds = {int(size): ways for size, ways in sizes["seconds"].items()}
        ways = list(next(iter(seconds.values())))
        megabytes = [size / 1e6 for size in seconds]
        each = [
            Line(way, megabytes, [1e3 * median(at[way]) for at in seconds.values()], colour)
            for way, colour in zip(ways, charts.COLOURS, strict=False)
        ]
        drawn.append((f"{ranks} ranks", charts.lines(each, "MB", "ms per all-reduce")))
        faster = sizes["times_faster_than_torch"]
        rows = [
            (f"{int(size) / 1e6:.3f}", *(f"{one:.2f}" for one in list(of.values())[1:])) for size, of in faster.items()
        ]
        tables.append(Table(f"{ranks} ranks: times as fast as {ways[0]}", ("MB", *ways[1:]), rows))
    if found.get("step"):
        step, ratios = found["step"]["seconds"], found["step"]["times_faster_than_ddp"]
        notes = {way: f"{ratio:.2f} times DDP's speed" for way, ratio in ratios.items()}
        chart = charts.bars({way: 1e3 * median(values) for way, values in step.items()}, "ms per step", notes, "ddp")
        drawn.append((f"training step of ResNet-18, 2 ranks x {found['step']['batch']} images", chart))
        tables.append(
            Table("step: times DDP's speed", ("averaging", "ratio"), [(w, f"{r:.2f}") for w, r in ratios.items()])
        )
    return View(drawn, tables)


def pipeline(found: Found) -> View:
    """Speed-up of each configuration."""
    each = found["configurations"]
    notes = {name: f"bubble {values['bubble']:.0%}" for name, values in each.items() if "bubble" in values}
    chart = charts.bars({name: values["speedup"] for name, values in each.items()}, "times as fast as one core", notes,
                        found["baseline"])  # fmt: skip
    rows = [(n, f"{v['median_seconds']:.3f}", f"{v['speedup']:.2f}", notes.get(n, "-")) for n, v in each.items()]
    return View([("steps of the pipeline", chart)], [Table("", ("configuration", "s", "times one core", "idle"), rows)])


def pipeline_memory(found: Found) -> View:
    """Activations that the stages keep."""
    stages = [f"stage {number}, from {name}" for number, name in enumerate(found["stages"])]
    first = {name: held[0] / 2**20 for name, held in found["bytes"].items()}
    rows = [(name, *(f"{one / 2**20:.1f}" for one in held)) for name, held in found["bytes"].items()]
    return View([("first stage", charts.bars(first, "MiB kept at most", grey="GPipe"))],
                [Table("MiB kept at most", ("schedule", *stages), rows)])  # fmt: skip


def scaling(found: Found) -> View:
    """Measured steps, the fitted model, and what it gives for more ranks."""
    measured = [
        (ranks, *(f"{1e3 * median(ways[way]):.0f} ({found['times_compute'][ranks][way]:.2f})" for way in charts.WAYS))
        for ranks, ways in found["steps"].items()
    ]
    fits = [
        (way, f"{1e6 * link['alpha']:.0f}", f"{1e-9 / link['beta']:.2f}" if link["beta"] else "no limit",
         f"{link['median_error']:.0%}", f"{link['largest_error']:.0%}")
        for way, link in found["fit"].items()
    ]  # fmt: skip
    calculated = [
        (str(row["ranks"]), f"{row['gigabits']} Gb/s", f"{1e6 * row['alpha']:.0f} µs, {row['alpha_from']}",
         *(f"{1e3 * row['seconds'][way]:.1f}" for way in ("flat", "ddp", "pipeline")))
        for row in found["extrapolation"]
    ]  # fmt: skip
    cores = found["machine"]["cores"]
    text = (
        f"Filled points and solid lines were measured on this machine ({cores} cores; more ranks share them, so that a "
        f"step takes ranks / {cores} times as long at best). Hollow points on broken lines are calculated, with the "
        f"formulas below: {SYMBOLS}. Here c = {1e3 * median(found['steps']['1']['compute']):.1f} ms (measured with one "
        "rank alone), "
        f"S = {found['gradient_bytes']:,} bytes, a = {found['activation_bytes']:,} bytes, "
        f"M = {found['micro_batches']}, P = 4. β is that of the network used to the full. Congestion, stragglers and "
        "additions are left out, and an all-reduce by a tree would have fewer messages: with many ranks it is the "
        "latency that makes a ring slow."
    )
    ways, head = tuple(charts.WAYS), ("all-reduce", "α, µs", "1/β, GB/s", "median error", "largest")
    return View(
        [
            ("time per step against ranks", charts.step_chart(found)),
            ("all-reduce of the gradients against ranks", charts.exchange_chart(found)),
        ],
        [
            Table("measured: ms per step (times the computing alone)", ("ranks", *ways), measured),
            Table("fitted to the measured all-reduces", head, fits),
            Table("formulas", ("what", "seconds"), list(FORMULAS.items())),
            Table("calculated: ms per step", ("ranks", "network", "α", "flat", "ddp", "pipeline"), calculated),
        ],
        text,
    )  # fmt: skip


def dataparallel(found: Found) -> View:
    """Speed against batch size."""
    batches = {int(batch): at["times_one_device"] for batch, at in found["batches"].items()}
    ways = list(next(iter(batches.values())))
    each = [
        Line(way, list(batches), [at[way] for at in batches.values()], colour)
        for way, colour in zip(ways, charts.COLOURS, strict=False)
    ]
    chart = charts.lines(each, "global batch, images", "times one device", list(batches), from_zero=True)
    rows = [(str(batch), *(f"{at[way]:.2f}" for way in ways)) for batch, at in batches.items()]
    return View([("speed against batch size", chart)], [Table("times one device", ("batch", *ways), rows)])


def bert(found: Found) -> View:
    """Each step from the naive recipe to ours."""
    speed, ratios = found["speed"]["sequences_per_second"], found["speed"]["ratio"]
    notes = {name: f"{value:.2f} times the naive recipe" for name, value in ratios.items()}
    rows = [(name, f"{value:.4g}", f"{ratios[name]:.2f}") for name, value in speed.items()]
    head = ("recipe", "sequences/s", "ratio to the naive one")
    tables = [Table("", head, rows)]
    if "accuracy" in found:
        reached = [
            (name, ", ".join(f"{curve[-1]:.4f}" for curve in run["accuracy"]))
            for name, run in found["accuracy"]["runs"].items()
        ]
        tables.append(Table("validation accuracy after the same epochs", ("recipe", "accuracy"), reached))
    return View([("training on real reviews", charts.bars(speed, "sequences/s", notes, next(iter(speed))))], tables)


# -------------------------------------------------------------------------------------------------------- the registry


def ratio(part: str, name: str) -> Callable[[Found], float | None]:
    """The ratio to the peer of one program in one part of imagenet_throughput.json."""
    return lambda found: found[part]["medians"][name]["peer_ratio"]


def at_equal_accuracy(found: Found) -> float:
    """How many times sooner the last recipe ends as many epochs as the naive one; 1 if its accuracy is lower."""
    naive, ours = found["accuracy"]["runs"].values()
    reached = [mean(curve[-1] for curve in run["accuracy"]) for run in (naive, ours)]
    sooner = sum(naive["training_seconds"]) / sum(ours["training_seconds"])
    return sooner if reached[1] >= reached[0] - 0.01 else 1.0


def by_hand(found: Found) -> float:
    """How many times as fast our best schedule is as the best of torch's engine."""
    ours, torchs = (found["configurations"][found["best"][who]]["speedup"] for who in ("hand", "torch"))
    return ours / torchs


BENCHMARKS = (
    Benchmark(
        "mnist_time_to_accuracy", "MNIST: time to 99 % test accuracy", "mnist_time_to_accuracy", "--data-dir {mnist}",
        "--rounds 1 --target 0.9 --peer-epochs 1", ("mnist",), f"{PEER} mnist",
        (
            Claim("one process reaches 99 % on MNIST sooner than the peer", 25,
                  lambda found: found["medians"]["ours, 1 process"]["peer_ratio"]),
        ), mnist,
    ),
    Benchmark(
        "imagenet_throughput", "Folders of JPEGs: the input alone, and training", "imagenet_throughput",
        "--data {images}", "--rounds 1 --steps 1", ("images",), f"{PEER} imagenet",
        (
            Claim("images per second and core, straight from JPEGs, as bytes, against the peer", 2,
                  ratio("input", "ours, uint8")),
            Claim("the same with a cache of decoded pixels", 4, ratio("input", "ours, cache, uint8")),
            Claim("ResNet-18 training on a CPU against the peer", 4, ratio("training", "ours, 1 process")),
        ), imagenet,
    ),
    Benchmark(
        "allreduce", "All-reduces by hand beside torch's", "allreduce", "",
        "--starts 1 --rounds 1 --steps 0 --ranks 2", claims=(
            *(
                Claim(f"shared memory in place, ResNet-18's gradients, {ranks} ranks, against dist.all_reduce", 5,
                      lambda found, ranks=ranks:
                      found["sizes"][ranks]["times_faster_than_torch"][RESNET18]["shared memory, in place"])
                for ranks in ("2", "4")
            ),
            *(
                Claim(f"a ring by hand, the least of 1 to 67 MB, {ranks} ranks, against dist.all_reduce", 1,
                      lambda found, ranks=ranks:
                      min(ways["ring"] for size, ways in found["sizes"][ranks]["times_faster_than_torch"].items()
                          if int(size) >= 1 << 20))
                for ranks in ("2", "4")
            ),
            *(
                Claim(f"sum in shared memory in place, ResNet-18, {ranks} ranks, against the memory's limit",
                      2, lambda found, ranks=ranks: found["sizes"][ranks]["times_memory_limit"][RESNET18], most=True)
                for ranks in ("2", "4")
            ),
            Claim("a step with buckets by hand against DDP", 1,
                  lambda found: found["step"]["times_faster_than_ddp"]["bucketed"]),
            Claim("a step with shared memory against DDP", 1.05,
                  lambda found: found["step"]["times_faster_than_ddp"]["shared-memory"]),
        ), view=allreduce,
    ),
    Benchmark(
        "pipeline", "A pipeline of two processes against one core", "pipeline", "",
        "--rounds 1 -a resnet18 --image-size 32 -b 8 --micro-batches 2 4", claims=(
            Claim("two stages on two cores, ours, against one core", 1.45,
                  lambda found: found["configurations"][found["best"]["hand"]]["speedup"]),
            Claim("the best schedule by hand against the best of torch's engine", 1, by_hand),
        ), view=pipeline,
    ),
    Benchmark(
        "pipeline_memory", "Activations kept by the stages of a pipeline", "pipeline", "--nproc 4 --memory",
        "-a resnet18 --image-size 32 -b 16", claims=(
            Claim("GPipe keeps M / P = 2 times the activations of 1F1B in the first of 4 stages, 8 micro-batches", 1.9,
                  lambda found: found["bytes"]["GPipe"][0] / found["bytes"]["1F1B"][0]),
        ), view=pipeline_memory,
    ),
    Benchmark(
        "scaling", "Time per step against ranks, and a model for more of them", "scaling", "",
        "--ranks 1 2 --rounds 1 --image-size 32 --batch 4", claims=(
            Claim("the latency-bandwidth model is near the measured all-reduces of torch (median error)", 0.3,
                  lambda found: found["fit"]["dist.all_reduce"]["median_error"], "", most=True),
        ), view=scaling,
    ),
    Benchmark(
        "dataparallel", "DataParallel and DDP against one device, over batch sizes", "dataparallel", "",
        "--rounds 1 --batches 8 32", claims=(
            Claim("two replicas in threads against one device, the largest batch", 1,
                  lambda found: list(found["batches"].values())[-1]["times_one_device"]["eight steps by hand"]),
        ), view=dataparallel,
    ),
    Benchmark(
        "bert_throughput", "Text classification: training on real reviews", "bert_throughput",
        "--csv {csv} --vocab {vocab}", "--rounds 1 --steps 1 --layers 1 --hidden 64", ("csv", "vocab"), claims=(
            Claim("training of bert_dp on real reviews against the naive recipe", 3,
                  lambda found: list(found["speed"]["ratio"].values())[-1]),
            Claim("the same to the end, at no less accuracy (one point of 100)", 3, at_equal_accuracy),
        ), view=bert,
    ),
    Benchmark(
        "soak", "Ranks, agents and nodes killed in training", "soak", "", "--minutes 0.2 --epochs 4", claims=(
            Claim("trainings that ended with other parameters or losses than an undisturbed one", 0,
                  lambda found: found["other_parameters"] + found["other_losses"], "", most=True),
        ), out_is_file=True,
    ),
)  # fmt: skip
