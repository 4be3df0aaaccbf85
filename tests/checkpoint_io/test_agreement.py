"""All ranks get the same answer, from a real store, in bounded time, also when the store is gone or ranks are."""

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from time import monotonic
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, TCPStore

from perdure.checkpoint_io.agreement import Answer, agree, digests_of_plain
from perdure.checkpoint_io.flatten import Flat, flatten

SAME = flatten({"a": torch.ones(3), "b": 1})
OTHER = flatten({"a": torch.ones(4), "b": 1})


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)


def client(server: TCPStore) -> PrefixStore:
    store = TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=20), wait_for_workers=False)
    return PrefixStore("round-3", store)


def ask(server: TCPStore, states: list[Flat], world_size: int, generation: str, deadline_s: float) -> list[Answer]:
    stores = [client(server) for _ in states]

    def one(store: Any, flat: Flat) -> Answer:
        return agree(store, flat, world_size=world_size, generation=generation, deadline_s=deadline_s)

    with ThreadPoolExecutor(len(states)) as threads:
        return list(threads.map(one, stores, states))


def test_ranks_that_hold_the_same_agree_again_for_each_layout(server: TCPStore) -> None:
    for generation in ("0-3-1", "0-3-2"):
        assert ask(server, [SAME] * 5, 5, generation, 20) == [Answer(frozenset("ab"))] * 5


@pytest.mark.parametrize("states", [[SAME, SAME, OTHER], [OTHER, SAME, SAME], [SAME, OTHER, SAME]])
def test_what_differs_is_shared_by_nobody_and_the_rest_is(server: TCPStore, states: list[Flat]) -> None:
    began = monotonic()
    answers = ask(server, states, 3, "g", 60)
    assert monotonic() - began < 20
    assert answers == [Answer(frozenset("b"))] * 3


def test_what_a_rank_has_of_its_own_leaves_the_rest_shared(server: TCPStore) -> None:
    states = [flatten({"a": torch.ones(3), "b": 1, f"rng-{rank}": torch.ones(2), "me": {rank: 5}}) for rank in range(4)]
    assert ask(server, states, 4, "g", 20) == [Answer(frozenset("ab"))] * 4
    states = [flatten({f"rng-{rank}": rank}) for rank in range(3)]
    assert ask(server, states, 3, "h", 20) == [Answer(frozenset())] * 3
    states = [flatten({}), flatten({"a": 1})]
    assert ask(server, states, 2, "i", 20) == [Answer(frozenset())] * 2


def test_who_does_not_come_is_counted(server: TCPStore) -> None:
    answers = ask(server, [SAME] * 3, 5, "g", 0.5)
    assert not any(answer.shared for answer in answers)
    assert all("2 of 5 ranks have not come" in answer.why for answer in answers)


def test_without_others_or_without_a_store() -> None:
    assert agree(None, SAME, world_size=1, generation="g", deadline_s=1) == Answer(frozenset("ab"))
    answer = agree(None, SAME, world_size=2, generation="g", deadline_s=1)
    assert not answer.shared
    assert "no store" in answer.why


def test_any_store_will_do() -> None:
    store = HashStore()
    assert agree(store, SAME, world_size=2, generation="g", deadline_s=0.1).why
    assert agree(store, SAME, world_size=2, generation="g", deadline_s=5) == Answer(frozenset("ab"))


SERVE = """
import sys, warnings
warnings.simplefilter("ignore")
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_stops_or_dies_is_a_no_in_time(how: signal.Signals) -> None:
    environment = dict(os.environ, RES_OPTIONS="use-vc")
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5), wait_for_workers=False)
        process.send_signal(how)
        if how is signal.SIGKILL:
            process.wait(10)
        began = monotonic()
        answer = agree(store, SAME, world_size=2, generation="g", deadline_s=1)
        assert not answer.shared
        assert "the round's store" in answer.why or "1 of 2 ranks" in answer.why
        assert monotonic() - began < 8
    finally:
        process.kill()
        process.communicate(timeout=10)
    leave_the_store()


def leave_the_store() -> None:
    """The thread that asked is let go by the death of the store."""
    for thread in threading.enumerate():
        if thread.name == "perdure-agreement":
            thread.join(10)
            assert not thread.is_alive()


def test_digests_are_of_names_and_shapes() -> None:
    one = flatten({"a": torch.ones(3), "c": torch.ones(2), "b": 1, "d": 2})
    other = flatten({"d": 5, "c": torch.zeros(2), "b": 1, "a": torch.zeros(3)})
    assert digests_of_plain(one) == digests_of_plain(other)
    assert set(digests_of_plain(one).values()) == {"a", "b", "c", "d"}
    different = [SAME, OTHER, flatten({"a": torch.ones(3).half()}), flatten({"a": 1}), flatten({"a": torch.ones(3, 1)})]
    assert len({digest for flat in different for digest in digests_of_plain(flat)}) == len(different) + 1


def test_sockets_are_not_left_open(server: TCPStore) -> None:
    assert socket.getdefaulttimeout() is None
    before = len(os.listdir("/proc/self/fd"))
    ask(server, [SAME] * 2, 2, "g", 10)
    assert len(os.listdir("/proc/self/fd")) <= before + 2
