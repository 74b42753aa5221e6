"""The index of a large folder: made once, shared, and never older than the folder."""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from common.images import index, sets
from common.images.cache import pixel_cache
from common.images.decode import Pixels
from common.images.find import Found, find_images, readable
from common.images.folder import ImageFolder
from common.images.index import index_places, listed_images
from common.images.sets import image_folders
from common.launch.errors import UserError
from tests.common.test_image_folders import animals, picture
from tests.conftest import Programs

QUICK = 20_000_000  # ns: longer than between two ticks of the clock of any local file system


@pytest.fixture(autouse=True)
def _any_folder_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "FEW", 1)
    monkeypatch.setattr(index, "COARSE", QUICK)


def settle() -> None:
    time.sleep(0.05)


def facts(found: Found) -> list[object]:
    return [found.classes, list(found.files), found.labels.tolist(), found.digest, found.unused, len(found.folders)]


def odd(folder: Path) -> Path:
    """What folders may hold: see test_image_folders.py."""
    root = animals(folder) / "train"
    (root / "cat").rename(os.fsdecode(os.fsencode(root) + "/狗".encode("gb18030")))
    picture(root / "dog" / "more" / "b.png")
    picture(root / "dog" / "more" / ".hidden.png")
    picture(root / "dog" / ".hidden" / "x.png")
    (root / "dog" / "notes.txt").touch()
    (root / "empty").mkdir()
    (root / "linked").symlink_to(folder / "val" / "cat")
    settle()
    return root


def files(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir()) if place.exists() else []


def test_what_is_read_is_what_was_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, place = odd(tmp_path / "data"), tmp_path / "not/yet/there"
    expected = facts(find_images(root))
    assert facts(listed_images(root, (), [place])) == expected
    (name,) = files(place)
    assert name.endswith(".images"), "neither a lock nor a half file is left"
    reference = ImageFolder(root, 8, training=False)
    monkeypatch.setattr(index, "find_images", None)  # nobody lists again
    assert facts(listed_images(root, (), [place])) == expected
    monkeypatch.chdir(tmp_path)
    assert facts(listed_images(Path("data/train"), (), [place])) == expected, "by another path"
    data = ImageFolder(root, 8, training=False, index=[place])
    for number in range(len(data)):
        assert data.file(number) == reference.file(number)
    assert data.__getitems__(range(len(data))).images.equal(reference.__getitems__(range(len(data))).images)


def test_the_digest_is_that_of_earlier_versions(tmp_path: Path) -> None:
    """Or their checkpoints could not be resumed: SHA-256 of an array of bytes of one length, and of int64."""
    root = odd(tmp_path)
    found = find_images(root)
    names = np.array([os.fsencode(name) for name in found.files])
    assert found.digest == hashlib.sha256(names.tobytes() + found.labels.tobytes()).hexdigest()[:16]


def added(root: Path) -> None:
    picture(root / "dog/new.png")


def removed(root: Path) -> None:
    (root / "dog/1.png").unlink()


def renamed(root: Path) -> None:
    (root / "dog/1.png").rename(root / "dog/7.png")


def swapped_between_classes(root: Path) -> None:
    (root / "dog/1.png").rename(root / "linked/7.png")


def deep(root: Path) -> None:
    picture(root / "dog/more/c.png")


def deeper(root: Path) -> None:
    picture(root / "dog/more/yet/c.png")


def new_class(root: Path) -> None:
    picture(root / "ant/0.png")


def lost_class(root: Path) -> None:
    shutil.rmtree(root / "dog")


def renamed_class(root: Path) -> None:
    (root / "dog").rename(root / "wolf")


def filled(root: Path) -> None:
    picture(root / "empty/0.png")


def behind_a_link(root: Path) -> None:
    picture(root.parent / "val/cat/new.png")


def another_link(root: Path) -> None:
    (root / "linked").unlink()
    (root / "linked").symlink_to(root.parent / "val" / "dog")


