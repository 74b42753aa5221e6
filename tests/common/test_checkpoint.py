"""Checkpoints under damage, interruption and attack."""

import hashlib
import os
import pickle
import random
import resource
import signal
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist

from common.launch.errors import UserError
from common.train.checkpoint import Checkpoints
from common.train.checkpoint_files import latest, read
from common.train.files import write_atomically
from tests.conftest import Programs


@pytest.fixture(scope="module", autouse=True)
def world_of_one() -> Generator[None]:
    """A process group in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def some(folder: Path, config: dict[str, object] | None = None) -> Checkpoints:
    model = torch.nn.Linear(4, 3)
    return Checkpoints(folder / "checkpoints", {"model": model}, config or {"lr": 0.1})


def save(checkpoints: Checkpoints, progress: dict[str, Any]) -> None:
    checkpoints.save(progress)
    checkpoints.wait()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_checkpoint_returns_what_was_saved(tmp_path: Path) -> None:
    saved = some(tmp_path)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    save(saved, {"step": 120, "note": "x"})
    drawn = random.random(), np.random.rand(), torch.rand(1).item(), np.random.randn()
    loaded = some(tmp_path)
    found = loaded.load("auto")
    assert found is not None
    assert (found.step, found.state["progress"]) == (120, {"step": 120, "note": "x"})
    assert (random.random(), np.random.rand(), torch.rand(1).item(), np.random.randn()) == drawn
    assert torch.equal(loaded.parts["model"].state_dict()["weight"], saved.parts["model"].state_dict()["weight"])
    by_path = some(tmp_path).load(str(found.path))
    assert by_path is not None
    assert by_path.step == 120


class OnDevice(torch.Tensor):
    """A tensor on a device whose copies to the host are done when the host waits for it."""

    is_cuda = True
    begun: ClassVar[list[tuple[torch.Tensor, torch.Tensor]]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and kwargs == {"non_blocking": True}:
            host, source = args
            cls.begun.append((host, source.as_subclass(torch.Tensor)))
            return host
        assert func is not torch.Tensor.cpu, "waits for the device"
        return super().__torch_function__(func, types, args, kwargs or {})


def test_copies_from_a_gpu_are_begun_together_and_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    like, pinned, waits = torch.empty_like, [], []

    def host(tensor: torch.Tensor, *, device: str, pin_memory: bool) -> torch.Tensor:
        pinned.append((device, pin_memory))
        return torch.full_like(tensor.as_subclass(torch.Tensor), -1)

    def synchronize() -> None:
        waits.append(len(OnDevice.begun))
        for target, source in OnDevice.begun:
            target.copy_(source)
        OnDevice.begun.clear()

    monkeypatch.setattr(torch, "empty_like", host)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    weights = [torch.arange(4.0), torch.arange(6.0).view(2, 3)]
    state = {"weights": [weight.as_subclass(OnDevice) for weight in weights], "step": torch.tensor(3)}
    part: Any = SimpleNamespace(state_dict=lambda: state)
    save(Checkpoints(tmp_path / "checkpoints", {"model": part}, {}), {"step": 1})
    monkeypatch.setattr(torch, "empty_like", like)
    found = latest(tmp_path / "checkpoints")
    assert found is not None
    assert [weight.tolist() for weight in found.state["model"]["weights"]] == [weight.tolist() for weight in weights]
    assert found.state["model"]["step"] == 3
    assert (waits, pinned) == ([2], [("cpu", True)] * 2)


def test_the_last_two_stay_and_order_is_by_number(tmp_path: Path) -> None:
    saved = some(tmp_path)
    for step in (9, 10, 99_999_999, 100_000_000):
        save(saved, {"step": step})
    assert [name.split("-")[1] for name in files(tmp_path)] == ["100000000", "99999999"]
    found = latest(saved.folder)
    assert found is not None
    assert found.step == 100_000_000


def test_any_flipped_bit_or_cut_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = some(tmp_path)
    save(saved, {"step": 1})
    save(saved, {"step": 2})
    newest = next(saved.folder.glob("step-00000002-*"))
    content = newest.read_bytes()
    choose = random.Random(0)
    for number in range(150):
        position = choose.randrange(len(content))
        damaged = bytearray(content)
        damaged[position] ^= 1 << choose.randrange(8)
        newest.write_bytes(bytes(damaged) if number % 3 else content[:position])
        with pytest.raises(UserError, match="damaged"):
            read(newest)
    found = latest(saved.folder)
    assert found is not None
    assert found.step == 1
    warned = capsys.readouterr().err
    assert f"warning: checkpoint {newest} is damaged" in warned
    assert "trying the one before it" in warned


def test_newer_ones_are_set_aside_when_an_older_one_is_resumed(tmp_path: Path) -> None:
    saved = some(tmp_path)
    for step in (1, 2, 3):
        save(saved, {"step": step})
    older = next(saved.folder.glob("step-00000002-*"))
    loaded = some(tmp_path)
    assert loaded.load(str(older)) is not None
    save(loaded, {"step": 3, "branch": "new"})
    save(loaded, {"step": 4})
    found = latest(saved.folder)
    assert found is not None
    assert found.step == 4
    assert len(list(saved.folder.glob("*.aside"))) == 1


def test_a_renamed_or_foreign_file_is_refused(tmp_path: Path) -> None:
    saved = some(tmp_path)
    save(saved, {"step": 1})
    path = next(saved.folder.iterdir())
    other = path.rename(tmp_path / "model.pt")
    with pytest.raises(UserError, match="is not a checkpoint of this program"):
        saved.load(str(other))
    with pytest.raises(UserError, match="does not exist"):
        saved.load(str(path))
    path.mkdir()
    with pytest.raises(UserError, match="cannot be read"):
        saved.load(str(path))


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("payload-was-executed",)


def test_no_code_in_a_checkpoint_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"progress": Payload()}, "zip.pt")
    for content in (pickle.dumps(Payload(), 2), Path("zip.pt").read_bytes()):
        path = Path(f"step-00000001-{hashlib.sha256(content).hexdigest()[:16]}.pt")
        path.write_bytes(content)
        with pytest.raises(UserError, match="is not a checkpoint of this program"):
            read(path)
    assert not Path("payload-was-executed").exists()


def test_other_settings_are_named(tmp_path: Path) -> None:
    save(some(tmp_path, {"lr": 0.1, "epochs": 3}), {"step": 1})
    with pytest.raises(UserError, match=r"was made with epochs = 3, this run has 4: give"):
        some(tmp_path, {"lr": 0.1, "epochs": 4}).load("auto")
    with pytest.raises(UserError, match=r"was made with epochs = 3, this run has 4; lr = 0.1, this run has 0.2: give"):
        some(tmp_path, {"lr": 0.2, "epochs": 4}).load("auto")


def test_a_setting_that_is_new_or_gone_is_named(tmp_path: Path) -> None:
    save(some(tmp_path, {"lr": 0.1, "old": 3}), {"step": 1})
    with pytest.raises(UserError, match=r"was made with old = 3, this run has None: give the same flags"):
        some(tmp_path, {"lr": 0.1}).load("auto")
    with pytest.raises(UserError, match=r"was made with new = None, this run has 4: give the same flags"):
        some(tmp_path, {"lr": 0.1, "old": 3, "new": 4}).load("auto")


@pytest.mark.parametrize("resume", ["auto", "no", "PATH"])
def test_restarted_workers_go_on_from_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str) -> None:
    """Whatever --resume says: it was for the first start, and they have gone on since."""
    saved = some(tmp_path)
    for step in (10, 20):
        save(saved, {"step": step})
    middle = saved.folder / files(tmp_path)[0]
    resume = resume.replace("PATH", str(middle))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    found = some(tmp_path).load(resume)
    assert found
    assert (found.step, len(files(tmp_path))) == (20, 2), "and nothing is set aside"
    for path in saved.folder.iterdir():
        if path != middle:
            path.unlink()
    found = some(tmp_path).load(resume)
    assert found
    assert found.step == 10


def test_another_number_of_threads_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It changes the last bits, as a pod's new CPU limit would."""
    before = torch.get_num_threads()
    save(some(tmp_path), {"step": 1})
    assert some(tmp_path).load("auto")
    assert capsys.readouterr().err == ""
    torch.set_num_threads(before + 1)
    try:
        assert some(tmp_path).load("auto")
    finally:
        torch.set_num_threads(before)
    said = f"continuing with {before + 1} thread(s) per rank, not {before}: sums are rounded differently; "
    assert capsys.readouterr().err == f"warning: {said}--threads {before} gives the same bits as before\n"


