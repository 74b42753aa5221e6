"""Dockerfiles, bake file, compose file and build commands, without an engine; `make e2e` runs them."""

import fnmatch
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.e2e.engine import COMMANDS, HARDENED, build
from tests.k8s.rendered import BUILT, EXAMPLES, manifests

DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("*/Dockerfile"))
BIN = Path(sys.executable).parent
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
HARD = {
    "read_only": True,
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "tmpfs": ["/tmp:exec,size=1g"],
    "user": "10001:10001",
    "networks": ["job"],
}


def tool(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN / name, *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.parent.name)
def test_dockerfiles_are_clean(file: Path) -> None:
    done = tool("hadolint", file)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_linter_sees_mistakes(tmp_path: Path) -> None:
    source = (DOCKER / "base" / "Dockerfile").read_text()
    for number, (old, new) in enumerate(
        [("--no-install-recommends ", ""), ("USER 10001:10001", "USER root"), ("WORKDIR /out", "WORKDIR out")]
    ):
        assert old in source
        file = tmp_path / f"Dockerfile{number}"
        file.write_text(source.replace(old, new))
        assert tool("hadolint", file).returncode != 0, new


def test_scripts_are_clean() -> None:
    scripts = [
        ROOT / "tests/e2e/prepare.sh",
        ROOT / ".ci/run",
        ROOT / "tests/install.sh",
        ROOT / "examples/imagenet_ddp/job.sbatch",
    ]
    done = tool("shellcheck", *scripts)
    assert (done.returncode, done.stdout) == (0, "")


def unsafe(image: str, source: str) -> list[str]:
    """What an image's Dockerfile must have and has not."""
    last = source[source.rindex("FROM ") :]
    found = []
    if re.findall(r"^USER (\S+)$", last, re.MULTILINE)[-1:] != ["10001:10001"]:
        found.append("ends as root")
    if re.search(r":latest|^ADD |curl|wget|git clone|chmod 777", source, re.MULTILINE):
        found.append("unpinned")
    if image == "base":
        if not re.search(r"^ARG BASE_IMAGE=\S+:[\w.-]+@sha256:[0-9a-f]{64}$", source, re.MULTILINE):
            found.append("the base image is not pinned by tag and digest")
        copied = "COPY docker/entrypoint.py docker/entrypoint.py\n" in last
        if not copied or 'ENTRYPOINT ["python", "/app/docker/entrypoint.py", "--"]' not in last:
            found.append("no first process")
        if source.count("FROM ") < 3 or "python3-venv" in last:
            found.append("the tools that install are kept")
        for word in ("--mount=type=cache", "constraints.txt", "--compile-bytecode", "PYTHONSAFEPATH=1", "HOME=/tmp"):
            if word not in last:
                found.append(f"no {word}")
        if last.index("uv pip install") > last.index("COPY common"):
            found.append("the source comes before the packages")
        compiler = last.find("recommends g++ python3-dev")
        if not 0 < last.find("ARG COMPILER=no\n") < last.find('if [ "$COMPILER" = yes ]; then') < compiler:
            found.append("a compiler that nobody has asked for, or none")
        if not last.index("uv pip install") < compiler < last.index("COPY common"):
            found.append("a compiler makes other layers large")
    elif (
        not re.search(rf'^ENV PROGRAM="?examples\.{image}\b', last, re.MULTILINE)
        or f"COPY examples/{image} " not in last
    ):
        found.append("another program")
    return found


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.parent.name)
def test_images_are_safe_by_themselves(file: Path) -> None:
    assert unsafe(file.parent.name, file.read_text()) == []


