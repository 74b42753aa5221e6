"""Programs that start warm: forked from a server that has imported torch once, in place of importing it themselves.

Importing the libraries costs 5 to 8 seconds of a core, and the tests start several hundred programs. A warm program is
a process like any other, with a session, pipes and an exit code of its own, a child of whoever started it; it imports
the project's modules itself, from its own folder. Processes that programs start are warm as well: the server from
which `multiprocessing` forks workers, the workers of torchrun, and the programs that benchmarks compare.

What warm programs do not show is what they import and in which order: that is what the documented commands are for.
Each program starts from nothing in an image (tests/e2e), or where the pages start it for the first time
(tests/docs/shell.py), like every program with `cold=True` or a variable that libraries read when imported. Nor do they
show what examples draw, but in tests/contract and the documented commands: others' pictures stay empty, which takes a
fifth off a few steps' training. With `DDP_TEST_COLD=1` every program is started from nothing, but for those that enter
a network namespace.
"""

import atexit
import ctypes
import gc
import importlib
import inspect
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import forkserver, util
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NoReturn

LIBRARIES = (
    "torch", "torch._dynamo", "torch.distributed.launcher.api", "torch.utils.data", "torch.utils.tensorboard",
    "torchvision", "torchvision.transforms.v2", "sklearn.datasets", "sklearn.metrics", "sklearn.model_selection",
    "matplotlib.backends.backend_agg", "matplotlib.pyplot", "pandas", "safetensors.torch", "tqdm", "tyro", "xxhash",
    "PIL.Image",
)  # fmt: skip
ALSO: list[str] = []  # what the tests of an example import besides, added to before the first program is started
READ_AT_IMPORT = ("OMP_", "KMP_", "MKL_", "PYTHONHASHSEED", "LD_", "TORCH_LOGS", "TORCH_SHOW", "TORCH_CPP")
COLD = "DDP_TEST_COLD"  # set to 1, it switches all of this off
DRAW = "DDP_TEST_DRAW"  # set for programs that draw their pictures
# Passed on to all programs: how threads wait for work, how many they are, and in which pages memory comes.
PASSED_ON = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GLIBC_TUNABLES")
STARTERS = ("torch.distributed.run", "benchmarks.")  # programs that start programs
TORCHRUNS = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"  # has taken `Popen`
SPACE = "DDP_TEST_NETNS"  # the network namespace that a program enters
MARK = "DDP_TEST_RUN"  # inherited by every process that a test starts, so that leftovers can be found
SET_NAME, SET_CHILD_SUBREAPER = 15, 36  # of prctl(2)
CLONE_NEWNET = 0x40000000  # of setns(2)
HUGE, MADV_COLLAPSE = 2 << 20, 25  # bytes; of madvise(2)
Request = tuple[list[str], dict[str, str], str, list[int]]


def prctl(option: int, value: object) -> None:
    if ctypes.CDLL(None).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(f"prctl({option}) failed")


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def name_of(token: str) -> str:
    """What a test's forked processes are called, as /proc/PID/comm has it: their environment cannot be seen."""
    return token[:11]


def possible(words: list[str], env: dict[str, str]) -> bool:
    """Whether a fork can do it: a module, a script, or code, without flags of Python itself."""
    if os.environ.get(COLD) == "1" and SPACE not in env:
        return False
    return forkable(words) and not any(name.startswith(READ_AT_IMPORT) for name in env)


def forkable(words: list[str]) -> bool:
    return words[0] in ("-m", "-c") or words[0][0] != "-"


