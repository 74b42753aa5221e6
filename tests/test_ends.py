"""How a run ends: exit codes, one line per error and job, a checkpoint after a signal."""

import fcntl
import re
import socket
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM
from typing import Any

import pytest
import torch

from tests import ranks
from tests.hooks import At

EXAMPLE = "mnist_ddp_spawn"
TRAIN = f"examples.{EXAMPLE}.train"
SHORT = ["--epochs", "2", "--checkpoint-every", "4"]  # 11 steps per epoch
RESTARTED = {1: {"TORCHELASTIC_RESTART_COUNT": "1"}}  # each node's torchrun has its own count
QUICK = ["--timeout", "2"]  # ranks that will never join
EVERY_STEP = ("common.run", "STOP_DELAY = 0.1", "STOP_DELAY = 0.0")  # signals are noticed at once


def run(count: int, flags: list[str], out: Path, **options: Any) -> ranks.Training:
    return ranks.run(EXAMPLE, count, [*SHORT, *flags], out=out, **options)


def errors(training: ranks.Training) -> list[str]:
    return re.findall("^error: (.*)", training.text, re.MULTILINE)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> ranks.Training:
    """A run of 2 ranks that was killed in step 10; it has checkpoints of steps 4 and 8."""
    out = tmp_path_factory.mktemp("killed") / "out"
    training = run(2, [], out, fault=At(1, 10, SIGKILL))
    assert training.codes == [75, -9]
    assert len(errors(training)) == 1
    assert "rank 0: lost a connection: " in errors(training)[0]
    assert "\nrank 1 has exited\n" in training.text
    return training


def copy(killed: ranks.Training, out: Path) -> Path:
    """Copy the checkpoints to another run's folder, and return the newest."""
    folder = out / "checkpoints"
    folder.mkdir(parents=True)
    for path in (killed.out / "checkpoints").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return max(folder.iterdir())


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


# ---------------------------------------------------------------------------- the user's mistakes


@pytest.mark.parametrize(
    ("count", "flags", "message"),
    [
        (2, ["-b", "121"], "--batch-size 121 is not divisible by 2 ranks"),
        (2, ["--dataset", "nowhere"], "nowhere/train-images-idx.-ubyte is missing"),
        (2, ["--resume", "nowhere.pt"], "nowhere.pt is not a checkpoint: No such file"),
        (2, ["--resume", "no.safetensors"], "no.safetensors contains no weights: No such file"),
        (2, ["--resume", "README.md"], "README.md is not a checkpoint"),
        (2, ["--lr", "1e30"], "the test loss is NaN or infinite"),
        (1, ["--device", "cuda"], "--device cuda: torch found no CUDA device"),
        (1, ["--dist-backend", "nccl"], "--dist-backend nccl requires CUDA devices"),
        (1, ["--epochs", "0"], "--epochs must be positive, got 0"),
        (1, ["--world-size", "2"], "--world-size needs --dist-url"),
    ],
)
def test_mistake_is_one_line(count: int, flags: list[str], message: str, tmp_path: Path) -> None:
    training = run(count, flags, tmp_path / "out")
    assert training.codes == [2] * count, training.text
    assert len(errors(training)) == 1, training.text
    assert re.search(message, errors(training)[0])
    assert "Traceback" not in training.text


@pytest.mark.parametrize("flags", [["--seed", "1"], ["--batch-size", "60"]])
def test_other_training_is_not_resumed(
    flags: list[str], killed: ranks.Training, tmp_path: Path
) -> None:
    training = run(2, [*flags, "--resume", str(copy(killed, tmp_path))], tmp_path / "out")
    assert training.codes == [2, 2], training.text
    assert len(errors(training)) == 1
    assert f"{flags[0]} differs from" in errors(training)[0]


def test_changed_flag_is_a_warning(killed: ranks.Training, tmp_path: Path) -> None:
    path = copy(killed, tmp_path)
    training = run(2, ["--lr", "0.1", "--resume", str(path)], tmp_path / "out").done()
    assert training.text.count("warning: ") == 1, training.text
    assert "lr = 0.2; this run uses 0.1" in training.text


def test_damaged_checkpoint_is_replaced_by_the_one_before(
    killed: ranks.Training, tmp_path: Path
) -> None:
    whole = run(2, [], tmp_path / "whole").done()
    flip_bit(copy(killed, tmp_path / "out"))
    training = run(2, ["--resume", "auto"], tmp_path / "out").done()
    assert "damaged" in training.text
    assert "resumed from" in training.text
    assert "step-00000004.pt" in training.text
    assert training.result["parameter_hash"] == whole.result["parameter_hash"]


