"""Two nodes that have addresses of IPv6 only. Needs root, and `ip` (Debian: iproute2)."""

from pathlib import Path

import pytest

from tests.conftest import Programs
from tests.faults.network import ip
from tests.runs import result
from tests.warm import SPACE

pytestmark = pytest.mark.timed  # beside the others that need `ip`: the rest of the tests does not wait for it
MEETING = (
    ({}, ("--world-size", 2, "--dist-url", "tcp://[fd77::1]:29500")),
    ({"PET_NNODES": "2", "PET_MASTER_ADDR": "fd77::1", "PET_MASTER_PORT": "29500"}, ()),
)


@pytest.mark.parametrize(("variables", "flags"), MEETING, ids=["flags", "variables"])
def test_two_nodes_meet_by_ipv6(
    programs: Programs, tmp_path: Path, network: tuple[str, str], variables: dict[str, str], flags: tuple[object, ...]
) -> None:
    """Their store is reached by a number with colons, which a URL has in brackets."""
    nodes = []
    for number, space in enumerate(network):
        ip("-n", space, "address", "flush", "dev", "cable")
        ip("-n", space, "address", "add", f"fd77::{number + 1}/64", "dev", "cable", "nodad")
    for number, space in enumerate(network):
        env = {SPACE: space, "GLOO_SOCKET_IFNAME": "cable", "PET_NODE_RANK": str(number)} | variables
        own = ("--rank", number) if flags else ()
        words = ("-m", "examples.mnist_ddp_spawn", "--epochs", 1, "--limit-steps", 3, *flags, *own)
        nodes.append(programs.start(*words, "--out", tmp_path / str(number), env=env))
    for node in nodes:
        programs.finish(node, limit=100)
    assert result(tmp_path / "0")["world_size"] == 2
