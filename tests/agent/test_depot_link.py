"""The agent keeps a depot, whatever happens to it, never waits for it, and leaves none behind."""

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from perdure.checkpoint_io.depot_messages import Begin
from perdure.protocol.checkpoints import DepotOrders, Fact, Place, Publish, Replicate, SaveId, What
from perdure.protocol.keys import new_keys
from perdure.protocol.names import AgentName
from perdure.protocol.settings import Settings
from perdure.worker_runtime.agent import depot_link
from perdure.worker_runtime.agent.depot_link import DepotHandlers, DepotLink, begin_of
from perdure.worker_runtime.agent.options import Options
from perdure.worker_runtime.agent.reaper import children

Run = Callable[[Callable[[], Any]], Any]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
SAVE = SaveId(100, 0xAB, 1)
NOTHING_THERE = Publish(SAVE, 1, b"x")
"""An order that is answered at once: there is no such save."""


class Agent:
    """What an agent is told by its depot."""

    def __init__(self, env: dict[str, str], folder: Path) -> None:
        self.begin = Begin("n0", "127.0.0.1", str(folder / "s"), str(folder / "l"), 20.0, new_keys(), True)
        self.facts: list[Fact] = []
        self.found: list[str] = []
        self.lines: list[str] = []
        self.depot = DepotLink(
            env,
            DepotHandlers(
                saved=self.facts.extend,
                found=lambda address, facts, durable: self.found.append(address),
                write=lambda level, text: self.lines.append(text),
            ),
        )

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[DepotLink]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.depot.serve, self.begin)
            yield self.depot
            nursery.cancel_scope.cancel()


@pytest.fixture
def agent(env: dict[str, str], tmp_path: Path) -> Agent:
    (tmp_path / "s").mkdir()
    return Agent(env, tmp_path)


def test_orders_go_there_and_what_became_of_them_comes_back(run: Run, agent: Agent, until: Until) -> None:
    async def main() -> None:
        async with agent.serving() as depot:
            depot.begin_session()
            depot.order(DepotOrders(publish=(NOTHING_THERE,)))
            await until(lambda: [fact.what for fact in agent.facts] == [What.UNPUBLISHED] and len(agent.found) == 1)
            assert agent.found[0].startswith("tcp://127.0.0.1:")
            depot.begin_session()
            await until(lambda: len(agent.facts) == 2 and len(agent.found) == 2)
            started = trio.current_time()
            await depot.finish()
            assert trio.current_time() - started < depot_link.FAREWELL_S
            await until(lambda: children() == [])

    run(main)
    assert not [line for line in agent.lines if "cannot publish" not in line]


def test_a_depot_that_is_killed_is_replaced_and_told_again(run: Run, agent: Agent, until: Until) -> None:
    async def main() -> None:
        async with agent.serving() as depot:
            depot.begin_session()
            depot.order(DepotOrders(publish=(NOTHING_THERE,)))
            await until(lambda: len(agent.facts) == 1 and len(agent.found) == 1)
            os.kill(depot.pid, signal.SIGKILL)
            await until(lambda: len(agent.facts) == 2 and len(agent.found) == 2)
            assert agent.found[0] != agent.found[-1], "it serves elsewhere, and the controller is told where"
            await depot.finish()

    run(main)
    assert any("was killed by signal 9; another one is started" in line for line in agent.lines)


def test_where_no_depot_can_live_every_order_is_answered(
    run: Run, agent: Agent, until: Until, env: dict[str, str]
) -> None:
    agent.depot = DepotLink({**env, "PYTHONHOME": "/nowhere"}, agent.depot._on)  # pyright: ignore[reportPrivateUsage]
    copy = Replicate(SAVE, Place(3, "n1", "tcp://127.0.0.1:9"))

    async def main() -> None:
        async with agent.serving() as depot:
            depot.begin_session()
            depot.order(DepotOrders(publish=(NOTHING_THERE,)))
            await until(lambda: len(agent.facts) == 1)
            depot.order(DepotOrders(publish=(NOTHING_THERE,), replicate=(copy,)))
            await until(lambda: len(agent.facts) == 2)
            await depot.finish()

    run(main)
    assert [(fact.what, fact.rank, fact.node) for fact in agent.facts] == [
        (What.UNPUBLISHED, -1, ""),
        (What.FAILED, 3, "n0"),
    ]
    assert len([line for line in agent.lines if "ended with code" in line]) == depot_link.RESTARTS + 1


def test_a_frozen_depot_holds_up_nobody(run: Run, agent: Agent, until: Until, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depot_link, "FINISH_S", 0.3)
    monkeypatch.setattr(depot_link, "FAREWELL_S", 0.2)
    many = tuple(Publish(SaveId(step, 1, 1), 1, b"x" * 16) for step in range(10_000))

    async def main() -> None:
        async with agent.serving() as depot:
            depot.begin_session()
            await until(lambda: len(agent.found) == 1)
            os.kill(depot.pid, signal.SIGSTOP)
            for count in range(30):  # each is more than the socket holds; only the newest is kept
                depot.order(DepotOrders(publish=many[count:]))
                await trio.lowlevel.checkpoint()
            depot.order(DepotOrders(publish=(NOTHING_THERE,)))
            started = trio.current_time()
            await depot.finish()
            assert trio.current_time() - started < 2

    run(main)
    assert agent.lines == [f"depot: not ended in time; not published: {SAVE}"]


def test_it_carries_the_agents_token(run: Run, agent: Agent, env: dict[str, str], until: Until) -> None:
    """So the guard finds it if the agent is killed."""

    async def main() -> None:
        async with agent.serving() as depot:
            depot.begin_session()
            await until(lambda: len(agent.found) == 1)
            environ = Path(f"/proc/{depot.pid}/environ").read_bytes().split(b"\0")
            assert f"PERDURE_TOKEN={env['PERDURE_TOKEN']}".encode() in environ
            assert os.getsid(depot.pid) == depot.pid
            await depot.finish()

    run(main)


def test_an_agent_without_checkpoints_has_none(run: Run, agent: Agent) -> None:
    async def main() -> None:
        agent.depot.begin_session()
        await agent.depot.finish()
        assert not agent.depot.begun

    run(main)


def test_what_a_depot_is_told_first(tmp_path: Path) -> None:
    options = Options("j", AgentName("n0"), "n0", "h", 0, 1, "", tmp_path, ("true",), 1, Settings())
    keys = new_keys()
    assert begin_of(options, Settings(), "10.0.0.1", keys) is None
    settings = msgspec.structs.replace(Settings(), non_persistent_local_ckpt_dir="/l", save_timeout=7.0)
    assert begin_of(options, settings, "10.0.0.1", keys) == Begin("n0", "10.0.0.1", None, "/l", 7.0, keys, True)
    late = Options("j", AgentName("n9"), "n9", "h", 9, 10, "", tmp_path, ("true",), 1, Settings())
    begin = begin_of(late, msgspec.structs.replace(settings, save="/s"), "10.0.0.1", None)
    assert begin == Begin("n9", "10.0.0.1", "/s", "/l", 7.0, None, False)
