"""The comparison of runs: in the terminal, as a picture, and as a page."""

import base64
import html
import shutil
from collections.abc import Sequence
from pathlib import Path

from common.compare.runs import Finished, differing, load
from common.launch.args import show
from common.train.curves import Line, draw_panels
from common.train.files import check_writable, write_atomically

LOSSES = {"loss/test": "test loss", "loss/train": "training loss"}
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
table { border-collapse: collapse } td, th { border-bottom: 1px solid #8884; text-align: left;
padding: .25rem .8rem; white-space: nowrap } td { font-variant-numeric: tabular-nums }
div { overflow-x: auto } img { max-width: 100% } :root { color-scheme: light dark }
"""


def compare(folders: Sequence[Path], out: Path) -> None:
    """Print what differs between runs, and write compare.png and compare.html.

    Args:
        folders: of the runs.
        out: for the files.

    Raises:
        UserError: a run cannot be read, or a file not be written.
    """
    runs = load(folders)
    rows = differing(runs)
    check_writable(out, "--out")
    picture, page = out / "compare.png", out / "compare.html"
    names = ", ".join(run.name for run in runs)
    panels = panels_of(runs)
    if panels:
        draw_panels(picture, panels, names)
    write_atomically(page, page_of(runs, rows, picture if panels else None).encode())
    files = [f"{'curves:':23}{picture}", f"{'page:':23}{page}", ""]
    show("\n".join([*table([run.name for run in runs], rows), *files]))


def panels_of(runs: Sequence[Finished]) -> dict[str, dict[str, Line]]:
    """For each quantity, the runs' curves: metrics first, the accuracy alone where there is one."""
    metrics = dict.fromkeys(name for run in runs for name in run.curves if name.startswith("test/"))
    shown = ["test/accuracy"] if "test/accuracy" in metrics else list(metrics)
    titles = {name: name.replace("test/", "test ") for name in shown} | LOSSES
    panels = {
        title: {run.name: run.curves[name] for run in runs if name in run.curves}
        for name, title in titles.items()
    }
    return {title: lines for title, lines in panels.items() if lines}


def table(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Rows as lines that fit the terminal, long values cut."""
    if not rows:
        return ["nothing differs"]
    room = shutil.get_terminal_size((80, 24)).columns
    first = max(len(name) for name, _ in rows) + 2
    width = max(10, (room - first) // len(names) - 2)
    lines = [("", names), *rows]
    return [
        f"{name:{first}}" + "  ".join(f"{_cut(value, width):{width}}" for value in values).rstrip()
        for name, values in lines
    ]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def page_of(
    runs: Sequence[Finished], rows: Sequence[tuple[str, Sequence[str]]], picture: Path | None
) -> str:
    """One HTML file with everything in it."""
    cells = [("", [run.name for run in runs]), *rows]
    body = [
        "<tr><th>" + html.escape(name) + "".join(f"<td>{html.escape(v)}" for v in values)
        for name, values in cells
    ]
    image = ""
    if picture:
        content = base64.b64encode(picture.read_bytes()).decode()
        image = f'<img alt="curves" src="data:image/png;base64,{content}">'
    title = html.escape(" / ".join(run.name for run in runs))
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
        f"<style>{STYLE}</style>\n<h1>{title}</h1>\n{image}\n"
        f"<h2>What differs</h2>\n<div><table>\n" + "\n".join(body) + "\n</table></div></html>\n"
    )
