"""A lost rank does not end the job: processes that are killed at chosen moments, against a replay in one process."""

import os
import re
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from benchmarks.survive_replay import replayed
from common.data.idx import ImageData, idx_folder
from common.launch.errors import Lost
from common.train.membership import NOTHING, Membership, TooLate, leave_group
from tests.conftest import Programs
from tests.examples.test_manual_allreduce_sgd import plain_loop
from tests.machine import here
from tests.runs import Eventually, mutated, result

FOLDER = "examples/manual_allreduce_sgd"
SHARED = {"membership.py": "common/train", "members.py": "common/launch"}
SURVIVE = ("-m", "examples.manual_allreduce_sgd.survive", "--epochs", 3, "-b", 24, "--lr", 0.1, "--threads", 1)
STEPS = 27
KILL, STOP, FAIL = "kill", "stop", "fail"
Fault = tuple[str, int, int, str]  # moment, member, step or generation, what happens

# A copy of the project in which members have accidents, wherever this is called.
ACCIDENT = '''
def accident(moment: str, member: int, number: int) -> None:
    """Have the one that is planned for this moment, if any."""
    match FAULTS.pop((moment, member, number), None):
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "fail":
            raise RuntimeError("as if a connection had closed")


def await_knock(membership: Membership, done: int) -> bool:
    """Newcomers are heard in step 6, in which all wait for one."""
    while done == 6 and not membership.somebody_knocks():
        time.sleep(0.01)
    return done == 6


@contextmanager'''
SUM, AGREED = "ring(message)  # the sum over the ranks", "        with communication():\n            dist.init_process"
HOOKS = (
    ("survive.py", "import NOTHING, ", "import NOTHING, accident, "),
    (
        "survive.py",
        SUM,
        'accident("before", membership.me, done)\n                ring(message)\n'
        '                accident("after", membership.me, done)',
    ),
    (
        "survive.py",
        'membership.store.set("finished", "")\n',
        'membership.store.set("finished", "")\n        accident("written", membership.me, 0)\n',
    ),
    ("membership.py", AGREED, f'        accident("agreed", self.me, self.generation)\n{AGREED}'),
    (
        "membership.py",
        "dist.broadcast(state",
        'accident("broadcast", self.me, self.generation)\n                dist.broadcast(state',
    ),
    (
        "allreduce.py",
        "    send = dist.P2POp(",
        "    global calls\n    calls += 1\n"
        '    accident("exchange", int(os.environ["RANK"]), calls)\n    send = dist.P2POp(',
    ),
    (
        "allreduce.py",
        "import torch\n",
        "import os\nimport torch\nfrom common.train.membership import accident\ncalls = 0\n",
    ),
)


def with_faults(folder: Path, faults: tuple[Fault, ...], *changes: tuple[str, str, str]) -> Path:
    """A copy of the project with these accidents, and with what else is changed."""
    planned = {fault[:3]: fault[3] for fault in faults}
    defined = f"import os\nimport signal\n\nFAULTS = {planned}\n{ACCIDENT}"
    hooks = (*changes, *HOOKS, ("membership.py", "\n@contextmanager", defined))
    return mutated(folder, *((f"{SHARED.get(file, FOLDER)}/{file}", old, new) for file, old, new in hooks))


@pytest.fixture(scope="module")
def data(small: Path) -> ImageData:
    """The last of 9 batches has one sample."""
    return idx_folder(small)


def check(data: ImageData, out: Path, expected: list[tuple[int, list[int]]]) -> None:
    """The history is the expected one, and its replay has the same bits; one process's training is close."""
    found = result(out)
    assert [(each["steps_done"], each["members"]) for each in found["generations"]] == expected
    assert found["parameter_hash"] == replayed(data, found, 24, 0.1)
    model, _ = plain_loop(data)
    for name, value in load_file(out / "model.safetensors").items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------- losses

