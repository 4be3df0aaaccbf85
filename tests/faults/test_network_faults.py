"""The network between controller and agents is cut, in namespaces of the test's own: nobody may die of it."""

import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from .cluster import of_node, reserves, same_processes, stamp, wait_new, wait_phase
from .harness import Job
from .processes import lives

pytestmark = pytest.mark.netns


class Network:
    """A bridge with a namespace for each of `names`; address .1, .2, ... in that order, .254 for the test."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.mark = secrets.token_hex(3)
        self.subnet = f"10.213.{secrets.randbelow(256)}"
        self._bridge = f"pd{self.mark}b"
        self._ip(f"link add {self._bridge} type bridge forward_delay 0")
        self._ip(f"addr add {self.subnet}.254/24 dev {self._bridge}")
        self._ip(f"link set {self._bridge} up")
        for number, name in enumerate(names, 1):
            space, outer, inner = self.space(name), self._outer(name), f"pd{self.mark}i{number}"
            self._ip(f"netns add {space}")
            self._ip(f"link add {outer} type veth peer name {inner}")
            self._ip(f"link set {inner} netns {space}")
            self._ip(f"link set {outer} master {self._bridge} up")
            for command in (f"addr add {self.address(name)}/24 dev {inner}", f"link set {inner} up", "link set lo up"):
                self._ip(f"-n {space} {command}")

    def space(self, name: str) -> str:
        return f"pd{self.mark}-{name}"

    def address(self, name: str) -> str:
        return f"{self.subnet}.{self.names.index(name) + 1}"

    def prefix(self, name: str) -> list[str]:
        """A command that runs another one in the namespace `name`."""
        return ["ip", "netns", "exec", self.space(name)]

    def cut(self, name: str) -> None:
        self._ip(f"link set {self._outer(name)} down")

    def mend(self, name: str) -> None:
        self._ip(f"link set {self._outer(name)} up")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", self.space(name)], capture_output=True, check=False)
            subprocess.run(["ip", "link", "del", self._outer(name)], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)

    def _outer(self, name: str) -> str:
        return f"pd{self.mark}o{self.names.index(name) + 1}"

    def _ip(self, words: str) -> None:
        done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"ip {words}: {done.stderr.strip()}")


@pytest.fixture
def network() -> Iterator[Network]:
    made: list[Network] = []
    try:
        network = Network("controller", "n0", "n1")
        made.append(network)
    except RuntimeError as error:
        pytest.skip(f"no network namespaces can be made here: {error}")
    yield network
    network.remove()


@pytest.fixture
def spread(network: Network, launch: Callable[..., Job]) -> Callable[..., Job]:
    """Launches a job whose controller and two agents live in three namespaces."""

    def start(source: str = "run()", **options: object) -> Job:
        return launch(
            source,
            nodes=("n0", "n1"),
            nproc=2,
            prefixes={name: network.prefix(name) for name in network.names},
            host=network.address("controller"),
            **options,
        )

    return start


def lost(job: Job) -> list[str]:
    return [x["text"] for x in job.log() if x["event"] in ("agent_lost", "node_lost")]


def test_a_cut_of_ten_seconds_changes_nothing(spread: Callable[..., Job], network: Network) -> None:
    job = spread(heartbeat_timeout=20)
    before = job.wait_round(0)
    wait_phase(job, "running")
    network.cut("n1")
    time.sleep(10)
    network.mend("n1")
    same_processes(before, job)
    job.kill(before[3])
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={3}) == 3
    assert job.finish() == 0
    job.assert_rounds(2)
    assert lost(job) == []


def test_a_fault_during_a_cut_is_handled_after_it(spread: Callable[..., Job], network: Network) -> None:
    job = spread(heartbeat_timeout=20)
    before = job.wait_round(0)
    wait_phase(job, "running")
    network.cut("n0")
    job.kill(before[0])
    network.mend("n0")
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={0}) == 3
    assert job.finish() == 0
    job.assert_rounds(2)


def test_a_node_that_is_cut_off_for_too_long_is_left_out_and_comes_back_as_reserve(
    spread: Callable[..., Job], network: Network
) -> None:
    """Its ranks are healthy, so they live on; they are only taken out of the round that goes on without them."""
    job = spread(heartbeat_timeout=3, heartbeat_interval=0.5)
    before = job.wait_round(0)
    wait_phase(job, "running")
    away = of_node(before, "n1")
    network.cut("n1")
    middle = job.wait_round(1)
    assert sorted(middle) == [0, 1]
    since = stamp(job)
    network.mend("n1")
    wait_new(job, since, "agent", "n1")
    job.wait_for(lambda: len(reserves(job)) == 2, "the ranks of n1 to come back to the gate")
    for rank, each in before.items():
        assert lives(each.key), f"rank {rank} was healthy and is dead"
    job.kill(middle[1])
    after = job.wait_round(2)
    assert {each.key for each in after.values()} & {before[rank].key for rank in away}
    assert job.survivors(middle, after, dead={1}) == 1
    assert job.finish() == 0


def test_a_controller_that_nobody_reaches_blames_nobody(spread: Callable[..., Job], network: Network) -> None:
    """All agents are silent for longer than heartbeat_timeout: it is the controller that is cut off."""
    job = spread(heartbeat_timeout=3, heartbeat_interval=0.5)
    before = job.wait_round(0)
    wait_phase(job, "running")
    network.cut("controller")
    job.wait_for(lambda: job.log("isolated") or lost(job), "the controller to notice")
    assert lost(job) == []
    network.mend("controller")
    job.wait_for(lambda: len([x for x in job.log("agent") if "is back" in x["text"]]) >= 2, "both agents to be back")
    same_processes(before, job)
    job.kill(before[1])
    after = job.wait_round(1)
    assert job.survivors(before, after, dead={1}) == 3
    assert job.finish() == 0
    job.assert_rounds(2)


def test_agents_that_are_cut_off_end_their_ranks_in_time(spread: Callable[..., Job], network: Network) -> None:
    """The controller lives, but nobody can tell from where the agents are, unless they find its verdict: it ends the
    job at about the same time, and the run directory is not cut off."""
    job = spread(heartbeat_timeout=2, heartbeat_interval=0.5, controller_timeout=3)
    job.wait_round(0)
    wait_phase(job, "running")
    network.cut("controller")
    for node in job.nodes:
        code = job.agents[node].wait(20)
        said = {94: "no controller for 3 s (controller_timeout)", 91: "0 healthy ranks are left"}
        assert code in said
        assert said[code] in job.output(node)
    assert job.controller is not None
    assert job.controller.wait(30) == 91
    job.controller = None
    network.mend("controller")
    assert os.path.exists(job.run_dir / "verdict.json")
