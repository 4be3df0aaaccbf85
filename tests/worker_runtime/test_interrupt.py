"""Leaving the training function from outside, wherever its main thread is."""

import time

import pytest

from perdure.protocol.rank_messages import Entered, Interrupt, Raised, Ready, Returned

from .harness import trainer

PLACES = {
    "busy": "while True: pass",
    "tries": """
                while True:
                    try:
                        sum(range(100))
                    except Exception:
                        pass""",
    "sleep": "time.sleep(1000)",
    "lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "event": "threading.Event().wait()",
    "join": "threading.Thread(target=time.sleep, args=(5,), daemon=True).start(); threading.enumerate()[-1].join()",
    "child": "import subprocess; subprocess.run(['sleep', '3'])",
    "select": "import select; select.select([], [], [])",
    "pipe": "os.read(os.pipe()[0], 1)",
    "queue": "import queue; queue.Queue().get()",
    "asyncio": "import asyncio; asyncio.run(asyncio.sleep(1000))",
}


@pytest.mark.parametrize("place", PLACES)
def test_interrupted_everywhere(place: str) -> None:
    with trainer(f"""
        @perdure.resilient
        def train(round):
            round.ping(1)
            if round.index == 0:
                {PLACES[place]}
            return "again"
        print(train())
        """) as rank:
        rank.start()
        rank.wait_page(1)
        began = time.monotonic()
        ready = rank.interrupt(deadline_s=3)
        assert time.monotonic() - began < 1.0
        assert ready.fault is None
        assert ready.swallowed == ()
        assert not ready.in_collective
        assert ready.where.startswith("<string>:")
        rank.enter(1, port=ready.port)
        rank.expect(Entered)
        rank.expect(Returned)
        assert rank.finish()[:2] == (0, "again\n")


def test_an_import_is_never_cut_short() -> None:
    """torch, for one, cannot be imported again after half an import."""
    with trainer("""
        import sys, tempfile
        folder = tempfile.TemporaryDirectory()
        with open(os.path.join(folder.name, "slow_to_import.py"), "w") as file:
            file.write("import time\\nfor _ in range(100): time.sleep(0.01)\\nwhole = True")
        sys.path.insert(0, folder.name)

        @perdure.resilient
        def train(round):
            round.ping(1)
            import slow_to_import
            if round.index == 0:
                time.sleep(1000)
            return slow_to_import.whole
        print(train())
        folder.cleanup()
        """) as rank:
        rank.start()
        rank.wait_page(1)
        ready = rank.interrupt(deadline_s=5)
        assert ready.fault is None
        rank.enter(1, port=ready.port)
        rank.expect(Entered)
        rank.expect(Returned)
        assert rank.finish()[:2] == (0, "True\n")


def test_who_swallows_is_named() -> None:
    with trainer("""
        def work():
            time.sleep(1000)
        def swallower():
            try:
                work()
            except BaseException:
                pass
        @perdure.resilient
        def train(round):
            round.ping(1)
            swallower()
            time.sleep(1000)
        train()
        """) as rank:
        rank.start()
        rank.wait_page(1)
        ready = rank.interrupt(deadline_s=5)
        assert ready.swallowed == ("<string>:8",)
        assert ready.where == "<string>:5"


def test_clean_up_in_finally_is_not_cut_short() -> None:
    with trainer("""
        @perdure.resilient
        def train(round):
            round.ping(1)
            try:
                time.sleep(1000)
            finally:
                time.sleep(0.3)
                print("cleaned", flush=True)
        train()
        """) as rank:
        rank.start()
        rank.wait_page(1)
        ready = rank.interrupt(deadline_s=5)
        assert ready.swallowed == ()
        assert rank.finish(3)[:2] == (3, "cleaned\n")


