"""further/sampler.py shows what DistributedSampler, all_gather and new_group do."""

from tests import programs


def test_sampler_shows_the_samples_of_each_rank() -> None:
    module = "examples.mnist_ddp_spawn.further.sampler"
    text = programs.run(*programs.PYTHON, module, "--nproc", "3", "--samples", "10").done().stdout
    lines = [line.partition(":") for line in text.splitlines()]
    shown = {
        lines[i][0].strip(): [
            [int(word) for word in words.split()] for *_, words in lines[i + 1 :][:3]
        ]
        for i in range(0, len(lines), 4)
    }
    assert shown["not shuffled"] == [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]]
    assert shown["drop_last"] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    first, second = shown["epoch 0 with set_epoch(0)"], shown["epoch 1 with set_epoch(1)"]
    assert shown["epoch 0 without set_epoch"] == shown["epoch 1 without set_epoch"] == first
    assert first != second
    for indices in (first, second):
        assert {index for own in indices for index in own} == set(range(10))
    ordered = [10 * index for index in range(10)]
    assert shown["in dataset order, without duplicates, on every rank"] == [ordered] * 3
    assert shown["new_group([0, 2])"] == [[2], [1], [2]]
