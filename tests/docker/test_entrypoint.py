"""The first process of a container: signals, exit codes, what is stuck and what is left over."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.launch import errors
from common.launch.args import parse
from common.launch.errors import NOTES, RETRY, note
from common.launch.flags import Launch
from common.launch.resolve import resolve
from tests.conftest import ROOT, Programs
from tests.e2e.engine import load
from tests.machine import here
from tests.make_data import write_idx
from tests.runs import Eventually, newest_step

SCRIPT = ROOT / "docker" / "entrypoint.py"
ENTRY = (SCRIPT,)
entrypoint = load("docker/entrypoint.py")
PYTHON = sys.executable
WAITS = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print('up', flush=True); "
NOTED = f"echo 0 {{code}} {{processes}} >> ${NOTES}; "


def noted(*codes: int, processes: int = 0) -> str:
    return "".join(NOTED.format(code=code, processes=processes or len(codes)) for code in codes)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 0", 0),
        ("exit 5", 5),
        ("kill -9 $$", 137),
        (noted(2) + "exit 1", 2),  # as torchrun does
        (noted(1, RETRY) + "exit 1", 1),
        (noted(RETRY, 143) + "exit 1", RETRY),
        (noted(RETRY, processes=2) + "exit 1", 1),  # the other process of this machine was killed: that is the cause
        (noted(RETRY, 137, processes=2) + "exit 1", 137),  # as a program that starts its processes itself
        (noted(1) + "exit 0", 0),  # torchrun has started them again, and they have done it
    ],
)
def test_the_exit_code_says_what_has_happened(programs: Programs, command: str, code: int) -> None:
    programs.run(*ENTRY, "--", "sh", "-c", command, code=code, cold=True)


AT_A_TERMINAL = """
import os, pty, sys
pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
os.write(terminal, b"typed\\n")
said = b""
try:
    while part := os.read(terminal, 1024):
        said += part
except OSError:  # nobody has it open any more
    pass
print(said.decode())
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_command_of_its_own_reads_from_the_terminal(programs: Programs) -> None:
    """`docker run -it IMAGE bash`: as a group in the background it would be stopped."""
    reads = ("sh", "-c", 'read line && echo "has read $line" && exit 5')
    said = programs.run("-c", AT_A_TERMINAL, *ENTRY, "--", *reads, code=5, cold=True).stdout
    assert "has read typed" in said


def test_what_it_shares_with_the_project_is_equal() -> None:
    """It is the first process of every image and imports nothing of the project."""
    assert (entrypoint.NOTES, entrypoint.RETRY) == (errors.NOTES, errors.RETRY) == ("EXIT_NOTES", 75)
    assert not re.search(r"^\s*(import|from) (common|examples)", SCRIPT.read_text(), re.MULTILINE)


def test_the_last_attempt_counts() -> None:
    assert entrypoint.first_note("0 1 2\n0 75 2\n1 143 2\n1 1 2\n", asked=False) == 143
    assert entrypoint.first_note("", asked=False) is None


def test_who_followed_a_killed_process_is_not_the_cause() -> None:
    for note_of_the_other in (143, RETRY):
        assert entrypoint.first_note(f"0 {note_of_the_other} 2\n", asked=False) is None
        assert entrypoint.first_note(f"0 {note_of_the_other} 1\n", asked=False) == note_of_the_other
    assert entrypoint.first_note("0 143 2\n", asked=True) == 143
    assert entrypoint.first_note("0 2 2\n", asked=False) == 2
    # Where it was seen how the first one ended, notes need not be counted: torchrun kills who does not stop in time.
    assert entrypoint.first_note(f"0 {RETRY} 2\n", asked=False, killed=False) == RETRY
    assert entrypoint.first_note(f"0 {RETRY} 1\n", asked=False, killed=True) is None
    assert entrypoint.first_note(f"0 {RETRY} 2\n0 137 2\n", asked=False) == 137
    assert entrypoint.first_note("0 143 2\n0 137 2\n", asked=True) == 143


FAILING_TORCHRUN = """#!/bin/sh
echo 0 {note} >> $EXIT_NOTES
echo Traceback of torchrun, 35 lines >&2
exit 1
"""


