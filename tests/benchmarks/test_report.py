"""The report: made from JSON files alone, whichever there are."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks import all as every
from benchmarks import charts, inputs, readme, report, tables, views, views_of_ranks
from benchmarks.charts import Lines
from benchmarks.registry import BENCHMARKS, Benchmark, Claim
from tests.conftest import ROOT, Programs

RESULTS = ROOT / "benchmarks/results"


def text_of(html: str) -> str:
    """The page without its charts."""
    return re.sub(r'src="data:[^"]*"', "", html)


def test_the_committed_report_is_that_of_the_committed_results() -> None:
    written = (RESULTS / "report.html").read_text()
    assert text_of(written) == text_of(report.page(report.load(RESULTS))), "run: python -m benchmarks.report"
    assert len(written) < 1_500_000
    assert 'td[data-head="goal"]' in written, "the style is not escaped as text is"


def test_the_committed_readme_is_that_of_the_committed_results() -> None:
    """The claims and the charts, and where and on what was measured."""
    text = (ROOT / "benchmarks/README.md").read_text()
    assert text == readme.page(report.load(RESULTS)), "run: python -m benchmarks.readme"
    assert "Measured on 215 JPEGs of 500x375 pixels (median), 104 KiB each (mean)." in text
    pictures = re.findall(r"!\[.+?\]\((results/.+?)\)", text)
    assert len(pictures) >= 8
    assert all((ROOT / "benchmarks" / picture).exists() for picture in pictures)


def test_nothing_measured(tmp_path: Path) -> None:
    html = report.write(tmp_path).read_text()
    shown = report.shown({})
    assert {"allreduce", "scaling"} <= {benchmark.result for benchmark in shown} <= {b.result for b in BENCHMARKS}
    for benchmark in shown:
        assert f"there is no {benchmark.result}.json" in html
        assert benchmark.command in html
    assert html.count(">not measured</td>") == sum(len(benchmark.claims) for benchmark in shown)
    assert "<img" not in html


@pytest.mark.parametrize("missing", ["allreduce", "imagenet_throughput", "scaling"])
def test_some_results_are_missing(tmp_path: Path, missing: str) -> None:
    for file in RESULTS.glob("*.json"):
        if file.stem != missing:
            shutil.copy(file, tmp_path)
    html = report.write(tmp_path).read_text()
    assert f"there is no {missing}.json" in html
    assert html.count("<img") >= 4


def test_results_that_nobody_described(tmp_path: Path) -> None:
    found = {
        "date": "2026-01-01", "machine": {"cpu": "<b>x</b>", "cores": 2, "memory_gib": 4.0, "gpus": []},
        "versions": {"python": "3"}, "ways": [{"one": {"seconds": [1.0, 4.0, 2.0]}}], "accuracy": 0.75, "flag": True,
    }  # fmt: skip
    (tmp_path / "new.json").write_text(json.dumps(found))
    (tmp_path / "mnist_time_to_accuracy.json").write_text(json.dumps(found))  # of a form that is not known
    html = report.write(tmp_path).read_text()
    row = ('<td data-head="what">ways / 0 / one / seconds</td><td data-head="value or median">2</td>'
           '<td data-head="range">1 to 4</td><td data-head="samples">3</td>')  # fmt: skip
    assert html.count(row) == 2
    assert "&lt;b&gt;x&lt;/b&gt;" in html
    assert "Not of the form that this report knows" in html
    assert html.count("<img") == 2


def test_results_of_other_machines(tmp_path: Path) -> None:
    """Charts of results that are not in this folder: of reviews, of DataParallel, and of a pipeline's speed."""
    at = {"date": "2026-01-01", "machine": {"cpu": "x", "cores": 2, "memory_gib": 4.0, "gpus": ["G", "G"]}}
    found = {
        "bert_throughput": {
            "speed": at | {"sequences_per_second": {"naive": 50.0, "o": 160.0}, "ratio": {"naive": 1.0, "o": 3.2}},
            "accuracy": at | {"runs": {
                "naive": {"accuracy": [[0.8, 0.86]], "training_seconds": [310.0]},
                "o": {"accuracy": [[0.8, 0.87]], "training_seconds": [100.0]},
            }},
        },
        "dataparallel": at | {"batches": {"8": {"times_one_device": {"one device": 1.0, "DDP": 0.5}}}},
        "pipeline": at | {
            "baseline": "alone 1", "best": {"hand": "hand 1f1b 4", "torch": "torch zbv 4"}, "configurations": {
                "hand 1f1b 4": {"median_seconds": 1.0, "speedup": 1.7, "bubble": 0.2},
                "torch zbv 4": {"median_seconds": 1.1, "speedup": 1.4, "bubble": 0.1},
                "alone 1": {"median_seconds": 1.5, "speedup": 1.0},
            },
        },
    }  # fmt: skip
    for name, values in found.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    html = report.write(tmp_path).read_text()
    assert "Not of the form" not in html
    assert html.count("<img") == 3
    assert html.count(">met</td>") == 5  # 3.2 and 3.1 of 3, 0.01 more accurate, 1.7 of 1.65, 1.7 against 1.4
    assert ">0.8; 0.87<" in html  # after the first epoch and the second


