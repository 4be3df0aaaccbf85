"""Whole jobs: many rounds, several functions, several jobs on one host, and the end of a reserve."""

from collections.abc import Callable

from .harness import Job
from .processes import Usage, descendants_of

MANY = """
import gc
def fault(round, step):
    if step == 3 and round.index in (5, ROUNDS):
        gc.collect()
        tell("here", round)
        wait_said(f"measured-{round.index}", round)
    if step == 4 and round.index < ROUNDS and round.rank == round.index % round.world_size:
        FAULT
"""


def measure(job: Job, index: int, processes: int) -> dict[str, Usage]:
    """Of the job's processes, in a round in which all ranks stand still, and when the agent has so many descendants."""
    seats = job.wait_round(index, "here", deadline_s=60)
    agent = job.agents["n0"].pid
    job.wait_for(lambda: len(descendants_of(agent)) == processes, f"{processes} processes below the agent")
    found = {f"rank {rank}": Usage(each.pid) for rank, each in seats.items()}
    found |= {"agent": Usage(agent), "controller": Usage(job.controller_pid())}
    job.say(f"measured-{index}")
    return found


def assert_flat(before: dict[str, Usage], after: dict[str, Usage], grown_mb: float) -> None:
    for name, was in before.items():
        now = after[name]
        told = f"{name}: {was} -> {now}"
        assert now.descriptors <= was.descriptors + 2, told
        assert now.threads <= was.threads + 2, told
        assert now.memory_mb <= was.memory_mb + grown_mb, told


def test_fifty_rounds_leave_nothing_in_ranks_agent_and_controller(launch: Callable[..., Job]) -> None:
    lost = 'ballast = bytearray(b"x") * (8 << 20); raise ValueError("boom")'  # frames must not keep what they held
    source = MANY.replace("FAULT", lost) + "run(fault, gloo=True)\n"
    job = launch(source.replace("ROUNDS", "50"), nproc=2, respawn=False)
    before = job.wait_round(0)
    early, late = measure(job, 5, 4), measure(job, 50, 4)
    assert job.survivors(before, job.wait_round(50)) == 2
    assert job.finish() == 0
    job.assert_rounds(51)
    assert_flat(early, late, grown_mb=8)
    assert job.log("recovered")[-1]["faults"] == 50


def test_twenty_deaths_leave_nothing_in_agent_and_controller(launch: Callable[..., Job]) -> None:
    source = MANY.replace("FAULT", "os.kill(os.getpid(), signal.SIGKILL)") + "run(fault)\n"
    job = launch(source.replace("ROUNDS", "20"), nproc=3, active_world_size=2)
    processes = 6  # three ranks, controller, guard, fork server
    early, late = measure(job, 5, processes), measure(job, 20, processes)
    assert job.finish() == 0
    job.assert_rounds(21)
    assert_flat(*({name: each[name] for name in ("agent", "controller")} for each in (early, late)), grown_mb=8)


def test_two_resilient_functions_in_one_script(launch: Callable[..., Job]) -> None:
    """Each with a fault; rounds go on counting. Who is started in the second one gets nothing from the first."""
    job = launch(
        """
        def first(round, step):
            if (round.index, round.rank, step) == (0, 1, 5):
                raise ValueError("in the first")
        def second(round, step):
            if (round.index, round.rank, step) == (2, 0, 5):
                os.kill(os.getpid(), signal.SIGKILL)
        @perdure.resilient
        def train(round, name, fault):
            tell("entered", round)
            for step in range(1, 100_000):
                round.ping(round.index * 100_000 + step)
                fault(round, step)
                time.sleep(0.004)
                if is_said(name):
                    return name
        for name, fault in (("first", first), ("second", second)):
            tell("result", value=str(train(name, fault)))
        """,
    )
    start, again = job.wait_round(0), job.wait_round(1)
    assert job.survivors(start, again) == 3
    job.say("first")
    second = job.wait_round(2)
    third = job.wait_round(3)
    assert job.survivors(second, third, dead={0}) == 2
    job.say("second")
    assert job.wait_end() == 0
    job.assert_rounds(4)
    values = [each.more["value"] for each in job.events("result")]
    assert sorted(values) == ["None"] + ["first"] * 3 + ["second"] * 3


def test_a_reserve_that_was_never_needed_ends_with_0(launch: Callable[..., Job]) -> None:
    job = launch(
        """
        import atexit
        tell("started")
        atexit.register(tell, "bye")
        run()
        """,
        nproc=4,
        active_world_size=2,
        respawn=False,
    )
    job.wait_round(0)
    assert job.finish() == 0
    job.assert_rounds(1)
    assert len(job.events("left")) == len(job.events("bye")) == 4
    assert job.log("slot_gone") == []
    assert job.log("kill") == []


def test_two_jobs_on_one_host_do_not_see_each_other(launch: Callable[..., Job]) -> None:
    source = """
        def fault(round, step):
            if (round.index, round.rank, step) == (0, 1, 5):
                wait_said("both", round)
                raise ValueError("boom")
        run(fault)
        """
    one, other = launch(source, nproc=2), launch(source, nproc=2)
    before = [job.wait_round(0) for job in (one, other)]
    one.say("both")
    assert one.survivors(before[0], one.wait_round(1)) == 2
    one.kill(one.wait_round(1)[0])
    assert one.survivors(one.wait_round(1), one.wait_round(2), dead={0}) == 1
    other.assert_rounds(1)
    other.say("both")
    assert other.survivors(before[1], other.wait_round(1)) == 2
    assert one.finish() == 0
    other.assert_rounds(2)
    assert other.finish() == 0


def test_a_job_can_run_again_in_the_same_run_directory(launch: Callable[..., Job]) -> None:
    job = launch(nproc=2, respawn=False)
    job.wait_round(0)
    assert job.finish() == 0
    job.start()
    assert job.wait_end() == 0
    assert len(job.events("entered", round=0)) == 4
