"""What the tests of common share: a process group, the ways to decode an image."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from common.images import decode as decoder
from common.launch.rendezvous import JOB


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one process, in this one."""
    threads = torch.get_num_threads()
    dist.init_process_group("gloo", init_method=JOB)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture(params=["nvimgcodec", "simplejpeg", "Pillow"])
def each_decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """simplejpeg decodes where nvimgcodec has no wheel, and Pillow where neither is installed."""
    monkeypatch.setattr(decoder, "DECODER", request.param)
