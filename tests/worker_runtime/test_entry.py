"""The loop around the training function: what goes in, what comes out, and what the agent hears of it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.checkpoint_io.settings import VARIABLE, CheckpointSettings
from perdure.protocol.faults import FaultKind
from perdure.protocol.names import RESERVE
from perdure.protocol.rank_messages import Enter, Entered, Facts, Finish, Interrupt, Leaving, Raised, Ready, Returned
from perdure.worker_runtime import beats

from .harness import Rank, trainer, trainers


def test_arguments_go_in_and_the_value_comes_out() -> None:
    with trainer("""
        @perdure.resilient
        def train(round, a, *, b):
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "PERDURE_ROUND")
            return a, b, round.index, round.rank, round.world_size, [os.environ[name] for name in names]
        print(train(1, b="two"))
        """) as rank:
        ready = rank.expect(Ready)
        assert ready.round == -1
        assert ready.port > 0
        assert ready.fault is None
        rank.enter(4, rank=2, world_size=3, port=1)
        assert rank.expect(Entered) == Entered(4)
        assert rank.expect(Returned) == Returned(4)
        assert rank.page.read().stage == beats.RETURNED
        code, stdout, _ = rank.finish()
        assert code == 0
        assert stdout == "(1, 'two', 4, 2, 3, ['2', '3', '2', '3', '127.0.0.1', '4'])\n"


def test_an_exception_is_told_and_the_next_round_runs() -> None:
    with trainer("""
        @perdure.resilient()
        def train(round):
            round.ping(7)
            if round.index == 0:
                raise ValueError("bad \\udcff value")
            return round.index
        print(train())
        """) as rank:
        rank.start()
        fault = rank.expect(Raised).fault
        assert (fault.kind, fault.error, fault.step, fault.round) == (FaultKind.EXCEPTION, "ValueError", 7, 0)
        assert fault.slot == "n0/0"
        assert fault.life == 1
        assert fault.entered
        assert not fault.peer_error
        assert fault.message == "ValueError: bad \\udcff value"
        assert "in train" in fault.detail
        assert fault.place.startswith("<string>:")
        ready = rank.expect(Ready)
        assert ready.fault == fault
        assert ready.round == 0
        rank.enter(1, port=ready.port)
        assert rank.expect(Entered) == Entered(1)
        assert rank.expect(Returned) == Returned(1)
        assert rank.finish()[:2] == (0, "1\n")


@pytest.mark.parametrize(
    ("leave", "code"),
    [
        ("sys.exit(16)", 16),
        ("sys.exit()", 0),
        ("sys.exit('why')", 1),
        ("sys.exit(300)", 44),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_a_process_that_wants_to_leave_leaves(leave: str, code: int) -> None:
    with trainer(f"""
        @perdure.resilient
        def train(round):
            {leave}
        train()
        """) as rank:
        rank.start()
        leaving = rank.expect(Leaving)
        assert leaving.code == code
        assert leaving.fault is not None
        assert leaving.fault.kind is FaultKind.EXIT
        assert leaving.fault.code == code
        assert rank.page.read().dying == beats.EXITING
        assert rank.page.read().code == code
        assert rank.end()[0] == (-signal.SIGINT if code == 130 else code)


def test_a_returned_rank_runs_again_after_an_interrupt() -> None:
    with trainer("""
        @perdure.resilient
        def train(round):
            return round.index
        print(train())
        """) as rank:
        rank.start()
        rank.expect(Returned)
        ready = rank.interrupt()
        rank.enter(1, port=ready.port)
        rank.expect(Entered)
        assert rank.expect(Returned) == Returned(1)
        # A next round without an interrupt in between.
        rank.enter(2, port=1)
        assert rank.expect(Entered) == Entered(2)
        assert rank.expect(Returned) == Returned(2)
        assert rank.finish()[1] == "2\n"


def test_the_end_of_the_job() -> None:
    source = """
        @perdure.resilient
        def train(round):
            if round.index: time.sleep(1000)
        print(train())
        """
    reserve, failed, running = (Rank(source, slot=f"n0/{i}") for i in range(3))
    with trainers(reserve, failed, running):
        reserve.expect(Ready)
        reserve.send(Enter(0, RESERVE, 1, 0, 1, "127.0.0.1", 1, "test"))
        assert reserve.finish()[:2] == (0, "None\n")
        failed.expect(Ready)
        code, stdout, stderr = failed.finish(90, "budget spent")
        assert (code, stdout, stderr) == (90, "", "perdure: the job ends with code 90: budget spent\n")
        running.expect(Ready)
        running.enter(1, port=1)
        running.expect(Entered)
        assert running.finish(91, "world too small")[0] == 91


def test_twice_in_one_process_and_nothing_left() -> None:
    with trainer("""
        import signal
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, print)
        def handlers(): return [signal.getsignal(number) for number in signal.valid_signals()]
        def state(): return handlers(), threading.active_count(), os.listdir("/proc/self/fd"), list(sys.meta_path)
        @perdure.resilient
        def first(round): return 1
        @perdure.resilient
        def second(round): return 2
        before = state()
        for function in (first, second, first):
            print(function(), state() == before)
        """) as rank:
        for last in (False, False, True):
            rank.start()
            rank.expect(Returned)
            if not last:
                rank.send(Finish(0, "done"))
        code, stdout, stderr = rank.finish()
        assert (code, stdout) == (0, "1 True\n2 True\n1 True\n"), stderr


def test_an_interrupt_right_behind_the_seat() -> None:
    with trainer("""
        @perdure.resilient
        def train(round):
            time.sleep(1000)
        train()
        """) as rank:
        for index in range(30):
            ready = rank.expect(Ready)
            rank.enter(index, port=ready.port)
            rank.send(Interrupt(index, "at once"))
            assert rank.expect(Entered) == Entered(index)
        assert rank.expect(Ready).round == 29


def test_the_agent_is_gone() -> None:
    with trainer("""
        @perdure.resilient
        def train(round):
            print("flushed")
            round.ping(1)
            time.sleep(1000)
        train()
        """) as rank:
        rank.start()
        rank.wait_page(1)
        rank.hang_up()
        code, stdout, stderr = rank.end()
        assert (code, stdout) == (94, "flushed\n")
        assert "the agent is gone" in stderr
        assert len(stderr.splitlines()) == 1


def test_ctrl_c_at_the_gate() -> None:
    with trainer("""
        @perdure.resilient
        def train(round): pass
        train()
        """) as rank:
        rank.expect(Ready)
        rank.process.send_signal(signal.SIGINT)
        assert rank.expect(Leaving) == Leaving(130)
        assert rank.end()[0] == -signal.SIGINT


def test_hooks_run_in_order_and_an_unhealthy_rank_leaves() -> None:
    with trainer("""
        def healthy(): print("health", flush=True); return len(rounds) < 2
        rounds = []
        def broken(): raise OSError("abort is broken")
        @perdure.resilient(
            abort=[lambda: print("abort"), broken], finalize=[lambda: print("finalize")], health_check=[healthy])
        def train(round):
            rounds.append(round.index)
            raise RuntimeError
        train()
        """) as rank:
        rank.start()
        rank.expect(Raised)
        ready = rank.expect(Ready)
        assert [note.text for note in rank.notes] == ["abort step broken failed: OSError: abort is broken"]
        rank.enter(1, port=ready.port)
        rank.expect(Entered)
        rank.expect(Raised)
        fault = rank.expect(Ready).fault
        assert fault is not None
        assert fault.kind is FaultKind.HEALTH_CHECK
        assert "healthy" in fault.message
        assert rank.expect(Leaving) == Leaving(1, fault)
        code, stdout, _ = rank.end()
        assert (code, stdout) == (1, "abort\nfinalize\nhealth\n" * 2)


def _alone(source: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
    environ.update(RANK="3", WORLD_SIZE="5")
    command = [sys.executable, "-c", "import perdure, threading\n" + source]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)


def test_without_an_agent_it_runs_once_and_says_so() -> None:
    source = """