def test_run_without_any_readable_checkpoint_starts_anew(
    killed: ranks.Training, tmp_path: Path
) -> None:
    copy(killed, tmp_path / "out")
    for path in (tmp_path / "out/checkpoints").iterdir():
        flip_bit(path)
    training = run(2, ["--resume", "auto"], tmp_path / "out", fault=At(0, 6, SIGKILL))
    assert training.text.count("damaged") == 2
    assert "resumed from" not in training.text
    # The damaged ones of later steps do not outrank the new one.
    again = run(2, ["--resume", "auto"], tmp_path / "out").done()
    assert "damaged" not in again.text
    assert "step-00000004.pt" in again.text


def test_ranks_see_other_checkpoints(killed: ranks.Training, tmp_path: Path) -> None:
    """Two nodes do not share the folder of the run."""
    copy(killed, tmp_path / "one" / "out")
    env = {0: {"HOME": str(tmp_path / "one")}, 1: {"HOME": str(tmp_path / "two")}}
    training = run(2, ["--resume", "auto", "--out", "~/out"], tmp_path / "out", env=env)
    assert training.codes == [2, 2], training.text
    assert len(errors(training)) == 1
    assert "[8, None]" in errors(training)[0]


def test_number_of_ranks_may_change(killed: ranks.Training, tmp_path: Path) -> None:
    whole = run(2, [], tmp_path / "whole").done()
    flags = ["--resume", str(copy(killed, tmp_path / "copy"))]
    training = run(3, flags, tmp_path / "out").done()
    assert "the number of ranks has changed" in training.text
    assert training.losses == pytest.approx(whole.losses[8:], rel=1e-3)


def test_restart_by_torchrun_resumes(killed: ranks.Training, tmp_path: Path) -> None:
    """torchrun repeats the command, which says nothing of --resume."""
    copy(killed, tmp_path / "out")
    training = run(2, [], tmp_path / "out", env=RESTARTED).done()
    assert "step-00000008.pt" in training.text


def test_mistake_in_a_loader_worker_is_one_line(tmp_path: Path) -> None:
    broken = """
from common.launch import UserError
class Broken(torch.utils.data.Dataset):
    def __len__(self): return 1437
    def __getitem__(self, index): raise UserError(f"sample {index} is damaged")
def report("""
    mutate = [
        (
            TRAIN,
            "loader = DataLoader(\n        data.train,",
            "loader = DataLoader(\n        Broken(),",
        )
    ]
    mutate += [(TRAIN, "def report(", broken)]
    training = run(2, ["--workers", "1"], tmp_path / "out", mutate=mutate)
    assert 2 in training.codes, training.text
    assert len(errors(training)) == 1, training.text
    assert re.fullmatch(r"sample \d+ is damaged", errors(training)[0])


def test_folder_of_another_run_is_locked(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / "lock").open("w+") as lock:
        lock.write("processes of that run")
        lock.flush()
        fcntl.lockf(lock, fcntl.LOCK_SH)  # even a shared lock is enough
        training = run(2, [], tmp_path / "out")
    assert (tmp_path / "out" / "lock").read_text() == "processes of that run"
    assert training.codes[0] == 2, training.text
    assert len(errors(training)) == 1
    assert "another run is using" in errors(training)[0]


def test_full_disk_is_one_line(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (99_999, 99_999))\n"
    mutate = [("common.checkpoint", "import zipfile\n", "import zipfile\n" + limit)]
    training = run(2, [], tmp_path / "out", mutate=mutate)
    assert training.codes[0] == 2, training.text
    assert len(errors(training)) == 1
    assert re.search(r"cannot write .*step-00000004.pt", errors(training)[0])


# ------------------------------------------------------------------- missing, lost and other ranks


@pytest.mark.parametrize("nodes", [1, 2])
def test_missing_rank_is_named(nodes: int, tmp_path: Path) -> None:
    training = run(4, QUICK, tmp_path / "out", missing=[2], nodes=nodes)
    assert training.codes == [75] * 3, training.text
    assert "rank 2 of 4 did not join within 2 s" in errors(training)


def test_missing_first_node_is_named(tmp_path: Path) -> None:
    training = run(2, QUICK, tmp_path / "out", missing=[0], nodes=2)
    assert training.codes == [75], training.text
    assert "node 0 did not accept connections at 127.0.0.1:" in errors(training)[0]


def test_nodes_with_different_world_sizes(tmp_path: Path) -> None:
    training = run(2, QUICK, tmp_path / "out", nodes=2, env={1: {"WORLD_SIZE": "4"}})
    assert training.codes[0] == 2, training.text
    assert "world sizes differ: [2, 4]" in errors(training)[0]


