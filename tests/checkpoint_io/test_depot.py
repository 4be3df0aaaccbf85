"""The depot carries out orders on real folders, tells what became of them, and ends, whatever the disk does."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from perdure.checkpoint_io.catalog import mark_bad, read_manifest, scan_local
from perdure.checkpoint_io.depot_messages import FACTS_AT_ONCE, Done, Found, Line, in_parts
from perdure.checkpoint_io.fetch import TEMPORARY
from perdure.checkpoint_io.names import TRACKER, TRASH, data_name, local_name, published_name, saving_name, sidecar_name
from perdure.checkpoint_io.verify import verify_save
from perdure.protocol.checkpoints import DepotOrders, Fact, Place, Prune, Publish, Replicate, SaveId, Tier, What
from perdure.protocol.keys import new_keys

from .depots import DepotProcess
from .made_saves import flip_bit, local_save_of, written_save

KEYS = new_keys()
OLD, SAVE, NEXT = SaveId(100, 0xAB, 1), SaveId(200, 0xAB, 2), SaveId(300, 0xAB, 2)


def whats(facts: tuple[Fact, ...]) -> list[tuple[str, What]]:
    return [(str(fact.save), fact.what) for fact in facts]


@contextmanager
def frozen_sidecar(folder: Path) -> Iterator[Callable[[], None]]:
    """A file whose opening takes for ever, until the function that is given is called, or the end."""
    path = folder / sidecar_name(1)
    kept = path.read_bytes()
    path.unlink()
    os.mkfifo(path)

    def thaw() -> None:
        end = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # whoever waits for a writer goes on
        os.write(end, kept)
        path.unlink()
        path.write_bytes(kept)
        os.close(end)

    yield thaw


def test_a_save_is_published_and_the_oldest_is_pruned(tmp_path: Path) -> None:
    first, second = written_save(tmp_path, OLD), written_save(tmp_path, SAVE)
    with DepotProcess("n0", KEYS, save=tmp_path) as depot:
        depot.order(DepotOrders(publish=(first, second)))
        told = [depot.facts()[0], depot.facts()[0]]
        assert [(fact.save, fact.what, fact.digest) for fact in told] == [
            (OLD, What.PUBLISHED, first.digest),
            (SAVE, What.PUBLISHED, second.digest),
        ]
        assert told[0].nbytes == read_manifest(tmp_path / published_name(100)).nbytes > 0
        assert (tmp_path / TRACKER).read_text() == "200"
        assert not [each for each in verify_save(tmp_path / published_name(200)) if each.problem]
        depot.order(DepotOrders(prune=(Prune(OLD, Tier.DURABLE),)))
        assert depot.facts() == (Fact(OLD, What.PRUNED, Tier.DURABLE),)
        assert sorted(os.listdir(tmp_path)) == [published_name(200), TRACKER]


def test_what_was_answered_is_done_again_only_if_it_is_ordered_again(tmp_path: Path) -> None:
    missing = Publish(SAVE, 2, b"0" * 16)
    other = written_save(tmp_path, OLD)
    with DepotProcess("n0", KEYS, save=tmp_path) as depot:
        depot.order(DepotOrders(publish=(missing,)))
        (failed,) = depot.facts()
        assert failed.what is What.UNPUBLISHED
        assert saving_name(SAVE) in failed.why
        depot.order(DepotOrders(publish=(missing, other)))
        assert whats(depot.facts()) == [(str(OLD), What.PUBLISHED)], "the first one has been answered"
        depot.order(DepotOrders(publish=(other,)))
        depot.order(DepotOrders(publish=(missing, other)))
        assert whats(depot.facts()) == [(str(SAVE), What.UNPUBLISHED)], "it was withdrawn in between"
        depot.order(DepotOrders(publish=(missing, other)), session=2)
        again = [depot.facts()[0].what, depot.facts()[0].what]
        assert again == [What.UNPUBLISHED, What.PUBLISHED], "a new session knows nothing of earlier answers"


def test_another_save_of_the_step_that_came_first(tmp_path: Path) -> None:
    winner, loser = SaveId(100, 0xAB, 1), SaveId(100, 0xAB, 5)
    with DepotProcess("n0", KEYS, save=tmp_path) as depot:
        depot.order(DepotOrders(publish=(written_save(tmp_path, winner),)))
        depot.facts()
        depot.order(DepotOrders(publish=(written_save(tmp_path, loser),)))
        assert whats(depot.facts()) == [(str(winner), What.PUBLISHED), (str(loser), What.UNPUBLISHED)]


def test_a_file_system_that_stands_still_costs_the_order_its_deadline_and_nothing_else(tmp_path: Path) -> None:
    order = written_save(tmp_path / "s", SAVE)
    local_save_of(tmp_path / "l", "n0", OLD, [0])
    with (
        frozen_sidecar(tmp_path / "s" / saving_name(SAVE)) as thaw,
        DepotProcess("n0", KEYS, save=tmp_path / "s", local=tmp_path / "l", limit_s=1.0, durable=False) as depot,
    ):
        depot.order(DepotOrders(publish=(order,), prune=(Prune(OLD, Tier.LOCAL),)))
        assert depot.facts() == (Fact(OLD, What.PRUNED, Tier.LOCAL, node="n0"),), "other work goes on"
        (late,) = depot.facts()
        assert (late.what, late.why) == (What.UNPUBLISHED, "not done within 1 s (save_timeout)")
        depot.order(DepotOrders(publish=(order,)), session=2)
        (stuck,) = depot.facts()
        assert "has not answered an earlier attempt yet" in stuck.why
        thaw()
        assert whats(depot.facts()) == [(str(SAVE), What.PUBLISHED)], "it is told all the same"


def test_the_end_comes_soon_though_the_file_system_stands_still(tmp_path: Path) -> None:
    order = written_save(tmp_path, SAVE)
    with (
        frozen_sidecar(tmp_path / saving_name(SAVE)),
        DepotProcess("n0", KEYS, save=tmp_path, durable=False) as depot,
    ):
        depot.order(DepotOrders(publish=(order,)))
        assert depot.finish(0.3) == 0


def test_at_the_end_of_the_job_what_is_ordered_is_still_published(tmp_path: Path) -> None:
    orders = tuple(written_save(tmp_path, SaveId(step, 0xAB, 1)) for step in (100, 200, 300))
    with DepotProcess("n0", KEYS, save=tmp_path, durable=False) as depot:
        depot.order(DepotOrders(publish=orders))
        assert depot.finish(20.0) == 0
        told = [depot.facts()[0].what for _ in orders]
    assert told == [What.PUBLISHED] * 3
    assert (tmp_path / TRACKER).read_text() == "300"


def test_it_ends_with_the_agent_and_not_by_the_signals_that_end_a_job(tmp_path: Path) -> None:
    with DepotProcess("n0", KEYS, local=tmp_path) as depot:
        assert depot.address.startswith("tcp://127.0.0.1:")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(depot.process.pid, number)
        depot.order(session=2)
        depot.hear(Found)
        assert os.getpriority(os.PRIO_PROCESS, depot.process.pid) == 10
        depot.sock.close()
        assert depot.process.wait(5) == 0


def test_stock_of_both_tiers(tmp_path: Path) -> None:
    save, local = tmp_path / "s", tmp_path / "l"
    with DepotProcess("n0", KEYS, save=save) as depot:
        depot.order(DepotOrders(publish=(written_save(save, OLD), written_save(save, SAVE))))
        depot.facts()
        depot.facts()
    flip_bit(save / published_name(200) / sidecar_name(1), 999)
    folder = local_save_of(local, "n0", NEXT, [0, 1])
    mark_bad(folder, "for a test", 1)
    (local / "n0" / f"{TRASH}1").mkdir()
    (folder / f"{TEMPORARY}left").touch()
    with DepotProcess("n0", KEYS, save=save, local=local) as depot:
        depot.order()
        here = depot.hear(Found)
        assert [(fact.save, fact.rank, fact.what, fact.node) for fact in here.facts] == [
            (NEXT, 0, What.WRITTEN, "n0"),
            (NEXT, 1, What.BAD, "n0"),
            (SAVE, -1, What.BAD, ""),
            (OLD, -1, What.PUBLISHED, ""),
        ]
        assert here.address
        assert sorted(os.listdir(local / "n0")) == [local_name(NEXT)]
        assert not list(folder.glob(f"{TEMPORARY}*"))
        shutil.rmtree(folder)
        depot.order(session=2)
        assert whats(depot.hear(Found).facts) == [(str(SAVE), What.BAD), (str(OLD), What.PUBLISHED)], "it looks again"


def test_only_some_look_through_the_durable_tier(tmp_path: Path) -> None:
    with DepotProcess("n7", KEYS, save=tmp_path, durable=False) as depot:
        depot.order(DepotOrders(publish=(Publish(SAVE, 1, b""),)))
        depot.hear(Done)
        assert depot.hear(Found) == Found("", ())


def test_a_shard_is_copied_from_depot_to_depot(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    folder = local_save_of(a, "n0", SAVE, [0, 1])
    with DepotProcess("n0", KEYS, local=a) as source, DepotProcess("n1", KEYS, local=b) as target:
        places = [Place(rank, "n0", source.address) for rank in (0, 1)]
        target.order(DepotOrders(replicate=tuple(Replicate(SAVE, place) for place in places)))
        told = sorted((target.facts()[0], target.facts()[0]), key=lambda fact: fact.rank)
        expected = {found.rank: found for found in scan_local(a, "n0")}
        for fact in told:
            assert (fact.what, fact.tier, fact.node, fact.world_size) == (What.WRITTEN, Tier.LOCAL, "n1", 2)
            assert (fact.digest, fact.nbytes) == (expected[fact.rank].digest, expected[fact.rank].nbytes)
        copy = b / "n1" / local_name(SAVE)
        for path in folder.iterdir():
            assert (copy / path.name).read_bytes() == path.read_bytes()
        assert len(list(copy.iterdir())) == len(list(folder.iterdir()))


def test_a_copy_replaces_one_that_was_bad(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    local_save_of(a, "n0", SAVE, [1])
    copy = local_save_of(b, "n1", SAVE, [1])
    flip_bit(copy / data_name(1, 0), 5)
    mark_bad(copy, "a digest is wrong", 1)
    with DepotProcess("n0", KEYS, local=a) as source, DepotProcess("n1", KEYS, local=b) as target:
        target.order(DepotOrders(replicate=(Replicate(SAVE, Place(1, "n0", source.address)),)))
        assert target.facts()[0].what is What.WRITTEN
    assert [found.usable for found in scan_local(b, "n1")] == [True]


@pytest.mark.parametrize("harm", ["flipped", "killed", "stopped", "strange"])
def test_a_copy_that_fails_says_why_and_leaves_nothing(tmp_path: Path, harm: str) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    folder = local_save_of(a, "n0", SAVE, [1])
    keys = new_keys() if harm == "strange" else KEYS
    with DepotProcess("n0", keys, local=a) as source, DepotProcess("n1", KEYS, local=b, limit_s=2.0) as target:
        address = source.address
        if harm == "flipped":
            flip_bit(folder / data_name(1, 0), 4096)
        elif harm == "killed":
            source.process.kill()
            source.process.wait()
        elif harm == "stopped":
            source.stop()
        target.order(DepotOrders(replicate=(Replicate(SAVE, Place(1, "n0", address)),)))
        (fact,) = target.facts()
        source.go_on()
    assert (fact.what, fact.tier, fact.rank, fact.node) == (What.FAILED, Tier.LOCAL, 1, "n1")
    assert address in fact.why or "save_timeout" in fact.why
    assert scan_local(b, "n1") == []


def test_a_tier_that_the_job_does_not_have(tmp_path: Path) -> None:
    with DepotProcess("n0", KEYS, local=tmp_path) as depot:
        depot.order(DepotOrders(publish=(Publish(SAVE, 1, b""),)))
        assert "its setting save is off" in depot.facts()[0].why


def test_a_folder_that_cannot_be_deleted_is_a_line_in_the_log(tmp_path: Path) -> None:
    """A plain file where the tier's folder should be."""
    (tmp_path / "s").touch()
    with DepotProcess("n0", KEYS, save=tmp_path / "s", durable=False) as depot:
        depot.order(DepotOrders(prune=(Prune(SAVE, Tier.DURABLE),)))
        line = depot.hear(Line)
    assert line.level == "warning"
    assert line.text.startswith(f"depot: cannot delete {SAVE} from the durable tier: ")


def test_nothing_is_told_of_what_is_here_before_the_durable_tier_could_be_read(tmp_path: Path) -> None:
    """A job that is told of nothing begins anew."""
    save = tmp_path / "s"
    save.touch()
    with DepotProcess("n0", KEYS, save=save, local=tmp_path / "l") as depot:
        depot.order()
        assert str(save) in depot.hear(Line).text
        save.unlink()
        with DepotProcess("n1", KEYS, save=save, durable=False) as other:
            other.order(DepotOrders(publish=(written_save(save, OLD),)))
            other.facts()
        until = time.monotonic() + 20
        while not (found := depot.hear(Found)).facts:  # the folder may have been there before what is in it
            assert time.monotonic() < until
            depot.order(session=2)
        assert whats(found.facts) == [(str(OLD), What.PUBLISHED)]


def test_facts_travel_in_messages_that_are_not_too_long() -> None:
    facts = [Fact(SaveId(step, 1, 1), What.WRITTEN, Tier.LOCAL) for step in range(2 * FACTS_AT_ONCE + 1)]
    parts = list(in_parts(facts))
    assert [len(part) for part in parts] == [FACTS_AT_ONCE, FACTS_AT_ONCE, 1]
    assert [fact for part in parts for fact in part] == facts
