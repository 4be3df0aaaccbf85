"""Ranks that die without a word, with and without somebody to take their place."""

import os
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perdure.worker_runtime.agent.oom import count_file

from .harness import Event, Job, Seats
from .processes import lives


def started(job: Job, slot: str, life: int = 1) -> Event:
    """The start of a process, wherever it is now. Needs a script that begins with STARTED."""
    return job.wait_event("started", slot=slot, more={"life": life})


STARTED = 'tell("started", life=int(os.environ["PERDURE_LIFE"]))\n'


def reserve_slot(seats: Seats, nproc: int) -> str:
    (slot,) = {f"n0/{index}" for index in range(nproc)} - {each.slot for each in seats.values()}
    return slot


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_reserve_takes_the_place_of_a_killed_rank(launch: Callable[..., Job], rank: int) -> None:
    job = launch(nproc=4, active_world_size=3)
    before = job.wait_round(0)
    reserve = reserve_slot(before, 4)
    job.kill(before[rank])
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={rank}) == 2
    assert after[rank].slot == reserve
    assert job.finish() == 0
    job.assert_rounds(2)
    story = job.wait_log("recovered")
    assert (story["rank"], story["kind"], story["world_size"]) == (rank, "signal", 3)
    assert f"{reserve} takes rank {rank}" in story["text"]


@pytest.mark.parametrize("rank", [0, 2])
def test_without_a_reserve_the_slot_is_filled_again(launch: Callable[..., Job], rank: int) -> None:
    job = launch(nproc=3)
    before = job.wait_round(0)
    job.kill(before[rank])
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={rank}) == 2
    assert len(after) == 3
    assert after[rank].slot == before[rank].slot
    assert job.finish() == 0
    job.assert_rounds(2)


@pytest.mark.parametrize("rank", [0, 2])
def test_without_respawn_the_world_shrinks(launch: Callable[..., Job], rank: int) -> None:
    job = launch(nproc=3, respawn=False)
    before = job.wait_round(0)
    job.kill(before[rank])
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={rank}) == 2
    assert sorted(after) == [0, 1]
    assert job.finish() == 0
    job.assert_rounds(2)


def test_a_killed_reserve_disturbs_nobody_and_is_replaced(launch: Callable[..., Job]) -> None:
    job = launch(STARTED + "run()", nproc=3, active_world_size=2)
    before = job.wait_round(0)
    slot = reserve_slot(before, 3)
    job.kill(started(job, slot))
    started(job, slot, life=2)
    job.wait_log("slot_gone", "SIGKILL")
    job.assert_rounds(1)
    job.kill(before[1])
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={1}) == 1
    assert job.finish() == 0
    job.assert_rounds(2)


def test_when_the_reserves_are_used_up_the_world_shrinks_and_then_the_job_ends(launch: Callable[..., Job]) -> None:
    job = launch(nproc=4, active_world_size=3, min_world_size=2, respawn=False)
    worlds: list[int] = []
    for index in range(3):
        before = job.wait_round(index)
        worlds.append(len(before))
        job.kill(before[0])
        if index < 2:
            after = job.wait_round(index + 1)
            assert job.survivors(before, after, dead={0}) == len(before) - 1
    assert worlds == [3, 3, 2]
    assert job.wait_end() == 91
    job.assert_rounds(3)
    assert "min_world_size" in job.reason()


def test_two_ranks_killed_at_once_make_one_round(launch: Callable[..., Job]) -> None:
    job = launch(nproc=4)
    before = job.wait_round(0)
    for rank in (1, 3):
        job.kill(before[rank])
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={1, 3}) == 2
    assert job.finish() == 0
    job.assert_rounds(2)
    assert job.wait_log("recovered")["faults"] == 2