class Warm(subprocess.Popen[str]):
    """A `Popen` whose program is forked by a server; its command is `[python, "-u"?, "-m", MODULE, ...]`, or `-c CODE`,
    or the path of a script.
    """

    server: ClassVar[socket.socket | None] = None
    process: ClassVar[subprocess.Popen[bytes] | None] = None
    lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def connect(cls, server: socket.socket) -> None:
        """Have programs forked by this server from now on, as children of this process."""
        prctl(SET_CHILD_SUBREAPER, 1)  # a program's parent is gone at once: then it becomes a child of the next above
        cls.server = server

    def _execute_child(self, args: Any, *others: Any) -> None:
        _, _, _, _, cwd, env, *_ = others
        pipes = others[9:15]  # p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        output, error = (1 if pipes[3] == -1 else pipes[3]), (2 if pipes[5] == -1 else pipes[5])
        words = [str(word) for word in args[1:] if word != "-u"]
        if args[0] != sys.executable or not forkable(words):  # programs start other commands, too
            super()._execute_child(args, *others)  # ty: ignore[missing-attribute]
            return
        request = json.dumps([words, dict(os.environ if env is None else env), str(cwd or Path.cwd())])
        with self.lock:
            assert self.server is not None
            socket.send_fds(self.server, [request.encode()], [output, error])
            self.pid = int(self.server.recv(64))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # ty: ignore[missing-attribute]


def start() -> None:
    """Start a server for this process; it ends when this process does."""
    if Warm.server is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {k: v for k, v in os.environ.items() if k in PASSED_ON or not k.startswith(READ_AT_IMPORT)}
        Warm.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), *ALSO],
            pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL,
            env=env | {"OPENBLAS_NUM_THREADS": "1"},  # NumPy's threads would be lost in the programs
        )  # fmt: skip
        theirs.close()
        Warm.connect(ours)


# ---------------------------------------------------------------------------------- in the server and the programs


def serve(server: socket.socket) -> Request:
    """Fork a program for every request; return in the programs. Ends this process when nobody can ask any more."""
    while True:
        message, fds, _, _ = socket.recv_fds(server, 1 << 20, 2)
        if not message:
            os._exit(0)
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            parent, program = os.getpid(), os.fork()
            if program == 0:
                while os.getppid() == parent:  # a worker of torchrun ends when its parent is another than at its start
                    time.sleep(0.001)
                for descriptor in (server.fileno(), reading, writing):
                    os.close(descriptor)
                server.detach()
                return *json.loads(message), fds
            os.write(writing, str(program).encode())
            os._exit(0)
        os.waitpid(between, 0)
        server.send(os.read(reading, 64))
        for descriptor in (reading, writing, *fds):
            os.close(descriptor)


