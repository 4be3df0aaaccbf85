"""What an agent's message is to the core."""

import msgspec
import pytest

from perdure.controller.core import events
from perdure.controller.core.events import Entry, Event, event_of
from perdure.protocol.checkpoints import Fact, SaveId, Tier, What
from perdure.protocol.messages import Acknowledge, Beat, FromAgent, Remark, Report, Saved, Stock, StopRequest
from perdure.protocol.names import AgentName

AGENT = AgentName("n0")
FACTS = (Fact(SaveId(7, 1_800_000_000, 2), What.WRITTEN, Tier.LOCAL, 3, "n0", 4, 10**12, b"x" * 16, 1.5, "why"),)

MEANT: list[tuple[FromAgent, Event]] = [
    (Report(()), events.Reported(AGENT, ())),
    (StopRequest(143, "SIGTERM"), events.StopAsked(143, "SIGTERM", AGENT)),
    (Saved(FACTS), events.Saved(AGENT, FACTS)),
    (Stock("tcp://10.0.0.1:7", FACTS), events.Stocked(AGENT, "tcp://10.0.0.1:7", FACTS)),
]


@pytest.mark.parametrize(("message", "event"), MEANT)
def test_it_is_an_event_that_a_journal_can_hold(message: FromAgent, event: Event) -> None:
    assert event_of(AGENT, message) == event
    entry = Entry(1.0, event)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(entry), type=Entry) == entry


@pytest.mark.parametrize("message", [Beat(), Acknowledge(), Remark("note", "text")])
def test_what_only_keeps_the_connection_is_none(message: FromAgent) -> None:
    assert event_of(AGENT, message) is None
