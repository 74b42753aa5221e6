"""Build the images of docker-bake.json with docker or podman, whichever is there (standard library only).

    python3 docker/build.py                                  # all
    python3 docker/build.py imagenet_ddp                     # one, and the base image that it needs
    python3 docker/build.py --base-image debian:trixie-slim  # on another base than CUDA's
    COMPILER=yes python3 docker/build.py                     # with what --compile needs; tags end in -compile

`docker buildx bake -f docker/docker-bake.json` builds the same images, with the same variables (and
BASE_IMAGE for the flag), where buildx is installed. It neither asks git for the revision nor
passes on the settings of a private index.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BAKE = Path(__file__).with_name("docker-bake.json")
CHOICE = re.compile(r'\$\{(\w+) == "(\w+)" \? "(.*)" : "(.*)"\}')  # the one kind of expression in the bake file
# What uv and pip know of a private index or a proxy here, they must know while building; folders are not there.
SETTINGS = re.compile(r"(?i)(UV|PIP)_(\w+_)?(INDEX|INDEX_URL|HOST|TIMEOUT|URL)|(HTTPS?|NO|ALL)_PROXY")


def engine(env: Mapping[str, str]) -> str:
    """The container engine: ENGINE, docker where its daemon answers, or podman.

    Raises:
        SystemExit: there is none.
    """
    if "ENGINE" in env:
        if shutil.which(env["ENGINE"]):
            return env["ENGINE"]
        print(f"error: ENGINE={env['ENGINE']}: there is no such command", file=sys.stderr)
        raise SystemExit(2)
    docker = shutil.which("docker")
    if docker and subprocess.run([docker, "info"], capture_output=True, check=False).returncode == 0:
        return "docker"
    if shutil.which("podman"):
        return "podman"
    print("error: neither docker (with a running daemon) nor podman is here: install one of them", file=sys.stderr)
    raise SystemExit(2)


def targets(env: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The images of the bake file, in the order in which they are built, variables and inherited settings put in."""
    text = BAKE.read_text()
    values: dict[str, str] = {}
    for name, variable in json.loads(text)["variable"].items():
        default = variable["default"]
        if choice := CHOICE.fullmatch(default):
            default = choice[3] if values[choice[1]] == choice[2] else choice[4]
        values[name] = env.get(name, default)
        text = text.replace(f"${{{name}}}", values[name])
    bake = json.loads(text)
    found = {}
    for name in bake["group"]["default"]["targets"]:
        own = bake["target"][name]
        parents = [bake["target"][parent] for parent in own.get("inherits", [])]
        found[name] = {key: value for target in (*parents, own) for key, value in target.items()}
    return found


def commands(names: list[str], base_image: str | None, env: Mapping[str, str], program: str) -> list[list[str]]:
    """The build commands for some images and those that they are built on.

    Raises:
        KeyError: there is no such image.
    """
    images = targets(env)
    needed = dict.fromkeys(names or images)
    for name in names:
        bases = [source.removeprefix("target:") for source in images[name].get("contexts", {}).values()]
        needed = dict.fromkeys([*bases, *needed])
    result = []
    for name in needed:
        image = images[name]
        args = dict(image["args"])
        for context, source in image.get("contexts", {}).items():
            tag = images[source.removeprefix("target:")]["tags"][0]
            args = {key: tag if value == context else value for key, value in args.items()}
        if base_image and name == "base":
            args["BASE_IMAGE"] = base_image
        words = [program, "build", "--file", image["dockerfile"], "--tag", image["tags"][0]]
        if program == "podman":
            words += ["--network", "host"]
        for key, value in args.items():
            words += ["--build-arg", f"{key}={value}"]
        result.append([*words, image["context"]])
    return result


def secrets(folder: Path, env: Mapping[str, str]) -> list[str]:
    """Files for the secrets of the base image, and the flags that pass them on; none of them stays in an image."""
    exports = [f"export {name}='{value}'" for name, value in env.items() if SETTINGS.fullmatch(name)]
    (folder / "settings").write_text("".join(line + "\n" for line in exports if "='/" not in line))
    certificate = Path(env.get("SSL_CERT_FILE", "/nowhere"))
    (folder / "ca").write_bytes(certificate.read_bytes() if certificate.is_file() else b"")
    return [word for name in ("settings", "ca") for word in ("--secret", f"id={name},src={folder / name}")]


def main() -> int:
    """Build what is asked for."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--base-image", help="base of the base image (default: BASE_IMAGE, or the bake file's)")
    flags.add_argument("images", nargs="*", help="names as in the bake file (default: all)")
    args = flags.parse_args()
    unknown = sorted(set(args.images) - targets(os.environ).keys())
    if unknown:
        print(
            f"error: no such image: {', '.join(unknown)}; there are {', '.join(targets(os.environ))}", file=sys.stderr
        )
        return 2
    if os.environ.get("COMPILER", "no") not in ("yes", "no"):
        print(f"error: COMPILER={os.environ['COMPILER']}: it is yes or no", file=sys.stderr)
        return 2
    git = shutil.which("git") or "/bin/false"
    head = subprocess.run([git, "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    env = {"REVISION": head.stdout.strip() or "unknown"} | dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        for command in commands(args.images, args.base_image, env, engine(env)):
            words = [*command[:2], *secrets(Path(folder), env), *command[2:]]
            print("+", *command, flush=True)
            # BuildKit, for the mounts in the Dockerfiles; podman has them by itself.
            code = subprocess.run(words, cwd=ROOT, env=env | {"DOCKER_BUILDKIT": "1"}, check=False).returncode
            if code != 0:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
