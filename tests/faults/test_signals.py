"""Signals to the agent, the controller and the whole group, at any moment: one orderly end with one exit code."""

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

import perdure

from .cluster import STARTED, started, wait_phase
from .harness import Job
from .processes import is_zombie, lives, processes_with

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
OF_PYTHON = "Failed to import the site module"


def end_of(job: Job, deadline_s: float = 15) -> set[int]:
    """The exit codes of all processes, as a shell shows them: one that died of a signal has 128 + its number."""
    job.wait_for(lambda: all(p.poll() is not None for p in job.processes()), "the end of the job", deadline_s)
    return {128 - p.returncode if p.returncode < 0 else p.returncode for p in job.processes()}


def assert_quiet(job: Job) -> None:
    for name in ("controller", *job.nodes):
        said = job.output(name)
        assert "Traceback" not in said, said
        assert "ExceptionGroup" not in said, said


def before_our_code(job: Job) -> bool:
    """Whether the signal was a SIGINT that came while Python started (its code is 1 then) or looked for our package,
    which takes it tens of milliseconds: nobody can take the signal there but Python, with its own traceback."""
    said = job.output()
    ours = rf'{re.escape(perdure.__path__[0])}/bin/main\.py", line \d+, in main\b'
    return said.rstrip().endswith(("KeyboardInterrupt", OF_PYTHON)) and not re.search(ours, said)


RANDOM = random.Random(20261130)
MOMENTS = [0.0, 0.02, 0.05, *sorted(round(RANDOM.uniform(0.08, 1.6), 3) for _ in range(7))]
"""Seconds after the start: at the first the interpreter is not up yet, at the last the job has long been running."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", MOMENTS)
def test_at_any_moment_of_a_jobs_life(launch: Callable[..., Job], number: signal.Signals, moment: float) -> None:
    job = launch(nproc=2)
    time.sleep(moment)
    job.agents["n0"].send_signal(number)
    codes = end_of(job)
    if number is signal.SIGINT and before_our_code(job):
        assert codes <= {1, CODES[number]}
    else:
        assert codes == {CODES[number]}
        assert_quiet(job)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_during_a_restart(launch: Callable[..., Job], number: signal.Signals) -> None:
    """A round is being aborted, and one rank takes its time."""
    job = launch("""
        def fault(round, step):
            if round.index == 0 and round.rank == 2:
                with round.atomic():
                    tell("slow", round)
                    wait_said("never", round)
        run(fault)
        """)
    before = job.wait_round(0)
    job.wait_event("slow")
    job.kill(before[1])
    wait_phase(job, "aborting")
    job.agents["n0"].send_signal(number)
    assert end_of(job) == {CODES[number]}
    assert_quiet(job)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_other_agents_are_awaited(launch: Callable[..., Job], number: signal.Signals) -> None:
    job = launch(nodes=("n0", "n1"), nproc=1)
    job.wait_log("agent", "n0 joined")
    job.agents["n0"].send_signal(number)
    assert end_of(job) == {CODES[number]}


def test_to_the_controller(launch: Callable[..., Job]) -> None:
    job = launch(nodes=("n0", "n1"), nproc=2)
    job.wait_round(0)
    assert job.controller is not None
    job.controller.send_signal(signal.SIGTERM)
    assert end_of(job) == {143}
    assert "SIGTERM to the controller" in job.reason()
    assert_quiet(job)


def test_to_one_agent_of_two_ends_the_whole_job(launch: Callable[..., Job]) -> None:
    job = launch(nodes=("n0", "n1"), nproc=2)
    job.wait_round(0)
    job.agents["n1"].send_signal(signal.SIGTERM)
    assert end_of(job) == {143}
    assert "SIGTERM to agent n1" in job.reason()
    assert_quiet(job)


def test_to_everybody_at_once(launch: Callable[..., Job]) -> None:
    """As `scancel` does it: agents, controller, ranks and whatever they started."""
    job = launch(nodes=("n0", "n1"), nproc=2)
    job.wait_round(0)
    for pid, _ in processes_with(job.mark):
        os.kill(pid, signal.SIGTERM)
    assert end_of(job) == {143}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_one_forces_the_end(launch: Callable[..., Job], number: signal.Signals) -> None:
    """Ranks that do not listen to SIGTERM hold the end up for termination_grace_time."""
    job = launch(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        def fault(round, step):
            with round.atomic():
                tell("slow", round)
                wait_said("never", round)
        run(fault)
        """,
        nproc=2,
        termination_grace_time=20,
        barrier_timeout=40,
    )
    job.wait_round(0, "slow")
    agent = job.agents["n0"]
    agent.send_signal(number)
    job.wait_for(lambda: [x for x in job.log() if f"{number.name} to agent n0" in x["text"]], "the word of the stop")
    assert agent.poll() is None
    began = time.monotonic()
    agent.send_signal(number)
    assert end_of(job) == {CODES[number]}
    assert time.monotonic() - began < 4
    assert_quiet(job)


