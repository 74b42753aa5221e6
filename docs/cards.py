"""Draws the small picture of each example, as SVG: `python -m docs.cards` writes docs/images/cards."""

from pathlib import Path

from docs.diagrams import BLUE, GREEN, INK, ORANGE, PALE, RANKS, arrow, box, picture, save, write

FOLDER = Path(__file__).parent / "images" / "cards"
WIDTH, HEIGHT = 190, 84


def card(name: str, *parts: str) -> tuple[str, str]:
    """A picture of the size of all cards."""
    return picture(name, WIDTH, HEIGHT, *parts)


def spawn() -> tuple[str, str]:
    """Two replicas that average their gradients."""
    ranks = [box(8 + 104 * rank, 14, 70, 56, f"rank {rank}\nmodel", RANKS[rank], 12) for rank in (0, 1)]
    return card("mnist_ddp_spawn", *ranks, arrow(80, 42, 110, 42, both=True))


def by_hand() -> tuple[str, str]:
    """A ring of four ranks."""
    places = [(12, 10), (142, 10), (142, 50), (12, 50)]
    ranks = [box(x, y, 36, 24, str(rank), RANKS[rank], 12) for rank, (x, y) in enumerate(places)]
    arrows = [arrow(48, 22, 138, 22), arrow(160, 34, 160, 48), arrow(142, 62, 52, 62), arrow(30, 50, 30, 36)]
    return card("manual_allreduce_sgd", *ranks, *arrows, write(95, 46, "all_reduce", 12))


def gan() -> tuple[str, str]:
    """Two networks against each other."""
    parts = [box(8, 28, 62, 30, "generator", ORANGE, 10), arrow(70, 43, 108, 43)]
    parts += [box(110, 28, 74, 30, "discriminator", BLUE, 10), write(90, 36, "fake", 10)]
    return card("gan_ddp", *parts, write(147, 14, "real", 10), arrow(147, 16, 147, 27))


def dataparallel() -> tuple[str, str]:
    """One process, a thread for each device."""
    threads = [box(124, 10 + 24 * k, 58, 18, f"thread {k}", RANKS[k], 10) for k in range(3)]
    arrows = [arrow(70, 42, 122, 19 + 24 * k, both=True) for k in range(3)]
    return card("mnist_dataparallel", box(8, 22, 62, 40, "1 process\nmodel", PALE, 11), *threads, *arrows)


def bert() -> tuple[str, str]:
    """A review, BERT, a verdict."""
    tokens = [box(8, 6 + 19 * k, 40, 16, word, PALE, 10) for k, word in enumerate(("[CLS]", "房间", "很", "干净"))]
    parts = [arrow(50, 42, 68, 42), box(70, 22, 52, 40, "BERT", BLUE, 12), arrow(122, 42, 138, 42)]
    return card("bert_dp", *tokens, *parts, box(140, 28, 46, 28, "positive", GREEN, 10))


def pipeline() -> tuple[str, str]:
    """Forward and backward of four micro-batches in three stages."""
    parts = []
    for stage in range(3):
        y = 10 + 22 * stage
        parts += [box(8 + 13 * (stage + k), y, 12, 18, "", BLUE) for k in range(4)]
        parts += [box(96 + 13 * (2 - stage + k), y, 12, 18, "", ORANGE) for k in range(4)]
    return card("resnet_pipeline", *parts, arrow(8, 80, 182, 80))


def imagenet() -> tuple[str, str]:
    """Two nodes, of which one is lost and comes back."""
    parts = []
    for node in (0, 1):
        x = 6 + 94 * node
        parts += [box(x, 6, 84, 52, fill=PALE), write(x + 42, 20, f"node {node}", 11)]
        parts += [box(x + 6 + 37 * k, 26, 34, 26, str(2 * node + k), RANKS[2 * node + k], 11) for k in (0, 1)]
    cross = f'<path d="M112 14L172 52M172 14L112 52" stroke="{INK}" stroke-width="2"/>'
    return card("imagenet_ddp", *parts, cross, write(95, 76, "killed, restarted, same bits", 11))


def template() -> tuple[str, str]:
    """The four places."""
    words = ("data", "model", "loss", "metric")
    places = [box(8 + 90 * (k % 2), 8 + 36 * (k // 2), 84, 30, f"{k + 1}. {words[k]}", RANKS[k], 12) for k in range(4)]
    return card("your_model", *places)


def drawings() -> dict[str, str]:
    """All cards, by the name of the example."""
    return dict((spawn(), by_hand(), gan(), dataparallel(), bert(), pipeline(), imagenet(), template()))


if __name__ == "__main__":
    save(FOLDER, drawings())
