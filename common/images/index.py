"""The list of a folder's images, kept in a file: made once, mapped by all ranks and their workers.

One process lists the folder while the others of the node wait for it; all then read the same pages
of the file, and so do later runs. The file counts only as long as no folder in it has changed: to
read the number and the times of each (`stamp`) takes milliseconds, where listing takes seconds.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torchvision.datasets.folder import IMG_EXTENSIONS

from common.images.find import Found, Stamp, find_images, stamp
from common.images.names import Names

MAGIC = b"images01"
START = len(MAGIC) + 16  # of the header: after a checksum of all that follows, and its length
FEW = 10_000  # images that are listed in less time than an index is worth
# A file system may give two changes within this time, ns, the same time: a list that was made so
# soon after a change may lack the next one.
COARSE = 2_000_000_000
NAME = "distributed-training-examples"


def index_places(cache: Path | None) -> list[Path]:
    """Folders for the index, the best first: that of --cache, the user's, and a temporary one."""
    places = [cache] if cache else []
    with contextlib.suppress(RuntimeError):  # a container's user may have no home
        places.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / NAME)
    return [*places, _temporary()]


def listed_images(root: Path, classes: Sequence[str] = (), places: Sequence[Path] = ()) -> Found:
    """The images of a folder, from its index if there is a valid one; else it is made.

    Processes that ask at the same time wait for the first of them.

    Args:
        root: the folder.
        classes: as of `find_images`.
        places: folders for the index; the first that can be written takes a new one. Without any,
            the folder is listed.

    Raises:
        UserError: as `find_images`.
    """
    name = _name(root, classes)
    places = [place for place in places if _trusted(place)]
    for place in places:
        if found := _read(place / name, root):
            return found
    for place in [] if _just_changed(root) else places:
        with contextlib.ExitStack() as held:
            try:
                place.mkdir(0o700 if place == _temporary() else 0o777, True, True)
                lock = place / f".{name}.lock"
                waited = _lock(held.enter_context(lock.open("wb")))
            except OSError:  # or the file system does not support locks
                continue
            held.callback(lock.unlink, missing_ok=True)
            found = _read(place / name, root)
            if waited and not found:  # it is not worth one: nobody waits for this process, too
                break
            return found or _indexed(place / name, root, classes)
    return find_images(root, classes)


def _indexed(path: Path, root: Path, classes: Sequence[str]) -> Found:
    """List the images, and keep the list if that is worth it, and possible."""
    began = time.time_ns()
    found = find_images(root, classes)
    if len(found.files) >= FEW and _old(list(found.folders.values()), began):
        with contextlib.suppress(OSError):  # the disk is full
            _write(path, found)
    return _read(path, root) or found


def _name(root: Path, classes: Sequence[str]) -> str:
    """Of the index: the same for all who would find the same, and no others.

    The root's stamp is in it for nodes that have images of their own and caches in common.
    """
    what = [os.path.realpath(root), stamp(root), list(classes), IMG_EXTENSIONS]
    return f"{hashlib.sha256(MAGIC + json.dumps(what).encode()).hexdigest()[:16]}.images"


def _temporary() -> Path:
    return Path(tempfile.gettempdir(), f"{NAME}-{os.getuid()}")


def _trusted(place: Path) -> bool:
    """Whether nobody else has made a folder of this name where everybody may make folders."""
    if place != _temporary() or not os.path.lexists(place):
        return True
    return not place.is_symlink() and place.stat().st_uid == os.getuid()


def _just_changed(root: Path) -> bool:
    """Whether the folder or a class in it is so new that an index would not be kept."""
    try:
        entries = list(os.scandir(root))
    except OSError:  # which is said when the images are looked for
        entries = []
    classes = [Path(one) for one in entries if one.is_dir() and not one.name.startswith(".")]
    return not _old([stamp(folder) for folder in (root, *classes)], time.time_ns())


def _old(stamps: Sequence[Stamp], now: int) -> bool:
    return all(0 < max(times) < now - COARSE for _, *times in stamps)


def _lock(file: Any) -> bool:
    """Lock a file until it is closed; whether that had to wait for another process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(file, fcntl.LOCK_EX)
        return True
    return False


def _write(path: Path, found: Found) -> None:
    """Write an index, whole or not at all."""
    facts: dict[str, Any] = {"classes": found.classes, "digest": found.digest}
    facts |= {"unused": found.unused, "folders": found.folders, "images": len(found.files)}
    header = json.dumps(facts).encode()
    header += b" " * (-len(header) % 8)
    arrays = (found.files.ends, found.labels, found.files.text)
    parts = [memoryview(header), *(array.data for array in arrays)]
    size = np.array([len(header)], np.uint64).tobytes()
    checksum = xxhash.xxh3_64(size)
    for part in parts:
        checksum.update(part)
    temporary = path.with_name(f".{path.name}.tmp")  # ours: we have the lock
    try:
        with temporary.open("wb") as file:
            file.write(MAGIC + np.array([checksum.intdigest()], np.uint64).tobytes() + size)
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path, root: Path) -> Found | None:
    """Map an index; None if there is none, it is damaged, or the folder has changed since."""
    try:
        length = path.stat().st_size
        if length < START:
            return None
        # As the pixel cache: no file stays open, and what is not written to is not copied.
        content = torch.from_file(str(path), size=length, dtype=torch.uint8).numpy()
    except (OSError, RuntimeError):
        return None
    checksum, size = (int(value) for value in content[len(MAGIC) : START].view(np.uint64))
    right = bytes(content[: len(MAGIC)]) == MAGIC
    if not right or xxhash.xxh3_64_intdigest(content[START - 8 :].data) != checksum:
        return None
    facts: dict[str, Any] = json.loads(content[START : START + size].tobytes())
    if any(list(stamp(root / name)) != known for name, known in facts["folders"].items()):
        return None
    ends, labels, text = np.split(
        content[START + size :], [8 * facts["images"], 16 * facts["images"]]
    )
    files, numbers = Names(text, ends.view(np.int64)), labels.view(np.int64)
    return Found(
        facts["classes"], files, numbers, facts["digest"], facts["unused"], facts["folders"]
    )