@pytest.mark.parametrize(
    ("image", "old", "new"),
    [
        ("base", "USER 10001:10001", "USER 0"),
        ("base", "@sha256:", "@sha256-"),
        ("base", "13.0.3-base-ubuntu24.04@", "@"),
        ("base", "/app/docker/entrypoint.py", "/app/docker/other.py"),
        ("base", "COPY docker/entrypoint.py", "COPY docker/build.py"),
        ("base", "--compile-bytecode", ""),
        ("base", "--mount=type=cache", "--mount=type=tmpfs"),
        ("base", "PYTHONSAFEPATH=1", "PYTHONSAFEPATH="),
        ("base", "HOME=/tmp", "HOME=/root"),
        ("base", "ARG COMPILER=no", "ARG COMPILER=yes"),
        ("base", "= yes ]; then", "= yes ] || true; then"),
        ("base", "g++ python3-dev", "python3-dev"),
        ("gan_ddp", "USER 10001:10001", ""),
        ("gan_ddp", 'PROGRAM="examples.gan_ddp', 'PROGRAM="examples.bert_dp'),
    ],
)
def test_what_makes_an_image_unsafe_is_seen(image: str, old: str, new: str) -> None:
    source = (DOCKER / image / "Dockerfile").read_text()
    assert old in source
    assert unsafe(image, source.replace(old, new))


def test_the_bake_file_has_every_image() -> None:
    bake = json.loads((DOCKER / "docker-bake.json").read_text())
    targets = bake["group"]["default"]["targets"]
    assert set(targets) == {"base", *EXAMPLES} == {file.parent.name for file in DOCKERFILES}
    assert set(BUILT) <= set(targets)
    for name in targets:
        target = build.targets({})[name]
        assert target["dockerfile"] == f"docker/{name}/Dockerfile"
        assert target["tags"] == [f"localhost/distributed-training-examples/{name}:0.1.0"]
        args = set(re.findall(r"^ARG (\w+)", (ROOT / target["dockerfile"]).read_text(), re.MULTILINE))
        assert set(target["args"]) <= args
    assert build.targets({"REGISTRY": "here/mine", "TAG": "7"})["gan_ddp"]["tags"] == ["here/mine/gan_ddp:7"]


def test_the_bake_file_passes_on_what_the_build_command_does() -> None:
    """By the same variables: bake alone would build on the Dockerfile's base, whatever was asked for."""
    source = (DOCKER / "base" / "Dockerfile").read_text()
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", source, re.MULTILINE))
    assert build.targets({})["base"]["args"] == {name: defaults[name] for name in defaults}
    given = {"BASE_IMAGE": "debian", "REVISION": "abc", "TAG": "7", "COMPILER": "yes"}
    args = build.targets(given)["base"]["args"]
    assert args == {"BASE_IMAGE": "debian", "REVISION": "abc", "VERSION": "7", "COMPILER": "yes"}
    assert "BASE_IMAGE=other" in build.commands(["base"], "other", given, "docker")[0]