def scaling_charts(found: views.Found) -> list[Lines]:
    drawn = [chart for each in views_of_ranks.scaling(found).values() for chart in each]
    return [chart for chart in drawn if isinstance(chart, Lines)]


def test_what_was_measured_and_what_was_calculated_look_different() -> None:
    found = json.loads((RESULTS / "scaling.json").read_text())
    assert [len(chart.lines) for chart in scaling_charts(found)] == [3, 3, 4]
    for chart in scaling_charts(found):
        drawn = charts.figure([chart]).axes[0].get_lines()
        for line in drawn:
            measured = str(line.get_label()).endswith("measured")
            assert measured == (line.get_linestyle() == "-") == (line.get_markerfacecolor() != "white")
            assert not measured or float(np.max(line.get_xdata())) <= 4
    (scaling,) = (benchmark for benchmark in BENCHMARKS if benchmark.result == "scaling")
    (calculated,) = (table for table in scaling.tables_of(found) if "calculated" in table.title)
    cells = {name: set(column) for name, *column in zip(calculated.head, *calculated.rows, strict=True)}
    assert cells["ranks"] == {"8", "64", "512"}
    assert cells["gigabits"] == {"100", "400"}


def test_the_table_of_inputs_follows_the_results() -> None:
    """Count and size of images, ranks that were measured (not those calculated), threads, date, machine."""
    found = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in ("scaling", "imagenet_throughput")}
    found["imagenet_throughput"]["input"]["images"] |= {"count": 1234, "median_width": 500.0, "median_height": 375.0}
    found["imagenet_throughput"]["input"]["date"] = "2027-01-02T03:04:05"
    found["scaling"] |= {"threads": 7, "machine": {"cpu": "Z80", "cores": 1, "gpus": ["H100"]}}
    table = {row[0]: dict(zip(inputs.HEAD, row, strict=True)) for row in inputs.inputs(found).rows}
    assert table["imagenet_throughput, input"]["images or texts"].startswith("1,234 JPEGs of 500x375 ")
    assert table["imagenet_throughput, input"]["date"] == "2027-01-02"
    assert table["imagenet_throughput, training"]["ranks"] == "1, 2"
    cache = inputs.inputs({"pixel_cache": json.loads((RESULTS / "pixel_cache.json").read_text())}).rows[0]
    shown = dict(zip(inputs.HEAD, cache, strict=True))
    assert (shown["ranks"], shown["images or texts"]) == ("-", "4000, 12000, 36000, 100000 JPEGs")
    scaling = table["scaling"]
    assert [scaling[name] for name in ("machine", "ranks", "threads")] == ["Z80, 1 core, H100", "1, 2, 3, 4", "7"]


def test_a_table_has_no_empty_column() -> None:
    rows = {"one": {"peer_ratio": 2.0, "device_mib": None}, "two": {"peer_ratio": None, "device_mib": None}}
    shown = tables.table("", rows)
    assert (shown.head, shown.rows) == (["", "times as fast as the peer"], [["one", "2"], ["two", "-"]])
    unknown = report.all_of({"kills": 3, "bytes": 4}).tables[0]
    assert list(unknown.head) == ["what", "value or median", "samples"]


def test_verdicts(tmp_path: Path) -> None:
    """A claim is met or not by the figures in the file, and by nothing else."""
    found = json.loads((RESULTS / "imagenet_throughput.json").read_text())
    for ratio, verdict in ((1.99, "NOT met"), (2.0, "met")):
        found["input"]["medians"]["ours, uint8"]["peer_ratio"] = ratio
        (tmp_path / "imagenet_throughput.json").write_text(json.dumps(found))
        html = report.write(tmp_path).read_text()
        assert re.search(rf"straight from JPEGs.*>at least 2 times<.*>{ratio:.3g} times<.*>{verdict}<", html)


