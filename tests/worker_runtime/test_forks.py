"""Forked and spawned children of a trainer are no ranks, and do not disturb theirs."""

from perdure.protocol.rank_messages import Entered, Ready, Returned

from .harness import trainer


def test_two_hundred_forks_while_the_runtime_is_busy() -> None:
    with trainer("""
        @perdure.resilient
        def train(round):
            stop = threading.Event()
            def pinger():
                while not stop.is_set():
                    round.ping(5)
                    time.sleep(0.0002)
            threads = [threading.Thread(target=pinger) for _ in range(2)]
            for thread in threads: thread.start()
            bad = 0
            for _ in range(200):
                pid = os.fork()
                if pid == 0:
                    round.ping(1000)
                    with round.atomic(): pass
                    try:
                        os.fstat(int(os.environ["PERDURE_RANK_FD"]))
                    except OSError:
                        os._exit(0)
                    os._exit(1)
                bad += os.waitpid(pid, 0)[1] != 0
            stop.set()
            for thread in threads: thread.join()
            return bad
        print(train())
        """) as rank:
        rank.start()
        rank.expect(Returned)
        assert rank.page.read().step == 5
        assert rank.finish()[:2] == (0, "0\n")


def test_a_forked_child_that_comes_out_of_the_function() -> None:
    with trainer("""
        @perdure.resilient
        def train(round):
            pid = os.fork()
            if pid == 0: return "child"
            assert os.waitpid(pid, 0)[1] == 0
            pid = os.fork()
            if pid == 0: raise LookupError("child")
            os.waitpid(pid, 0)
            time.sleep(1000)
        try: value = train()
        except LookupError as error: value = repr(error)
        print(value, flush=True)
        """) as rank:
        rank.start()
        # Nothing is heard of the children, and the parent is there for its interrupt.
        rank.interrupt()
        assert rank.finish(3)[1] in ("", "child\n", "child\nLookupError('child')\n")


def test_spawned_children_are_not_supervised() -> None:
    with trainer("""
        import subprocess
        CHILD = "import perdure\\n@perdure.resilient\\ndef train(round): return 'alone'\\nprint(train())"
        @perdure.resilient
        def train(round):
            return subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
        done = train()
        print(done.stdout, "not supervised" in done.stderr)
        """) as rank:
        rank.start()
        rank.expect(Returned)
        assert rank.finish()[1] == "alone\n True\n"


def test_a_data_loader_with_workers_across_interrupts() -> None:
    with trainer(
        """
        import warnings
        from torch.utils.data import DataLoader
        warnings.filterwarnings("ignore")
        @perdure.resilient
        def train(round):
            for step, batch in enumerate(DataLoader(range(10**6), batch_size=4, num_workers=2)):
                round.ping(step)
                if round.index == 2 and step == 50: return int(batch.sum())
        total = train()
        # A queue that is closed does not wait for its feeder thread, which ends soon, or never if a loader is left.
        for thread in threading.enumerate():
            if thread is not threading.main_thread(): thread.join(5)
        print(total, threading.active_count())
        """,
        torch=True,
    ) as rank:
        ready = rank.expect(Ready)
        for index in range(2):
            rank.enter(index, port=ready.port)
            rank.expect(Entered)
            rank.wait_page(20)
            ready = rank.interrupt(index, deadline_s=10)
            assert ready.fault is None
        rank.enter(2, port=ready.port)
        rank.expect(Entered)
        rank.expect(Returned)
        code, stdout, stderr = rank.finish()
        assert (code, stdout) == (0, f"{sum(range(200, 204))} 1\n"), stderr
