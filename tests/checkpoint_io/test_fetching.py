"""One process brings all far shards of a restore; what goes wrong costs one of them, and nothing is left at the end."""

import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from perdure.checkpoint_io import fetching
from perdure.checkpoint_io.checkpointer import Checkpointer
from perdure.checkpoint_io.fetching import Fetching
from perdure.checkpoint_io.names import local_name, sidecar_name
from perdure.checkpoint_io.settings import CheckpointSettings
from perdure.checkpoint_io.turn import Turn
from perdure.protocol.checkpoints import Fact, Place, Tier, What, holders_of
from perdure.protocol.keys import new_keys
from perdure.worker_runtime.interrupt import Flight, Interrupter, RoundInterrupted

from .depots import DepotProcess
from .shards import SAVE, resume_of, split, write_shard

KEYS = new_keys()
WORLD = 4
WHOLE = torch.arange(4096, dtype=torch.float32)


OTHERS: set[int] = set()  # children of this process that were there before a test


@pytest.fixture(autouse=True)
def others() -> None:
    OTHERS.clear()
    OTHERS.update(helpers())


def helpers(of: int = 0) -> set[int]:
    """The children that fetch, dead ones included, of a process, or of this one."""
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it is gone
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes() if parent == (of or os.getpid()) else b"another's"
            if not command or b"perdure.checkpoint_io.fetch" in command:  # a dead one has no command any more
                found.add(int(entry.name))
    return found - OTHERS


def descriptors() -> set[str]:
    return {f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}" for fd in map(int, os.listdir("/proc/self/fd")) if is_open(fd)}


def is_open(fd: int) -> bool:
    """Not the one by which the folder was listed."""
    return os.path.lexists(f"/proc/self/fd/{fd}")


class Site:
    """A world of WORLD ranks was saved on n0, whose depot runs; this rank is on n1."""

    def __init__(self, root: Path, depot: DepotProcess, digests: list[bytes]) -> None:
        self.root = root
        self.depot = depot
        self.places = tuple(Place(rank, "n0", depot.address) for rank in range(WORLD))
        self.turn = Turn(0, 1, 7, 4, resume=resume_of(digests, local=True, holders=holders_of(self.places)))
        self.facts: list[Fact] = []
        self.settings = CheckpointSettings("n1", local=str(root / "b" / "n1"), keys=str(root / "keys.json"))
        self.folder = root / "b" / "n1" / local_name(SAVE)

    @contextmanager
    def fetching(self, limit_s: float = 20.0, turn: Turn | None = None) -> Iterator[Fetching]:
        made = Fetching(self.settings, turn or self.turn, self.facts.append, limit_s)
        try:
            yield made
        finally:
            made.close()
            assert helpers() == set()

    def names(self) -> list[str]:
        return sorted(os.listdir(self.folder)) if self.folder.exists() else []


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    keys = tmp_path / "keys.json"
    keys.touch(mode=0o600)
    keys.write_bytes(msgspec.json.encode(KEYS))
    folder = tmp_path / "a" / "n0" / local_name(SAVE)
    digests = [write_shard(folder, rank, WORLD, {"w": each}) for rank, each in enumerate(split(WHOLE, WORLD))]
    with DepotProcess("n0", KEYS, local=tmp_path / "a") as depot:
        yield Site(tmp_path, depot, digests)


@pytest.fixture
def silent(site: Site) -> Iterator[Site]:
    """The depot's machine accepts connections, and nothing else comes of them until `go_on`."""
    site.depot.stop()
    yield site
    site.depot.go_on()


def wait_begun(of: int = 0) -> int:
    until = time.monotonic() + 20
    while not (found := helpers(of)):
        assert time.monotonic() < until
        os.sched_yield()
    (pid,) = found
    return pid


@contextmanager
def once_begun(do: Callable[[int], object]) -> Iterator[None]:
    """Call it with the process id as soon as there is a process that fetches, in a thread."""

    thread = threading.Thread(target=lambda: do(wait_begun()))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@contextmanager
def dying(pid: int) -> Iterator[None]:
    """It is gone soon after the end of this."""
    descriptor = os.pidfd_open(pid)
    try:
        yield
        assert select.select([descriptor], [], [], 5)[0]
    finally:
        os.close(descriptor)


# ---- one process ----------------------------------------------------------------------------------------------


