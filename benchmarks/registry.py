"""The benchmarks of registry.toml: how each is started, what it shows, and the claims it supports.

A benchmark that is not named there runs with its defaults, and the report shows all its numbers.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import views, views_at_scale, views_of_ranks
from benchmarks.tables import Table, find, tables
from benchmarks.views import Found, Pictures

Value = Callable[..., float]


@dataclass(frozen=True)
class Claim:
    """Something that a benchmark shows, or not.

    Args:
        text: what should be so.
        goal: "at least" or "at most", a number, and its unit.
        value: the way to the measured value in the JSON: keys between " > ". Or a function of this
            module: "name()" or "name(argument)".
    """

    text: str
    goal: str
    value: str

    @property
    def unit(self) -> str:
        """Of the goal and of the value."""
        return " ".join(self.goal.split()[3:])

    def measured(self, found: Found) -> float | None:
        """The value, or None where the results do not have it."""
        try:
            if call := re.fullmatch(r"(\w+)\((\w*)\)", self.value):
                function: Value = globals()[call[1]]
                return float(function(found, *filter(None, [call[2]])))
            return float(find(found, self.value.split(" > ")))
        except (IndexError, KeyError, TypeError, ValueError):  # ValueError: the least of nothing
            return None

    def told(self, value: float) -> str:
        """A value with its unit; a speed of once that of the other is as fast."""
        if self.unit == "times" and self.goal.startswith("at least") and f"{value:.3g}" == "1":
            return "as fast"
        return f"{value:.3g} {self.unit}".strip()

    @property
    def aim(self) -> str:
        """The goal in words."""
        return self.goal.replace("at least 1 times", "at least as fast")

    def met(self, value: float) -> bool:
        """Whether a value meets the goal."""
        goal = float(self.goal.split()[2])
        return value <= goal if self.goal.startswith("at most") else value >= goal


@dataclass(frozen=True)
class Benchmark:
    """One result file, and how it is made: a table of registry.toml, which explains the fields."""

    result: str
    title: str = ""
    program: str = ""
    flags: str = ""
    quick: str = ""
    peer: str = ""
    tables: Mapping[str, str] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    text: str = ""

    @property
    def module(self) -> str:
        """Name of the program."""
        return self.program or self.result

    @property
    def needs(self) -> list[str]:
        """The places without which it cannot run."""
        return re.findall(r"{(\w+)}", self.flags)

    def words(self, places: Mapping[str, str], quick: bool = False) -> list[str]:
        """What Python is given to run it, with the places filled in."""
        flags = f"{self.flags} {self.quick if quick else ''}".split()
        if self.peer and "peer" in places:
            flags += ["--peer", "{peer}"]
        return ["-m", f"benchmarks.{self.module}", *(flag.format_map(places) for flag in flags)]

    @property
    def command(self) -> str:
        """How to repeat it, with the places in capitals."""
        places = {name: name.upper() for name in (*self.needs, "peer")}
        return " ".join(["python", *self.words(places)])

    def pictures(self, found: Found) -> Pictures:
        """Its charts, if one of the modules of views has a function of its name."""
        drawn: Pictures = {}
        for module in (views, views_at_scale, views_of_ranks):
            draw: Callable[[Found], Pictures] = getattr(module, self.result, lambda _: {})
            drawn = draw(found) or drawn
        return drawn

    def tables_of(self, found: Found) -> list[Table]:
        """Its tables."""
        ways = {title: way.split(" > ") for title, way in self.tables.items()}
        return [one for title, way in ways.items() for one in tables(title, find(found, way))]


def load(file: Path) -> tuple[Benchmark, ...]:
    """The benchmarks of a registry, in its order."""
    found: dict[str, dict[str, Any]] = tomllib.loads(file.read_text())
    for entry in found.values():
        entry["claims"] = tuple(Claim(*claim) for claim in entry["claims"])
    return tuple(Benchmark(result, **entry) for result, entry in found.items())


BENCHMARKS = load(Path(__file__).with_suffix(".toml"))


# The functions that claims name.


def least_ring(found: Found, ranks: str) -> float:
    """The least speed-up of the ring over messages of 1 MiB and more; of the fast one, if any."""
    sizes = found["sizes"][ranks]["times_faster_than_torch"]
    large = (ways for size, ways in sizes.items() if int(size) >= 1 << 20)
    return min(ways.get("fast ring", ways["ring"]) for ways in large)


def best(found: Found, engine: str) -> float:
    """The speed-up of an engine's best schedule."""
    return found["configurations"][found["best"][engine]]["speedup"]