def test_when_all_ranks_are_killed_new_ones_go_on(launch: Callable[..., Job]) -> None:
    job = launch(nproc=3)
    before = job.wait_round(0)
    for each in before.values():
        os.kill(each.pid, signal.SIGKILL)
    after = job.wait_round(1)
    assert job.survivors(before, after, dead=set(before)) == 0
    assert len(after) == 3
    assert job.finish() == 0
    job.assert_rounds(2)
    assert job.wait_log("recovered")["faults"] == 3


def test_the_last_words_on_stderr_are_in_the_report(launch: Callable[..., Job]) -> None:
    job = launch("""
        def fault(round, step):
            if (round.index, round.rank, step) == (0, 1, 5):
                os.write(2, b"cuda says: unspecified launch failure 0xBEEF\\n")
                os.kill(os.getpid(), signal.SIGABRT)
        run(fault)
        """)
    before, after = job.wait_round(0), job.wait_round(1)
    assert job.survivors(before, after, dead={1}) == 2
    assert job.finish() == 0
    fault = job.wait_log("fault", "SIGABRT")
    assert (fault["rank"], fault["kind"]) == (1, "signal")
    assert "launch failure 0xBEEF" in fault["detail"]
    assert "launch failure 0xBEEF" in job.output()


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory cgroup of 700 MB: enough for a job, its controller and its fork server, but not for a glutton."""
    file = count_file(1)
    if file is None:
        pytest.skip("this machine shows no OOM counts")
    folder = Path(file).parent / f"perdure-test-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
        limit = "memory.limit_in_bytes" if Path(file).name == "memory.oom_control" else "memory.max"
        (folder / limit).write_text(str(700 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield folder
    folder.rmdir()


def test_an_out_of_memory_kill_is_told_from_sigkill(launch: Callable[..., Job], small_group: Path) -> None:
    join = f'echo $$ > {small_group}/cgroup.procs && exec "$@"'
    job = launch(
        """
        def fault(round, step):
            if (round.index, round.rank, step) == (0, 1, 5):
                eaten = []
                while True:
                    round.ping(step)
                    eaten.append(bytearray(b"x") * (8 << 20))
        run(fault)
        """,
        prefix=["/bin/sh", "-c", join, "sh"],
    )
    before, after = job.wait_round(0), job.wait_round(1)
    assert job.survivors(before, after, dead={1}) == 2
    job.kill(after[2])
    last = job.wait_round(2)
    assert job.survivors(after, last, dead={2}) == 2
    assert job.finish() == 0
    first, second = job.log("recovered")
    assert (first["rank"], first["kind"]) == (1, "oom")
    assert (second["rank"], second["kind"]) == (2, "signal"), "a plain SIGKILL after it is none"


def test_what_a_killed_rank_had_started_dies_with_it(launch: Callable[..., Job]) -> None:
    """A child in its session, and one that forked twice into a session of its own."""
    job = launch("""
        import subprocess
        from pathlib import Path
        CHILD = Path(__file__).with_name("child.py")
        CHILD.write_text("import sys, time, trainer_kit; trainer_kit.tell(sys.argv[1]); time.sleep(1000)")
        def enter(round):
            if (round.index, round.rank) == (0, 1):
                subprocess.Popen([sys.executable, str(CHILD), "child"])
                subprocess.Popen(["setsid", "--fork", sys.executable, str(CHILD), "daemon"])
        run(enter=enter)
        """)
    before = job.wait_round(0)
    keys = [job.wait_event(name).key for name in ("child", "daemon")]
    assert all(map(lives, keys))
    job.kill(before[1])
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={1}) == 2
    job.wait_for(lambda: not any(map(lives, keys)), "the end of what rank 1 had started")
    assert job.finish() == 0


def test_a_signal_that_the_rank_dies_of_is_named(launch: Callable[..., Job]) -> None:
    job = launch(nproc=2)
    before = job.wait_round(0)
    job.kill(before[0], signal.SIGSEGV)
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={0}) == 1
    assert job.finish() == 0
    assert "SIGSEGV" in job.wait_log("recovered")["text"]
