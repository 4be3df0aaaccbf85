"""The agent finds the controller of its own attempt, whatever earlier ones have left in the run directory."""

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from perdure.controller.run_directory import RunDirectory
from perdure.protocol.checkpoints import Fact, SaveId, Tier, What
from perdure.protocol.codec import decode_from_agent, encode_body, pack, unpack
from perdure.protocol.controller_socket import ControllerSocket
from perdure.protocol.endpoint import Endpoint
from perdure.protocol.keys import JobKeys, create_keys
from perdure.protocol.link import ReceiveWindow
from perdure.protocol.messages import PROTOCOL_VERSION, Hello, Saved, SlotState, Welcome
from perdure.protocol.names import AgentName, this_process
from perdure.protocol.settings import Settings
from perdure.protocol.wire import Disconnected, Received
from perdure.worker_runtime.agent import link
from perdure.worker_runtime.agent.ending import Ending
from perdure.worker_runtime.agent.link import Handlers, Link

JOB = "77"
RESTARTED = {"SLURM_RESTART_COUNT": "1"}
NOBODY = "tcp://127.0.0.1:9"
TWICE_THE_LONGEST_LOOK_S = 2.0


class Heard:
    """What a link said, and when."""

    def __init__(self) -> None:
        self.welcomes: list[int] = []
        self.complaints: list[str] = []
        self.refusals: list[str] = []
        self.ends: list[tuple[int, str]] = []
        self.at_hello: list[Callable[[], None]] = []
        """What the agent does while it introduces itself, each once."""
        self._bell = trio.Event()

    def link(self, folder: Path, environ: dict[str, str]) -> Link:
        def note(place: list[Any], value: object) -> None:
            place.append(value)
            self._bell.set()

        def hello(address: str, pending: tuple[SlotState, ...]) -> Hello:
            while self.at_hello:
                self.at_hello.pop()()
            return Hello(PROTOCOL_VERSION, AgentName("n0"), "n0", "h", address, 0, 1, this_process(), 0, (), pending)

        handlers = Handlers(
            hello=hello,
            welcomed=lambda welcome: note(self.welcomes, welcome.incarnation),
            directed=lambda incarnation, directive: None,
            refused=lambda reason: note(self.refusals, reason),
            lost=lambda: None,
            ended=lambda code, reason: note(self.ends, (code, reason)),
            complain=lambda text: note(self.complaints, text),
        )
        return Link(JOB, folder, environ, 5.0, handlers)

    async def until(self, condition: Callable[[], bool], within_s: float) -> None:
        with trio.fail_after(within_s):
            while not condition():
                self._bell = trio.Event()
                await self._bell.wait()


