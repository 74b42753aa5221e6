"""The comparison of runs: in the terminal, as a picture, and as a page."""

import base64
import html
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.compare.runs import GROUPS, Left, Row, differing, load, same
from common.launch.console import say
from common.train.curves import Line, draw_panels
from common.train.files import check_writable, write_atomically

LOSSES = {"loss/test": "test loss", "loss/train": "training loss"}
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
table { border-collapse: collapse } td, th { border-bottom: 1px solid #8884; text-align: left;
padding: .25rem .8rem; white-space: nowrap } td { font-variant-numeric: tabular-nums }
.group th { border: 0; padding-top: 1.2rem }
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
    finished = [run for run in runs if run.facts]
    groups, alike = differing(finished), {group: same(finished, group) for group in GROUPS[:2]}
    check_writable(out, "--out")
    picture, page = out / "compare.png", out / "compare.html"
    panels = panels_of(runs)
    if panels:
        draw_panels(picture, panels, ", ".join(run.name for run in runs))
    write_atomically(page, page_of(runs, groups, alike, picture if panels else None).encode())
    differs = table([run.name for run in finished], groups) if len(finished) > 1 else []
    files = [f"{'curves:':23}{picture}"] if panels else []
    blocks = differs, [*in_words(alike), *unfinished(runs)], [*files, f"{'page:':23}{page}"]
    say("\n\n".join("\n".join(lines) for lines in blocks if lines))


def panels_of(runs: Sequence[Left]) -> dict[str, dict[str, Line]]:
    """For each quantity, the runs' curves: metrics first, the accuracy alone where there is one."""
    metrics = dict.fromkeys(name for run in runs for name in run.curves if name.startswith("test/"))
    shown = ["test/accuracy"] if "test/accuracy" in metrics else list(metrics)
    titles = {name: name.replace("test/", "test ") for name in shown} | LOSSES
    panels = {
        title: {run.name: run.curves[name] for run in runs if name in run.curves}
        for name, title in titles.items()
    }
    return {title: lines for title, lines in panels.items() if lines}


def table(names: Sequence[str], groups: Mapping[str, Sequence[Row]]) -> list[str]:
    """Groups of rows as lines that fit the terminal, long values cut."""
    if not groups:
        return ["nothing differs"]
    room = shutil.get_terminal_size((80, 24)).columns
    first = 4 + max(len(name) for rows in groups.values() for name, _ in rows)
    first = max(first, 2 + max(len(group) for group in groups))
    width = max(10, (room - first) // len(names) - 2)
    rows = [("what differs", list(names))]
    for group, own in groups.items():
        rows += [(group, []), *((f"  {name}", values) for name, values in own)]
    return [
        (
            f"{name:{first}}" + "  ".join(f"{_cut(value, width):{width}}" for value in values)
        ).rstrip()
        for name, values in rows
    ]


def in_words(alike: Mapping[str, Sequence[Row]]) -> list[str]:
    """How much is the same, and the first of the results that are."""
    (arguments, results, *_), lines = GROUPS, []
    if alike[arguments]:
        count = len(alike[arguments])
        lines.append(f"{count} other arguments are the same; the page lists them")
    if found := alike[results]:
        shown = [*found[:2], *(row for row in found[2:] if row[0] == "parameter_hash")]
        told = ", ".join(f"{name} {_cut(values[0], 13)}" for name, values in shown)
        more = ", ..." if len(found) > len(shown) else ""
        lines.append(f"{len(found)} other results are the same: {told}{more}")
    return lines


def unfinished(runs: Sequence[Left]) -> list[str]:
    """A line for each run that has no results."""
    return [
        f"{run.name} has no result.json: it has not finished, so only its curves are compared"
        for run in runs
        if not run.facts
    ]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def page_of(
    runs: Sequence[Left],
    groups: Mapping[str, Sequence[Row]],
    alike: Mapping[str, Sequence[Row]],
    picture: Path | None,
) -> str:
    """One HTML file with everything in it: what differs first, then the curves."""
    text, names = html.escape, [run.name for run in runs if run.facts]
    body = ["<tr><th>" + "".join(f"<th>{text(name)}" for name in names)] if groups else []
    for group, rows in groups.items():
        body.append(f'<tr class="group"><th colspan="{len(names) + 1}">{text(group)}')
        body += [_row(name, values) for name, values in rows]
    nothing = "<tr><td>nothing" if len(names) > 1 else ""
    told = "".join(f"<p>{text(line)}</p>\n" for line in unfinished(runs))
    image = ""
    if picture:
        content = base64.b64encode(picture.read_bytes()).decode()
        image = f'<img alt="curves" src="data:image/png;base64,{content}">'
    title = text(" / ".join(run.name for run in runs))
    same_rows = "".join(
        f"<details><summary>{len(rows)} {text(group)} are the same</summary><div><table>\n"
        + "\n".join(_row(name, values[:1]) for name, values in rows)
        + "\n</table></div></details>\n"
        for group, rows in alike.items()
        if rows
    )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
        f"<style>{STYLE}</style>\n<h1>{title}</h1>\n<h2>What differs</h2>\n"
        f"<div><table>\n" + ("\n".join(body) or nothing) + f"\n</table></div>\n{told}"
        f"<h2>Curves</h2>\n{image}\n{same_rows}</html>\n"
    )


def _row(name: str, values: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in (name, *values))
