"""Pipeline schedules by hand: who computes in which order. GPipe, 1F1B, interleaved 1F1B, ZB-H1.

A process runs a list of operations: F3 is the forward of micro-batch 3, B3 its backward. The list
depends only on the process's place and on the number of micro-batches, so every process computes
its own list and nothing has to be agreed on. `pipeline.py` runs the lists. (A schedule that depends
on measured times: v_schedule.py.)

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

    ZB-H1 (https://arxiv.org/abs/2401.10241, section 2.2): 1F1B whose backward is split: I3 is the
    gradient of the stage's input, for which the stage before waits, W3 those of the weights, for
    which nobody waits. (The paper calls I "B".) Stage s leaves W behind by s micro-batches, and
    fills with them the time in which it would idle at the end: a third of the bubble, and no stage
    keeps more than P micro-batches, as the first one does anyway. Equal times for F, I and W

        stage 0   F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        stage 1   .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        stage 2   .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
"""

from collections.abc import Callable
from itertools import chain, pairwise
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]


class Op(NamedTuple):
    """One operation of one micro-batch in one stage."""

    kind: Kind
    """Forward, backward, or a backward's halves: the input's gradient and those of the weights."""
    micro: int
    stage: int

    @property
    def source(self) -> int:
        """The stage whose result F, B or I needs: -1, or the one after the last, if nobody's."""
        return self.stage + (-1 if self.kind == "F" else 1)

    @property
    def target(self) -> int:
        """The stage that needs the result of F, B or I: -1 or the one after the last, if none."""
        return self.stage + (1 if self.kind == "F" else -1)


class Seconds(NamedTuple):
    """How long a stage, or a part of one, computes for one micro-batch."""

    forward: float
    inputs: float
    """Backward: the gradient of the input."""
    weights: float
    """Backward: the gradients of the weights."""

    def of(self, kind: str) -> float:
        """Of an operation."""
        both = self.inputs + self.weights
        return {"F": self.forward, "B": both, "I": self.inputs, "W": self.weights}[kind]


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


def zero_bubble_h1(pp_rank: int, pp_size: int, count: int) -> list[Op]:
    """1F1B with split backward passes, whose second halves stay behind by `pp_rank`."""
    ops: list[Op] = []
    for op in one_forward_one_backward(pp_rank, pp_size, count):
        if op.kind == "F":
            ops.append(op)
            continue
        ops.append(op._replace(kind="I"))
        if op.micro >= pp_rank:
            ops.append(Op("W", op.micro - pp_rank, pp_rank))
    return [*ops, *(Op("W", i, pp_rank) for i in range(max(0, count - pp_rank), count))]


SCHEDULES: dict[str, Callable[[int, int, int], list[Op]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
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
    if schedule in ("zbv", "dualpipev") and (pp_size > 1 or engine == "torch"):
        return processes + processes[::-1]  # 0 1 2 2 1 0
    return processes


def micro_batch_sizes(samples: int, count: int) -> list[int]:
    """Cut a batch into micro-batches whose sizes differ by one at most: 10 in 4 is 3, 3, 2, 2."""
    return [len(range(part, samples, count)) for part in range(min(count, samples))]


def ideal_bubble(schedule: str, count: int, pp_size: int) -> float:
    """The idle share (P-1)/(KM+P-1) of P processes with equal stages and M >= P micro-batches.

    K says how much shorter the wait for the first work and for the last is: 1 for GPipe and 1F1B, 2
    for interleaved; with equal times for F, I and W, 3 for zb-h1 and 6 for zbv (P <= 4).
    """
    return (pp_size - 1) / (bubble_factor(schedule, pp_size) * count + pp_size - 1)


def bubble_factor(schedule: str, pp_size: int) -> int:
    """K of `ideal_bubble`."""
    return {"interleaved": 2, "zb-h1": 3, "zbv": 6}.get(schedule, 1) if pp_size > 1 else 1
