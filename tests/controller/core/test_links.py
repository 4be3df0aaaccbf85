"""How long a lost connection to an agent may take to come back, before its ranks are given up."""

import pytest

from perdure.controller.core.links import LINK_GRACE_WITH_PEER_ERRORS_S
from perdure.controller.core.rounds import JobPhase

from .desk import Desk


def test_a_lost_connection_has_a_moment_to_come_back() -> None:
    desk = Desk((2, 2)).form()
    desk.link_lost("n1")
    assert desk.phase is JobPhase.RUNNING
    assert desk.job.deadline() == pytest.approx(desk.now + desk.settings.last_call_wait)
    desk.attach("n1")
    assert desk.job.deadline() is None
    assert desk.told("node_lost") == []


@pytest.mark.parametrize("errors_come_first", [True, False])
def test_it_has_less_when_ranks_elsewhere_see_broken_connections_too(errors_come_first: bool) -> None:
    """Which of the two is heard of first is chance: both are the work of one kernel that closes a node's sockets."""
    desk = Desk((2, 2)).form()
    if errors_come_first:
        desk.fault("n0/1", peer_error=True)
        desk.link_lost("n1")
    else:
        desk.link_lost("n1")
        desk.fault("n0/1", peer_error=True)
    lost_at = desk.now
    desk.gate("n0/0", "n0/1")
    desk.wait()
    assert desk.now == pytest.approx(lost_at + LINK_GRACE_WITH_PEER_ERRORS_S)
    assert len(desk.told("node_lost")) == 1
    assert desk.seats == ["n0/0", "n0/1"]