@pytest.mark.parametrize(
    ("note", "code", "last"),
    [
        ("143 1 stopped by SIGTERM: checkpoint at step 17", 143, "stopped by SIGTERM: checkpoint at step 17"),
        ("143 1", 143, f"exit code 143: {entrypoint.OTHERWISE}"),
        ("1 1 error: rank 0: no", 1, "error: rank 0: no"),
    ],
)
def test_the_last_line_is_the_reason(programs: Programs, tmp_path: Path, note: str, code: int, last: str) -> None:
    """Below torchrun's tracebacks, which tell of its own end."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(FAILING_TORCHRUN.format(note=note))
    torchrun.chmod(0o755)
    said = programs.run(*ENTRY, "--", torchrun, code=code, cold=True).stderr
    assert said.splitlines() == ["Traceback of torchrun, 35 lines", last]


def test_the_reason_is_that_of_the_exit_code() -> None:
    notes = "0 75 2 lost another process\n0 143 2\n0 143 2 stopped by SIGTERM\n"
    assert entrypoint.last_words(notes, 143, True) == "stopped by SIGTERM"
    assert entrypoint.last_words(notes, RETRY, True) == "lost another process"
    assert entrypoint.first_note(notes, asked=True) == RETRY
    assert entrypoint.last_words("", 137, True) == f"exit code 137: {entrypoint.OTHERWISE}"
    # Without torchrun's tracebacks nothing is said twice: who has no text here has said it.
    assert entrypoint.last_words(notes, 143, False) == ""
    assert entrypoint.last_words(notes, RETRY, False) == "lost another process"
    assert entrypoint.last_words("", 137, False) == ""


def test_notes_are_for_the_entrypoint_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NOTES, raising=False)
    note(2)
    (tmp_path / "notes").touch()
    monkeypatch.setenv(NOTES, str(tmp_path / "notes"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    note(2, 1, "error: no", spoke=True)
    note(143, 4, "stopped by SIGTERM: checkpoint at step 17")
    note(1, 1, "error: rank 0: Traceback (most recent call last):\n  in a file\nValueError: no\n")
    stopped = "3 143 4 stopped by SIGTERM: checkpoint at step 17\n"
    assert (tmp_path / "notes").read_text() == f"3 2 1\n{stopped}3 1 1 error: rank 0: ValueError: no\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "error: no command: give one after --"),
        (("--", "--epochs", "1"), "error: no command: give one after --"),
        (("--", "no-such-program"), "error: no-such-program cannot be started (No such file or directory)"),
    ],
)
def test_mistakes_end_with_one_line(programs: Programs, words: tuple[str, ...], message: str) -> None:
    assert programs.run(*ENTRY, *words, code=2, cold=True).stderr == message + "\n"


def test_flags_alone_go_to_the_program_of_the_image(programs: Programs) -> None:
    env = {"PROGRAM": "calendar"}
    done = programs.run(*ENTRY, "--", "--type", "text", "2026", "11", env=env, cold=True)
    assert "November 2026" in done.stdout
    assert "20" in programs.run(*ENTRY, "--", env=env, cold=True).stdout
    assert programs.run(*ENTRY, "--", "echo", "up", env=env, cold=True).stdout == "up\n"


@pytest.mark.parametrize(
    ("typed", "given"),
    [
        ([], ["--each"]),
        (["--resume", "auto"], ["--each", "--resume", "auto"]),
        (["--nproc", "2"], ["--each", "--nproc", "2"]),
        (["--gpu", "1"], ["--gpu", "1"]),
        (["--gpu=1"], ["--gpu=1"]),
    ],
)
def test_flags_are_added_to_those_of_the_image(
    monkeypatch: pytest.MonkeyPatch, typed: list[str], given: list[str]
) -> None:
    """Or a run that is resumed would go on with one GPU of eight."""
    commands: list[list[str]] = []
    monkeypatch.setattr(entrypoint.Supervisor, "run", lambda self, foreground: commands.append(self.command) or 0)
    assert entrypoint.main(["--", *typed], {"PROGRAM": "examples.gan_ddp --each"}) == 0
    assert commands == [[PYTHON, "-m", "examples.gan_ddp", *given]]


@pytest.mark.parametrize(
    "image", [file.parent.name for file in ROOT.glob("docker/*/Dockerfile") if file.parent.name != "base"]
)
def test_the_flags_of_an_image_start_a_process_per_gpu(image: str) -> None:
    """But for DataParallel, and unless others are given."""
    found = re.search(r'^ENV PROGRAM="?([^"\n]+)', (ROOT / "docker" / image / "Dockerfile").read_text(), re.MULTILINE)
    assert found is not None
    program, *flags = found[1].split()
    assert program == f"examples.{image}"
    for more, processes in (([], 8), (["--nproc", "2"], 2)):
        place = resolve(parse(Launch, [*flags, *more]), {}, lambda: 8)
        single = image in ("bert_dp", "mnist_dataparallel") and "--nproc" not in more
        assert place.local_world_size == (1 if single else processes)


def test_the_entrypoint_needs_the_standard_library_only() -> None:
    done = subprocess.run(
        [PYTHON, "-S", "-c", "import entrypoint, sys; print(*sys.modules)"],
        cwd=SCRIPT.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    known = sys.stdlib_module_names | {"entrypoint", "__main__"}
    assert [name for name in done.stdout.split() if name not in known and name.split(".")[0] not in known] == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_are_passed_on(programs: Programs, signum: signal.Signals) -> None:
    program = WAITS + f"signal.signal({int(signum)}, lambda *_: sys.exit(7)); time.sleep(60)"
    process = programs.start(*ENTRY, "--", PYTHON, "-c", program, cold=True)
    assert process.stdout
    assert process.stdout.readline() == "up\n"
    process.send_signal(signum)
    # 7 is not one of our codes: torchrun's 1 after a signal means no more than 128 + n.
    programs.finish(process, code=128 + signum)


COUNTS = """
import signal, sys, time
came = []
signal.signal(signal.SIGINT, lambda *_: came.append(1))
print("up", flush=True)
while not came:
    time.sleep(0.01)
