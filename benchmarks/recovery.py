"""Check that random kills do not change the losses and parameters of a training run.

    python -m benchmarks.recovery

A training run on 2 ranks is disturbed several times at random moments: a rank is killed, all
processes are killed, or the run receives SIGTERM. It is then restarted with `--resume auto`. Losses
and parameters must be bit-identical to a run without disturbances. A run on one rank has the same
losses up to rounding.

After the loss of a rank, a restart from a checkpoint is compared with torchft (`pip install
torchft`), whose other rank continues alone. torchft is run with its default timeout for heartbeats,
5 s, and with 1 s.
"""

import importlib.metadata
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import closing, suppress
from functools import partial
from itertools import islice, takewhile
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Claim, Measurement, Result, Table, compare

RANKS = 2
WORDS = ("--device", "cpu", "--precision", "fp32", "--checkpoint-every", 5)
LONGEST = 2.0  # maximum seconds from the first line of a run to its disturbance
DIFFERENCE = 1e-3
SGD, KILLED = "examples.manual_allreduce_sgd", 50  # kill a rank after step 50


def command(out: Path, ranks: int, epochs: int) -> list[str]:
    """Return the command that starts a training run."""
    words = ("-m", "examples.mnist_ddp_spawn", "--nproc", ranks, "--epochs", epochs, "--out", out)
    return [sys.executable, *map(str, (*words, *WORDS))]


