"""Dockerfiles, bake file, compose file and build context, without an engine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.rendered import EXAMPLES, REGISTRY, ROOT, TAG, manifests

DOCKER = ROOT / "docker"
BASE = (DOCKER / "base" / "Dockerfile").read_text()
NEEDED = [  # in the order of the layers: packages change rarely, the source often
    r"^ARG BASE_IMAGE=\S+:[\w.-]+@sha256:[0-9a-f]{64}$",
    r"^FROM python AS tools$",  # uv and pip stay there
    r"^FROM python$",
    r"PYTHONSAFEPATH=1 .*HOME=/tmp ",  # /out is writable for everyone; no home folder
    r"--mount=type=bind,from=tools,.*--mount=type=cache,.*--compile-bytecode .*--constraint /build",
    r"^ARG COMPILER=no$",
    r'if \[ "\$COMPILER" = yes \]; then .*g\+\+ python3-dev',
    r"^COPY common .*^COPY examples .*^COPY docker/torchrun.py ",
    r"chmod -R a\+rX \. ",
    r"^USER 10001:10001$",
    r'^ENTRYPOINT \["python", "/app/docker/torchrun.py"\]$',
]


def test_the_base_image_is_safe_by_itself() -> None:
    found, rest = [], BASE
    for pattern in NEEDED:
        match = re.search(pattern, rest, re.MULTILINE | re.DOTALL)
        found += [pattern] if match else []
        rest = rest[match.start() :] if match else rest
    assert found == NEEDED


def test_dockerfiles_are_clean() -> None:
    command = [Path(sys.executable).with_name("hadolint"), *DOCKER.glob("*/Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_image_adds_its_command(name: str) -> None:
    """And starts one rank where the pods of its overlay do."""
    source = (DOCKER / name / "Dockerfile").read_text()
    one = '"--nproc-per-node", "1", ' if manifests(f"{name}_gpu").processes == 1 else ""
    command = f'ENTRYPOINT ["python", "/app/docker/torchrun.py", {one}"-m", "examples.{name}"]'
    assert source.splitlines()[:3] == [f"ARG BASE={REGISTRY}/base:{TAG}", "FROM ${BASE}", command]


def test_the_bake_file_builds_every_image() -> None:
    bake = (DOCKER / "docker-bake.hcl").read_text()
    assert re.findall(r'^ {6,}"(\w+)",$', bake, re.MULTILINE) == EXAMPLES
    defaults = dict(re.findall(r'^variable "(\w+)" { default = "(.*)" }$', bake, re.MULTILINE))
    assert defaults == {"REGISTRY": REGISTRY, "TAG": TAG, "COMPILER": "no", "REVISION": "unknown"}


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_builds_what_exists(language: str) -> None:
    page = (ROOT / "docs" / language / "docker.md").read_text()
    lines = re.findall(rf"-f docker/(\w+)/Dockerfile -t {REGISTRY}/(\w+):{TAG} \.", page)
    assert lines == [("base", "base"), ("imagenet_ddp", "imagenet_ddp")]
    assert set(re.findall(rf"{REGISTRY}/(\w+):", page)) <= {"base", *EXAMPLES}


def test_only_the_source_is_in_the_build_context() -> None:
    rules = (ROOT / ".dockerignore").read_text().splitlines()[1:]
    source = ["constraints.txt", "pyproject.toml", "common", "tools", "examples"]
    assert rules[:7] == ["*", *(f"!{name}" for name in [*source, "docker/torchrun.py"])]
    assert "**/__pycache__" in rules


def test_the_nodes_of_the_compose_file_are_like_pods() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    job = manifests("imagenet_ddp")
    for index, node in enumerate(compose["services"].values()):
        assert (node["user"], node["read_only"], node["cap_drop"]) == ("10001:10001", True, ["ALL"])
        assert node["stop_grace_period"] == f"{job.pod['terminationGracePeriodSeconds']}s"
        assert node["command"] == job.container["args"][2:]
        pod = job.environment(index) | {"PET_MASTER_ADDR": "node-0"}
        assert {key: pod[key] for key in node["environment"]} == node["environment"]
    assert compose["networks"] == {"job": {"internal": True}}
