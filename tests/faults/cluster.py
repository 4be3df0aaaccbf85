"""Faults of what surrounds the ranks: the controller, the agents, whole nodes."""

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from perdure.controller.core.job import Job as Core
from perdure.controller.journal import read_records
from perdure.controller.journal_format import JournalError
from perdure.controller.recovery import decode_entry

from .harness import DEADLINE_S, Event, Job, Seats
from .processes import Key, lives, state_of

STARTED = 'tell("started", life=int(os.environ["PERDURE_LIFE"]))\n'
"""For the beginning of a script: tells that a process has started, before it reaches the gate."""


def core_of(job: Job) -> Core | None:
    """The job's state, as its journal tells it; None before there is one."""
    core = Core()
    try:
        for _, payload in read_records(job.run_dir / "journal"):
            entry = decode_entry(payload)
            core.on(entry.event, entry.now)
    except (JournalError, msgspec.MsgspecError):
        return None
    return core


def phase_of(job: Job) -> str:
    core = core_of(job)
    return core.phase.value if core is not None else ""


def reserves(job: Job) -> set[str]:
    """Slots at the gate without a seat in the present round."""
    core = core_of(job)
    if core is None or core.round is None:
        return set()
    return {str(r.slot) for r in core.roster.slots() if r.at_gate and core.round.seat_of(r) is None}


def wait_phase(job: Job, phase: str) -> None:
    job.wait_for(lambda: phase_of(job) == phase, f"the phase {phase}")


def stamp(job: Job) -> int:
    """How many lines the log has: `wait_new` finds later ones."""
    return len(job.log())


def wait_new(job: Job, since: int, event: str, text: str = "", deadline_s: float = DEADLINE_S) -> str:
    """Wait for a line of this kind with `text` in it that is newer than `stamp`; its text."""

    def found() -> str:
        lines = job.log()[since:]
        return next((str(x["text"]) for x in lines if x["event"] == event and text in x["text"]), "")

    return job.wait_for(found, f"a new line {event!r} with {text!r} in the log", deadline_s)


def kill_controller(job: Job) -> None:
    """SIGKILL the controller that is a process of its own."""
    assert job.controller is not None
    job.controller.kill()
    job.controller.wait(10)


def replace_controller(job: Job) -> str:
    """Start another controller after the first; what it says of its return."""
    since = stamp(job)
    job.start_controller()
    return wait_new(job, since, "controller_back")


def crash_controller(job: Job, phase: str) -> None:
    """Kill the controller in this phase, start another, and wait until it has taken the job up where it was."""
    wait_phase(job, phase)
    kill_controller(job)
    said = replace_controller(job)
    assert f"in phase {phase}" in said, said


def ranks_of(job: Job, node: str) -> set[Key]:
    """The rank processes of this agent that live now."""
    return {each.key for each in job.events() if each.slot.startswith(f"{node}/") and lives(each.key)}


def lose_node(job: Job, node: str) -> None:
    """The agent and all its ranks die at the same moment."""
    agent = job.agents.pop(node)
    victims = [agent.pid, *(pid for pid, _ in ranks_of(job, node))]
    for pid in victims:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    for pid in victims:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait(10)


def lose_agent(job: Job, node: str) -> set[Key]:
    """The agent alone is killed. Returns the ranks that it leaves."""
    left = ranks_of(job, node)
    agent = job.agents.pop(node)
    agent.kill()
    agent.wait(10)
    return left


def wait_gone(job: Job, keys: Iterable[Key], deadline_s: float) -> float:
    """Wait for the death of these processes; how many seconds it took."""
    started = time.monotonic()
    job.wait_for(lambda: not any(map(lives, keys)), "the end of the ranks of a dead agent", deadline_s)
    return time.monotonic() - started


def second_agent(job: Job, node: str) -> subprocess.Popen[bytes]:
    """Start another agent under a name that is taken; the job's own stays in `job.agents`."""
    own = job.agents[node]
    try:
        return job.start_agent(node)
    finally:
        job.agents[node] = own


def of_node(seats: Seats, node: str) -> set[int]:
    """The ranks that this node has."""
    return {rank for rank, each in seats.items() if each.slot.startswith(f"{node}/")}


def same_processes(before: Seats, job: Job) -> None:
    """Demand that every process of these seats lives, and that nobody has started another round."""
    for rank, each in before.items():
        assert lives(each.key), f"rank {rank} (pid {each.pid}) is dead"
    newest = max(job.rounds())
    assert {each.round for each in before.values()} == {newest}, f"the job is in round {newest}"


def freeze(pid: int) -> None:
    """SIGSTOP, and wait until every thread stands still."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + 5
    while state_of(pid) != "T":
        assert time.monotonic() < end, f"pid {pid} does not stop"
        time.sleep(0.002)


def started(job: Job, slot: str, life: int = 1) -> Event:
    """Wait for the start of a process. Needs a script that begins with STARTED."""
    return job.wait_event("started", slot=slot, more={"life": life})