def test_one_while_the_controller_is_away(launch: Callable[..., Job]) -> None:
    job = launch(nodes=("n0", "n1"), nproc=2)
    job.wait_round(0)
    wait_phase(job, "running")
    assert job.controller is not None
    job.controller.kill()
    job.controller.wait(10)
    job.controller = None
    for agent in job.agents.values():
        agent.send_signal(signal.SIGTERM)
    assert end_of(job, 8) == {143}
    assert_quiet(job)


def test_hangup_ends_the_job(launch: Callable[..., Job]) -> None:
    """The terminal is gone."""
    job = launch()
    job.wait_round(0)
    job.agents["n0"].send_signal(signal.SIGHUP)
    assert end_of(job) == {129}
    assert "SIGHUP to agent n0" in job.reason()
    assert_quiet(job)


def test_hangup_is_ignored_under_nohup(launch: Callable[..., Job]) -> None:
    job = launch(prefix=["nohup"])
    before = job.wait_round(0)
    job.agents["n0"].send_signal(signal.SIGHUP)
    for each in before.values():
        os.kill(each.pid, signal.SIGHUP)
    os.kill(job.controller_pid(), signal.SIGHUP)
    job.kill(before[1])
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={1}) == 2
    assert job.finish() == 0


def test_ranks_that_are_still_starting(launch: Callable[..., Job]) -> None:
    job = launch(STARTED + "wait_said('never')\n", nproc=2)
    started(job, "n0/0")
    started(job, "n0/1")
    job.agents["n0"].send_signal(signal.SIGTERM)
    assert end_of(job) == {143}
    assert_quiet(job)


PID_1 = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


@pytest.fixture
def needs_unshare() -> None:
    if os.geteuid() != 0 or subprocess.run([*PID_1, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no pid namespaces can be made here")


@pytest.mark.usefixtures("needs_unshare")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_as_pid_1(launch: Callable[..., Job], number: signal.Signals) -> None:
    """Orphans are buried and signals are heard, though the kernel spares PID 1 those that it does not handle."""
    job = launch(
        """
        import subprocess
        def enter(round):
            for _ in range(5):
                subprocess.run(["sh", "-c", "true & true & exit"], check=True)
            tell("spread", round)
        run(enter=enter)
        """,
        prefix=PID_1,
    )
    job.wait_round(0, "spread")
    agent = inner_child(job)
    job.wait_for(lambda: not zombies_below(agent), "the burial of all orphans", 5)
    os.kill(agent, number)
    assert end_of(job) == {CODES[number]}
    assert_quiet(job)


def test_survives_as_pid_1(launch: Callable[..., Job], needs_unshare: None) -> None:
    job = launch("tell('outer')\nrun()\n", prefix=PID_1)
    before = job.wait_round(0)
    agent = inner_child(job)
    victim = next(pid for pid in below(agent) if inner_pid(pid) == before[1].pid)
    os.kill(victim, signal.SIGKILL)
    after = job.wait_round(1)
    assert {each.pid for each in after.values()} & {before[0].pid, before[2].pid} == {before[0].pid, before[2].pid}
    assert job.finish() == 0


def inner_child(job: Job) -> int:
    """The agent, which `unshare` has forked."""
    (child,) = children_of(job.agents["n0"].pid)
    return child


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/children") as file:
            found += [int(word) for word in file.read().split()]
    return found


def below(pid: int) -> list[int]:
    found: list[int] = []
    waiting = [pid]
    while waiting:
        for child in children_of(waiting.pop()):
            found.append(child)
            waiting.append(child)
    return found


def zombies_below(pid: int) -> list[int]:
    return [child for child in children_of(pid) if _is_dead(child)]


def _is_dead(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] == b"Z"


def inner_pid(pid: int) -> int:
    """The pid of a process in its own namespace."""
    with open(f"/proc/{pid}/status") as file:
        line = next(line for line in file if line.startswith("NSpid:"))
    return int(line.split()[-1])


def test_two_jobs_at_once(launch: Callable[..., Job]) -> None:
    """With defaults, on one host: neither takes anything of the other's, and one's end is not the other's."""
    first, second = launch(), launch()
    one, two = first.wait_round(0), second.wait_round(0)
    first.kill(one[1])
    second.kill(two[0])
    assert first.survivors(one, first.wait_round(1), dead={1}) == 2
    after = second.wait_round(1)
    assert second.survivors(two, after, dead={0}) == 2
    first.agents["n0"].send_signal(signal.SIGTERM)
    assert end_of(first) == {143}
    assert all(lives(each.key) for each in after.values())
    assert second.finish() == 0


def test_the_same_job_id_and_run_directory_twice(launch: Callable[..., Job]) -> None:
    """The second is attempt 2, with a journal of its own."""
    job = launch("def enter(round):\n    tell('attempt', round)\nrun(enter=enter)\n", nproc=2)
    job.wait_round(0)
    assert job.finish() == 0
    (job.folder / "said-release").unlink()
    (job.folder / "events").unlink()
    job.start_agent("n0")
    job.wait_round(0)
    assert job.finish() == 0
    assert (job.run_dir / "attempt-1" / "journal").exists()
    assert job.endpoint()["attempt"] == 2
    assert not any(is_zombie(each.key) for each in job.events())
