"""A sample that other programs disturbed is taken again, but not forever."""

import pytest

from benchmarks import harness


def test_a_disturbed_sample_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock of which each look costs a second, and others who are busy until the machine's third sample."""
    seconds, busy, samples = iter(range(1000)), [0.0], iter("abcdef")
    monkeypatch.setattr(harness.time, "monotonic", lambda: float(next(seconds)))
    monkeypatch.setattr(harness, "busy_seconds", lambda: busy[0])
    monkeypatch.setattr(harness, "busy_share", lambda _: 0.0)
    monkeypatch.setattr(harness, "cores", lambda: 2)

    def measure() -> str:
        sample = next(samples)
        busy[0] += 5.0 * (sample < "c")
        return sample

    patient = harness.Quiet(100)
    assert (patient.sample(measure), patient.others) == ("c", [0.0])
    assert patient.sample(measure) == "d"
    busy[0], samples = 0.0, iter("abcdef")
    hurried = harness.Quiet(0)
    assert hurried.sample(measure) == "a", "and says how much they took"
    assert hurried.others[0] > harness.DISTURBED


def test_this_program_is_no_other_one() -> None:
    before = harness.busy_seconds()
    assert before > 0
    sum(number * number for number in range(3_000_000))
    assert harness.busy_seconds() >= before - 0.1  # /proc/stat counts in hundredths
