"""All sidecars of a save in one file: who restores opens that and its own shard, and nothing of it is trusted."""

import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure.checkpoint_io import sources
from perdure.checkpoint_io.bundle import Bundle, NoBundle, write_bundle
from perdure.checkpoint_io.formats import digest_of_save
from perdure.checkpoint_io.names import BUNDLE, data_name, local_name, published_name, sidecar_name
from perdure.checkpoint_io.restore import Restored, RestoreError, StateMismatch, Where, restore
from perdure.protocol.checkpoints import Fact, Place, Resume, SaveId, Tier, holders_of

from .made_saves import flip_bit
from .shards import SAVE, Chunks, publish, resume_of, split, whole, write_shard

WORLD = 4
FULL = torch.arange(8000, dtype=torch.float32).reshape(80, 100)
SHARED = {f"shared{rank}": torch.full((5,), float(rank)) for rank in range(WORLD)}
"""Held by all ranks, each written by the one whose number it has."""


class Mine:
    """A class of the user's, in a value."""


class Site:
    """A published save of four ranks: each has its part of one tensor, and one of what all ranks hold."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.folder = root / published_name(SAVE.step)
        parts = split(FULL, WORLD)
        self.digests: list[bytes] = []
        for rank in range(WORLD):
            chunks: Chunks = {"w": parts[rank], **whole({f"shared{rank}": SHARED[f"shared{rank}"]})}
            left = {f"shared{other}": other for other in range(WORLD) if other != rank}
            values = {"mine": Mine()} if rank == 0 else None
            self.digests.append(write_shard(self.folder, rank, WORLD, chunks, values, left_to=left))
        write_bundle(self.folder, self.digests)
        self.resume = resume_of(self.digests, durable=True)
        self.facts: list[Fact] = []
        self.opened: list[int] = []
        self._spy(monkeypatch)

    def _spy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Remembers the ranks whose sidecars are looked at, in the bundle or beside it."""
        real: Callable[..., Any] = sources._shard_of  # pyright: ignore[reportPrivateUsage]

        def look(data: bytes, path: Path, rank: int, *rest: Any) -> Any:
            self.opened.append(rank)
            return real(data, path, rank, *rest)

        monkeypatch.setattr(sources, "_shard_of", look)

    def restore(self, state: dict[str, Any], rank: int = 1, world: int = WORLD, **where: Any) -> Restored:
        here = {"save": self.root, "on_bad": self.facts.append, "rank": rank, "world_size": world, **where}
        return restore(state, here.pop("resume", self.resume), Where(**here))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def wanted(rank: int, *shared: int) -> dict[str, Any]:
    """What one rank of the same layout wants."""
    return {f"shared{number}": torch.zeros(5) for number in (rank, *shared)}


def check(state: Mapping[str, torch.Tensor]) -> None:
    for fqn, tensor in state.items():
        assert torch.equal(tensor, FULL if fqn == "w" else SHARED[fqn]), fqn


def test_a_rank_looks_at_its_own_shard_and_those_that_it_names(site: Site) -> None:
    site.restore(state := wanted(1))
    check(state)
    assert site.opened == [1]
    site.opened.clear()
    done = site.restore(state := wanted(1, 3))
    check(state)
    assert sorted(site.opened) == [1, 3]
    assert [rank for rank, _, _ in done.shards] == [1, 3]


def test_what_others_were_left_to_write_and_nobody_wants_is_known(site: Site) -> None:
    site.restore({"nested": {}, **wanted(1)})
    assert site.restore(wanted(1)).unwanted == {"w", "shared0", "shared2", "shared3"}


@pytest.mark.parametrize(("rank", "world"), [(1, 2), (-1, WORLD), (7, 8)])
def test_another_world_looks_at_all(site: Site, rank: int, world: int) -> None:
    site.restore(state := {"w": torch.zeros_like(FULL), **wanted(0, 1, 2, 3)}, rank, world)
    check(state)
    assert set(site.opened) == set(range(WORLD))


def test_a_layout_that_changed_is_made_whole_from_the_others(site: Site) -> None:
    """The own shard has a part of it, by name: the rest is looked for everywhere."""
    site.restore(state := {"w": torch.zeros_like(FULL), **wanted(1)})
    check(state)
    assert set(site.opened) == set(range(WORLD))