@perdure.resilient
def train(round):
    with round.section("step"), round.atomic(), round.pause(max=1): round.ping(2**70)
    return round.index, round.rank, round.world_size, round.should_stop(9), round.resume
print(train())
"""
    done = _alone(source)
    assert done.stdout == "(0, 3, 5, False, None)\n"
    assert done.stderr.startswith("perdure: not supervised")
    assert len(done.stderr.splitlines()) == 1
    refused = _alone("perdure.require()\n" + source)
    assert refused.returncode == 1
    assert "NotSupervised" in refused.stderr
    assert "perdure run" in refused.stderr


def test_another_thread_is_refused() -> None:
    done = _alone("""
@perdure.resilient
def train(round): print("never")
thread = threading.Thread(target=train); thread.start(); thread.join()
""")
    assert done.stdout == ""
    assert "main thread only" in done.stderr


def test_a_save_in_another_thread_is_refused_and_costs_nothing(tmp_path: Path) -> None:
    environ = {VARIABLE: CheckpointSettings(node="n0", save=str(tmp_path)).text()}
    with trainer(
        """
        said = []
        @perdure.resilient
        def train(round):
            def save():
                try:
                    round.checkpointer.save(1, {"a": torch.ones(3)})
                except RuntimeError as error:
                    said.append(str(error))
            for _ in range(3):
                thread = threading.Thread(target=save); thread.start(); thread.join()
            return round.checkpointer.save(2, {"a": torch.ones(3)}).wait(20)
        print(train(), len(said), said[0])
        """,
        torch=True,
        env=environ,
    ) as rank:
        rank.start()
        assert rank.expect(Facts).facts[0].save.step == 2
        rank.expect(Returned)
        _, stdout, _ = rank.finish()
        assert stdout.startswith("True 3 round.checkpointer.save works in the main thread only")