def with_its_old_time(root: Path) -> None:
    """As some programs that copy do."""
    before = (root / "dog").stat()
    picture(root / "dog/new.png")
    os.utime(root / "dog", ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = [
    *(added, removed, renamed, swapped_between_classes, deep, deeper, new_class, lost_class, renamed_class),
    *(filled, behind_a_link, another_link, with_its_old_time),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_noticed(tmp_path: Path, change: Callable[[Path], None]) -> None:
    root, place = odd(tmp_path / "data"), tmp_path / "index"
    before = facts(listed_images(root, (), [place]))
    assert facts(listed_images(root, (), [place])) == before
    change(root)
    settle()
    expected = facts(find_images(root))
    assert expected[:3] != before[:3] or change is another_link
    assert facts(listed_images(root, (), [place])) == expected
    assert facts(listed_images(root, (), [place])) == expected


def test_without_the_times_no_change_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: what `test_a_change_is_noticed` sees is decided by them."""
    root, place = odd(tmp_path / "data"), tmp_path / "index"
    for module in ("index", "find"):
        monkeypatch.setattr(f"common.images.{module}.stamp", lambda _: (1, 2, 3))
    before = facts(listed_images(root, (), [place]))
    added(root)
    assert facts(listed_images(root, (), [place])) == before


def test_other_pixels_of_the_same_name_are_no_change(tmp_path: Path) -> None:
    """Names and classes are the same; whoever keeps pixels asks the files themselves."""
    root, place = odd(tmp_path / "data"), tmp_path / "index"
    before = facts(listed_images(root, (), [place]))
    (root / "dog/0.png").write_bytes((root / "dog/1.png").read_bytes())
    assert facts(listed_images(root, (), [place])) == before == facts(find_images(root))


def test_a_list_made_just_after_a_change_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next change could have the same time."""
    root, place = odd(tmp_path / "data"), tmp_path / "index"
    monkeypatch.setattr(index, "COARSE", 60 * 10**9)
    assert facts(listed_images(root, (), [place])) == facts(find_images(root))
    assert files(place) == []


def test_a_small_folder_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, place = odd(tmp_path / "data"), tmp_path / "index"
    monkeypatch.setattr(index, "FEW", 100)
    assert facts(listed_images(root, (), [place])) == facts(find_images(root))
    assert files(place) == []


def flip(content: bytes, at: float) -> bytes:
    place = int(at * len(content))
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut short": lambda content: content[:-1],
    "cut in its head": lambda content: content[:20],
    "longer": lambda content: content + b"\0",
    "another file": lambda _: b"<html>404</html>" * 9,
    **{f"a bit at {at}": lambda content, at=at: flip(content, at) for at in (0.0, 0.02, 0.05, 0.3, 0.6, 0.99)},
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_index_is_made_anew(tmp_path: Path, damage: str) -> None:
    root, place = odd(tmp_path / "data"), tmp_path / "index"
    expected = facts(listed_images(root, (), [place]))
    (name,) = files(place)
    whole = (place / name).read_bytes()
    (place / f".{name}.tmp").write_bytes(whole[:50])  # of a process that was killed
    (place / name).write_bytes(DAMAGE[damage](whole))
    assert facts(listed_images(root, (), [place])) == expected
    assert (files(place), (place / name).read_bytes()) == ([name], whole)


def test_where_nothing_can_be_written_the_next_folder_is_taken(tmp_path: Path) -> None:
    root = odd(tmp_path / "data")
    (tmp_path / "file").touch()
    none = [tmp_path / "file", Path("/proc/index")]
    expected = facts(find_images(root))
    assert facts(listed_images(root, (), none)) == expected
    assert facts(listed_images(root, (), [*none, tmp_path / "index"])) == expected
    assert len(files(tmp_path / "index")) == 1


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, place = odd(tmp_path / "data"), tmp_path / "index"

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert facts(listed_images(root, (), [place])) == facts(find_images(root))
    assert files(place) == []


def test_a_temporary_folder_of_somebody_else_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = odd(tmp_path / "data")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/cache")
    *_, place = index_places(None)
    assert place.parent == tmp_path / "tmp"
    place.parent.mkdir()
    (tmp_path / "theirs").mkdir()
    place.symlink_to(tmp_path / "theirs")
    assert facts(listed_images(root, (), index_places(None))) == facts(find_images(root))
    assert files(tmp_path / "theirs") == []
    place.unlink()
    listed_images(root, (), index_places(None))
    assert len(files(place)) == 1
    assert place.stat().st_mode & 0o777 == 0o700


def test_the_folders_are_those_of_the_flags_and_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name, temporary = "distributed-training-examples", Path(tempfile.gettempdir())
    expected = [tmp_path / name, temporary / f"{name}-{os.getuid()}"]
    assert index_places(None) == expected
    assert index_places(Path("pixels")) == [Path("pixels"), *expected]


@pytest.mark.usefixtures("alone")
def test_mistakes_and_classes_are_as_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes of the training set decide the labels of the other, and each pair has an index of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    odd(tmp_path / "data")
    picture(tmp_path / "data/val/zebra/0.png")
    settle()
    for _ in range(2):
        with pytest.raises(UserError, match=r"val/cat: the training set has no such class, it has dog, linked, "):
            image_folders(tmp_path / "data", 8, seed=0)
    for name in ("cat", "zebra"):
        shutil.rmtree(tmp_path / "data/val" / name)
    settle()
    first, second = (image_folders(tmp_path / "data", 8, seed=0) for _ in range(2))
    assert first.identity == second.identity
    assert first.classes == second.classes == ["dog", os.fsdecode("狗".encode("gb18030"))]
    assert first.val.labels.tolist() == second.val.labels.tolist() == [0, 0, 0]
    assert len(files(tmp_path / "cache/distributed-training-examples")) == 2, "of train and of val"


LIST = """
import os, sys, time
from pathlib import Path
from common.images import find, index
index.FEW, index.COARSE = 1, 20_000_000
listing = index.find_images
def listed(*words):
    print("listed", flush=True)
    time.sleep(1)  # the others come, and wait
    return listing(*words)
index.find_images = listed
place = Path(sys.argv[2])
found = index.listed_images(Path(sys.argv[1]), (), [place])
def private():
    touched = sum(map(len, found.files)) + int(found.labels.sum())
    blocks = Path("/proc/self/smaps").read_text().split("VmFlags")
    (ours,) = [block for block in blocks if f"{place}/" in block]
    numbers = {line.split(":")[0]: int(line.split()[1]) for line in ours.splitlines() if line.endswith(" kB")}
    print("touched", touched, "kB mapped", numbers["Rss"], "private", numbers["Private_Dirty"], flush=True)
if os.fork() == 0:  # a worker of the loader
    private()
    os._exit(0)
os.wait()
private()
"""


def test_ranks_share_one_file_and_their_workers_copy_nothing(programs: Programs, tmp_path: Path) -> None:
    root = tmp_path / "data"
    picture(root / "0/0.png")
    for number in range(2000):
        (root / "0" / f"{number:06d}.png").touch()
    settle()
    ranks = [programs.start("-c", LIST, root, tmp_path / "index") for _ in range(3)]
    said = [programs.finish(rank).stdout.splitlines() for rank in ranks]
    assert [line for lines in said for line in lines].count("listed") == 1
    touched = [line.split() for lines in said for line in lines if line.startswith("touched")]
    assert len(touched) == 6
    assert {line[1] for line in touched} == {str(len("0/0.png") + 2000 * len("0/000000.png"))}
    assert all(int(line[4]) > 40 for line in touched), "kB"
    assert all(line[6] == "0" for line in touched)


# ------------------------------------------------------------------------------- the cache of decoded pixels


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("free", [900, 1300])
def test_the_size_of_the_cache_is_said_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """Six images of 8 x 8 pixels, 3 bytes each."""
    folder = animals(tmp_path / "data")
    monkeypatch.setattr(sets.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    cache = tmp_path / "pixels"
    if free < 1000:
        with pytest.raises(UserError) as error:
            image_folders(folder, 8, seed=0, cache=cache)
        assert str(error.value) == (
            f"--cache {readable(cache)}: about 1.15e-06 GB are needed, 9e-07 GB are free: "
            f"choose another folder, or leave out --cache"
        )
        assert not list(cache.rglob("chunk-*")), "nothing was decoded"
    else:
        image_folders(folder, 8, seed=0, cache=cache)
        image_folders(folder, 8, seed=0, cache=cache)
    said = capsys.readouterr().out
    line = f"cache {cache}: 6 of 6 images to decode, about 1.15e-06 GB; {free / 1e9:.3g} GB are free\n"
    assert said.count(line) == (1 if free < 1000 else 2), "of train and val, once"


def test_a_cache_that_is_there_announces_nothing(tmp_path: Path) -> None:
    data = ImageFolder(animals(tmp_path / "data") / "train", 8, training=False)
    asked: list[int] = []

    def pixels(number: int) -> Pixels:
        return data.pixels(number)

    for _ in range(2):
        pixel_cache(tmp_path, data.root, data.files, pixels, 1, asked.append)
    assert asked == [6]