def test_that_there_is_nothing_to_resume_from_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = some(tmp_path)
    assert saved.load("auto") is None
    assert capsys.readouterr().out == f"no checkpoint in {saved.folder} yet: starting from the beginning\n"


def test_starting_afresh_moves_the_old_ones_aside(tmp_path: Path) -> None:
    for _ in range(2):
        saved = some(tmp_path)
        save(saved, {"step": 1})
        (saved.folder / ".step-1.tmp").touch()
        assert saved.load("no") is None
        assert not saved.folder.exists()
    assert len(list((tmp_path / "checkpoints.1").glob("step-*"))) == 1
    assert len(list((tmp_path / "checkpoints.2").glob("step-*"))) == 1
    assert some(tmp_path).load("auto") is None


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    saved = some(tmp_path)
    save(saved, {"step": 1})
    before = files(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # writes beyond fail as on a full disk
    try:
        with pytest.raises(UserError, match=r"cannot be written \(File too large\): [\d,]+ bytes needed, [\d,]+ free"):
            save(saved, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert files(tmp_path) == before
    read(saved.folder / before[0])


def test_a_file_is_whole_when_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a machine that loses power would keep the new name, and not all of the content."""
    sizes = list[int]()
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    write_atomically(tmp_path / "file", b"content")
    assert sizes[0] == len(b"content")


SAVE_AND_BE_KILLED = """
import hashlib, os, random, signal, sys, time
from pathlib import Path
from common.train.files import write_atomically
folder, choose, survived, number = Path(sys.argv[1]), random.Random(0), 0, 0
while number < 40 or (number < 400 and (survived <= 20 or len(list(folder.glob(".*.tmp"))) <= 5)):
    number += 1
    content = os.urandom(3_000_000)
    began = time.monotonic()
    write_atomically(folder / "measured", content)
    takes = time.monotonic() - began  # mostly in fsync: that of a busy disk is ten times longer
    path = folder / f"step-00000001-{hashlib.sha256(content).hexdigest()[:16]}.pt"
    child = os.fork()
    while child == 0:
        write_atomically(path, content)
    time.sleep(takes * (0.2 + 2 * choose.random()))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for path in folder.glob("step-*"):
        assert path.name[14:30] == hashlib.sha256(path.read_bytes()).hexdigest()[:16], path
        survived += 1
        path.unlink()
print(survived, len(list(folder.glob(".*.tmp"))))
"""


def test_killed_while_saving_no_checkpoint_is_damaged(programs: Programs, tmp_path: Path) -> None:
    """A process that saves without pause is killed 40 times or more; what bears a checkpoint's name is whole."""
    survived, temporary = map(int, programs.run("-c", SAVE_AND_BE_KILLED, tmp_path).stdout.split())
    assert survived > 20
    assert temporary > 5, "the kills did not hit a save"


SAVE_WITH_KEEP_1_AND_BE_KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from common.train.checkpoint import Checkpoints
from common.train.checkpoint_files import latest
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.set_num_threads(1)
choose, steps = random.Random(0), []
measured = Checkpoints(Path(sys.argv[1]) / "measured", {}, {}, keep=1)
while len(steps) < 30 or (len(steps) < 300 and len(set(steps)) <= 5):
    saved = Checkpoints(Path(sys.argv[1]), {"model": torch.nn.Linear(300, 300)}, {}, keep=1)
    if not steps:
        saved._write(1, {"progress": {"step": 1}})
    began = time.monotonic()
    measured._write(len(steps), {"model": saved.parts["model"].state_dict(), "progress": {"step": len(steps)}})
    takes = time.monotonic() - began
    step = latest(saved.folder).step
    child = os.fork()
    while child == 0:
        step += 1
        saved._write(step, {"model": saved.parts["model"].state_dict(), "progress": {"step": step}})
    time.sleep(takes * (0.2 + 2 * choose.random()))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = latest(saved.folder)
    assert found is not None, "a crash has left none"
    steps.append(found.step)
assert steps == sorted(steps)
# a kill between the rename and the deletion leaves one more, until a save is complete
last = steps[-1] + 1
saved._write(last, {"model": saved.parts["model"].state_dict(), "progress": {"step": last}})
print(len(set(steps)), *(path.name[5:13] == f"{last:08d}" for path in saved.folder.glob("step-*")))
"""


def test_one_that_is_kept_is_always_whole(programs: Programs, tmp_path: Path) -> None:
    """With --keep 1: the one before is deleted when the new one is on the disk, not earlier."""
    different, *left = programs.run("-c", SAVE_WITH_KEEP_1_AND_BE_KILLED, tmp_path).stdout.split()
    assert int(different) > 5, "the kills came before the first save"
    assert left == ["True"], "a complete save keeps the new one, and deletes what kills have left"


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        write_atomically(tmp_path / "file" / "below", b"x")


def test_a_sharded_part_is_refused(tmp_path: Path) -> None:
    """Rank 0 would write its own shard, and every rank would load that."""
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(4, 3)
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    with pytest.raises(UserError, match="part 'model' of the checkpoints is sharded"):
        Checkpoints(tmp_path / "checkpoints", {"model": model}, {}).load("no")