def test_a_state_that_does_not_fit_is_left_as_it_is(site: Site) -> None:
    for misfit in ({"w": torch.zeros(3)}, {"shared3": torch.zeros(6)}, {"never.saved": torch.zeros(1)}):
        state = wanted(1) | misfit
        with pytest.raises(StateMismatch, match=next(iter(misfit))):
            site.restore(state)
        assert not any(tensor.any() for tensor in state.values())


def test_a_class_of_the_users_needs_no_look_at_the_other_shards(site: Site) -> None:
    site.restore(state := {"mine": None}, rank=0)
    assert isinstance(state["mine"], Mine)
    assert site.opened == [0]
    # Another job's digest: neither the bundle nor the sidecars are those that were committed.
    other = Resume(SAVE, WORLD, digest_of_save([b"x" * 16] * WORLD), durable=True)
    with pytest.raises(RestoreError, match="committed is"):
        site.restore({"mine": None}, rank=0, resume=other)


@pytest.mark.parametrize("harm", ["gone", "cut", "another", "index", "content"])
def test_without_a_good_bundle_the_sidecars_are_read(site: Site, harm: str) -> None:
    bundle = site.folder / BUNDLE
    if harm == "gone":
        bundle.unlink()
    elif harm == "cut":
        os.truncate(bundle, bundle.stat().st_size - 100)
    elif harm == "another":
        bundle.write_bytes(b"nonsense")
    elif harm == "index":
        flip_bit(bundle, 8 * 40)
    else:
        flip_bit(bundle, 8 * (bundle.stat().st_size - 200))
    for rank in range(WORLD):
        site.restore(state := {"w": torch.zeros_like(FULL), **wanted(rank, 0)}, rank)
        check(state)
    assert site.facts == [], "the shards are good"


def test_a_sidecar_is_read_only_where_the_bundle_is_bad_and_must_be_the_committed_one(site: Site) -> None:
    (site.folder / sidecar_name(3)).write_bytes(b"nonsense")
    site.restore(state := wanted(3), rank=3)
    check(state)
    parts = split(FULL + 1, WORLD)
    write_shard(site.folder, 3, WORLD, {"w": parts[3], **whole({"shared3": SHARED["shared3"]})})
    flip_bit(site.folder / BUNDLE, 8 * ((site.folder / BUNDLE).stat().st_size - 200))
    with pytest.raises(RestoreError, match="not the one that was published"):
        site.restore(wanted(3), rank=3)
    assert {(fact.tier, fact.rank) for fact in site.facts} == {(Tier.DURABLE, 3)}


def test_another_jobs_save_is_opened_in_the_same_way_and_not_trusted(site: Site) -> None:
    """After a new start nobody knows the digest; the manifest has it, and whoever can write there can write that."""
    unknown = Resume(SAVE, WORLD, durable=True)
    site.restore(state := wanted(1, 3), resume=unknown)
    assert set(site.opened) == set(range(WORLD)), "nothing says that its own sidecar is enough"
    publish(site.root, site.digests)
    site.opened.clear()
    site.restore(state := wanted(1, 3), resume=unknown)
    check(state)
    assert sorted(site.opened) == [1, 3]
    with pytest.raises(RestoreError, match="trust=True"):
        site.restore({"mine": None}, rank=0, resume=unknown)


def test_any_flipped_bit_of_a_bundle_is_known(site: Site) -> None:
    path, chance = site.folder / BUNDLE, random.Random(5)
    assert Bundle(site.folder, WORLD, site.resume.digest).damage() == ""
    bits = path.stat().st_size * 8
    for position in {0, bits - 1, *(chance.randrange(bits) for _ in range(200))}:
        flip_bit(path, position)
        try:
            assert Bundle(site.folder, WORLD, site.resume.digest).damage()
        except NoBundle:
            pass
        flip_bit(path, position)
    with open(path, "ab") as file:
        file.write(b"more")
    assert "bytes, its index says" in Bundle(site.folder, WORLD, site.resume.digest).damage()


def test_nothing_is_left_of_a_bundle_whose_sidecars_are_others_by_now(site: Site) -> None:
    (site.folder / BUNDLE).unlink()
    before = sorted(each.name for each in site.folder.iterdir())
    with pytest.raises(NoBundle, match=r"__2\.shard changed"):
        write_bundle(site.folder, [*site.digests[:2], b"x" * 16, site.digests[3]])
    (site.folder / sidecar_name(2)).unlink()
    with pytest.raises(FileNotFoundError):
        write_bundle(site.folder, site.digests)
    assert sorted(each.name for each in site.folder.iterdir()) == [name for name in before if name != sidecar_name(2)]