def become(request: Request) -> NoReturn:
    """Turn this fork of the server into the program that was asked for, and run it."""
    words, env, cwd, fds = request
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for descriptor, target in zip(fds, (1, 2), strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    # A line is one write, even where the server is unbuffered: ranks would write into each other's lines.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=False)  # ty: ignore[missing-union-attribute]
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if "OMP_NUM_THREADS" in env:  # torchrun's, for its workers; OpenMP was imported with the server's
        sys.modules["torch"].set_num_threads(int(env["OMP_NUM_THREADS"]))
    prctl(SET_NAME, f"{name_of(env.get(MARK, ''))}:{env.get('RANK', '')}".encode())
    if SPACE in env:
        enter(env[SPACE])
    kind, what = words[:2] if words[0] in ("-m", "-c") else ("script", words[0])
    first = str(Path(what).absolute().parent) if kind == "script" else cwd
    sys.path[:1] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = words if kind == "script" else [kind, *words[2:]]
    importlib.invalidate_caches()
    # torchrun's agent calls inspect.stack() between reading and writing the state of its rendezvous, and that looks for
    # these frames' file in all modules: 90 ms with what is imported here, 12 ms in a program that starts from nothing.
    # On a busy machine it took longer than the second after which another node writes, so that it never came to write.
    inspect.modulesbyfile[str(Path("<frozen runpy>").absolute())] = "runpy"
    util.spawnv_passfds = spawnv_passfds  # ty: ignore[invalid-assignment]
    if DRAW not in env and not what.startswith("benchmarks."):
        sys.modules["matplotlib.figure"].Figure.draw = lambda *_: None
    if what.startswith(STARTERS):
        warm_children()
    if kind == "-m":
        run_and_end(lambda: runpy._run_module_as_main(what))  # ty: ignore[missing-attribute]
    if kind == "-c":
        sys.modules["__main__"] = main = ModuleType("__main__")
        run_and_end(lambda: exec(what, vars(main)))
    run_and_end(lambda: runpy.run_path(what, run_name="__main__"))


def enter(space: str) -> None:
    """Move this process, which has one thread, into a network namespace, with all that it will fork."""
    with Path(f"/run/netns/{space}").open() as file:
        if ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(f"setns({space}) failed")


def spawnv_passfds(path: Any, args: Any, passfds: Any, _start: Any = util.spawnv_passfds) -> int:
    """What `multiprocessing` calls to start its servers: the one that forks the workers is itself a fork.

    Not that of a loader in a rank, though: ranks have threads, and a fork would lose them and keep their locks.
    """
    if "multiprocessing.forkserver" not in args[-1] or threads() > 1:
        return _start(path, args, passfds)
    pid = os.fork()
    if pid == 0:
        become_server(args[-1], {0, 1, 2, *passfds})
    return pid


def become_server(code: str, kept: set[int]) -> NoReturn:
    """Turn this fork of a program into a server of `multiprocessing`, with nothing of the program left."""
    prctl(SET_NAME, f"{name_of(os.environ[MARK])}:srv".encode())
    for descriptor in (int(path.name) for path in list(Path("/proc/self/fd").iterdir())):
        if descriptor not in kept:
            try:
                os.close(descriptor)
            except OSError:
                continue
    for name in list(sys.modules):
        if name.partition(".")[0] in ("benchmarks", "common", "examples", "tests"):
            del sys.modules[name]
    # The project's module registers its handler when it is imported again.
    sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers.pop("job", None)
    forkserver._forkserver._lock = threading.Lock()  # ty: ignore[missing-attribute] # the one that this fork holds
    sys.modules["__main__"] = ModuleType("__main__")  # workers import their main module, unless it is this already
    run_and_end(lambda: exec(code, {"__name__": "__main__"}))


def run_and_end(program: Callable[[], object]) -> NoReturn:
    """Run, and end with the exit code and the last words that Python ends with."""
    code = 0
    try:
        program()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if not isinstance(stop.code, int | None):
            sys.stderr.write(f"{stop.code}\n")
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # ty: ignore[missing-attribute]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking down the interpreter would print what Triton's bindings leak


def warm_children() -> None:
    """Give the program that this process becomes a server of its own for those that it starts."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        for signum in (signal.SIGINT, signal.SIGTERM):  # what is sent to the program's session is not for it
            signal.signal(signum, signal.SIG_IGN)
        become(serve(theirs))
    theirs.close()
    Warm.connect(ours)
    for module in (subprocess, importlib.import_module(TORCHRUNS)):
        vars(module)["Popen"] = Warm


def draw_once() -> None:
    """Have matplotlib load its fonts and PNG writer, which takes every program half a second."""
    from matplotlib import pyplot

    pyplot.switch_backend("agg")
    figure, axes = pyplot.subplots()
    axes.plot([1, 2], label="x")
    axes.legend()
    figure.tight_layout()
    figure.savefig(io.BytesIO(), format="png")
    pyplot.close(figure)


def in_huge_pages() -> None:
    """Have Linux (6.1 or later) keep what this process has in memory in pages of 2 MB.

    A fork copies the page table: a few hundred entries in place of a hundred thousand, which halves the cost of a fork.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, rights, _, _, inode, *_ = line.split()
        if rights == "rw-p" and inode == "0":
            start, end = (int(address, 16) for address in area.split("-"))
            start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
            if start < end:  # an older kernel refuses, and forks take longer
                ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


if __name__ == "__main__":
    asked = socket.socket(fileno=int(sys.argv[1]))
    asked.set_inheritable(False)
    gc.disable()  # what is imported stays: looking for garbage in it would take a sixth of the time
    for library in (*LIBRARIES, *sys.argv[2:]):
        importlib.import_module(library)
    draw_once()
    assert threads() == 1, "forking would lose threads"
    gc.collect()
    gc.freeze()  # the garbage collector would write to, and so copy, every page that programs share
    gc.enable()
    # torch takes its operators back when a program ends, one by one: that writes to, and so copies, thousands of pages.
    for finalizer in list(weakref.finalize._registry):  # ty: ignore[missing-attribute]
        finalizer.atexit = False
    in_huge_pages()
    become(serve(asked))