time.sleep(0.5)
print(len(came), flush=True)
"""


def test_ctrl_c_on_a_terminal_reaches_the_command_once(programs: Programs) -> None:
    """A terminal sends it to its whole group; the command would take a second one for: do not save."""
    process = programs.start(*ENTRY, "--", PYTHON, "-c", COUNTS, cold=True)
    assert process.stdout
    assert process.stdout.readline() == "up\n"
    os.killpg(process.pid, signal.SIGINT)
    assert programs.finish(process).stdout == "1\n"


def test_the_command_starts_with_no_signal_blocked_or_ignored(programs: Programs) -> None:
    """The entrypoint blocks signals for itself, and a shell lets what it starts in the background ignore Ctrl-C."""
    table = "grep -E 'Sig(Blk|Ign)' /proc/self/status"
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    done = programs.run("-c", ignoring, PYTHON, SCRIPT, "--", "sh", "-c", table, cold=True)
    masks = dict(line.split() for line in done.stdout.splitlines())
    stopping = sum(1 << (signum - 1) for signum in entrypoint.AWAITED)
    assert {name: int(mask, 16) & stopping for name, mask in masks.items()} == {"SigBlk:": 0, "SigIgn:": 0}


def test_what_ignores_the_signal_is_ended_after_the_time_of_grace(programs: Programs) -> None:
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    process = programs.start(*ENTRY, "--grace", "0.5", "--", PYTHON, "-c", program, cold=True)
    assert process.stdout
    assert process.stdout.readline() == "up\n"
    process.terminate()
    assert programs.finish(process, code=143).stderr == "error: not ended within 0.5 s after SIGTERM: killed\n"


def test_nodes_that_never_came_are_no_failure_of_this_one(programs: Programs, free_port: int) -> None:
    """torchrun waits for them for a quarter of an hour, and ends with 1."""
    torchrun = Path(PYTHON).with_name("torchrun")
    words = ("--nnodes", 2, "--node-rank", 0, "--master-addr", "127.0.0.1", "--master-port", free_port)
    done = programs.run(
        *ENTRY, "--stuck", 1, "--", torchrun, *words, "--rdzv-conf", "timeout=2", "-m", "nothing", code=75, cold=True
    )
    assert re.search(r"error: torchrun gave up after \d+ s without starting a worker: not all nodes came", done.stderr)


def test_what_a_command_leaves_behind_is_ended(programs: Programs) -> None:
    """A daemon in a session of its own, and a process that ignores SIGTERM."""
    program = (
        "import os, signal, subprocess; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "subprocess.Popen(['sleep', '600'], start_new_session=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    programs.run(*ENTRY, "--", PYTHON, "-c", program, code=137, cold=True, limit=60)
    assert programs.gone(within=0.1)


SUPERVISOR = (  # its worker has ended and left a note; it never asks about it, as torchrun when it is cut off
    f"import os, subprocess, time; worker = subprocess.Popen(['sh', '-c', 'echo 0 {{code}} 1 >> ${NOTES}; {{more}}']);"
    "print('up', flush=True); time.sleep({seconds})"
)


def test_a_supervisor_that_does_not_notice_the_end_of_its_worker_is_ended(programs: Programs) -> None:
    stuck = SUPERVISOR.format(code=RETRY, more="exit 1", seconds=60)
    done = programs.run(*ENTRY, "--stuck", "0.5", "--", PYTHON, "-c", stuck, code=RETRY, cold=True, limit=60)
    assert re.search(r"^error: all workers ended 0.5 s ago and \S+ has not noticed: killed$", done.stderr, re.MULTILINE)


@pytest.mark.parametrize("more", ["sleep 60", "true; : > $EXIT_NOTES"])
def test_a_supervisor_with_work_left_is_not_ended(programs: Programs, more: str) -> None:
    """One worker that goes on; one that has left no note, because it is none of ours."""
    program = SUPERVISOR.format(code=1, more=more, seconds=2)
    programs.run(*ENTRY, "--stuck", "0.3", "--", PYTHON, "-c", program, cold=True)


def test_orphans_are_asked_about(programs: Programs, eventually: Eventually) -> None:
    """Ended processes whose parents are gone do not fill the process table."""
    program = "for i in 1 2 3; do (sleep 0.1 & ); done; sleep 0.6; echo up; sleep 60"
    process = programs.start(*ENTRY, "--", "sh", "-c", program, cold=True)
    assert process.stdout
    assert process.stdout.readline() == "up\n"
    eventually(lambda: len(children(process.pid)) == 1, 5, "orphans")  # the shell is left, and none that has ended
    process.terminate()
    programs.finish(process, code=143)


def children(pid: int) -> list[int]:
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(file.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(file.parent.name))
    return found


WITH_COUNTERS = f"""
import os, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import entrypoint
entrypoint.MEMORY_EVENTS = sys.argv[1:3]
sys.exit(entrypoint.main(["--", "sh", "-c", sys.argv[3]], os.environ))
"""


def test_the_end_for_memory_is_named(programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's counter, of either version of control groups, is emulated: a test cannot set a limit."""
    monkeypatch.setattr(entrypoint, "MEMORY_EVENTS", (tmp_path / "memory.events", tmp_path / "oom_control"))
    assert entrypoint.oom_kills() == 0
    counter = tmp_path / "oom_control"
    counter.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert entrypoint.oom_kills() == 3
    command = f"echo oom_kill 4 > {counter}; {noted(RETRY, processes=2)} exit 1"
    done = programs.run("-c", WITH_COUNTERS, tmp_path / "memory.events", counter, command, code=137, cold=True)
    assert "the kernel ended 1 process(es): the memory limit of the container was reached" in done.stderr


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port")
SMALL = ("-m", "examples.manual_allreduce_sgd", "--algorithm", "flat", "--resume", "auto")