def test_a_peer_that_was_not_there_is_named() -> None:
    found = json.loads((RESULTS / "mnist_time_to_accuracy.json").read_text())
    line = "Skipped: the peer pytorch/examples mnist"
    assert line not in report.page({"mnist_time_to_accuracy": found})
    del found["medians"]["pytorch/examples mnist"]
    for name in ("ours, 1 process", "ours, 2 processes"):
        found["medians"][name] |= {"peer_ratio": None, "peer_ratio_per_round": []}
    html = report.page({"mnist_time_to_accuracy": found})
    assert line in html
    assert "sooner than the peer</td>" in html
    assert ">met</td>" not in html


def test_a_benchmark_that_cannot_run_and_one_that_fails(tmp_path: Path) -> None:
    """Exit code 2 is a benchmark that is not for this machine, with its own words; any other is a failure."""
    cannot, fails = Benchmark("soak", flags="--epochs 0"), Benchmark("none")
    runs = [every.run(each, every.Args(out=tmp_path), {})[0] for each in (cannot, fails)]
    assert (runs[0].state, runs[0].why) == ("skipped", "error: --epochs 0: give at least 1")
    assert runs[1].state == "failed"
    assert "No module named benchmarks.none" in runs[1].why


def test_programs_that_nobody_described_run_with_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(every, "BENCHMARKS", [each for each in BENCHMARKS if each.module != "soak"])
    (found,) = (benchmark for benchmark in every.known() if benchmark.result == "soak")
    assert found.words({}, quick=True) == ["-m", "benchmarks.soak"]
    assert [each.module for each in every.known()].count("pipeline") == 2  # speed and memory
    helpers = {"all", "report", "bert_recipes", "charts", "commands", "harness", "imagenet_input", "machine", "ranks"}
    assert not {each.module for each in every.known()} & helpers


def test_all_programs(programs: Programs, tmp_path: Path) -> None:
    """The quick mode: what needs data and peers is skipped by name, what runs leaves results, and the page has both."""
    peer = tmp_path / "not-there"
    done = programs.run("-m", "benchmarks.all", "--quick", "--peer", peer, "--out", tmp_path, "--only",
                        "mnist_time_to_accuracy", "imagenet_throughput", "scaling", limit=200)  # fmt: skip
    assert f"warning: PEER {peer}: not there" in done.stderr
    runs = {one["name"]: one for one in json.loads((tmp_path / "bench.json").read_text())["runs"]}
    assert {name: one["state"] for name, one in runs.items()} == {
        "mnist_time_to_accuracy": "skipped", "imagenet_throughput": "skipped", "scaling": "done",
    }  # fmt: skip
    assert runs["mnist_time_to_accuracy"]["why"] == "MNIST was not given, or is not there"
    found = json.loads((tmp_path / "scaling.json").read_text())
    assert {ranks: {way: len(samples) for way, samples in ways.items()} for ranks, ways in found["steps"].items()} == {
        ranks: dict.fromkeys(("compute", "flat", "ring", "ddp", "pipeline"), 1) for ranks in ("1", "2")
    }
    assert found["fit"]["dist.all_reduce"]["beta"] > 0
    assert [(row["ranks"], row["gigabits"]) for row in found["extrapolation"][:3]] == [(8, 100), (64, 100), (512, 100)]
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
    html = (tmp_path / "report.html").read_text()
    assert "MNIST was not given, or is not there" in html
    assert html.count("<img") == 3, "steps measured, steps calculated, the exchange"
    wrong = programs.run("-m", "benchmarks.all", "--only", "nothing", code=2)
    assert "error: --only nothing: there are allreduce" in wrong.stderr


def test_once_as_fast_is_said_in_words() -> None:
    claim = Claim("ours against theirs", "at least 1 times", "ratio")
    assert (claim.aim, claim.told(1.001), claim.told(1.5)) == ("at least as fast", "as fast", "1.5 times")
    assert Claim("bytes", "at most 1 times", "ratio").told(1) == "1 times", "of a size, that would be wrong"


def test_the_names_of_lines_can_be_read() -> None:
    """As small text on white: dark where the line is light, and otherwise in the line's colour."""
    assert charts.contrast("#ffffff") == pytest.approx(1)
    assert charts.contrast("#000000") == pytest.approx(21)
    assert all(charts.contrast(charts.ink(colour)) >= 4.5 for colour in charts.COLOURS)
    assert charts.ink(charts.BLUE) == charts.BLUE