ALL, LEFT = [0, 1, 2], [0, 2]
HALF = (("after", 1, 4, KILL), ("after", 2, 4, FAIL))  # member 0 alone has taken step 4
FIFTH = 4 * 4  # exchanges of three ranks in four steps
MOMENTS = {
    "before the all-reduce": ([("before", 1, 4, KILL)], [(4, LEFT)]),
    "in its first exchange": ([("exchange", 1, FIFTH + 1, KILL)], [(4, LEFT)]),
    "in its third exchange": ([("exchange", 1, FIFTH + 3, KILL)], [(4, LEFT)]),
    "after the all-reduce": ([("after", 1, 4, KILL)], [(5, LEFT)]),
    "when one has the sum, and another not": (HALF, [(5, LEFT)]),
    "and the one that has it, too": ((*HALF, ("broadcast", 0, 1, KILL)), [(5, LEFT), (4, [2])]),
    "two at once": ([("before", 0, 4, KILL), ("before", 1, 4, KILL)], [(4, [2])]),
    "in the last step": ([("before", 0, 26, KILL)], [(26, [1, 2])]),
    "after the result is written": ([("written", 0, 0, KILL)], [(27, ALL), (27, [1, 2])]),
    "before the first step": ([("agreed", 1, 0, KILL)], [(0, LEFT)]),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_lost_rank_does_not_end_the_job(programs: Programs, tmp_path: Path, data: ImageData, moment: str) -> None:
    faults, then = MOMENTS[moment]
    seconds = "CONNECTING = timedelta(seconds={})"  # a group that connects waits for all
    short = ("membership.py", seconds.format(5), seconds.format(round(here(2)) if faults[0][0] == "agreed" else 5))
    folder, out = with_faults(tmp_path / "project", tuple(faults), short), tmp_path / "out"
    words = (*SURVIVE, "--nproc", 3, "--timeout", 60, "--dataset", data.name, "--out", out)
    programs.run(*words, cwd=folder)
    last = [] if then[-1][0] == STEPS else [(STEPS, then[-1][1])]
    check(data, out, [(0, ALL), *then, *last])


def test_an_undisturbed_run(programs: Programs, tmp_path: Path, data: ImageData) -> None:
    programs.run(*SURVIVE, "--nproc", 4, "--dataset", data.name, "--out", tmp_path)
    check(data, tmp_path, [(0, [0, 1, 2, 3]), (STEPS, [0, 1, 2, 3])])


# Each breaks one thing, at which a run with a lost rank must end otherwise: (file, before, after), moment, code
MUTATIONS = {
    "the step is not redone": (("survive.py", "   continue\n", "   done += 1\n            continue\n"), 0, 1),
    "the share is that of three": (("survive.py", "dist.get_world_size())", "3)"), 0, 1),
    "nobody is brought up to date": (("membership.py", "if min(done) < max(done):", "if False:"), 4, 1),
    "a step that is done is taken back": (("membership.py", "max(done)", "min(done)"), 4, 1),
    "the momentum is not given on": (("replica.py", ".values(), *momenta,", ".values(),"), 4, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_seen(programs: Programs, tmp_path: Path, data: ImageData, name: str) -> None:
    change, moment, code = MUTATIONS[name]
    faults, then = list(MOMENTS.values())[moment]
    folder, out = with_faults(tmp_path / "project", tuple(faults), change), tmp_path / "out"
    words = (*SURVIVE, "--nproc", 3, "--timeout", 60, "--dataset", data.name, "--out", out)
    done = programs.run(*words, cwd=folder, code=code)
    if code:
        assert re.search("CheckError: .* samples of the epoch were lost, or trained on twice", done.stderr), done.stderr
    else:
        with pytest.raises(AssertionError):
            check(data, out, [(0, ALL), *then, (STEPS, then[-1][1])])


# ------------------------------------------------------------------------------------------------------- newcomers


# A newcomer that came before the others have noticed the loss would be let in at once, and knock at nobody's door.
JOINED = "    store = join(local_number, place)\n"
NOTICED = f"{JOINED}    if number >= place.world_size:\n        store.wait(['1/members'])\n"
WAIT = (
    ("survive.py", JOINED, NOTICED),
    ("survive.py", "float(membership.somebody_knocks())", "float(await_knock(membership, done))"),
    ("survive.py", "import NOTHING, ", "import NOTHING, await_knock, "),
)


def test_a_newcomer_goes_on_alone(programs: Programs, tmp_path: Path, data: ImageData) -> None:
    """It comes in the middle of epoch 1, and loses all others in epoch 3: it has had everything from them."""
    faults: tuple[Fault, ...] = (
        ("before", 1, 4, KILL),
        ("before", 0, 20, KILL),
        ("before", 2, 22, KILL),
    )
    once = ("members.py", "if replace:", "if replace and number == 1:")
    folder, out = with_faults(tmp_path / "project", faults, once, *WAIT), tmp_path / "out"
    words = (*SURVIVE, "--nproc", 3, "--replace", "--timeout", 60, "--dataset", data.name, "--out", out)
    programs.run(*words, cwd=folder)
    check(data, out, [(0, ALL), (4, LEFT), (7, [0, 2, 3]), (20, [2, 3]), (22, [3]), (STEPS, [3])])


@pytest.mark.timed
def test_a_silent_rank_is_given_up_and_comes_back(
    programs: Programs, tmp_path: Path, data: ImageData, eventually: Eventually
) -> None:
    """As on a machine that hangs for a while: no connection closes."""
    faults: tuple[Fault, ...] = (("before", 1, 4, STOP),)
    folder, out, log = with_faults(tmp_path / "project", faults, *WAIT), tmp_path / "out", tmp_path / "log"
    words = (*SURVIVE, "--nproc", 3, "--timeout", round(here(3)), "--dataset", data.name, "--out", out)
    process = programs.start(*words, cwd=folder, log=log)
    eventually(lambda: "after step 4: members 0, 2\n" in log.read_text(), 60, "the others go on")
    (silent,) = re.findall(r"^member 1 is process (\d+)$", log.read_text(), re.MULTILINE)
    os.kill(int(silent), signal.SIGCONT)
    assert process.wait(here(120)) == 0, log.read_text()
    check(data, out, [(0, ALL), (4, LEFT), (7, ALL), (STEPS, ALL)])


def test_two_nodes(programs: Programs, tmp_path: Path, data: ImageData, free_port: int) -> None:
    """Two processes that start two members each; one member of the second is lost, and replaced."""
    folder = with_faults(tmp_path / "project", (("before", 3, 4, KILL),), *WAIT)
    words = (*SURVIVE, "--nproc", 2, "--replace", "--timeout", 60, "--dataset", data.name, "--out", tmp_path / "out")
    meeting = ("--world-size", 2, "--dist-url", f"tcp://127.0.0.1:{free_port}")
    nodes = [programs.start(*words, *meeting, "--rank", node, cwd=folder) for node in (0, 1)]
    for node in nodes:
        programs.finish(node)
    all_four = [0, 1, 2, 4]
    check(data, tmp_path / "out", [(0, [0, 1, 2, 3]), (4, [0, 1, 2]), (7, all_four), (STEPS, all_four)])


def test_a_node_goes_on_without_the_members_of_the_first(
    programs: Programs, tmp_path: Path, data: ImageData, free_port: int
) -> None:
    """Whose parent keeps the store for it."""
    folder = with_faults(tmp_path / "project", (("before", 0, 4, KILL), ("before", 1, 4, KILL)))
    words = (*SURVIVE, "--nproc", 2, "--timeout", 60, "--dataset", data.name, "--out", tmp_path / "out")
    meeting = ("--world-size", 2, "--dist-url", f"tcp://127.0.0.1:{free_port}")
    first, second = (programs.start(*words, *meeting, "--rank", node, cwd=folder) for node in (0, 1))
    assert "no member of this node is left: waiting for 2, 3\n" in programs.finish(first).stdout
    programs.finish(second)
    check(data, tmp_path / "out", [(0, [0, 1, 2, 3]), (4, [2, 3]), (STEPS, [2, 3])])


def test_a_node_that_is_stopped_says_so_to_the_others(
    programs: Programs, tmp_path: Path, data: ImageData, free_port: int, eventually: Eventually
) -> None:
    """They need not wait for its members, which are silent. Before, it is asked for a table, and goes on."""
    folder = with_faults(tmp_path / "project", (("before", 2, 4, STOP), ("before", 3, 4, STOP)))
    words = (*SURVIVE, "--nproc", 2, "--timeout", 900, "--dataset", data.name, "--out", tmp_path / "out")
    meeting = ("--world-size", 2, "--dist-url", f"tcp://127.0.0.1:{free_port}")
    first, second = (programs.start(*words, *meeting, "--rank", node, cwd=folder) for node in (0, 1))
    assert second.stdout is not None
    lines = [second.stdout.readline() for _ in range(3)]
    found = re.findall(r"member \d is process (\d+)", "".join(lines))
    stats = [Path(f"/proc/{member}/stat") for member in found]
    eventually(lambda: [file.read_text().split(") ")[1][0] for file in stats] == ["T", "T"], 60, "both are silent")
    second.send_signal(signal.SIGUSR1)
    assert "no table: " in second.stdout.readline()
    second.send_signal(signal.SIGTERM)
    said = programs.finish(second, 128 + signal.SIGTERM).stderr
    assert said == "error: stopped by SIGTERM: nothing is saved before the end\n"
    programs.finish(first)
    check(data, tmp_path / "out", [(0, [0, 1, 2, 3]), (4, [0, 1]), (STEPS, [0, 1])])


def test_a_newcomer_knocks_at_the_same_door_until_it_is_let_in() -> None:
    """The others may be in an evaluation, which takes longer than a newcomer waits."""
    store = dist.HashStore()
    store.add("newcomers", 1)
    membership = Membership(store, 1, 1, timedelta(seconds=0.1))
    store.set("0/members", '{"0": 0}')
    for _ in range(2):
        with pytest.raises(Lost, match="no member has let this one in"):
            membership.meet(NOTHING)
    assert membership.generation == 0
    assert store.check(["1/knock"])
    assert not store.check(["2/knock"])


def test_who_was_given_up_stays_a_newcomer() -> None:
    """Also at its second try: or it would decide on its own who the members are, with a state that is too old."""
    store = dist.HashStore()
    membership = Membership(store, 1, 2, timedelta(seconds=0.1))
    store.set("0/members", '{"0": 3}')
    for _ in range(2):
        with pytest.raises(Lost, match="no member has let this one in"):
            membership.meet(2)
    assert store.get("1/here/1") == str(NOTHING).encode()
    assert not store.check(["1/members"])
    store.set("1/members", '{"1": -1}')
    assert membership.meet(2) == NOTHING
    leave_group()


def test_a_group_that_could_not_connect_is_not_counted() -> None:
    """A newcomer has no such group behind it, and must meet the others under the same name."""
    store = dist.HashStore()
    membership = Membership(store, 0, 2, timedelta(seconds=1))
    store.set("0/here/1", "0")  # and then it is lost
    with pytest.raises(Lost):
        membership.meet(0)
    store.set("ended/1", "-9")
    membership.meet(0)
    try:
        assert list(membership.members) == [0]
        assert getattr(dist.group.WORLD, "group_name") == "0"  # noqa: B009 - ty does not know it
    finally:
        leave_group()


def test_a_newcomer_does_not_wait_for_itself() -> None:
    """It was on the list, without the state yet, when the last that had it was lost."""
    for ended, expected in (((1,), Lost), ((0, 1), TooLate)):
        membership = Membership(dist.HashStore(), 2, 2, timedelta(seconds=0.1))
        membership.store.add("newcomers", 1)
        membership.members = {0: 5, 2: NOTHING}
        for number in ended:
            membership.store.set(f"ended/{number}", "-9")
        with pytest.raises(expected):
            membership.meet(NOTHING)


def test_each_generation_has_the_seconds_of_its_own_way() -> None:
    membership = Membership(dist.HashStore(), 0, 1, timedelta(seconds=1))
    for number, seconds in ((0, 2.5), (1, None), (2, 0.5)):
        membership.generation = number
        membership.store.set(f"{number}/members", f'{{"0": {number}}}')
        if seconds is not None:
            membership.note_seconds(seconds)
    assert [each.get("seconds") for each in membership.history()] == [2.5, None, 0.5]


# ----------------------------------------------------------------------------------------------- what goes wrong


def test_all_are_lost(programs: Programs, tmp_path: Path, data: ImageData) -> None:
    """And newcomers have nobody to ask."""
    folder = with_faults(tmp_path / "project", (("before", 0, 4, KILL), ("before", 1, 4, KILL)))
    words = (*SURVIVE, "--nproc", 2, "--replace", "--timeout", 60, "--dataset", data.name, "--out", tmp_path / "out")
    done = programs.run(*words, cwd=folder, code=1)
    assert done.stderr == "error: all members are lost: nobody was left to go on\n"


def test_a_missing_first_node_is_named(programs: Programs, tmp_path: Path, free_port: int) -> None:
    """And a stop while it is waited for ends the wait."""
    words = (*SURVIVE, "--world-size", 2, "--rank", 1, "--dist-url", f"tcp://127.0.0.1:{free_port}", "--out", tmp_path)
    done = programs.run(*words, "--timeout", 1, code=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: the first node, 127.0.0.1:{free_port}, cannot be reached within 1 s")
    waiting = programs.start(*words, "--timeout", 600)
    assert waiting.stdout is not None
    assert "waiting for the first node" in [waiting.stdout.readline() for _ in range(2)][1]
    waiting.send_signal(signal.SIGTERM)
    said = programs.finish(waiting, 128 + signal.SIGTERM).stderr
    assert said == "stopped by SIGTERM: outside of training, nothing to save\n"


def test_an_error_ends_the_job(programs: Programs, tmp_path: Path, data: ImageData) -> None:
    """It would come again in all others, one after the other."""
    change = ("replica.py", "        share = batch[", "        assert rank != 1, 'broken'\n        share = batch[")
    folder = with_faults(tmp_path / "project", (), change)
    words = (*SURVIVE, "--nproc", 3, "--replace", "--dataset", data.name, "--out", tmp_path / "out")
    done = programs.run(*words, cwd=folder, code=1)
    assert re.search(r"error: rank 1: .*AssertionError: broken\n", done.stderr, re.DOTALL), done.stderr


def test_a_newcomer_has_the_local_number_of_the_lost_one(programs: Programs) -> None:
    """Or two would speak for their node, and none would be its first."""
    said = programs.run("-m", "tests.examples.members_job", "--nproc", 3).stdout
    found = re.findall(r"member (\d): (\d) of this node, (\d) by its name", said)
    assert sorted(found) == [(number, local, local) for number, local in zip("0123", "0120", strict=True)]


def test_torchrun_is_refused(programs: Programs, tmp_path: Path) -> None:
    torchrun = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    env = dict(zip(torchrun, "0011", strict=True))
    done = programs.run(*SURVIVE, "--out", tmp_path, env=env, code=2)
    assert done.stderr == "error: survive starts its processes by itself: srun and torchrun end all of them\n"
