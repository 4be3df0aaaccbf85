"""Mistakes at the start are one clear error each; addresses that are told to others can be reached."""

import resource
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest
import trio

from perdure.protocol import wire
from perdure.protocol.agent_socket import AgentSocket
from perdure.protocol.controller_socket import ControllerSocket, ensure_descriptors
from perdure.protocol.keys import new_keys
from perdure.protocol.wire import Connected, WireError

KEYS = new_keys()


def run(test: Callable[[], Awaitable[None]], within_s: float = 8.0) -> None:
    async def bounded() -> None:
        with trio.fail_after(within_s):
            await test()

    trio.run(bounded)


def a_controller(host: str = "127.0.0.1", port: int = 0, advertise: str = "") -> ControllerSocket:
    return ControllerSocket(KEYS, host=host, port=port, advertise=advertise, heartbeat_timeout_s=4, expected_agents=10)


def fails_to_bind(message: str, host: str = "127.0.0.1", port: int = 0) -> None:
    async def test() -> None:
        with pytest.raises(WireError, match=message):
            await a_controller(host, port).bind()

    run(test)


def test_a_port_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        fails_to_bind("another program has it; choose another port", port=taken.getsockname()[1])


def test_a_host_that_is_unknown_or_elsewhere() -> None:
    fails_to_bind("'no-such-host.invalid' cannot be resolved", host="no-such-host.invalid")
    fails_to_bind("this host has no such address", host="198.51.100.7")


def test_a_port_that_is_none() -> None:
    for port in (-1, 65_536):
        with pytest.raises(WireError, match=r"0 \(any free port\) to 65535"):
            a_controller(port=port)


@pytest.mark.parametrize(
    "address", ["", "tcp://", "tcp://host", "tcp://host:0", "tcp://host:99999", "udp://host:1", "tcp://:5"]
)
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(WireError, match="tcp://host:port"):
        wire.split_address(address)


def test_too_few_open_files_is_said_before_anything_starts() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(WireError, match=f"allows {hard} open files"):
        ensure_descriptors(hard + 1)


def test_the_soft_limit_of_open_files_is_raised_when_needed() -> None:
    program = (
        "import resource\n"
        "from perdure.protocol.controller_socket import ensure_descriptors\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "ensure_descriptors(1000)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    assert subprocess.check_output([sys.executable, "-c", program]).strip() == b"1000"


def test_where_a_host_is_reached_from() -> None:
    async def test() -> None:
        assert await wire.local_address("tcp://127.0.0.1:4242") == "127.0.0.1"
        assert await wire.local_address("tcp://localhost:4242") in ("127.0.0.1", "::1")
        assert await wire.local_address("tcp://[::1]:4242") == "::1"
        with pytest.raises(WireError, match="cannot be resolved"):
            await wire.local_address("tcp://no-such-host.invalid:1")

    run(test)
    assert wire.is_numeric(wire.host_address())


def test_a_controller_on_all_addresses_tells_a_real_one() -> None:
    async def test() -> None:
        async with a_controller(host="*").listening() as controller:
            host, port = wire.split_address(controller.address)
            assert wire.is_numeric(host)
            assert host not in ("0.0.0.0", "::")
            for target in (controller.address, f"tcp://127.0.0.1:{port}"):
                agent = AgentSocket(KEYS, heartbeat_timeout_s=4)
                async with agent.running():
                    await agent.connect(target)
                    assert await agent.recv_many() == [Connected()]
        async with a_controller(host="*", advertise="head-node").listening() as controller:
            assert controller.address.startswith("tcp://head-node:")

    run(test)
