"""The pauses that a kill costs, from what trainings say of their steps and members."""

from pathlib import Path

from benchmarks.lost_ranks import pauses
from benchmarks.torchft_kills import Replica, Step
from benchmarks.torchft_kills import pauses as torchfts


def test_pauses_follow_from_the_history() -> None:
    """Member 1 is lost while a group forms; of two generations, the second has come to a step; 4 dies at the end."""
    generations = [
        {"members": [0, 1, 2], "seconds": 9.0},
        {"members": [0, 2]},
        {"members": [0, 2, 3], "seconds": 0.5},
        {"members": [0, 2, 3, 4], "seconds": 0.1},
        {"members": [0, 2, 3, 4]},
    ]
    assert pauses({"generations": generations, "killed": [1, 4]}) == ([0.5], [0.5, 0.1])


class Done(Replica):
    """A replica whose steps are known."""

    def __init__(self, *done: Step) -> None:
        self.done = list(done)

    def steps(self) -> list[Step]:
        return self.done


def test_pauses_follow_from_the_steps_of_replicas() -> None:
    """Two kills in a row share a pause; where the number of replicas stays, the longest pause is that of the kill."""
    whole = Done((1.0, 1, 3), (2.0, 2, 3), (7.0, 3, 2), (7.5, 4, 3), (9.0, 5, 3), (9.1, 6, 3))
    other = Done((2.1, 2, 3), (6.9, 3, 2))
    lost, joined = torchfts([whole, other], [2.5, 2.6, 8.0])
    assert [round(one, 6) for one in lost] == [4.9, 4.9, 1.5]
    assert [round(one, 6) for one in joined] == [0.6]


def test_a_line_that_is_being_written_is_no_step(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("1.5 1 3\n2.5 2 ")
    assert Replica(None, tmp_path / "log").steps() == [(1.5, 1, 3)]  # ty: ignore[invalid-argument-type]