def test_port_is_taken(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("", port := ranks.free_port()))
        listener.listen()
        env = {0: {"MASTER_PORT": str(port)}}
        training = run(2, QUICK, tmp_path / "out", nodes=2, missing=[1], env=env)
    assert training.codes == [2], training.text
    assert errors(training) == [f"port {port} is already in use; choose a different port"]


def test_exception_of_one_rank_is_one_traceback(tmp_path: Path) -> None:
    mutate = [(TRAIN, "run.log(loss)", "run.log(loss if rank == 0 else None)")]
    training = run(3, [], tmp_path / "out", mutate=mutate)
    assert sorted(training.codes) == [1, 1, 75], training.text
    assert training.text.count("Traceback (most recent call last)") == 1
    assert re.match("rank [12]: Traceback", errors(training)[0])
    assert "AttributeError" in training.text


def test_different_replicas_are_an_error(tmp_path: Path) -> None:
    changed = "model.module[-1].bias.data[0] += rank\n    run.finish(model)"
    mutate = [(TRAIN, "run.finish(model)", changed)]
    training = run(3, ["--epochs", "1"], tmp_path / "out", mutate=mutate)
    assert training.codes == [1, 1, 1], training.text
    assert "rank(s) [1, 2]" in training.text
    assert not (training.out / "result.json").exists()


def test_forgotten_set_epoch_is_one_line(tmp_path: Path) -> None:
    mutate = [(TRAIN, "sampler.set_epoch(epoch)", "pass")]
    training = run(2, [], tmp_path / "out", mutate=mutate)
    assert training.codes == [2, 2], training.text
    assert "sampler.set_epoch(epoch)" in errors(training)[0]


# ------------------------------------------------------------------------------------------ signals


@pytest.mark.parametrize(("signal", "code"), [(SIGTERM, 143), (SIGINT, 130)])
def test_signal_to_one_rank_stops_all_after_the_same_step(
    signal: int, code: int, tmp_path: Path
) -> None:
    fault = At(1, 6, signal)
    training = run(2, [], tmp_path / "out", fault=fault, mutate=[EVERY_STEP])
    assert training.codes == [code, code], training.text
    assert training.text.count("stopped by") == 1
    step = training.checkpoint()["step"]
    assert step in (6, 7, 8)  # signals are exchanged every other step
    assert f"saved {training.out}/checkpoints/step-{step:08}.pt" in training.text


def test_signal_before_training(tmp_path: Path) -> None:
    stop = "import signal; signal.raise_signal(signal.SIGTERM)\n    data = image_data("
    training = run(1, [], tmp_path / "out", mutate=[(TRAIN, "data = image_data(", stop)])
    assert training.codes == [143], training.text
    assert "stopped by SIGTERM: nothing to save" in training.text


# ------------------------------------------------------------------------------------------ results


def test_results_of_a_run(tmp_path: Path) -> None:
    training = run(2, ["--log-every", "5"], tmp_path / "out").done()
    result, checkpoint = training.result, training.checkpoint()
    assert (result["world_size"], result["epochs"], result["steps"]) == (2, 2, 22)
    assert result["args"]["lr"] == float(checkpoint["args"]["lr"]) == 0.2
    assert (result["threads"], result["device"], result["torch"]) == (1, "cpu", torch.__version__)
    assert result["best"] == max(p["test/accuracy"] for p in training.points()[-12:] if len(p) > 2)
    assert [p["step"] for p in training.points() if "loss/train" in p] == list(range(1, 23))
    assert (checkpoint["epoch"], checkpoint["batch"], checkpoint["step"]) == (2, 0, 22)
    assert len(list((training.out / "checkpoints").iterdir())) == 2
    assert "batch 120 = 2 ranks x 60" in training.text
    assert training.text.count(": loss ") == 4
    files = {path.name for path in training.out.iterdir()}
    assert files >= {"best.safetensors", "curves.png", "predictions.csv", "tensorboard"}


def test_weights_start_a_run(tmp_path: Path) -> None:
    """--resume with best.safetensors: the parameters, and nothing else, come from the file."""
    first = run(1, [], tmp_path / "first").done()
    flags = ["--resume", str(first.out / "best.safetensors"), "--lr", "1e-9", "--seed", "5"]
    # torchrun restarted the processes before the first checkpoint.
    second = run(2, flags, tmp_path / "second", env=RESTARTED).done()
    assert len(second.losses) == 22
    assert second.result["metrics"]["accuracy"] == pytest.approx(first.result["best"])