@pytest.mark.timeout(600)
def test_torchrun_with_the_codes_of_its_workers(
    programs: Programs, tmp_path: Path, free_port: int, eventually: Eventually
) -> None:
    """A mistake that only the workers see; SIGTERM with a checkpoint; a killed worker; a killed torchrun."""
    write_idx(tmp_path / "data", train=12_800, test=100, size=8, classes=4, packed=False)  # scikit-learn starts slowly
    flags = ("--dataset", str(tmp_path / "data"), "--out", str(tmp_path))
    job = (*ENTRY, "--", PYTHON, *TORCHRUN, str(free_port), *SMALL, *flags)

    done = programs.run(*job, "--batch-size", "7", code=2, cold=True)
    assert "cannot be divided by 2 ranks" in done.stderr.splitlines()[-1], "below what torchrun says"

    def at_step(step: int) -> subprocess.Popen[str]:
        process = programs.start(*job, "--epochs", "1000", "--checkpoint-every", "5", cold=True)
        eventually(lambda: newest_step(tmp_path) >= step, 180, "a checkpoint")
        return process

    process = at_step(5)
    process.terminate()
    started = time.monotonic()
    last = programs.finish(process, code=143).stderr.splitlines()[-1]
    assert last.startswith("stopped by SIGTERM: checkpoint at step")
    assert time.monotonic() - started < here(10)
    stopped = newest_step(tmp_path)

    process = at_step(stopped + 5)
    os.kill(programs.worker(1), signal.SIGKILL)
    last = programs.finish(process, code=137).stderr.splitlines()[-1]  # counts: the cause was here
    assert re.match(
        r"error: a process of this node (was ended by SIGKILL|ended without a word).*; the container's", last
    )

    stopped = newest_step(tmp_path)
    process = at_step(stopped + 5)
    (agent,) = children(process.pid)
    os.kill(agent, signal.SIGKILL)
    programs.finish(process, code=137)
    assert programs.gone(within=0.5)
    assert newest_step(tmp_path) > stopped