def test_all_shards_come_by_one_process(site: Site) -> None:
    before = descriptors()
    seen: list[set[int]] = []
    with site.fetching() as made:
        assert helpers() == set(), "before there is something to fetch"
        for place in site.places:
            made.fetch(SAVE, place)
            seen.append(helpers())
            assert (site.folder / sidecar_name(place.rank)).exists()
    assert len(seen[0]) == 1
    assert seen == [seen[0]] * WORLD
    assert descriptors() == before
    told = [(fact.what, fact.tier, fact.rank, fact.node, fact.world_size) for fact in site.facts]
    assert told == [(What.WRITTEN, Tier.LOCAL, rank, "n1", WORLD) for rank in range(WORLD)]
    assert all(fact.nbytes > 4096 for fact in site.facts)


def test_threads_share_it(site: Site) -> None:
    with site.fetching() as made:
        threads = [threading.Thread(target=made.fetch, args=(SAVE, place)) for place in site.places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(helpers()) == 1
    assert sorted(fact.rank for fact in site.facts) == list(range(WORLD))


def test_a_restore_leaves_nothing_behind(site: Site) -> None:
    checkpointer = Checkpointer(site.settings, site.facts.append, lambda *_: None)
    state = {"w": torch.zeros_like(WHOLE)}
    try:
        checkpointer.begin(site.turn)
        assert checkpointer.restore(state) == SAVE.step
        assert torch.equal(state["w"], WHOLE)
        assert helpers() == set()
    finally:
        checkpointer.close()


# ---- what goes wrong ------------------------------------------------------------------------------------------


def test_one_that_fails_is_told_and_the_same_process_goes_on(site: Site) -> None:
    with site.fetching() as made:
        made.fetch(SAVE, site.places[1])
        first = helpers()
        with pytest.raises(
            OSError, match=f"shard 9 of step 100 .* from the depot at {site.places[0].address}: .*No such"
        ):
            made.fetch(SAVE, Place(9, "n0", site.places[0].address))
        made.fetch(SAVE, site.places[2])
        assert helpers() == first
    assert [fact.rank for fact in site.facts] == [1, 2]


def test_a_silent_depot_is_given_up_in_time(silent: Site) -> None:
    with silent.fetching(limit_s=0.5) as made:
        with pytest.raises(OSError, match="not here within the time given"):
            made.fetch(SAVE, silent.places[0])
        first = helpers()
        silent.depot.go_on()
        made.fetch(SAVE, silent.places[0])
        assert helpers() == first


def test_a_process_that_is_killed_costs_one_shard(silent: Site) -> None:
    with silent.fetching() as made:
        with once_begun(kill), pytest.raises(OSError, match=r"reading from tcp://.* the process for it was killed by"):
            made.fetch(SAVE, silent.places[0])
        assert helpers() == set()
        silent.depot.go_on()
        made.fetch(SAVE, silent.places[0])
        assert len(helpers()) == 1


def test_one_that_is_killed_between_two_shards_costs_none(site: Site) -> None:
    with site.fetching() as made:
        made.fetch(SAVE, site.places[0])
        (first,) = helpers()
        with dying(first):
            kill(first)
        made.fetch(SAVE, site.places[1])
        (second,) = helpers()
        assert second != first


def test_a_rank_that_is_killed_takes_it_along(silent: Site) -> None:
    rank = os.fork()
    if not rank:
        try:
            Fetching(silent.settings, silent.turn, silent.facts.append).fetch(SAVE, silent.places[0])
        finally:
            os._exit(1)
    try:
        helper = wait_begun(rank)
        assert os.getsid(helper) == os.getsid(0)
        with dying(helper):
            kill(rank)
    finally:
        kill(rank)
        os.waitpid(rank, 0)


def test_a_process_that_hangs_costs_one_shard(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "GRACE_S", 0.2)
    with site.fetching(limit_s=0.8) as made:
        made.fetch(SAVE, site.places[0])
        (first,) = helpers()
        os.kill(first, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(OSError, match=r"no answer in 1 s; the process for it was killed"):
            made.fetch(SAVE, site.places[1])
        assert time.monotonic() - started < 3
    with site.fetching() as made:
        made.fetch(SAVE, site.places[1])


def test_a_process_that_does_not_start(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "COMMAND", ("/bin/sh", "-c", "exit 3"))
    before = descriptors()
    with site.fetching() as made, pytest.raises(OSError, match="the process for it ended with exit code 3"):
        made.fetch(SAVE, site.places[0])
    monkeypatch.setattr(fetching, "COMMAND", (str(site.root / "none"),))
    with site.fetching() as made, pytest.raises(FileNotFoundError):
        made.fetch(SAVE, site.places[0])
    assert descriptors() == before


def test_one_that_says_what_it_must_not(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "COMMAND", ("/bin/sh", "-c", "echo nonsense >&0; exec cat"))
    with site.fetching() as made, pytest.raises(OSError, match="says what it must not: 9 bytes that are no answer"):
        made.fetch(SAVE, site.places[0])


def test_what_is_closed_starts_nothing_and_lets_nobody_wait(silent: Site) -> None:
    errors: list[str] = []

    def fetch(made: Fetching) -> None:
        for place in silent.places:
            try:
                made.fetch(SAVE, place)
            except OSError as error:
                errors.append(str(error))

    with silent.fetching() as made:
        thread = threading.Thread(target=fetch, args=(made,))
        thread.start()
        until = time.monotonic() + 20
        while not (made._process and made._process.busy):
            assert time.monotonic() < until
            os.sched_yield()
        made.close()
        thread.join(5)
        assert not thread.is_alive()
        assert helpers() == set()
    assert len(errors) == WORLD
    assert "the process for it ended with exit code 0" in errors[0]
    assert errors[1:] == ["the restore is over"] * (WORLD - 1)


# ---- the interrupt --------------------------------------------------------------------------------------------


class NoCommunicators:
    """Nothing to abort."""

    quick = True

    def run(self) -> None:
        pass

    def again(self) -> None:
        pass


class InFunction:
    """The main thread is in a training function, out of which it may be interrupted."""

    def __init__(self, interrupter: Interrupter) -> None:
        self.interrupter = interrupter
        self.flight = Flight(0, NoCommunicators(), lambda: None)

    def __enter__(self) -> "InFunction":
        self.interrupter.begin(self.flight)
        self.flight.inside = True
        return self

    def __exit__(self, kind: Any, error: BaseException | None, at: Any) -> bool:
        self.flight.inside = False
        self.flight.close()
        return isinstance(error, RoundInterrupted)

    def interrupt(self, *_: object) -> None:
        self.interrupter.request(0, "a rank died")

    @contextmanager
    def atomic(self) -> Iterator[None]:
        self.flight.enter_atomic()
        try:
            yield
        finally:
            self.flight.leave_atomic()


@pytest.fixture
def interrupter() -> Iterator[Interrupter]:
    with Interrupter(lambda: None, lambda *_: None) as made:
        yield made


def test_the_interrupt_ends_a_restore_in_the_middle_of_a_fetch(silent: Site, interrupter: Interrupter) -> None:
    checkpointer = Checkpointer(silent.settings, silent.facts.append, lambda *_: None)
    state = {"w": torch.zeros_like(WHOLE)}
    try:
        before = descriptors()
        with InFunction(interrupter) as inside:
            checkpointer.begin(replace(silent.turn, atomic=inside.atomic))
            with once_begun(inside.interrupt):
                checkpointer.restore(state)
        assert inside.flight.wanted
        assert helpers() == set()
        assert descriptors() == before
        assert silent.names() == []
        silent.depot.go_on()
        checkpointer.begin(silent.turn)
        assert checkpointer.restore(state) == SAVE.step
        assert torch.equal(state["w"], WHOLE)
    finally:
        checkpointer.close()


@pytest.mark.parametrize("seed", range(3))
def test_an_interrupt_at_any_time_leaves_nothing(site: Site, interrupter: Interrupter, seed: int) -> None:
    """The main thread closes it as far as it gets, and again before the next round."""
    before, chance = descriptors(), random.Random(seed)
    for most_s in [0.005] * 8 + [0.25] * 4:
        with InFunction(interrupter) as inside:
            made = Fetching(site.settings, replace(site.turn, atomic=inside.atomic), site.facts.append)
            timer = threading.Timer(chance.uniform(0, most_s), inside.interrupt)
            timer.start()
            try:
                for place in site.places:
                    made.fetch(SAVE, place)
            finally:
                made.close()
        timer.join()
        made.close()
        assert helpers() == set()
        assert descriptors() == before
    assert [name for name in site.names() if not name.startswith("__")] == []
