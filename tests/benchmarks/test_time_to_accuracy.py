"""The time to an accuracy: the benchmark reads what the program prints today."""

from pathlib import Path

from benchmarks import mnist_time_to_accuracy as benchmark


def test_our_epochs_are_read(tmp_path: Path) -> None:
    """Of two epochs on the embedded digits, only the first counts: it reaches the target."""
    found = benchmark.run_ours("python -m examples.mnist_ddp_spawn --epochs 2 --out OUT", tmp_path, 0.1)
    assert found["epochs"] == 1
    assert found["reached"]
    assert 0.1 <= found["accuracy"] <= 1
    assert min(found["startup"], found["training"], found["evaluation"]) > 0