SLOW_TORCHRUN = ("-m", "torch.distributed.run", "--monitor-interval", "3", "--max-restarts")  # so that ends are seen
ENDS = {
    "SIGKILL": "import os; os.kill(os.getpid(), 9)",
    "SIGSEGV": "import os; os.kill(os.getpid(), 11)",
    "1": "import sys; sys.exit(7)",
    "the second start": "import os, sys; os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.kill(os.getpid(), 9); "
    "import time; time.sleep(2); sys.exit(3)",
}
KILLED = "error: a process of this node was ended by SIGKILL; the container's memory limit was not reached"


@pytest.mark.parametrize(
    ("end", "code", "last"),
    [
        ("SIGKILL", 137, KILLED),
        ("SIGSEGV", 1, "error: a process of this node was ended by SIGSEGV: see what it printed"),
        ("1", 1, f"exit code 1: {entrypoint.OTHERWISE}"),
        ("the second start", 1, f"exit code 1: {entrypoint.OTHERWISE}"),
    ],
)
def test_a_worker_of_torchrun_that_leaves_no_note(
    programs: Programs, tmp_path: Path, free_port: int, end: str, code: int, last: str
) -> None:
    """A pod of one rank, or any program: nobody is left who says how it ended, and torchrun says 1."""
    (tmp_path / "worker.py").write_text(f"import time; time.sleep(1.5); {ENDS[end]}")
    words = (*SLOW_TORCHRUN, str(int(end == "the second start")), "--master-port", str(free_port))
    done = programs.run(*ENTRY, "--", PYTHON, *words, tmp_path / "worker.py", code=code, cold=True)
    assert done.stderr.splitlines()[-1].startswith(last)


@pytest.mark.timeout(600)
def test_a_killed_worker_of_a_program_that_starts_its_own(
    programs: Programs, tmp_path: Path, eventually: Eventually
) -> None:
    """It notes how its worker ended; what the others say of it is not the last line."""
    write_idx(tmp_path / "data", train=12_800, test=100, size=8, classes=4, packed=False)
    flags = ("--dataset", str(tmp_path / "data"), "--out", str(tmp_path), "--epochs", "1000", "--checkpoint-every", "5")
    process = programs.start(*ENTRY, "--", "--nproc", 2, *SMALL[2:], *flags, env={"PROGRAM": SMALL[1]}, cold=True)
    eventually(lambda: newest_step(tmp_path) >= 5, 180, "a checkpoint")
    os.kill(programs.worker(1), signal.SIGKILL)
    assert programs.finish(process, code=137).stderr.splitlines()[-1].startswith(KILLED)


LEAVES_A_DAEMON = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"


@pytest.mark.parametrize(
    ("old", "new", "command", "code"),
    [
        ("noted = first_note(notes, ", "noted = (lambda *_: None)(notes, ", ("sh", "-c", noted(2) + "exit 1"), 2),
        ("if KILLED in codes and", "if False and", ("sh", "-c", noted(RETRY, 137, processes=2) + "exit 1"), 137),
        ("self._end_rest()", "pass", (PYTHON, "-c", LEAVES_A_DAEMON), 0),
        ("prctl(36, 1,", "prctl(36, 0,", (PYTHON, "-c", LEAVES_A_DAEMON), 0),
        ("noted = 128 + self.asked[0]", "noted = code", ("sh", "-c", "kill -TERM $PPID; sleep 60 & wait"), 143),
    ],
)
def test_what_is_left_out_is_missed(
    programs: Programs, tmp_path: Path, old: str, new: str, command: tuple[str, ...], code: int
) -> None:
    """The code with one thing broken ends otherwise, or leaves something behind; the whole one does not."""
    source = SCRIPT.read_text()
    assert old in source
    (tmp_path / "entrypoint.py").write_text(source.replace(old, new))
    for script in (SCRIPT, tmp_path / "entrypoint.py"):
        process = programs.start(script, "--", *command, cold=True)
        process.wait(timeout=here(20))
        good = (process.returncode, programs.left()) == (code, {})
        programs.kill()
        process.communicate()
        assert good == (script == SCRIPT), (process.returncode, programs.left())