async def lead(
    folder: Path,
    keys: JobKeys,
    attempt: int,
    number: int,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """A controller that publishes where it is and welcomes everybody with `number` as its incarnation."""
    wire = ControllerSocket(keys, host="127.0.0.1", heartbeat_timeout_s=5.0, expected_agents=1)
    async with wire.listening():
        publish(folder, attempt, wire.address, keys, number)
        task_status.started()
        while True:
            for event in await wire.events():
                welcome(wire, event, number)


def welcome(wire: ControllerSocket, event: Received | Disconnected, number: int) -> None:
    if not isinstance(event, Received):
        return
    envelope = unpack(event.frame)
    if isinstance(decode_from_agent(envelope.body), Hello):
        body = encode_body(Welcome(number, Settings()))
        wire.send(event.peer, pack(JOB, number, envelope.session, 0, 0, body))


def publish(folder: Path, attempt: int, address: str, keys: JobKeys, incarnation: int = 1, job: str = JOB) -> None:
    Endpoint(job, attempt, incarnation, address, this_process(), keys.server_public).publish(folder / "endpoint.json")


def run(test: Callable[[trio.Nursery], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(20.0):
            async with trio.open_nursery() as nursery:
                await test(nursery)
                nursery.cancel_scope.cancel()

    trio.run(bounded)


def new_attempt(folder: Path) -> JobKeys:
    """What a controller does with the last attempt's files before it listens."""
    (folder / "endpoint.json").unlink()
    (folder / "keys.json").unlink()
    return create_keys(folder / "keys.json")


@pytest.mark.parametrize("environ", [RESTARTED, {}])
def test_the_address_and_keys_of_an_earlier_attempt_are_left_soon(tmp_path: Path, environ: dict[str, str]) -> None:
    """An agent that is started before the controller reads them first."""
    publish(tmp_path, 1, NOBODY, create_keys(tmp_path / "keys.json"))

    async def test(nursery: trio.Nursery) -> None:
        heard = Heard()
        nursery.start_soon(heard.link(tmp_path, environ).run)
        await trio.sleep(TWICE_THE_LONGEST_LOOK_S)  # the pauses between two looks have reached their longest
        assert heard.welcomes == []
        nursery.start_soon(lead, tmp_path, new_attempt(tmp_path), 2, 1)
        await heard.until(lambda: heard.welcomes == [1], TWICE_THE_LONGEST_LOOK_S)
        assert heard.refusals == []

    run(test)


def test_a_living_controller_of_an_earlier_attempt_is_not_joined(tmp_path: Path) -> None:
    """Its node was given up and is alive all the same."""

    async def test(nursery: trio.Nursery) -> None:
        heard = Heard()
        await nursery.start(lead, tmp_path, create_keys(tmp_path / "keys.json"), 1, 7)
        nursery.start_soon(heard.link(tmp_path, RESTARTED).run)
        nursery.start_soon(lead, tmp_path, new_attempt(tmp_path), 2, 1)
        await heard.until(lambda: len(heard.welcomes) > 0, 5.0)
        assert heard.welcomes == [1]

    run(test)


def test_an_agent_whose_attempt_is_over_is_told_once(tmp_path: Path) -> None:
    async def test(nursery: trio.Nursery) -> None:
        heard = Heard()
        nursery.start_soon(heard.link(tmp_path, {}).run)
        async with trio.open_nursery() as leading:
            leading.start_soon(lead, tmp_path, create_keys(tmp_path / "keys.json"), 1, 1)
            await heard.until(lambda: heard.welcomes == [1], 5.0)
            leading.cancel_scope.cancel()
        nursery.start_soon(lead, tmp_path, new_attempt(tmp_path), 2, 1)
        await heard.until(lambda: len(heard.refusals) > 0, 5.0)
        await trio.sleep(TWICE_THE_LONGEST_LOOK_S)
        assert heard.welcomes == [1]
        assert len(heard.refusals) == 1
        assert "attempt 2 of the job has begun" in heard.refusals[0]

    run(test)


def test_a_controller_that_accepts_connections_but_not_us_is_left_for_the_next_one(tmp_path: Path) -> None:
    keys = create_keys(tmp_path / "keys.json")

    async def test(nursery: trio.Nursery) -> None:
        mute = ControllerSocket(keys, host="127.0.0.1", heartbeat_timeout_s=5.0, expected_agents=1)
        async with mute.listening():
            publish(tmp_path, 1, mute.address, keys, 1)
            heard = Heard()
            nursery.start_soon(heard.link(tmp_path, {}).run)
            await mute.events()
            nursery.start_soon(lead, tmp_path, keys, 1, 2)
            await heard.until(lambda: heard.welcomes == [2], 5.0)

    run(test)


def test_no_controller_and_a_foreign_one_are_complained_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PATIENCE_S", 0.05)

    async def test(nursery: trio.Nursery) -> None:
        heard = Heard()
        nursery.start_soon(heard.link(tmp_path, {}).run)
        await heard.until(lambda: len(heard.complaints) == 1, 5.0)
        assert "has no endpoint.json" in heard.complaints[0]
        publish(tmp_path, 1, NOBODY, create_keys(tmp_path / "keys.json"), job="another")
        await heard.until(lambda: len(heard.complaints) == 2, 5.0)
        assert "belongs to job 'another'" in heard.complaints[1]

    run(test)


def test_a_job_that_ends_while_an_agent_looks_for_its_controller(tmp_path: Path) -> None:
    """Nobody is left who could tell it."""

    async def test(nursery: trio.Nursery) -> None:
        heard = Heard()
        publish(tmp_path, 1, NOBODY, create_keys(tmp_path / "keys.json"), 1)
        nursery.start_soon(heard.link(tmp_path, {}).run)
        await trio.sleep(TWICE_THE_LONGEST_LOOK_S)
        assert heard.ends == []
        RunDirectory(tmp_path).write_verdict(130, "SIGINT to agent n0")
        await heard.until(lambda: heard.ends == [(130, "SIGINT to agent n0")], 5.0)

    run(test)


def test_whose_verdict_it_is(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.write_verdict(3, "before the agent started")
    an_hour_ago = time.time() - 3600
    os.utime(directory.verdict, (an_hour_ago, an_hour_ago))
    ending = Ending(tmp_path)
    assert ending.look() is None
    directory.write_verdict(4, "after it had looked")
    verdict = ending.look()
    assert verdict is not None
    assert verdict.code == 4
    late = Ending(tmp_path).look()
    assert late is not None, "this process is older than the verdict, though it looks for the first time"
    directory.verdict.unlink()
    assert Ending(tmp_path).look() is None
    assert not list(tmp_path.glob(".agent-*"))


async def record(
    folder: Path,
    keys: JobKeys,
    number: int,
    told: list[int],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """A controller that acknowledges nothing; the steps of which it is told, in order of their numbers, each once."""
    wire = ControllerSocket(keys, host="127.0.0.1", heartbeat_timeout_s=5.0, expected_agents=1)
    window = ReceiveWindow(ordered=True)
    async with wire.listening():
        publish(folder, 1, wire.address, keys, number)
        task_status.started()
        while True:
            for event in await wire.events():
                welcome(wire, event, number)
                if isinstance(event, Received) and window.accept((envelope := unpack(event.frame)).seq):
                    message = decode_from_agent(envelope.body)
                    assert isinstance(message, Saved)
                    told.extend(fact.save.step for fact in message.facts)


def test_what_became_of_checkpoints_reaches_the_next_controller_in_order(
    tmp_path: Path, until: Callable[[Callable[[], bool]], Awaitable[None]]
) -> None:
    keys = create_keys(tmp_path / "keys.json")

    async def test(nursery: trio.Nursery) -> None:
        heard = Heard()
        agent = heard.link(tmp_path, {})

        def saved(step: int) -> None:
            agent.saved((Fact(SaveId(step, 1, 1), What.WRITTEN, Tier.LOCAL),))

        saved(1)
        nursery.start_soon(agent.run)
        first: list[int] = []
        async with trio.open_nursery() as leading:
            await leading.start(record, tmp_path, keys, 1, first)
            await heard.until(lambda: heard.welcomes == [1], 5.0)
            saved(2)
            await until(lambda: first == [1, 2])
            leading.cancel_scope.cancel()
        await until(lambda: not agent.up)
        saved(3)
        second: list[int] = []
        heard.at_hello.append(lambda: saved(4))  # between the new session's start and its welcome
        await nursery.start(record, tmp_path, keys, 2, second)
        await until(lambda: len(second) == 4)
        assert second == [1, 2, 3, 4]
        assert not agent.idle

    run(test)