def outcome(out: Path) -> tuple[str, list[float]]:
    """Return the parameter hash and the losses of a finished training run."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss/train"] for line in lines if "loss/train" in line]
    return json.loads((out / "result.json").read_text())["parameter_hash"], losses


def disturb(process: subprocess.Popen[str], out: Path, choice: random.Random) -> str:
    """Kill a rank or all processes of a run, or send SIGTERM; return the kind of disturbance."""
    kind = choice.choice(("SIGKILL of a rank", "SIGKILL of all processes", "SIGTERM"))
    if kind == "SIGTERM":
        process.terminate()
    elif kind == "SIGKILL of all processes":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        with suppress(ProcessLookupError):
            ranks = [int(line.split()[-1]) for line in (out / "lock").read_text().splitlines()]
            own = [rank for rank in ranks if os.getsid(rank) == process.pid]  # this run's ranks
            os.kill(choice.choice(own or [process.pid]), signal.SIGKILL)
    return kind


def disturbed(out: Path, epochs: int, kills: int, choice: random.Random) -> Counter[str]:
    """Train to the end with disturbances, and return the number of each kind."""
    kinds = Counter[str]()
    while not (out / "result.json").exists():
        with subprocess.Popen(
            [*command(out, RANKS, epochs), "--resume", "auto"],
            cwd=harness.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if "rank(s) on" in line and kinds.total() < kills:
                    time.sleep(choice.uniform(0, LONGEST))
                    kinds[disturb(process, out, choice)] += 1
            # The output is closed, so all processes of this run have exited.
    return kinds


def restart(repeated: list[int]) -> float:
    """Kill a rank and restart the run; return the seconds until the first new step."""
    last, began, step, seconds = 0, 0.0, 0, 0.0
    with tempfile.TemporaryDirectory() as out:
        words = ("python", "-m", SGD, "--nproc", RANKS, "--epochs", 7, "--out", out, *WORDS)
        words += ("--log-every", 1, "--resume", "auto")
        with suppress(SystemExit):  # a rank was killed
            for _, line in harness.lines(words):
                last += ", step " in line
                if last == KILLED and not began:
                    began = time.perf_counter()
                    os.kill(int(Path(out, "lock").read_text().split()[-1]), signal.SIGKILL)
        for _, line in harness.lines(words):
            if found := re.search(r"resumed from .*step-(\d+)", line):
                step = int(found[1])
                repeated.append(last - step)
            step += ", step " in line
            if step > last and not seconds:
                seconds = time.perf_counter() - began
    return seconds


def survive(heartbeat: int, repeated: list[int]) -> float:
    """Kill one of two torchft replicas; return the seconds until the other finishes a step."""
    os.environ["RUST_LOG"] = "error"  # otherwise torchft prints several lines per step
    from torchft.coordination import LighthouseServer  # ty: ignore[import-not-found]

    server = LighthouseServer("127.0.0.1:0", 1, 1000, heartbeat_timeout_ms=1000 * heartbeat)
    address = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    words = ("-m", f"{SGD}.further.fault_tolerant", "--steps", 10_000, "--lighthouse", address)
    command = [sys.executable, *map(str, words), "--replica"]
    other = subprocess.Popen([*command, "1"], stdout=subprocess.DEVNULL)
    with closing(harness.lines([*command, "0"])) as output:
        together = (line for _, line in output if "2 replica(s) done" in line)
        next(islice(together, KILLED - 1, None))
        began = time.perf_counter()
        other.kill()
        after = takewhile(lambda line: "1 replica(s) done" not in line[1], output)
        repeated.append(sum("failed" in line for _, line in after))
        seconds = time.perf_counter() - began
    other.wait()
    server.shutdown()
    return seconds


def measure(args: Measurement) -> Result:
    """Train with 1 and 2 ranks without disturbances, then several times with disturbances."""
    epochs, kills, rounds = (10, 2, 1) if args.quick else (60, 6, args.rounds)
    kinds, seconds, equal = Counter[str](), dict[str, list[float]](), 0
    with tempfile.TemporaryDirectory() as temporary:
        plain = dict[str, tuple[str, list[float]]]()
        for ranks in (1, RANKS):
            out, began = Path(temporary, f"{ranks}"), time.perf_counter()
            harness.run(command(out, ranks, epochs))
            name = f"{ranks} rank{'s' * (ranks > 1)}"
            plain[name], seconds[name] = outcome(out), [time.perf_counter() - began]
        one, two = plain.values()
        disturbed_name = f"{RANKS} ranks, disturbed {kills} times"
        seconds[disturbed_name], curves = [], {n: losses for n, (_, losses) in plain.items()}
        for number in range(rounds):
            out, began = Path(temporary, f"disturbed-{number}"), time.perf_counter()
            kinds += disturbed(out, epochs, kills, random.Random(number))  # noqa: S311
            seconds[disturbed_name].append(time.perf_counter() - began)
            equal += outcome(out) == two
            curves[disturbed_name] = outcome(out)[1]
            print(f"training {number + 1}: {dict(kinds)}, {equal} with the same bits", flush=True)
    differences = [abs(a - b) for a, b in zip(one[1], two[1], strict=True)]
    claims = [
        Claim(
            "disturbed trainings with the same losses and parameters", equal, rounds, f"of {rounds}"
        ),
        Claim(
            "loss with 1 and 2 ranks, largest difference", max(differences), DIFFERENCE, "", True
        ),
    ]
    inputs = {"data": "digits", "steps": len(two[1]), "disturbances": dict(kinds)}
    repeated = defaultdict[str, list[int]](list)
    programs = {"restart": partial(restart, repeated["restart"])}
    try:
        inputs["torchft"] = importlib.metadata.version("torchft")
        for timeout in (5, 1):
            name = f"torchft, heartbeat timeout {timeout} s"
            programs[name] = partial(survive, timeout, repeated[name])
    except importlib.metadata.PackageNotFoundError:
        print("torchft is not installed, so it is not compared")
    tables = {
        "Seconds of a training": Table("s", seconds),
        "From the loss of a rank to the next new step": Table("s", compare(programs, rounds)),
        "Repeated steps, with a checkpoint every 5 steps": Table("steps", repeated),
    }
    return Result(inputs, tables, claims, curves)


if __name__ == "__main__":
    harness.main("recovery", measure)
