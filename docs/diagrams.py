"""Draws the pictures of the concepts, as SVG: `python -m docs.diagrams` writes docs/images/concepts.

Those in its folder zh are the same with Chinese words, from docs/chinese.py.
"""

from pathlib import Path

from docs.chinese import translated

FOLDER = Path(__file__).parent / "images" / "concepts"
INK, PALE, BLUE, ORANGE, GREEN = "#37474f", "#eceff1", "#bbdefb", "#ffcc80", "#c8e6c9"
RANKS = ("#90caf9", "#ffcc80", "#a5d6a7", "#ce93d8")  # a colour for each rank


def box(x: float, y: float, width: float, height: float, text: str = "", fill: str = PALE, size: int = 13) -> str:
    """A rectangle with a line of text, or several divided by line breaks, in its middle."""
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" stroke="{INK}"/>'
    lines = text.split("\n") if text else []
    first = y + height / 2 - (len(lines) - 1) * size * 0.6
    return shape + "".join(
        write(x + width / 2, first + row * size * 1.2 + size * 0.35, line, size) for row, line in enumerate(lines)
    )


def write(x: float, y: float, text: str, size: int = 13, anchor: str = "middle") -> str:
    """A line of text."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{INK}">{text}</text>'


def arrow(x1: float, y1: float, x2: float, y2: float, both: bool = False) -> str:
    """A straight arrow, with a head at its end or at both."""
    start = ' marker-start="url(#head)"' if both else ""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" marker-end="url(#head)"{start}/>'


def picture(name: str, width: int, height: int, *parts: str) -> tuple[str, str]:
    """A whole file: its name and text."""
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
    )
    style = f'font-family="sans-serif" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    body = "\n".join((head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts))
    return name, f'<svg xmlns="http://www.w3.org/2000/svg" {style}>\n{body}\n</svg>\n'


def job(name: str, *, lit: str, caption: str, below: str = "") -> tuple[str, str]:
    """Two nodes with two processes each, in which one thing is coloured.

    Args:
        name: of the file.
        lit: world, node, rank, local_rank, group_rank, master, group or backend.
        caption: the line above.
        below: the second line of every process, with {rank} and {local}.
    """
    parts = [write(240, 20, caption)]
    if lit == "world":
        parts.append(box(4, 30, 472, 126, fill=BLUE))
    for node in (0, 1):
        x = 16 + 236 * node
        fill = ORANGE if lit in ("node", "group_rank") else PALE
        parts.append(box(x, 40, 212, 104, fill="white" if fill == PALE else fill))
        label = f"node {node}" + (f" = group_rank {node}" if lit == "group_rank" else "")
        parts.append(write(x + 106, 58, label))
        for local in (0, 1):
            rank = 2 * node + local
            chosen = lit in ("rank", "local_rank") or (lit == "group" and local == 0) or (lit == "master" and rank == 0)
            fill = RANKS[local if lit == "local_rank" else rank] if chosen else "white"
            text = f"rank {rank}" if lit != "local_rank" else f"local_rank {local}"
            extra = below.format(rank=rank, local=local)
            parts.append(box(x + 10 + 100 * local, 68, 92, 66, text + (f"\n{extra}" if extra else ""), fill))
    if lit == "master":
        for x in (172, 308, 408):
            parts.append(f'<path d="M{x} 134V150H72V136" fill="none" stroke="{INK}" marker-end="url(#head)"/>')
    if lit == "backend":
        parts += [arrow(118, 90, 126, 90, both=True), arrow(218, 101, 262, 101, both=True)]
        parts.append(arrow(354, 90, 362, 90, both=True))
    return picture(name, 480, 160, *parts)


def sampler() -> tuple[str, str]:
    """Nine positions, dealt to three ranks."""
    cells = [box(20 + 48 * k, 30, 40, 30, str(k), RANKS[k % 3]) for k in range(9)]
    rows = [write(20, 92 + 24 * rank, f"rank {rank}: {rank}, {rank + 3}, {rank + 6}", 14, "start") for rank in range(3)]
    return picture("sampler", 460, 150, write(230, 20, "world_size = 3"), *cells, *rows)


def ring() -> tuple[str, str]:
    """The chunks of three ranks: before, after reduce-scatter, after all-gather."""
    parts = []
    start = [[f"{'abc'[rank]}{chunk}" for chunk in range(3)] for rank in range(3)]
    done = [f"a{chunk}+b{chunk}+c{chunk}" for chunk in range(3)]
    stages = {
        "gradients": start,
        "reduce_scatter": [[done[c] if c == (r + 1) % 3 else "" for c in range(3)] for r in range(3)],
        "all_gather": [done] * 3,
    }
    for column, (title, rows) in enumerate(stages.items()):
        x = 60 + 226 * column
        parts.append(write(x + 96, 20, title))
        for rank, row in enumerate(rows):
            if column == 0:
                parts.append(write(28, 56 + 44 * rank, f"rank {rank}"))
            parts += [
                box(x + 64 * c, 34 + 44 * rank, 64, 34, text, RANKS[c] if "+" in text else PALE, 11)
                for c, text in enumerate(row)
            ]
        if column < 2:
            parts.append(arrow(x + 196, 95, x + 222, 95))
    return picture("ring", 720, 172, *parts)


def neighbours() -> tuple[str, str]:
    """Who sends to whom in a ring."""
    parts = [box(20 + 130 * rank, 20, 80, 36, f"rank {rank}", RANKS[rank]) for rank in range(4)]
    parts += [arrow(100 + 130 * rank, 38, 150 + 130 * rank, 38) for rank in range(3)]
    parts.append(
        f'<path d="M450 56V84H60V58" fill="none" stroke="{INK}" marker-end="url(#head)"/>',
    )
    return picture("neighbours", 510, 100, *parts)


def overlap() -> tuple[str, str]:
    """Backward computes while buckets that are ready travel."""
    parts = [write(10, 47, "backward", 13, "start"), write(10, 97, "all_reduce", 13, "start")]
    parts += [box(100 + 90 * k, 28, 88, 30, f"layer {4 - k}", BLUE) for k in range(4)]
    parts += [box(280, 78, 120, 30, "layers 4, 3", ORANGE), box(460, 78, 120, 30, "layers 2, 1", ORANGE)]
    parts += [arrow(280, 58, 280, 76), arrow(460, 58, 460, 76)]
    parts += [box(582, 78, 60, 30, "step", GREEN), arrow(100, 126, 640, 126), write(650, 130, "t")]
    return picture("overlap", 670, 140, *parts)


def data_parallel() -> tuple[str, str]:
    """The whole model on every device, a part of the batch each."""
    parts = []
    for rank in (0, 1):
        y = 20 + 80 * rank
        parts += [box(16, y, 90, 50, f"batch / 2\n(rank {rank})", RANKS[rank]), arrow(106, y + 25, 140, y + 25)]
        parts += [box(142 + 70 * k, y, 62, 50, f"layer {k + 1}", PALE) for k in range(4)]
    parts += [arrow(280, 72, 280, 98, both=True), write(296, 90, "all_reduce(gradients)", 13, "start")]
    return picture("data-parallel", 440, 164, *parts)


def model_parallel() -> tuple[str, str]:
    """A part of the model on every device."""
    parts = [box(16, 40, 80, 50, "batch", PALE), arrow(96, 65, 122, 65)]
    for rank in (0, 1):
        x = 124 + 186 * rank
        parts.append(box(x, 20, 152, 90, fill=RANKS[rank]))
        parts += [box(x + 8 + 70 * k, 46, 64, 38, f"layer {2 * rank + k + 1}", "white") for k in (0, 1)]
        parts.append(write(x + 76, 38, f"stage {rank} = rank {rank}"))
    parts += [arrow(276, 56, 308, 56), arrow(308, 76, 278, 76)]
    parts += [write(292, 132, "activations  →    ←  gradients")]
    return picture("model-parallel", 480, 146, *parts)


def timelines() -> tuple[str, str]:
    """Naive model parallelism and micro-batches (GPipe), with the same work."""
    parts = [write(10, 20, "1 micro-batch", 13, "start"), write(10, 126, "4 micro-batches", 13, "start")]
    for stage in (0, 1):
        y = 30 + 34 * stage
        parts.append(write(10, y + 19, f"stage {stage}", 13, "start"))
        forward, backward = 70 + 120 * stage, 70 + 240 + 120 * (1 - stage)
        parts += [box(forward, y, 118, 28, "F", BLUE), box(backward, y, 118, 28, "B", ORANGE)]
        y += 106
        parts.append(write(10, y + 19, f"stage {stage}", 13, "start"))
        parts += [box(70 + 30 * (stage + k), y, 28, 28, f"F{k}", BLUE, 11) for k in range(4)]
        parts += [box(220 + 30 * (1 - stage + k), y, 28, 28, f"B{k}", ORANGE, 11) for k in range(4)]
    parts += [arrow(70, 216, 560, 216), write(570, 220, "t")]
    return picture("timelines", 590, 230, *parts)


def threads() -> tuple[str, str]:
    """nn.DataParallel: one process, a thread per device, everything through the first device."""
    parts = [box(8, 8, 464, 150, fill="white"), write(20, 26, "nn.DataParallel: 1 process", 13, "start")]
    parts.append(box(24, 60, 110, 60, "cuda:0\nmodel, batch,\noutput, loss", ORANGE, 12))
    for device in range(4):
        y = 36 + 30 * device
        parts += [box(300, y, 150, 24, f"thread {device}: cuda:{device}", BLUE, 12), arrow(136, 90, 298, y + 12, True)]
    parts.append(write(214, 150, "scatter, replicate / gather", 12))
    return picture("threads", 480, 166, *parts)


def gain() -> tuple[str, str]:
    """A step of a small and of a large batch, with one device and with two."""
    parts = []
    for row, (name, compute) in enumerate((("small batch", 80), ("large batch", 400))):
        y = 24 + 96 * row
        parts += [write(10, y + 8, name, 13, "start"), write(10, y + 34, "1", 13, "start")]
        parts += [box(30, y + 18, compute, 24, "compute", BLUE, 12), write(10, y + 64, "2", 13, "start")]
        parts += [
            box(30, y + 48, compute / 2, 24, "", BLUE),
            box(30 + compute / 2, y + 48, 70, 24, "all_reduce", ORANGE, 12),
        ]
    return picture("gain", 450, 204, *parts)


def fork() -> tuple[str, str]:
    """Loader workers share the pages of the process that forked them, until somebody writes."""
    parts = [box(16, 50, 120, 50, "rank\n(DataLoader)", BLUE)]
    for worker in (0, 1):
        y = 16 + 74 * worker
        parts += [box(330, y, 120, 44, f"worker {worker}", GREEN), arrow(136, 75, 328, y + 22)]
    parts += [write(232, 40, "fork()"), box(172, 110, 120, 30, "shared pages", PALE), arrow(330, 130, 294, 128)]
    parts += [
        arrow(100, 100, 170, 122),
        box(470, 90, 110, 44, "own copy\nafter a write", ORANGE, 12),
        arrow(450, 112, 468, 112),
    ]
    return picture("fork", 600, 150, *parts)


def collectives() -> tuple[str, str]:
    """What each of three ranks holds before and after the six calls."""
    calls = {  # before, after
        "broadcast(src=0)": (("a", "", ""), ("a", "a", "a")),
        "scatter(src=0)": (("a b c", "", ""), ("a", "b", "c")),
        "gather(dst=0)": (("a", "b", "c"), ("a b c", "", "")),
        "reduce(dst=0, SUM)": (("a", "b", "c"), ("a+b+c", "", "")),
        "all_gather": (("a", "b", "c"), ("a b c", "a b c", "a b c")),
        "all_reduce(SUM)": (("a", "b", "c"), ("a+b+c", "a+b+c", "a+b+c")),
    }
    parts = []
    for number, (name, (before, after)) in enumerate(calls.items()):
        x, y = 8 + 250 * (number % 3), 8 + 180 * (number // 3)
        parts += [box(x, y, 240, 170, fill="white"), write(x + 120, y + 24, name, 14)]
        for rank in range(3):
            row = y + 38 + 42 * rank
            parts.append(write(x + 10, row + 21, f"rank {rank}", 12, "start"))
            parts += [*held(x + 56, row, before[rank]), *held(x + 158, row, after[rank])]
        parts.append(arrow(x + 132, y + 96, x + 154, y + 96))
    return picture("collectives", 756, 366, *parts)


def held(x: float, y: float, text: str) -> list[str]:
    """What a rank holds, 72 wide: nothing, one tensor, a list of three, or a sum."""
    if not text:
        empty = f'width="72" height="32" rx="4" fill="white" stroke="{INK}" stroke-dasharray="3" opacity="0.5"'
        return [f'<rect x="{x}" y="{y}" {empty}/>']
    if "+" in text:
        return [box(x, y, 72, 32, text, PALE)]
    names = text.split()
    width = 72 // len(names)
    return [box(x + width * k, y, width, 32, name, RANKS["abc".index(name)]) for k, name in enumerate(names)]


def eight_steps() -> tuple[str, str]:
    """An iteration of nn.DataParallel on three devices; an arrow is a copy from one to another."""
    steps = {  # what is on each device, and whether it comes from the first (1) or goes there (-1)
        "1  to the first device": (("batch, model",), 0),
        "2  scatter": (("chunk 0", "chunk 1", "chunk 2"), 1),
        "3  replicate": (("model", "copy", "copy"), 1),
        "4  forward, in threads": (("output 0", "output 1", "output 2"), 0),
        "5  gather, loss": (("outputs, loss",), -1),
        "6  backward, in threads": (("gradients 0", "gradients 1", "gradients 2"), 1),
        "7  reduce": (("sum of gradients",), -1),
        "8  optimizer.step()": (("new model",), 0),
    }
    places = [252, 412, 572]  # the middle of each device's column
    parts = [write(x, 20, f"cuda:{device}", 14) for device, x in enumerate(places)]
    for number, (name, (things, direction)) in enumerate(steps.items()):
        y = 32 + 52 * number
        parts.append(write(8, y + 19, name, 13, "start"))
        for device, thing in enumerate(things):
            parts.append(box(places[device] - 66, y, 132, 28, thing, RANKS[device]))
        for x in places[1:] if direction else ():
            way = (
                f"M{places[0]} {y}V{y - 12}H{x}V{y - 1}"
                if direction > 0
                else f"M{x} {y - 24}V{y - 12}H{places[0]}V{y - 1}"
            )
            parts.append(f'<path d="{way}" fill="none" stroke="{INK}" marker-end="url(#head)"/>')
    return picture("eight-steps", 648, 436, *parts)


def drawings() -> dict[str, str]:
    """All pictures, by name."""
    return dict(
        (
            job("world", lit="world", caption="world: world_size = 4"),
            job("node", lit="node", caption="nnodes = 2"),
            job("process", lit="rank", caption="4 processes", below="1 GPU"),
            job("rank", lit="rank", caption="RANK = 0 ... WORLD_SIZE - 1"),
            job("local-rank", lit="local_rank", caption="LOCAL_RANK, LOCAL_WORLD_SIZE = 2", below="cuda:{local}"),
            job("group-rank", lit="group_rank", caption="GROUP_RANK = RANK // LOCAL_WORLD_SIZE"),
            job("master", lit="master", caption="MASTER_ADDR = node 0, MASTER_PORT = 29500"),
            job("group", lit="group", caption="new_group([0, 2])"),
            job("backend", lit="backend", caption="nccl: CUDA tensors, gloo: CPU tensors", below="tensor"),
            sampler(), ring(), neighbours(), overlap(), data_parallel(), model_parallel(), timelines(), threads(),
            gain(), fork(), collectives(), eight_steps(),
        )
    )  # fmt: skip


def save(folder: Path, drawn: dict[str, str]) -> None:
    """Write drawings to a folder, and in Chinese to its folder zh."""
    (folder / "zh").mkdir(parents=True, exist_ok=True)
    for name, text in drawn.items():
        (folder / f"{name}.svg").write_text(text)
        (folder / "zh" / f"{name}.svg").write_text(translated(text))


if __name__ == "__main__":
    save(FOLDER, drawings())
