"""Pipeline schedules by hand: the order in which a process computes. GPipe, 1F1B, interleaved 1F1B.

A process runs a list of operations: F3 is the forward of micro-batch 3, B3 its backward. The list
depends only on the process's place and on the number of micro-batches, so every process computes
its own list and nothing has to be agreed on. `pipeline.py` runs the lists.

    GPipe (https://arxiv.org/abs/1811.06965), 3 stages, 4 micro-batches: all activations are kept
    until the middle

        stage 0   F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        stage 1   .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
        stage 2   .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

    1F1B (https://arxiv.org/abs/1806.03377, with a flush after each batch): takes as long, but stage
    s keeps the activations of at most `stages - s` micro-batches

        stage 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        stage 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

    Interleaved (https://arxiv.org/abs/2104.04473, section 2.2): two stages of half the size on each
    process, stages p and P + p on process p, so that the next process gets its first work sooner:
    half the bubble, twice the messages. 2 processes, 4 micro-batches; f and b belong to a process's
    second stage

        process 0   F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .  b2 .  b3 B2 B3
        process 1   .  F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3 .
"""

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Literal, NamedTuple


class Op(NamedTuple):
    """One operation: forward or backward of one micro-batch in one stage."""

    kind: Literal["F", "B"]
    micro: int
    stage: int


def gpipe(pp_rank: int, pp_size: int, count: int) -> list[Op]:
    """All forwards, then all backwards."""
    return [Op(kind, i, pp_rank) for kind in ("F", "B") for i in range(count)]


def one_forward_one_backward(pp_rank: int, pp_size: int, count: int) -> list[Op]:
    """A forward for each stage behind this one, then forward and backward in turn."""
    forwards, backwards = ([Op(kind, i, pp_rank) for i in range(count)] for kind in ("F", "B"))
    return in_turn(forwards, backwards, pp_size - pp_rank - 1)


def interleaved(pp_rank: int, pp_size: int, count: int) -> list[Op]:
    """1F1B with two stages per process, which alternate after each round of >= P micro-batches."""
    rounds = max(1, count // pp_size)
    ends = [0, *((number + 1) * count // rounds for number in range(rounds))]
    both = (pp_rank, pp_size + pp_rank) if pp_size > 1 else (pp_rank,)
    forwards, backwards = (
        [Op(kind, i, stage) for a, b in pairwise(ends) for stage in order for i in range(a, b)]
        for kind, order in (("F", both), ("B", both[::-1]))
    )
    # The first stage runs its longest round before the second stage has its first input.
    longest = max(b - a for a, b in pairwise(ends))
    warm_up = (len(both) - 1) * longest + 2 * (pp_size - pp_rank - 1)
    return in_turn(forwards, backwards, warm_up)


def in_turn(forwards: list[Op], backwards: list[Op], warm_up: int) -> list[Op]:
    """Some forwards, then forward and backward in turn, then the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    rest = backwards[len(forwards) - warm_up :]
    return [*forwards[:warm_up], *chain.from_iterable(pairs), *rest]


SCHEDULES: dict[str, Callable[[int, int, int], list[Op]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
}


def stage_owners(schedule: str, pp_size: int, engine: str) -> list[int]:
    """The process of the pipeline that holds each stage.

    Args:
        schedule: as `--schedule`.
        pp_size: processes of the pipeline.
        engine: as `--engine`; torch's schedules want two stages on a process alone, too.
    """
    processes = list(range(pp_size))
    if schedule in ("interleaved", "zero-bubble") and (pp_size > 1 or engine == "torch"):
        return processes * 2  # 0 1 2 0 1 2
    if schedule == "zbv":
        return processes + processes[::-1]  # 0 1 2 2 1 0
    return processes


def micro_batch_sizes(samples: int, count: int) -> list[int]:
    """Cut a batch into micro-batches whose sizes differ by one at most: 10 in 4 is 3, 3, 2, 2."""
    return [len(range(part, samples, count)) for part in range(min(count, samples))]


def simulate(
    schedule: str, forward: Sequence[float], backward: Sequence[float], count: int, pp_size: int
) -> float:
    """The seconds that a step takes if messages cost nothing.

    Args:
        schedule: gpipe, 1f1b or interleaved.
        forward: seconds of one micro-batch per stage.
        backward: the same of the backward pass.
        count: micro-batches.
        pp_size: processes P; stage s is on process s modulo P.
    """
    waiting = [SCHEDULES[schedule](pp_rank, pp_size, count) for pp_rank in range(pp_size)]
    done: dict[Op, float] = {}  # when an operation ended
    clocks = [0.0] * pp_size
    while any(waiting):
        before = len(done)
        for pp_rank, ops in enumerate(waiting):
            while ops:
                op = ops[0]
                needs = op._replace(stage=op.stage + (1 if op.kind == "B" else -1))
                if 0 <= needs.stage < len(forward) and needs not in done:
                    break
                seconds = (forward if op.kind == "F" else backward)[op.stage]
                done[op] = max(clocks[pp_rank], done.get(needs, 0.0)) + seconds
                clocks[pp_rank] = done[op]
                ops.pop(0)
        assert len(done) > before, "the processes wait for each other"
    return max(clocks)


def ideal_bubble(schedule: str, count: int, pp_size: int) -> float:
    """The idle share with equal stages: (P-1)/(M+P-1), interleaved (P-1)/(2M+P-1)."""
    stages_each = 2 if schedule == "interleaved" and pp_size > 1 else 1
    return (pp_size - 1) / (stages_each * count + pp_size - 1)
