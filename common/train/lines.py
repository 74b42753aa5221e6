"""The line of an epoch, in 80 columns."""

from collections.abc import Mapping

WIDTH = 79
FAR = 10  # times the first loss
SHORT = {"accuracy": "acc", "images": "img"}


def duration(seconds: float) -> str:
    """Seconds, in words as long as their size asks for: `12 s`, `3 min`, `2 h 05 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def epoch_line(
    label: str,
    losses: Mapping[str, float | None],
    score: tuple[str, float],
    speed: tuple[float | None, str],
    left: float,
    best: bool,
) -> str:
    """What is shown of an epoch; what does not fit is left out, and is in metrics.jsonl.

    Args:
        label: `epoch 3/20`.
        losses: by what they are called: `loss` and `test`.
        score: name and value of the metric that decides which model is the best.
        speed: samples per second, and what a sample is.
        left: seconds to the end of the run.
        best: whether the score is the best so far.
    """
    name, value = score
    shown = f"{100 * value:.2f}%" if name == "accuracy" else f"{value:.4g}"
    numbers = [f"{each} {loss:.3g}" for each, loss in losses.items() if loss is not None]
    numbers.append(f"{SHORT.get(name, name)} {shown}")
    rate, unit = speed
    pace = [] if rate is None else [f"{rate:,.0f} {SHORT.get(unit, unit)}/s"]
    time, mark = [f"{duration(left)} left"] * (left > 0), ["*best*"] * best
    choices = [[*numbers, *pace, *time, *mark]]
    choices += [[*numbers[n:], *pace, *mark] for n in range(len(numbers))]  # the time goes first
    lines = ["  ".join([label, *parts]) for parts in choices]
    return next((line for line in lines if len(line) <= WIDTH), lines[-1])


def far_above(label: str, loss: float | None, first: float | None) -> str:
    """A warning, if an epoch's loss is far above that of the run's first step; otherwise nothing.

    Args:
        label: `epoch 3/20`.
        loss: mean of the epoch.
        first: of the run's first step, with weights that know nothing; below 1 it counts as 1,
            for trained weights begin with next to nothing.
    """
    if loss is None or first is None or loss <= FAR * max(first, 1):
        return ""
    return (
        f"{label}: the mean loss is {loss:.3g}, that of the first step was {first:.3g}: "
        f"training diverges; lower --lr"
    )