def test_only_the_far_shards_that_are_needed_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose node was lost, on the local tier: its own shard, and the one that its sidecar names."""
    site = Site(tmp_path / "durable", monkeypatch)
    local = tmp_path / "local"
    far = tmp_path / "far" / local_name(SAVE)
    far.parent.mkdir()
    os.rename(site.folder, far)
    fetched: list[int] = []

    def fetch(save: SaveId, place: Place) -> None:
        assert save == SAVE
        fetched.append(place.rank)
        here = local / local_name(SAVE)
        here.mkdir(parents=True, exist_ok=True)
        for path in far.glob(f"__{place.rank}[._]*"):
            (here / path.name).write_bytes(path.read_bytes())

    places = tuple(Place(rank, f"n{rank}", "address") for rank in range(WORLD))
    monkeypatch.setattr(sources, "Bundle", None)  # the durable tier may hang, and is not wanted
    resume = resume_of(site.digests, local=True, durable=True, holders=holders_of(places))
    site.restore(state := wanted(2, 3), rank=2, save=tmp_path, local=local, node="new", fetch=fetch, resume=resume)
    check(state)
    assert fetched == [2, 3]


NAMES = ("a", "b", "c", "d")


def save_at_random(folder: Path, data: st.DataObject, world: int) -> tuple[list[bytes], dict[str, torch.Tensor]]:
    """Each name is split over the ranks, or written by one of them and held by all; hints may be wrong or missing."""
    full = {name: torch.randn(data.draw(st.integers(world, 9)), 2) for name in NAMES}
    writer = {name: data.draw(st.integers(-1, world - 1), label=f"writer of {name}") for name in NAMES}
    digests: list[bytes] = []
    for rank in range(world):
        chunks: dict[str, Any] = {}
        left: dict[str, int] = {}
        for name in NAMES:
            if writer[name] < 0:
                chunks[name] = split(full[name], world)[rank]
            elif writer[name] == rank:
                chunks |= whole({name: full[name]})
            else:
                left[name] = data.draw(st.sampled_from([writer[name], writer[name], -1, rank]))
        kept = {name: chunk for name, chunk in chunks.items() if chunk[2].numel()}
        digests.append(write_shard(folder, rank, world, kept, {f"value{rank}": rank}, left_to=left))
    return digests, full


def outcome(state: dict[str, Any], resume: Resume, where: Where) -> str:
    try:
        restore(state, resume, where)
    except RestoreError as error:
        return type(error).__name__
    return "restored"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_to_begin_with_the_own_shard_changes_nothing_but_what_is_opened(tmp_path: Path, data: st.DataObject) -> None:
    root = tmp_path / f"{random.getrandbits(60):x}"
    folder = root / published_name(SAVE.step)
    world = data.draw(st.integers(1, 4))
    digests, full = save_at_random(folder, data, world)
    write_bundle(folder, digests)
    harmed = data.draw(st.sampled_from(["", "", "bundle", "sidecar", "data"]))
    rank = data.draw(st.integers(0, world - 1))
    if harmed == "data":
        size = (folder / data_name(rank, 0)).stat().st_size
        if size:
            flip_bit(folder / data_name(rank, 0), 8 * data.draw(st.integers(0, size - 1)))
    elif harmed:
        path = folder / (BUNDLE if harmed == "bundle" else sidecar_name(rank))
        flip_bit(path, 8 * data.draw(st.integers(0, path.stat().st_size - 1)))
    shapes = {name: full[name].shape for name in data.draw(st.sets(st.sampled_from(NAMES), min_size=1))}
    if data.draw(st.integers(0, 4)) == 0:
        shapes[data.draw(st.sampled_from([*NAMES, "never"]))] = torch.Size((3, 3))
    ends: list[str] = []
    for where in (Where(save=root), Where(save=root, rank=data.draw(st.integers(0, world - 1)), world_size=world)):
        state: dict[str, Any] = {name: torch.zeros(shape) for name, shape in shapes.items()}
        ends.append(outcome(state, resume_of(digests, durable=True), where))
        if ends[-1] == "restored":
            assert all(torch.equal(state[name], full[name]) for name in state)
        elif ends[-1] == "StateMismatch":
            assert not any(tensor.any() for tensor in state.values())
        for mark in folder.glob("BAD*"):
            mark.unlink()
    assert ends[0] == ends[1]
