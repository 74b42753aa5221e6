"""mnist_ddp_spawn's page says how to write images in MNIST's format: what it writes is read, the same bytes."""

from pathlib import Path

import numpy as np
import pytest

from common.data.idx import image_data
from tests.conftest import ROOT
from tests.docs.markdown import FENCE

FOLDER = ROOT / "examples" / "mnist_ddp_spawn"


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_images_written_as_the_page_says_are_read(tmp_path: Path, page: str) -> None:
    (code,) = (code for language, code in FENCE.findall((FOLDER / page).read_text()) if language == "python")
    numbers = np.random.default_rng(0)
    images, labels = numbers.integers(0, 256, (30, 12, 12)), np.arange(30) % 3
    given = {"x_train": images[:20], "y_train": labels[:20], "x_test": images[20:], "y_test": labels[20:]}
    exec(code, {"folder": tmp_path, **given})
    data = image_data(str(tmp_path), Path())
    for part, kept in ((data.train, slice(20)), (data.test, slice(20, None))):
        assert (part.pixels.squeeze(1).numpy() == images[kept]).all()
        assert (part.labels.numpy() == labels[kept]).all()
    assert data.classes == 3
    assert (data.mean, data.std) == pytest.approx((images[:20].mean() / 255, images[:20].std(ddof=1) / 255))
