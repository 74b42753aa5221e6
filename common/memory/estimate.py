"""From what is measured to what a rank holds, for each way to divide the work."""

from collections.abc import Iterator, Sequence

from common.launch.console import say
from common.memory.args import Args
from common.memory.measure import Part, blocks, measure_all

GIB = 2**30
STATE = {"sgd": 1, "adamw": 2}  # the optimizer's tensors per parameter: momentum; two averages
COLUMNS = ("parameters", "gradients", "optimizer", "activations", "gathered", "sum")
Row = dict[str, float]


def runs(costs: Sequence[float], limit: float) -> list[list[int]]:
    """Neighbours together, by their numbers, as long as their sum is within a limit."""
    found, total = [[]], 0.0
    for number, cost in enumerate(costs):
        if found[-1] and total + cost > limit:
            found.append([])
            total = 0.0
        found[-1].append(number)
        total += cost
    return found


def largest_stage(costs: Sequence[float], stages: int) -> list[int]:
    """Cut into so many runs of neighbours that the largest is as small as can be: the largest."""
    low, high = max(costs), sum(costs)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if len(runs(costs, middle)) <= stages else (middle, high)
    return max(runs(costs, high), key=lambda run: sum(costs[number] for number in run))


def needs(parts: Sequence[Part], units: Sequence[int], state: int, ranks: int) -> dict[str, Row]:
    """What a rank holds, in bytes by column, for each strategy.

    Args:
        parts: of the whole batch.
        units: bytes of the parameters of each block that FSDP2 shards.
        state: tensors of the optimizer per parameter.
        ranks: that divide the work.
    """
    whole, activations = sum(p.parameters for p in parts), sum(p.activations for p in parts)
    copies = sum(part.copies for part in parts)
    costs = [part.parameters * (2 + state) + part.activations + part.copies for part in parts]
    stage = [parts[number] for number in largest_stage(costs, ranks)]
    # What is in no block stays whole; of the blocks, one computes and the next arrives; a gradient.
    block, rest = max(units, default=0), whole - sum(units)
    gathered = (rest + 2 * block + max(rest, block)) / (2 if copies else 1)
    found = {  # parameters, activations, gathered
        "one device": (whole, activations + copies, 0.0),
        "DDP": (whole, activations / ranks + copies, 0.0),
        "FSDP2": (whole / ranks, activations / ranks, gathered),
        "pipeline": (
            sum(part.parameters for part in stage),
            sum(part.activations + part.copies for part in stage),
            0.0,
        ),
    }
    # DDP's buckets are the gradients, and stay: all of it is there at the end of forward.
    rows = {name: (p, p, p * state, a, g) for name, (p, a, g) in found.items()}
    return {name: dict(zip(COLUMNS, (*row, sum(row)), strict=True)) for name, row in rows.items()}


def table(args: Args, parts: Sequence[Part], units: Sequence[int]) -> Iterator[str]:
    """A line per strategy, in GiB."""
    by_ranks = {n: needs(parts, units, STATE[args.optimizer], n) for n in (2**k for k in range(11))}
    yield "".join(f"{column:>12}" for column in COLUMNS)
    for name, row in needs(parts, units, STATE[args.optimizer], args.ranks).items():
        line = f"{name:12}" + "".join(f"{f'{number / GIB:.2f} GiB':>12}" for number in row.values())
        if args.memory is not None:
            room = args.memory * GIB
            first = next((n for n, rows in by_ranks.items() if rows[name]["sum"] <= room), None)
            line += "  fits" if row["sum"] <= room else "  no"
            line += (f", from {first} on" if first else ", never") * (name != "one device")
        yield line


def main(args: Args) -> None:
    """Measure in both precisions, and print."""
    (model, _, inputs), measured = measure_all(args)
    count = sum(parameter.numel() for parameter in model.parameters())
    shape = "x".join(map(str, inputs.shape[1:]))
    say(
        f"{args.arch}: {count:,} parameters, {args.optimizer}, global batch {args.batch_size} of "
        f"{shape}, {args.ranks} ranks, kernels of {args.device}; on a rank:"
    )
    for name, parts in measured.items():
        say(f"\n{name:12}" + "\n".join(table(args, parts, blocks(model))))
