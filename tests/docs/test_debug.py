"""The page 'Debug one rank': its ways are tried, by pdb over a pipe and by a client of debugpy."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Programs
from tests.docs.markdown import shell_blocks
from tests.machine import here
from tests.runs import mutated, result

PAGE = (ROOT / "docs" / "en" / "debug.md").read_text()
STOP, ATTACH = re.findall(r"```python\n(.*?)```", PAGE, re.S)
CONFIGURATIONS = {
    each["name"]: each for each in json.loads(re.findall(r"```json\n(.*?)```", PAGE, re.S)[0])["configurations"]
}
PDB, TORCHRUN = (" ".join(block.commands) for block in shell_blocks(PAGE))
TRAIN = "examples/mnist_ddp_spawn/train.py"


def asked(programs: Programs, command: str, answers: str, cwd: Path, out: Path) -> str:
    """What a command of the page says, whose debugger reads these answers."""
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "DDP_TEST_RUN": programs.token}
    words = [*command.split(), "--out", str(out)]
    done = subprocess.run(words, cwd=cwd, env=env, input=answers, capture_output=True, text=True, timeout=here(200))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def stopping(folder: Path, line: str) -> Path:
    """A copy of the project that stops with these words in the third step."""
    line = line.partition("  #")[0].strip()
    before = "                optimizer.zero_grad()\n"
    return mutated(
        folder, (TRAIN, before, f"                if run.state.step == 2:\n                    {line}\n{before}")
    )


@pytest.mark.timeout(300)
def test_one_process_under_pdb(programs: Programs, tmp_path: Path) -> None:
    lines = (ROOT / TRAIN).read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if "evaluation = evaluate(" in line)
    answers = f"tbreak {TRAIN}:{number}\nc\np ('epochs', args.num_epochs)\nc\n"
    said = asked(programs, PDB, answers, ROOT, tmp_path / "out")
    assert "('epochs', 1)" in said
    assert result(tmp_path / "out")["world_size"] == 1


@pytest.mark.timeout(300)
def test_one_rank_of_torchruns(programs: Programs, tmp_path: Path) -> None:
    project = stopping(tmp_path / "project", STOP)
    said = asked(programs, TORCHRUN, "up\np ('rank', rank, loss.item() > 0)\nc\n", project, tmp_path / "out")
    assert said.count("('rank', 1, True)") == 1
    assert result(tmp_path / "out")["world_size"] == 2


def test_a_rank_of_ours_has_no_terminal(programs: Programs, tmp_path: Path) -> None:
    project = stopping(tmp_path / "project", "breakpoint()")
    done = programs.run("-m", "examples.mnist_ddp_spawn", "--nproc", 2, "--out", tmp_path, cwd=project, code=1)
    assert "BdbQuit" in done.stdout + done.stderr


def test_launch_json_starts_what_it_says(programs: Programs, tmp_path: Path) -> None:
    ranks = {"one process": 1, "two ranks, by torchrun": 2}
    assert {name for name, each in CONFIGURATIONS.items() if each["request"] == "launch"} == ranks.keys()
    for name, number in ranks.items():
        words = ("-m", CONFIGURATIONS[name]["module"], *CONFIGURATIONS[name]["args"])
        programs.run(*words, "--out", tmp_path / str(number))
        assert result(tmp_path / str(number))["world_size"] == number


def attach(port: int, deadline: float) -> list[dict[str, Any]]:
    """What an editor says to a program that waits for it, and the answers."""
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port))
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "nobody listens"
            time.sleep(0.1)
    messages: list[dict[str, Any]] = []
    with connection, connection.makefile("rwb") as stream:

        def send(command: str, **arguments: object) -> None:
            request = {"seq": 1, "type": "request", "command": command, "arguments": arguments}
            body = json.dumps(request).encode()
            stream.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            stream.flush()

        def read_until(**wanted: str) -> None:
            while not messages or not wanted.items() <= messages[-1].items():
                length = int(stream.readline().split(b":")[1])
                stream.readline()
                messages.append(json.loads(stream.read(length)))

        send("initialize", adapterID="test")
        read_until(type="response", command="initialize")
        send("attach", justMyCode=False)
        read_until(type="event", event="initialized")
        send("configurationDone")
        read_until(type="response", command="attach")
        read_until(type="event", event="terminated")
    return messages


@pytest.mark.timeout(300)
def test_an_editor_attaches_to_a_rank(programs: Programs, tmp_path: Path, free_port: int) -> None:
    """It waits for its editor, and the other rank for it; then the training goes on."""
    assert CONFIGURATIONS["attach to a rank"]["connect"] == {"host": "127.0.0.1", "port": 5678}
    code = "import debugpy\n" + ATTACH.replace("5678", str(free_port))
    before = "    train(args, device)\n"
    lines = "".join(f"    {line}\n" for line in code.splitlines())
    project = mutated(tmp_path / "project", (TRAIN, before, lines + before))
    words = ("--nproc", 2, "--epochs", 1, "--timeout", 200, "--out", tmp_path / "out")
    running = programs.start("-m", "examples.mnist_ddp_spawn", *words, cwd=project, cold=True)
    messages = attach(free_port, time.monotonic() + here(150))
    programs.finish(running, limit=200)
    assert {"initialize", "attach"} <= {each.get("command") for each in messages if each.get("success")}
    assert result(tmp_path / "out")["world_size"] == 2
