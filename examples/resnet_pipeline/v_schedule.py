"""ZB-V: two stages per process that form a V, and an order that follows from measured times.

Process p has the stages p and 2P-1-p (https://arxiv.org/abs/2401.10241, section 6): the first
process also has the last stage. So a micro-batch that has gone down the processes and up again
begins its backward pass where it began its forward pass, and the backward pass, split into the
gradients of inputs (I) and of weights (W), goes the same way. Only the first wait is left, for the
first stage of the processes before. 2 processes, 4 micro-batches, equal times for F, I and W; small
letters are a process's second stage:

    process 0   F0 F1 F2 f0 i0 w0 f1 i1 I0 w1 F3 I1 W0 f2 i2 w2 W1 I2 W2 f3 i3 w3 .  I3 W3
    process 1   .  F0 f0 F1 f1 i0 I0 w0 F2 i1 I1 w1 f2 W0 F3 i2 I2 w2 f3 W1 W2 i3 I3 w3 W3

An order that is right for equal times idles when, say, I takes longer than F. So the order is
found, not written down: by playing the step through with the times that were measured, as the
paper's section 3.1 does.
"""

from collections.abc import Sequence
from functools import lru_cache

from examples.resnet_pipeline.schedule import Kind, Op, Seconds, stage_owners

PREFERENCES: tuple[tuple[Kind, ...], ...] = (("I", "F", "W"), ("F", "I", "W"))


@lru_cache
def zbv(pp_size: int, count: int, seconds: tuple[Seconds, ...]) -> tuple[tuple[Op, ...], ...]:
    """The operations of each process: of the orders that are tried, the one that ends first.

    All processes come to the same result, as they know the same times.

    Args:
        pp_size: processes of the pipeline, P.
        count: micro-batches, M.
        seconds: of each of the 2P stages; of the only one, if P is 1.
    """
    return min(played(pp_size, count, seconds, kinds) for kinds in PREFERENCES)[1]


def played(
    pp_size: int, count: int, seconds: Sequence[Seconds], preference: Sequence[Kind]
) -> tuple[float, tuple[tuple[Op, ...], ...]]:
    """Play a step through: a process that is free takes what it can begin first.

    No process keeps more activations than the first one does in 1F1B, which are those of P
    micro-batches in both stages. W gives them back.

    Args:
        pp_size: as that of `zbv`.
        count: as that of `zbv`.
        seconds: as that of `zbv`.
        preference: which kind goes first if several could begin; of two stages the later one.

    Returns:
        The seconds of the step, and the operations of each process.
    """
    owners = stage_owners("zbv", pp_size, "hand")
    stages = [[s for s, owner in enumerate(owners) if owner == p] for p in range(pp_size)]
    following = {(kind, stage): 0 for kind in preference for stage in range(len(owners))}
    done: dict[Op, float] = {}  # when an operation ended
    clocks, kept = [0.0] * pp_size, [0] * pp_size
    orders: list[list[Op]] = [[] for _ in range(pp_size)]

    def begin(op: Op) -> float | None:
        """When its process could begin an operation; None if this is not known yet."""
        process, edge = owners[op.stage], op.kind != "W" and not 0 <= op.source < len(owners)
        needs = [op._replace(kind="I")] if op.kind == "W" else [op._replace(stage=op.source)]
        needs = needs * (not edge) + [op._replace(kind="F")] * (op.kind == "I")
        # The last place is for second stages: without them nothing would ever be given back.
        room = len(stages[process]) * pp_size - (op.stage < pp_size < len(owners))
        full = op.kind == "F" and kept[process] >= room
        if op.micro == count or full or any(need not in done for need in needs):
            return None
        return max([clocks[process], *(done[need] for need in needs)])

    for _ in range(3 * count * len(owners)):
        ready = [
            (start, process, rank, -stage, Op(kind, following[kind, stage], stage))
            for process in range(pp_size)
            for rank, kind in enumerate(preference)
            for stage in stages[process]
            if (start := begin(Op(kind, following[kind, stage], stage))) is not None
        ]
        start, process, _, _, op = min(ready)
        clocks[process] = done[op] = start + seconds[op.stage].of(op.kind)
        following[op.kind, op.stage] += 1
        kept[process] += {"F": 1, "I": 0, "W": -1}[op.kind]
        orders[process].append(op)
    return max(clocks), tuple(map(tuple, orders))
