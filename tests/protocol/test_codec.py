"""What is encoded comes back; what is not a message is one clear error; nothing that a trainer says breaks encoding."""

import math
import pickle
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.protocol import codec
from perdure.protocol.codec import BadMessage
from perdure.protocol.faults import Fault, FaultKind
from perdure.protocol.messages import PROTOCOL_VERSION, Beat, Directive, Hello, Phase, Report, Seat, SlotState, Stage
from perdure.protocol.names import AgentName, ProcessId, Slot
from perdure.protocol.rank_messages import RANK_MESSAGE_LIMIT, Enter, Raised, Ready


def a_fault(**changes: object) -> Fault:
    fault = Fault(slot=Slot("n0/1"), life=2, round=3, kind=FaultKind.EXCEPTION, message="it broke", place="train.py:7")
    return msgspec.structs.replace(fault, **changes)


def a_state(**changes: object) -> SlotState:
    state = SlotState(slot=Slot("n0/1"), index=1, life=2, stage=Stage.GATE, round=3, port=4242, fault=a_fault())
    return msgspec.structs.replace(state, **changes)


def a_hello(slots: tuple[SlotState, ...]) -> Hello:
    process = ProcessId("boot", 10, 20)
    return Hello(1, AgentName("n0"), "n0", "host", "10.0.0.1", 0, 2, process, 5, slots, pending=slots[:1])


def test_a_message_comes_back_whole() -> None:
    for message in (a_hello((a_state(),)), Report((a_state(), a_state(index=2))), Beat(((0, 17, 0.25),))):
        assert codec.decode_from_agent(codec.encode_body(message)) == message
    directive = Directive(
        round=4,
        phase=Phase.RUN,
        seats=(Seat(Slot("n0/1"), 2, 0),),
        world_size=8,
        master_addr="h",
        lives={Slot("n0/1"): 2},
    )
    assert codec.decode_from_controller(codec.encode_body(directive)) == directive
    ready = Ready(3, 4242, a_fault(), timings={"abort": 0.5})
    assert codec.decode_from_rank(codec.encode_rank(ready)) == ready
    enter = Enter(
        round=3, rank=0, world_size=8, local_rank=0, local_world_size=4, master_addr="h", master_port=42, job="job"
    )
    assert codec.decode_to_rank(codec.encode_rank(enter)) == enter


def test_one_body_in_many_envelopes() -> None:
    body = codec.encode_body(Beat(((0, 17, 0.25),)))
    for seq in (1, 2**40):
        envelope = codec.unpack(codec.pack("job", 7, 2**63 - 1, seq, 5, body))
        fields = (envelope.job, envelope.incarnation, envelope.session, envelope.seq, envelope.ack)
        assert fields == ("job", 7, 2**63 - 1, seq, 5)
        assert bytes(envelope.body) == body
        assert codec.decode_from_agent(envelope.body) == Beat(((0, 17, 0.25),))


def test_the_two_directions_are_not_mistaken_for_each_other() -> None:
    with pytest.raises(BadMessage):
        codec.decode_from_controller(codec.encode_body(Beat()))


def test_another_version_is_refused_by_name() -> None:
    frame = msgspec.msgpack.encode([PROTOCOL_VERSION + 1, "job", 1, 1, 1, 1, None])
    with pytest.raises(BadMessage, match=f"version {PROTOCOL_VERSION + 1}"):
        codec.unpack(frame)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x00",
        b"GET / HTTP/1.0\r\n\r\n",
        pickle.dumps({"stop": True}),
        b"\x91" * 500_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdc\xff\xff" + b"\x80" * 65_535,
        b"\xa4\xff\xff\xff\xff",
        msgspec.msgpack.encode({"type": "beat", "ranks": [["a", 1, 1]]}),
        msgspec.msgpack.encode([PROTOCOL_VERSION, "job", 2**64 - 1, "x", 1, 1, None]),
        bytes(codec.MESSAGE_LIMIT + 1),
    ],
)
def test_foreign_bytes_are_one_error_and_little_memory(frame: bytes) -> None:
    tracemalloc.start()
    try:
        for decode in (codec.unpack, codec.decode_from_agent, codec.decode_from_controller, codec.decode_from_rank):
            with pytest.raises(BadMessage):
                decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=300))
def test_random_bytes_are_a_message_or_bad(data: bytes) -> None:
    for decode in (codec.unpack, codec.decode_from_agent, codec.decode_from_controller, codec.decode_to_rank):
        try:
            decode(data)
        except BadMessage:
            pass


@given(st.data())
def test_a_damaged_message_is_a_message_or_bad(data: st.DataObject) -> None:
    frame = bytearray(codec.pack("job", 1, 2, 3, 4, codec.encode_body(Report((a_state(),)))))
    for position in data.draw(st.lists(st.integers(0, len(frame) - 1), min_size=1, max_size=4)):
        frame[position] = data.draw(st.integers(0, 255))
    try:
        codec.decode_from_agent(codec.unpack(bytes(frame)).body)
    except BadMessage:
        pass


@given(st.text(st.characters()))
def test_clean_text_can_be_encoded_and_leaves_good_text_alone(text: str) -> None:
    cleaned = codec.clean_text(text)
    cleaned.encode()
    if not any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        assert cleaned == text


def test_what_msgpack_cannot_say_is_mended() -> None:
    state = a_state(step=2**70, fault=a_fault(message="file \udcff", stale_s=float("nan"), code=-(2**70)))
    (received,) = codec.decode_from_agent(codec.encode_body(Report((state,)))).slots  # type: ignore[union-attr]
    assert received.fault.message == "file \\udcff"
    assert math.isnan(received.fault.stale_s)
    assert (received.step, received.fault.code) == (2**63 - 1, -(2**63))
    assert (received.slot, received.stage, received.fault.kind) == (state.slot, state.stage, FaultKind.EXCEPTION)


def test_long_texts_are_cut_with_a_mark_and_the_rest_is_kept() -> None:
    states = tuple(
        a_state(index=i, fault=a_fault(detail=f"head {i} " + "\u00e9" * 500_000 + " tail")) for i in range(16)
    )
    body = codec.encode_body(a_hello(states))
    received = codec.decode_from_agent(body)
    assert isinstance(received, Hello)
    assert len(codec.pack("job", 1, 1, 1, 1, body)) <= codec.MESSAGE_LIMIT
    assert [state.index for state in received.slots] == list(range(16))
    for i, state in enumerate(received.slots):
        assert state.fault is not None
        assert state.fault.detail.startswith(f"head {i} ")
        assert state.fault.detail.endswith(" tail")
        assert "characters cut" in state.fault.detail

    packet = codec.encode_rank(Raised(a_fault(detail="x" * 10**6)))
    assert len(packet) <= RANK_MESSAGE_LIMIT


def test_what_cannot_be_cut_to_fit_says_so() -> None:
    with pytest.raises(BadMessage, match="send it in parts"):
        codec.encode_body(Report(tuple(a_state(index=i) for i in range(20_000))))
    with pytest.raises(BadMessage, match="job id"):
        codec.pack("j" * codec.MESSAGE_LIMIT, 1, 1, 1, 1, b"\xc0")
