"""Where shards come from: the order of places, what happens when one is bad, and that any flipped bit is found."""

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from perdure.checkpoint_io.formats import CHUNK
from perdure.checkpoint_io.names import data_name, local_name, published_name, sidecar_name
from perdure.checkpoint_io.restore import Restored, RestoreError, Where, restore
from perdure.checkpoint_io.sources import Sources
from perdure.protocol.checkpoints import Fact, Place, Resume, SaveId, Tier, What, holders_of

from .made_saves import flip_bit
from .shards import SAVE, flip, resume_of, split, whole, write_shard
from .test_restore import Mine

WORLD = 2
FULL = torch.arange(6000, dtype=torch.float32).reshape(60, 100)


class Site:
    """A save of two ranks on both tiers: rank 0's shard is local to n0, rank 1's to n1. We are on n0."""

    def __init__(self, root: Path) -> None:
        self.durable = root / "durable" / published_name(SAVE.step)
        self.here, self.there = (root / "local" / node / local_name(SAVE) for node in ("n0", "n1"))
        parts = split(FULL, WORLD)
        digests = [write_shard(self.durable, rank, WORLD, {"w": parts[rank]}, {f"v{rank}": rank}) for rank in range(2)]
        for rank, folder in enumerate((self.here, self.there)):
            self.copy(rank, self.durable, folder)
        self.facts: list[Fact] = []
        self.fetched: list[Place] = []
        self.resume = resume_of(digests, durable=True, local=True, holders=holders_of((Place(1, "n1", "a1"),)))
        self.where = Where(root / "durable", root / "local" / "n0", "n0", self.fetch, self.facts.append)

    @staticmethod
    def copy(rank: int, source: Path, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        for name in (data_name(rank, 0), data_name(rank, 1), sidecar_name(rank)):
            shutil.copy(source / name, target / name)

    def fetch(self, save: SaveId, place: Place) -> None:
        assert save == SAVE
        self.fetched.append(place)
        self.copy(place.rank, self.there.parent.parent / place.node / local_name(SAVE), self.here)

    def restore(self, resume: Resume | None = None) -> Restored:
        state = {"w": torch.zeros_like(FULL), "v0": None, "v1": None}
        done = restore(state, resume or self.resume, self.where)
        assert torch.equal(state["w"], FULL)
        assert (state["v0"], state["v1"]) == (0, 1)
        return done

    def bad(self) -> set[tuple[Tier, int, str]]:
        assert all(fact.what is What.BAD and fact.save == SAVE and fact.why for fact in self.facts)
        return {(fact.tier, fact.rank, fact.node) for fact in self.facts}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_local_first_then_other_nodes(site: Site) -> None:
    shutil.rmtree(site.durable)
    done = site.restore()
    assert done.shards == ((0, Tier.LOCAL, "n0"), (1, Tier.LOCAL, "n1"))
    assert site.fetched == [Place(1, "n1", "a1")]
    assert site.facts == []
    # The second rank of the node finds what the first one fetched.
    assert site.restore().shards == ((0, Tier.LOCAL, "n0"), (1, Tier.LOCAL, "n0"))
    assert len(site.fetched) == 1


def test_durable_only(site: Site) -> None:
    shutil.rmtree(site.here.parent)
    done = site.restore(Resume(SAVE, WORLD, site.resume.digest, durable=True))
    assert {tier for _, tier, _ in done.shards} == {Tier.DURABLE}
    assert site.facts == []


@pytest.mark.parametrize("name", [data_name(0, 0), data_name(0, 1), sidecar_name(0)])
def test_any_flipped_bit_is_found_and_the_other_tier_read(site: Site, name: str) -> None:
    path = site.here / name
    good = path.read_bytes()
    for at in (0, 1, len(good) // 3, len(good) // 2, len(good) - 17, len(good) - 1):
        path.write_bytes(good)
        flip(path, at, at % 8)
        site.facts.clear()
        done = site.restore()
        assert (0, Tier.DURABLE, "") in done.shards, at
        assert site.bad() == {(Tier.LOCAL, 0, "n0")}, at


@pytest.mark.parametrize("damage", ["missing data", "missing sidecar", "short", "long", "folder", "empty sidecar"])
def test_damaged_shards(site: Site, damage: str) -> None:
    data, sidecar = site.here / data_name(0, 0), site.here / sidecar_name(0)
    if damage == "missing data":
        data.unlink()
    elif damage == "missing sidecar":
        sidecar.unlink()
    elif damage == "short":
        os.truncate(data, data.stat().st_size - 1)
    elif damage == "long":
        os.truncate(data, data.stat().st_size + 1)
    elif damage == "folder":
        data.unlink()
        data.mkdir()
    else:
        sidecar.write_bytes(b"")
    assert (0, Tier.DURABLE, "") in site.restore().shards
    assert site.bad() == {(Tier.LOCAL, 0, "n0")}


def test_shards_whose_places_are_not_told_are_read_from_the_durable_tier_without_a_word(site: Site) -> None:
    """In a large world a node is told only of what its own ranks saved."""
    untold = msgspec.structs.replace(site.resume, holders=(), partial=True)
    done = site.restore(untold)
    assert done.shards == ((0, Tier.LOCAL, "n0"), (1, Tier.DURABLE, ""))
    assert site.bad() == set()
    assert site.fetched == []
    # What is here and no good is told all the same, and what is told to be here and is not.
    flip_bit(site.here / data_name(0, 0), 12345)
    assert site.restore(untold).shards[0] == (0, Tier.DURABLE, "")
    assert site.bad() == {(Tier.LOCAL, 0, "n0")}
    (site.here / sidecar_name(0)).unlink()
    site.facts.clear()
    site.restore(msgspec.structs.replace(untold, holders=holders_of((Place(0, "n0", "a0"), Place(0, "n9", "a9")))))
    assert (Tier.LOCAL, 0, "n0") in site.bad()


def test_several_replicas_are_tried(site: Site) -> None:
    shutil.rmtree(site.durable)
    third = site.there.parent.parent / "n2" / local_name(SAVE)
    site.copy(1, site.there, third)
    flip(site.there / data_name(1, 0), 5000)
    places = (Place(1, "gone", "a3"), Place(1, "n1", "a1"), Place(1, "n2", "a2"))
    done = site.restore(Resume(SAVE, WORLD, site.resume.digest, local=True, holders=holders_of(places)))
    assert done.shards == ((0, Tier.LOCAL, "n0"), (1, Tier.LOCAL, "n2"))
    assert site.bad() == {(Tier.LOCAL, 1, "gone"), (Tier.LOCAL, 1, "n1")}


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_copy_takes_the_place_of_a_bad_shard_of_ones_own(site: Site, damage: str) -> None:
    shutil.rmtree(site.durable)
    copy = site.there.parent.parent / "n2" / local_name(SAVE)
    site.copy(0, site.here, copy)
    if damage == "flipped":
        flip(site.here / data_name(0, 0), 5000)
    else:
        (site.here / sidecar_name(0)).unlink()
    places = (Place(0, "n0", "a0"), Place(0, "n2", "a2"), Place(1, "n1", "a1"))
    done = site.restore(Resume(SAVE, WORLD, site.resume.digest, local=True, holders=holders_of(places)))
    assert set(done.shards) == {(0, Tier.LOCAL, "n2"), (1, Tier.LOCAL, "n1")}
    assert site.bad() == {(Tier.LOCAL, 0, "n0")}, "it should have been there, and is told"


def test_nothing_left_says_everything(site: Site) -> None:
    for folder in (site.there, site.durable):
        flip(folder / data_name(1, 0), 6000)
    with pytest.raises(RestoreError) as caught:
        site.restore()
    text = str(caught.value)
    for words in (
        "step 100",
        "shard 1:",
        "local tier of n1",
        "durable tier",
        "digest differs",
        "without them: 'w', 'v1'",
    ):
        assert words in text
    assert caught.value.step == SAVE.step
    assert site.bad() == {(Tier.LOCAL, 1, "n1"), (Tier.DURABLE, 1, "")}


def test_another_shard_with_the_same_elements_is_as_good(tmp_path: Path) -> None:
    folder = tmp_path / published_name(SAVE.step)
    digests = [write_shard(folder, rank, 2, whole({"w": FULL})) for rank in range(2)]
    flip(folder / data_name(0, 0), 9000)
    state = {"w": torch.zeros_like(FULL)}
    facts: list[Fact] = []
    done = restore(state, resume_of(digests, durable=True), Where(save=tmp_path, on_bad=facts.append))
    assert torch.equal(state["w"], FULL)
    assert done.shards == ((1, Tier.DURABLE, ""),)
    assert [(fact.rank, fact.tier) for fact in facts] == [(0, Tier.DURABLE)]


def test_a_shard_of_another_save_is_not_taken(site: Site) -> None:
    """As when a folder was replaced by that of a later attempt at the same step."""
    other = SaveId(SAVE.step, SAVE.epoch, SAVE.round + 1)
    write_shard(site.here, 0, WORLD, {"w": split(FULL + 1, WORLD)[0]}, {"v0": 9}, save=other)
    assert (0, Tier.DURABLE, "") in site.restore().shards
    assert "round 4" in site.facts[0].why


def test_a_whole_shard_that_is_not_the_committed_one(site: Site) -> None:
    """Each sidecar is sound by itself; only the digest over all of them tells."""
    site.copy(1, site.there, site.here)
    write_shard(site.here, 0, WORLD, {"w": split(FULL + 1, WORLD)[0]}, {"v0": 9})
    done = site.restore(Resume(SAVE, WORLD, site.resume.digest, local=True, durable=True))
    assert {tier for _, tier, _ in done.shards} == {Tier.DURABLE}
    assert site.bad() == {(Tier.LOCAL, -1, "n0")}
    # It does not matter what is in it, not even if that would fit.
    site.facts.clear()
    write_shard(site.here, 0, WORLD, whole({"w": FULL[0], "v0": FULL}))
    site.restore(Resume(SAVE, WORLD, site.resume.digest, local=True, durable=True))
    assert site.bad() == {(Tier.LOCAL, -1, "n0")}
    write_shard(site.durable, 0, WORLD, {"w": split(FULL + 1, WORLD)[0]}, {"v0": 9})
    with pytest.raises(RestoreError, match="committed is"):
        site.restore(Resume(SAVE, WORLD, site.resume.digest, durable=True))


def test_a_class_of_the_users_on_the_local_tier(site: Site) -> None:
    """To know that this job wrote it takes all sidecars; they are only brought here when a value needs that."""
    parts = split(FULL, WORLD)
    digests = [
        write_shard(folder, rank, WORLD, {"w": parts[rank]}, {"mine": Mine(1)} if rank == 0 else {"v1": 1})
        for rank, folder in enumerate((site.here, site.there))
    ]
    resume = resume_of(digests, local=True, holders=holders_of((Place(1, "n1", "a1"),)))
    restore({}, resume, site.where)
    assert site.fetched == []
    state: dict[str, Any] = {"mine": None}
    restore(state, resume, site.where)
    assert state["mine"] == Mine(1)
    assert site.fetched == [Place(1, "n1", "a1")]


def test_bits_in_any_chunk_of_a_large_file(tmp_path: Path) -> None:
    folder = tmp_path / published_name(SAVE.step)
    big = torch.zeros(CHUNK * 5 // 2, dtype=torch.uint8)
    digest = write_shard(folder, 0, 1, whole({"big": big}))
    path = folder / data_name(0, 0)
    for chunk in range(3):
        with path.open("r+b") as file:
            file.seek(chunk * CHUNK + 100_000)
            file.write(b"\1")
        with pytest.raises(RestoreError, match=f"bytes {chunk * CHUNK} to"):
            restore({"big": torch.zeros_like(big)}, resume_of([digest], durable=True), Where(save=tmp_path))
        with path.open("r+b") as file:
            file.seek(chunk * CHUNK + 100_000)
            file.write(b"\0")
    state = {"big": torch.ones_like(big)}
    restore(state, resume_of([digest], durable=True), Where(save=tmp_path))
    assert torch.equal(state["big"], big)


def test_the_end_of_a_round_is_not_held_up_by_a_thread_that_waits(tmp_path: Path) -> None:
    """Shards of other nodes are looked at in threads; one of them hangs while the round ends."""

    class Over(BaseException):
        pass

    def over(*_: object) -> None:
        raise Over

    released, both = threading.Event(), threading.Barrier(2)
    over_with: list[Place] = []

    def fetch(save: SaveId, place: Place) -> None:
        if both.wait(20) == 0:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        released.wait(20)
        over_with.append(place)
        raise OSError("gone")

    places = tuple(Place(rank, "n1", "address") for rank in range(2))
    sources = Sources(
        resume_of([b""] * 2, local=True, holders=holders_of(places)), Where(local=tmp_path, node="n0", fetch=fetch)
    )
    former = signal.signal(signal.SIGUSR1, over)
    try:
        with pytest.raises(Over):
            sources.look([0, 1])
        assert not over_with
    finally:
        signal.signal(signal.SIGUSR1, former)
        released.set()
        for thread in [each for each in threading.enumerate() if each.name.startswith("perdure-look")]:
            thread.join(20)