def test_images_with_a_compiler_have_names_of_their_own() -> None:
    """One variable for make, build.py and bake; each image is built on the base that has the compiler."""
    plain, other = build.targets({"TAG": "7", "COMPILER": "no"}), build.targets({"TAG": "7", "COMPILER": "yes"})
    assert plain == build.targets({"TAG": "7"})
    assert {name: image["tags"] for name, image in other.items()} == {
        name: [f"{tag}-compile" for tag in image["tags"]] for name, image in plain.items()
    }
    assert (plain["base"]["args"]["COMPILER"], other["base"]["args"]["COMPILER"]) == ("no", "yes")
    base, example = build.commands(["gan_ddp"], None, {"COMPILER": "yes"}, "docker")
    assert "COMPILER=yes" in base
    assert "BASE=localhost/distributed-training-examples/base:0.1.0-compile" in example
    env = {"PATH": "/nowhere", "COMPILER": "1"}
    done = subprocess.run([sys.executable, DOCKER / "build.py"], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: COMPILER=1: it is yes or no\n")


def test_the_build_commands() -> None:
    """The base first, as the example's base; another base image goes to the base image only."""
    base, example = build.commands(["gan_ddp"], "debian", {"TAG": "7"}, "podman")
    assert base[-1] == example[-1] == "."
    assert "BASE_IMAGE=debian" in base
    assert "BASE_IMAGE=debian" not in example
    assert "BASE=localhost/distributed-training-examples/base:7" in example
    assert len(build.commands([], None, {}, "docker")) == len(DOCKERFILES)


def test_a_private_index_is_passed_on_as_a_secret(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("certificate")
    env = {"UV_INDEX_URL": "address", "PIP_INDEX_URL": "address", "PIP_FIND_LINKS": "/wheels", "HTTPS_PROXY": "proxy"}
    words = build.secrets(tmp_path, env | {"SSL_CERT_FILE": str(tmp_path / "ca.pem"), "SECRET_KEY": "x"})
    assert words == ["--secret", f"id=settings,src={tmp_path}/settings", "--secret", f"id=ca,src={tmp_path}/ca"]
    settings = (tmp_path / "settings").read_text().splitlines()
    assert settings == [f"export {name}='{env[name]}'" for name in ("UV_INDEX_URL", "PIP_INDEX_URL", "HTTPS_PROXY")]
    assert (tmp_path / "ca").read_text() == "certificate"


def test_an_unknown_image_and_no_engine_are_mistakes(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, DOCKER / "build.py", "x"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[:25]) == (2, "error: no such image: x; ")
    command = [sys.executable, DOCKER / "build.py"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: neither docker")


def sent(names: list[str]) -> list[str]:
    """The paths that .dockerignore lets into the build, by its rules: the last match decides."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    found = []
    for name in names:
        keep = True
        for rule in rules:
            pattern = rule.lstrip("!").removeprefix("**/")
            parts = [name, *map(str, Path(name).parents)]
            if any(fnmatch.fnmatch(part, pattern) or fnmatch.fnmatch(Path(part).name, pattern) for part in parts):
                keep = rule[0] == "!"
        found += [name] * keep
    return found


def test_only_the_source_is_sent_to_the_build() -> None:
    names = ["common/train/run.py", "examples/gan_ddp/train.py", "constraints.txt", "pyproject.toml"]
    names += ["docker/entrypoint.py"]
    others = ["runs/x/best.safetensors", ".git/config", ".venv/bin/python", "data/mnist/x", "tests/conftest.py"]
    others += ["docker/build.py", "docker/base/Dockerfile", "common/train/__pycache__/run.pyc"]
    others += ["examples/imagenet_ddp/README.md", "Makefile", "k8s/base/job.yaml"]
    assert sent(names + others) == names


def test_the_nodes_of_the_compose_file_are_as_hard_as_pods() -> None:
    services: dict[str, dict[str, Any]] = COMPOSE["services"]
    assert list(services) == ["node-0", "node-1"]
    job = manifests("overlays/imagenet_ddp")
    for number, (name, service) in enumerate(services.items()):
        assert {key: service[key] for key in HARD} == HARD
        assert not {"privileged", "ports", "network_mode", "pid", "ipc", "devices", "cap_add"} & service.keys()
        assert service["hostname"] == name
        assert service["volumes"] == ["out:/out"]
        assert service["stop_grace_period"] == f"{job.pod['terminationGracePeriodSeconds']}s"
        assert service["command"] == job.container["args"]
        env = service["environment"]
        assert env == {
            "PET_NNODES": str(len(services)), "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(number),
            "PET_MASTER_ADDR": "node-0", "PET_MASTER_PORT": "29500",
        }  # fmt: skip
        image = service["image"].replace("${REGISTRY:-", "").replace("${TAG:-", "").replace("}", "")
        assert image == job.container["image"]
    assert COMPOSE["networks"] == {"job": {"internal": True}}


def test_the_page_names_what_there_is() -> None:
    text = (ROOT / "docs/en/docker.md").read_text()
    assert HARDENED
    for name, tag in re.findall(r"distributed-training-examples/(\w+):([\w.-]+)", text):
        assert build.targets({})[name]["tags"] == [f"localhost/distributed-training-examples/{name}:{tag}"]
    assert "\nmake images COMPILER=yes " in text
    users: dict[str, set[str]] = {}
    for command in COMMANDS:
        for volume in re.findall(r" -v (\w+):/out ", command):
            users.setdefault(volume, set()).update(re.findall(r"--user (\S+)", command) or ["10001:10001"])
    assert len(users) == 2
    assert all(len(found) == 1 for found in users.values()), "the second user cannot write where the first has"
    assert shutil.which("kubectl"), "kubectl (1.27 or newer) renders the manifests: install it"


def test_an_engine_that_is_not_here_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        build.engine({"ENGINE": "of_nobody"})
    assert capsys.readouterr().err == "error: ENGINE=of_nobody: there is no such command\n"
