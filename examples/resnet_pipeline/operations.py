"""The operations of all processes, by the name of the schedule, and how long they would take."""

from collections.abc import Sequence

from examples.resnet_pipeline.schedule import SCHEDULES, Op, Seconds
from examples.resnet_pipeline.v_schedule import zbv

BY_HAND = (*SCHEDULES, "zbv")


def operations(
    schedule: str, pp_size: int, count: int, seconds: Sequence[Seconds]
) -> Sequence[Sequence[Op]]:
    """What each process of a pipeline computes, in order.

    Args:
        schedule: one of `BY_HAND`.
        pp_size: processes P.
        count: micro-batches.
        seconds: of each stage; zbv alone depends on them.
    """
    if schedule == "zbv":
        return zbv(pp_size, count, tuple(seconds))
    return [SCHEDULES[schedule](pp_rank, pp_size, count) for pp_rank in range(pp_size)]


def simulate(schedule: str, seconds: Sequence[Seconds], count: int, pp_size: int) -> float:
    """The seconds that a step takes if messages cost nothing.

    Args:
        schedule: one of `BY_HAND`.
        seconds: of each stage.
        count: micro-batches.
        pp_size: processes P.
    """
    waiting = [list(ops) for ops in operations(schedule, pp_size, count, seconds)]
    done: dict[Op, float] = {}  # when an operation ended
    clocks = [0.0] * pp_size
    while any(waiting):
        before = len(done)
        for pp_rank, ops in enumerate(waiting):
            while ops:
                op = ops[0]
                needs = op._replace(stage=op.source)
                alone = op.kind == "W" or not 0 <= op.source < len(seconds)
                if not alone and needs not in done:
                    break
                arrival = 0.0 if alone else done[needs]
                clocks[pp_rank] = max(clocks[pp_rank], arrival) + seconds[op.stage].of(op.kind)
                done[op] = clocks[pp_rank]
                ops.pop(0)
        assert len(done) > before, "the processes wait for each other"
    return max(clocks)
