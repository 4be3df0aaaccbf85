"""Sessions as the controller sees them: who counts as silent, and whose death can be seen."""

import os
import subprocess

from perdure.controller.peers import Peer, Peers
from perdure.protocol.names import AgentName, ProcessId, boot_id, start_time, this_process

INTERVAL_S, TIMEOUT_S = 1.0, 3.0


def heard(**at: float) -> Peers:
    """Accepted sessions of these agents, and when each was last heard."""
    peers = Peers()
    for number, (name, when) in enumerate(at.items()):
        peers.accept(peers.greeted(str(number).encode(), number, AgentName(name), when))
    return peers


def names(silent: list[Peer]) -> list[str]:
    return [str(peer.agent) for peer in silent]


def test_one_that_missed_its_beat_while_another_was_heard_is_silent() -> None:
    peers = heard(n0=10.0, n1=7.0)
    assert names(peers.take_silent(10.0, INTERVAL_S, TIMEOUT_S)) == ["n1"]
    assert names(peers.all()) == ["n0"]


def test_nobody_is_silent_before_its_time() -> None:
    assert heard(n0=10.0, n1=7.1).take_silent(10.0, INTERVAL_S, TIMEOUT_S) == []


def test_if_nobody_was_heard_since_all_are_waited_for() -> None:
    """It may be this end that is cut off: beats come at different moments, so their ages differ by an interval."""
    peers = heard(n0=7.0, n1=7.9)
    assert peers.take_silent(10.5, INTERVAL_S, TIMEOUT_S) == []
    assert names(peers.take_silent(10.9, INTERVAL_S, TIMEOUT_S)) == ["n0", "n1"], "the longest silence first"
    assert len(peers) == 0


def test_a_lonely_agent_is_silent_in_its_time() -> None:
    assert names(heard(n0=7.0).take_silent(10.0, INTERVAL_S, TIMEOUT_S)) == ["n0"]


def test_the_death_of_a_process_on_this_machine_is_seen() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        peer = Peers().greeted(b"a", 1, AgentName("n0"), 0.0)
        peer.look_for(ProcessId(boot_id(), child.pid, start_time(child.pid) or 0))
        assert peer.process is not None
        peers = Peers()
        peers.greeted(b"a", 1, AgentName("n0"), 0.0).look_for(peer.process)
        assert not peers.is_dead(b"a")
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert peers.is_dead(b"a"), "a zombie is dead"
    finally:
        child.kill()
        child.wait()


def test_of_another_machine_nothing_is_known() -> None:
    peers = Peers()
    me = this_process()
    peers.greeted(b"a", 1, AgentName("n0"), 0.0).look_for(ProcessId("another boot", me.pid, me.start))
    peers.greeted(b"b", 2, AgentName("n1"), 0.0).look_for(ProcessId(me.boot, me.pid, me.start + 1))
    assert not peers.is_dead(b"a")
    assert not peers.is_dead(b"b"), "another process has that pid here: it lives in another pid namespace"
    assert not peers.is_dead(b"nobody")


def test_who_asks_under_one_name_is_answered_in_turn() -> None:
    """Two agents with one name may say Hello in one batch: the first is welcomed, the second refused."""
    peers = Peers()
    first = peers.greeted(b"a", 1, AgentName("n0"), 0.0)
    second = peers.greeted(b"b", 2, AgentName("n0"), 0.0)
    assert peers.newcomer(AgentName("n0")) is first
    peers.accept(first)
    assert peers.newcomer(AgentName("n0")) is second
    assert peers.is_accepted(first)
    assert not peers.is_accepted(second)
    assert peers.drop(b"b") is None
    # The same session asks again, since the answer was lost.
    assert peers.greeted(b"a", 1, AgentName("n0"), 1.0) is first
    assert peers.newcomer(AgentName("n0")) is first


def test_who_is_gone_is_not_answered() -> None:
    peers = Peers()
    peers.greeted(b"a", 1, AgentName("n0"), 0.0)
    peers.drop(b"a")
    assert peers.newcomer(AgentName("n0")) is None
