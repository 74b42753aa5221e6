"""The files of MNIST and Fashion-MNIST: found in a folder, or downloaded into it."""

from pathlib import Path

from common.launch.collectives import local_rank0_first
from common.launch.errors import UserError

TORCHVISION = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}  # names of its classes
FILES = [
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
]


def mnist_folder(directory: Path, name: str) -> Path:
    """The folder with the four idx files of MNIST or Fashion-MNIST.

    Every rank calls this: one process per node downloads while the others wait.

    Args:
        directory: holds the files (.gz or not) itself, or in the folders that torchvision makes.
        name: `mnist` or `fashion-mnist`.

    Raises:
        UserError: the files are missing, and the download fails.
    """
    with local_rank0_first(f"download of {name}"):
        folder = _find(directory, name)
        if folder is None:
            _download(directory, name)
            folder = _find(directory, name)
            assert folder is not None
    return folder


def _find(directory: Path, name: str) -> Path | None:
    for folder in (directory, directory / TORCHVISION[name] / "raw", directory / "raw"):
        if all(any(folder.glob(f"{file}*")) for file in FILES):
            return folder
    return None


def _download(directory: Path, name: str) -> None:
    import torchvision  # 1 to 4 seconds, which only a download has to pay

    raw = directory / TORCHVISION[name] / "raw"
    before = set(raw.glob("*"))
    try:
        getattr(torchvision.datasets, TORCHVISION[name])(str(directory), download=True)
    except (OSError, RuntimeError) as error:
        for path in set(raw.glob("*")) - before:  # torchvision leaves a file with a wrong checksum
            path.unlink()
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{name} is not in {directory} and cannot be downloaded ({reason}); "
            f"put its four idx files there, or use --dataset digits, which needs no file"
        ) from None