def hand_against_torch(found: Found) -> float:
    """How many times as fast our best schedule is as the best of torch's engine."""
    return best(found, "hand") / best(found, "torch")


def gpipe_against_1f1b(found: Found) -> float:
    """How many times the activations GPipe keeps in the first stage."""
    return found["bytes"]["GPipe"][0] / found["bytes"]["1F1B"][0]


def lost_accuracy(found: Found, name: str) -> float:
    """What the default recipe's median accuracy on a set is below that of the one before."""
    before, default, *_ = found["median"][name].values()
    return round(before - default, 4)


def least_on_mnist(found: Found) -> float:
    """The least accuracy of the default recipe with the learning rate of the time to 99 %."""
    return min(found["accuracy"]["mnist"]["weight decay 5e-4, lr 0.3"])


def sooner_to_the_end(found: Found) -> float:
    """How many times as soon as the naive recipe ours ends as many epochs."""
    naive, ours = found["accuracy"]["runs"].values()
    return sum(naive["training_seconds"]) / sum(ours["training_seconds"])


def less_accurate(found: Found) -> float:
    """How much less accurate our recipe is than the naive one after as many epochs."""
    runs = found["accuracy"]["runs"].values()
    naive, ours = (mean(curve[-1] for curve in run["accuracy"]) for run in runs)
    return naive - ours


def above_the_linear_model(found: Found) -> float:
    """How much more of the reviews BERT tells rightly after its last epoch."""
    return found["mean"]["BERT, last epoch"] - found["mean"]["linear model"]


def lost(found: Found, way: str) -> float:
    """By how much a way that sends less is less accurate than whole gradients."""
    names = {"powersgd4": "powersgd, rank 4", "local15": "local-sgd, 15 steps"}
    of = found["ways"]
    whole, less = of["ring, fp32"]["medians"], of[names[way]]["medians"]
    return whole["accuracy"] - less["accuracy"]


def two_levels(found: Found, cluster: str) -> float:
    """How many times as fast as one ring two levels are, BERT's gradients, most GPUs."""
    (of,) = (of for name, of in found["clusters"].items() if cluster in name)
    seconds = list(of["seconds"]["BERT-base"].values())[-1]
    return seconds["flat ring"] / seconds["two levels, rings"]


def growth_of_questions(found: Found) -> float:
    """How many times as much as one of 8 ranks one of 512 asks the store."""
    questions = [found["sizes"][ranks]["medians"]["questions"]["job://"] for ranks in ("8", "512")]
    return questions[1] / questions[0]


def start_against_import(found: Found) -> float:
    """How many times as long as `import torch` a short run in a world of one takes."""
    seconds = found["seconds"]["medians"]
    return seconds["1"] / seconds["import torch"]


def growth_of_starts(found: Found) -> float:
    """How many times as many seconds of the cores as 2 ranks 16 take."""
    seconds = found["cpu"]["medians"]
    return seconds["16"] / seconds["2"]


def cores_of_cache(found: Found) -> float:
    """How many times as fast all cores fill the largest cache as one does."""
    largest = found["sizes"][max(found["sizes"], key=int)]["medians"]
    return largest["one core"]["seconds"] / largest["all cores"]["seconds"]


def waits_for_copy(found: Found) -> float:
    """How many times as long as a copy in memory takes training waits for a large checkpoint."""
    large = found["ranks"]["1"]["8 GB"]
    return large["training_waits"] / large["copy"]