def test_atomic_defers_interrupt_and_abort() -> None:
    with trainer("""
        @perdure.resilient(abort=[lambda: print("abort", flush=True)])
        def train(round):
            with round.atomic():
                with round.atomic():
                    round.ping(1)
                    time.sleep(0.3)
                time.sleep(0.1)
                print("whole", flush=True)
            print("never")
        train()
        """) as rank:
        rank.start()
        rank.wait_page(1)
        began = time.monotonic()
        ready = rank.interrupt(deadline_s=5)
        assert 0.3 < time.monotonic() - began < 0.9
        assert ready.fault is None
        assert rank.finish(3)[1] == "whole\nabort\n"


def test_what_follows_from_an_interrupt_is_no_fault() -> None:
    with trainer("""
        @perdure.resilient
        def train(round):
            round.ping(1)
            try:
                time.sleep(1000)
            except BaseException:
                if round.index == 0: raise RuntimeError("connection closed by peer")
                sys.exit(1)
        train()
        """) as rank:
        rank.start()
        rank.wait_page(1)
        ready = rank.interrupt()
        assert ready.fault is None
        rank.enter(1, port=ready.port)
        rank.expect(Entered)
        rank.wait_page(1)
        assert rank.interrupt(1).fault is None


def test_interrupts_at_the_moment_of_return_and_raise() -> None:
    with trainer("""
        @perdure.resilient
        def train(round):
            end = time.monotonic() + round.index % 7 * 1e-4
            while time.monotonic() < end: pass
            if round.index % 2: raise ValueError
        train()
        """) as rank:
        ready = rank.expect(Ready)
        for index in range(150):
            rank.enter(index, port=ready.port)
            rank.expect(Entered)
            rank.send(Interrupt(index, "now"))
            message = rank.receive()
            while not isinstance(message, Ready):
                assert isinstance(message, Returned | Raised)
                message = rank.receive()
            ready = message
            assert ready.round == index
        assert rank.finish(5)[0] == 5


def test_fifty_rounds_leave_nothing() -> None:
    with trainer("""
        import resource
        held = []
        @perdure.resilient
        def train(round):
            ballast = bytearray(50 << 20)
            rss = int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
            print(rss, len(os.listdir("/proc/self/fd")), threading.active_count(), flush=True)
            round.ping(1)
            if round.index % 2: raise MemoryError
            time.sleep(1000)
        train()
        """) as rank:
        ready = rank.expect(Ready)
        for index in range(50):
            rank.enter(index, port=ready.port)
            rank.expect(Entered)
            if index % 2:
                rank.expect(Raised)
                ready = rank.expect(Ready)
            else:
                rank.wait_page(1)
                ready = rank.interrupt(index)
        _, stdout, _ = rank.finish(1)
        rows = [[int(word) for word in line.split()] for line in stdout.splitlines()]
        memory, fds, threads = zip(*rows[2:], strict=True)
        assert len(rows) == 50
        assert max(memory) - min(memory) < 10
        assert len(set(fds)) == 1
        assert max(threads) <= min(threads) + 1


def test_nothing_of_the_function_outlives_it() -> None:
    """Neither the frame that was seen when the interrupt came nor those it was raised in: device memory hangs on
    them, and the next round would have to wait for the garbage collection."""
    with trainer("""
        import gc, weakref
        gc.disable()
        class Tensor: pass
        seen = []
        def held():
            seen.append(weakref.ref(tensor := Tensor()))
            return tensor
        def step(round):
            tensor = held()
            round.ping(1)
            while round._flight.wanted is None: pass
        def leave(round):
            tensor = held()
            with round.atomic(): step(round)
        @perdure.resilient
        def train(round):
            if round.index: return [ref() for ref in seen]
            leave(round)
        print(train())
        """) as rank:
        rank.start()
        rank.wait_page(1)
        rank.enter(1, port=rank.interrupt().port)
        rank.expect(Entered)
        rank.expect(Returned)
        assert rank.finish()[:2] == (0, "[None, None]\n")
