"""Real gloo between real trainers: whoever waits for a silent peer comes out, and goes on with the others."""

import time

import pytest

from perdure.protocol.rank_messages import Entered, Interrupt, Raised, Ready, Returned

from .harness import Rank, trainers

SOURCE = """
    @perdure.resilient
    def train(round):
        keep = PLACE == "before" and round.index == 0 and round.rank == SILENT
        assert sys.excepthook is sys.__excepthook__, "torch's hook of the round before is still in place"
        round.ping(1)
        if keep: time.sleep(1000)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        group = dist.new_group() if PLACE == "group" else None
        value = torch.ones(4)
        dist.all_reduce(value, group=group)
        round.ping(2)
        if round.index == 0 and round.rank == SILENT:
            time.sleep(1000)
        dist.all_reduce(value, group=group)
        return float(value[0])
    print(train())
"""


def _ranks(count: int, place: str, silent: int) -> list[Rank]:
    head = f"PLACE, SILENT = {place!r}, {silent}\n"
    return [Rank(SOURCE, slot=f"n0/{index}", torch=True, head=head) for index in range(count)]


def _enter(ranks: list[Rank], index: int, readies: list[Ready]) -> None:
    for number, rank in enumerate(ranks):
        rank.enter(index, number, len(ranks), readies[0].port)
    for rank in ranks:
        assert rank.expect(Entered) == Entered(index)


@pytest.mark.parametrize(
    ("place", "silent"), [("collective", 1), ("collective", 0), ("group", 2), ("before", 0), ("before", 2)]
)
def test_peers_of_a_silent_rank_go_on_without_it(place: str, silent: int) -> None:
    ranks = _ranks(3, place, silent)
    with trainers(*ranks):
        _enter(ranks, 0, [rank.expect(Ready) for rank in ranks])
        for rank in ranks:
            rank.wait_page(1 if place == "before" else 2)
        others = [rank for number, rank in enumerate(ranks) if number != silent]
        # That a peer is blocked shows only by its silence.
        time.sleep(0.1)
        began = time.monotonic()
        for rank in others:
            rank.send(Interrupt(0, "one is silent"))
        readies = [rank.at_gate() for rank in others]
        took = time.monotonic() - began
        assert took < 0.5, f"{took * 1000:.0f} ms"
        _enter(others, 1, readies)
        for rank in others:
            rank.expect(Returned)
        for rank in others:
            code, stdout, stderr = rank.finish()
            assert (code, stdout) == (0, "4.0\n"), stderr


HALF_WAY = """
    class Stuck(dist.Store):
        def __init__(self, store): super().__init__(); self.store = store
        def set(self, key, value): self.store.set(key, value)
        def add(self, key, amount): return self.store.add(key, amount)
        def check(self, keys): return self.store.check(keys)
        def wait(self, *args): round.ping(2); time.sleep(1000)
        get = multi_get = wait
        def set_timeout(self, timeout): pass
        def has_extended_api(self): return True
    @perdure.resilient
    def train(current):
        global round
        round = current
        round.ping(1)
        if round.index == 0 and round.rank == 2:
            store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 3, False)
            stuck = Stuck(dist.PrefixStore("default_pg", store))
            dist.init_process_group("gloo", store=stuck, rank=2, world_size=3)
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        value = torch.ones(4)
        dist.all_reduce(value)
        return float(value[0])
    train()
"""


def test_a_peer_that_has_told_its_address_and_never_connects() -> None:
    ranks = [Rank(HALF_WAY, slot=f"n0/{index}", torch=True) for index in range(3)]
    with trainers(*ranks):
        _enter(ranks, 0, [rank.expect(Ready) for rank in ranks])
        ranks[2].wait_page(2)
        # The others now wait for its connection, in C++ and without a socket: that shows only by their silence.
        time.sleep(0.3)
        began = time.monotonic()
        for rank in ranks:
            rank.send(Interrupt(0, "one is silent"))
        readies = [rank.at_gate() for rank in ranks]
        assert time.monotonic() - began < 1.0
        _enter(ranks, 1, readies)
        for rank in ranks:
            rank.expect(Returned)


def test_a_killed_peer_is_told_apart_from_an_own_fault() -> None:
    ranks = _ranks(2, "collective", 0)
    with trainers(*ranks):
        _enter(ranks, 0, [rank.expect(Ready) for rank in ranks])
        for rank in ranks:
            rank.wait_page(2)
        ranks[0].process.kill()
        fault = ranks[1].expect(Raised).fault
        assert fault.peer_error
        assert fault.in_collective
        assert fault.step == 2
        ready = ranks[1].expect(Ready)
        _enter(ranks[1:], 1, [ready])
        ranks[1].expect(Returned)
        assert ranks[1].finish()[1] == "1.0\n"


def test_rank_0_dies_before_it_serves_the_store() -> None:
    ranks = _ranks(2, "collective", 0)
    with trainers(*ranks):
        readies = [rank.expect(Ready) for rank in ranks]
        ranks[1].enter(0, 1, 2, readies[0].port)
        ranks[1].expect(Entered)
        ranks[1].wait_page(1)
        time.sleep(0.2)
        ranks[0].process.kill()
        began = time.monotonic()
        ready = ranks[1].interrupt(0)
        assert time.monotonic() - began < 10.0  # torch would go on for minutes
        _enter(ranks[1:], 1, [ready])
        ranks[1].expect(Returned)


def test_sockets_of_the_user_are_left_alone() -> None:
    source = """
        import asyncio, socket
        mine = socket.create_server(("127.0.0.1", 0))
        near = socket.create_connection(mine.getsockname())
        far, _ = mine.accept()
        async def serve():
            server = await asyncio.start_server(lambda reader, writer: writer.write(b"hello"), "127.0.0.1", 0)
            ports.append(server.sockets[0].getsockname()[1])
            await asyncio.sleep(1000)
        ports = []
        threading.Thread(target=asyncio.run, args=(serve(),), daemon=True).start()
        @perdure.resilient
        def train(round):
            dist.init_process_group("gloo")
            other = socket.create_connection(("127.0.0.1", ports[0]))
            round.ping(1)
            if round.index == 0:
                train.other = other
                time.sleep(1000)
            near.sendall(b"x"); assert far.recv(1) == b"x"
            assert train.other.recv(5) == b"hello"; assert other.recv(5) == b"hello"
            dist.destroy_process_group()
            return "whole"
        print(train())
        """
    rank = Rank(source, torch=True)
    with trainers(rank):
        rank.start()
        rank.wait_page(1)
        ready = rank.interrupt()
        _enter([rank], 1, [ready])
        rank.expect(Returned)
        assert rank.finish()[:2] == (0, "whole\n")


def test_torch_imported_inside_the_function() -> None:
    source = """
        @perdure.resilient
        def train(round):
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            value = torch.ones(1)
            dist.all_reduce(value)
            round.ping(2)
            if round.index == 0 and round.rank == 0: time.sleep(1000)
            dist.all_reduce(value)
            return float(value)
        print(train())
        """
    ranks = [Rank(source, slot=f"n0/{index}") for index in range(2)]
    with trainers(*ranks):
        _enter(ranks, 0, [rank.expect(Ready) for rank in ranks])
        for rank in ranks:
            rank.wait_page(2)
        for rank in ranks:
            rank.send(Interrupt(0, "one is silent"))
        readies = [rank.at_gate() for rank in ranks]
        _enter(ranks, 1, readies)
        for rank in ranks:
            rank.expect(Returned)
        assert [rank.finish()[1] for rank in ranks] == ["4.0\n"] * 2
