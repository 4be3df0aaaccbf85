"""Who is named as the cause, from what was seen and in which order."""

import pytest

from perdure.controller.core.blame import Finding, judge
from perdure.protocol.faults import Fault, FaultKind
from perdure.protocol.names import Slot

K = FaultKind


def seen(
    rank: int,
    kind: FaultKind,
    *,
    peer: bool = False,
    collective: bool = False,
    stale_s: float = 0.0,
    came: bool = False,
    runs: bool = False,
) -> Finding:
    fault = Fault(
        Slot(f"n0/{rank}"),
        1,
        0,
        kind,
        kind.value,
        peer_error=peer,
        in_collective=collective,
        stale_s=stale_s,
        interpreter_runs=runs,
    )
    return Finding(0, rank, fault, came)


CASES: dict[str, tuple[list[Finding], int, list[int], list[int]]] = {
    # name: (what was seen, in this order; the cause's rank; companions; victims)
    "one exception": ([seen(1, K.EXCEPTION)], 1, [], []),
    "the first of two exceptions": ([seen(2, K.EXCEPTION), seen(1, K.EXCEPTION)], 2, [1], []),
    "a death that is known late": (
        [seen(0, K.EXCEPTION, peer=True), seen(2, K.EXCEPTION, peer=True), seen(1, K.SIGNAL)],
        1,
        [],
        [0, 2],
    ),
    "peers time out on a silent rank": (
        [seen(0, K.EXCEPTION, peer=True), seen(1, K.EXCEPTION, peer=True), seen(2, K.SOFT_HANG, stale_s=60)],
        2,
        [],
        [0, 1],
    ),
    "all hang in a collective but one": (
        [
            seen(0, K.SOFT_HANG, collective=True, stale_s=62),
            seen(1, K.SOFT_HANG, stale_s=61),
            seen(2, K.SOFT_HANG, collective=True, stale_s=63),
        ],
        1,
        [],
        [2, 0],
    ),
    "of two that hang, the one that does not answer": (
        [seen(0, K.SOFT_HANG, stale_s=65, came=True), seen(1, K.SOFT_HANG, stale_s=61)],
        1,
        [],
        [0],
    ),
    "a livelock, before those that wait for it in C without a frame of torch.distributed (a backward pass, say)": (
        [
            seen(0, K.SOFT_HANG, stale_s=62, came=True),
            seen(1, K.SOFT_HANG, stale_s=61, came=True, runs=True),
            seen(2, K.SOFT_HANG, stale_s=63, came=True),
        ],
        1,
        [],
        [2, 0],
    ),
    "of two that hang, the one silent for longer": (
        [seen(0, K.SOFT_HANG, stale_s=61), seen(1, K.SOFT_HANG, stale_s=65)],
        1,
        [],
        [0],
    ),
    "an exception outranks a hang": ([seen(0, K.SOFT_HANG, stale_s=61), seen(1, K.EXCEPTION)], 1, [], [0]),
    "only victims: the first stands": ([seen(3, K.EXCEPTION, peer=True), seen(1, K.EXCEPTION, peer=True)], 3, [], [1]),
    "a node with all its ranks": (
        [seen(4, K.NODE_LOST), seen(5, K.NODE_LOST), seen(0, K.EXCEPTION, peer=True)],
        4,
        [5],
        [0],
    ),
    "did not come to the barrier": ([seen(1, K.EXCEPTION, peer=True), seen(0, K.BARRIER_LATE)], 0, [], [1]),
    "out of memory": ([seen(0, K.EXCEPTION, peer=True), seen(1, K.OOM)], 1, [], [0]),
    "health check": ([seen(0, K.EXCEPTION, peer=True), seen(1, K.HEALTH_CHECK)], 1, [], [0]),
}


@pytest.mark.parametrize("name", CASES)
def test_blame(name: str) -> None:
    findings, cause, companions, victims = CASES[name]
    for number, finding in enumerate(findings):
        finding.number = number
    verdict = judge(findings)
    assert verdict.cause.rank == cause
    assert [f.rank for f in verdict.companions] == companions
    assert [f.rank for f in verdict.victims] == victims
