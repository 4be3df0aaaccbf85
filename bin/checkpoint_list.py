"""What there is on both tiers, save by save: a table for people, objects for machines.

The durable tier's folders are saves already. On the local tier a save is put together from what the nodes have of it,
as far as their folders can be seen from here: on a machine with a disk of its own that is one node's, and what other
nodes have is not here, which is not bad.
"""

import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from ..checkpoint_io.catalog import Found, Kind, scan_durable, scan_local
from ..protocol.checkpoints import SaveId, Tier

HEADS = ("step", "tier", "size", "complete", "verified", "world", "replicas", "age", "folder")
NUMBERS = frozenset({"step", "size", "world", "replicas", "age"})
"""Columns whose cells stand at the right."""


class Row(msgspec.Struct, kw_only=True):
    """One save on one tier.

    found: what the catalog says of it, on the local tier shard by shard. folders: on the local tier one for each node.
    complete: it could be resumed from with what can be seen from here. damaged: it should be good and is not. why: if
    it is not complete, or damaged. replicas: on how many nodes each shard is, the least of them. age: seconds since a
    file of it was changed. verified, problems: once its bytes were read.
    """

    step: int
    save: SaveId | None
    tier: Tier
    kind: Kind
    found: tuple[Found, ...]
    folders: tuple[Path, ...]
    nbytes: int
    complete: bool
    damaged: bool
    why: str
    world_size: int
    age: float
    replicas: int | None = None
    verified: bool | None = None
    problems: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        return not self.damaged and self.verified is not False

    @property
    def name(self) -> str:
        more = f" (+{len(self.folders) - 1})" if len(self.folders) > 1 else ""
        return (f"{self.folder.parent.name}/{self.folder.name}" if self.tier is Tier.LOCAL else self.folder.name) + more

    @property
    def folder(self) -> Path:
        """The first of `folders`; there always is one."""
        return next(iter(self.folders))


# ---- from the folders -----------------------------------------------------------------------------------------


def read_rows(save: Path | None, local: Path | None) -> list[Row]:
    """All saves, the newest step last. Raises OSError if a tier's folder cannot be read."""
    durable = [] if save is None else [durable_row(found) for found in scan_durable(save) if found.step >= 0]
    own = [] if local is None else local_rows(local)
    return sorted([*durable, *own], key=lambda row: (row.step, row.tier.value, row.save or SaveId(0, 0, 0)))


def durable_row(found: Found) -> Row:
    known = found.kind is Kind.PUBLISHED and found.nbytes
    nbytes, age = (found.nbytes, found.age) if known else measure(found.path)
    # A save that gave way to another one under the same name was seen to already.
    gave_way = found.kind is Kind.OTHER and found.bad
    return Row(
        step=found.step,
        save=found.save,
        tier=Tier.DURABLE,
        kind=found.kind,
        found=(found,),
        folders=(found.path,),
        nbytes=nbytes,
        complete=found.usable,
        damaged=not found.usable and found.kind is not Kind.SAVING and not gave_way,
        why=found.why,
        world_size=found.world_size,
        age=age,
    )


def local_rows(local: Path) -> list[Row]:
    with os.scandir(local) as entries:
        nodes = sorted(entry.name for entry in entries if entry.is_dir())
    saves: dict[SaveId, list[Found]] = {}
    for node in nodes:
        for found in scan_local(local, node):
            if found.save is not None:
                saves.setdefault(found.save, []).append(found)
    return [local_row(save, founds) for save, founds in saves.items()]


def local_row(save: SaveId, founds: list[Found]) -> Row:
    folders = tuple(dict.fromkeys(each.path.parent if each.kind is Kind.SHARD else each.path for each in founds))
    usable = {rank: [each for each in founds if each.usable and each.rank == rank] for rank in ranks_of(founds)}
    world = max(each.world_size for each in founds)
    missing = [rank for rank in range(world) if not usable.get(rank)]
    bad = [each for each in founds if each.kind is Kind.SHARD and not each.usable]
    why = "; ".join([*(f"rank {each.rank} on {each.node}: {each.why}" for each in bad), *lacking(missing, world)])
    measured = [measure(folder) for folder in folders]
    complete = world > 0 and not missing
    return Row(
        step=save.step,
        save=save,
        tier=Tier.LOCAL,
        kind=Kind.SHARD if ranks_of(founds) else Kind.OTHER,
        found=tuple(founds),
        folders=folders,
        nbytes=sum(shards[0].nbytes for shards in usable.values() if shards) or sum(nbytes for nbytes, _ in measured),
        complete=complete,
        damaged=bool(bad),
        why=why or ("" if complete else founds[0].why),
        world_size=world,
        age=min(age for _, age in measured),
        replicas=min(len(usable.get(rank, ())) for rank in range(world)) if world else None,
    )


def ranks_of(founds: Iterable[Found]) -> list[int]:
    return sorted({each.rank for each in founds if each.kind is Kind.SHARD})


def lacking(missing: list[int], world: int) -> list[str]:
    """Ranks whose shards cannot be seen, in words."""
    if not missing or not world:
        return []
    shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return [f"{len(missing)} of {world} shards are not here (rank {shown})"]


def measure(folder: Path) -> tuple[int, float]:
    """Bytes in the files of a folder, and seconds since one of them, or the folder, was changed."""
    nbytes, newest = 0, 0.0
    try:
        newest = folder.stat().st_mtime
        with os.scandir(folder) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                nbytes, newest = nbytes + status.st_size, max(newest, status.st_mtime)
    except OSError:
        pass  # it is being deleted, or cannot be read, which the catalog has said
    return nbytes, max(0.0, time.time() - newest)


# ---- for people and machines ----------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> list[str]:
    """One line a row under a line of heads, each column as wide as it must be."""
    cells = [HEADS, *map(cells_of, rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADS))]
    return [join(line, widths) for line in cells]


def join(cells: Sequence[str], widths: Sequence[int]) -> str:
    placed = [
        cell.rjust(width) if head in NUMBERS else cell.ljust(width)
        for head, cell, width in zip(HEADS, cells, widths, strict=True)
    ]
    return "  ".join(placed).rstrip()


def cells_of(row: Row) -> tuple[str, ...]:
    return (
        str(row.step),
        row.tier.value,
        size(row.nbytes),
        whole(row),
        {None: "-", True: "yes", False: "NO"}[row.verified],
        str(row.world_size or "?"),
        "-" if row.replicas is None else str(row.replicas),
        span(row.age),
        row.name,
    )


def whole(row: Row) -> str:
    if row.complete:
        return f"yes, but {row.why}" if row.why else "yes"
    return f"{'BAD' if row.damaged else 'no'}: {row.why}"


def encode(rows: Iterable[Row]) -> list[str]:
    """One JSON object a line."""
    return [json.dumps(described(row)) for row in rows]


def described(row: Row) -> dict[str, object]:
    return {
        "step": row.step,
        "epoch": None if row.save is None else f"{row.save.epoch:x}",
        "round": None if row.save is None else row.save.round,
        "tier": row.tier.value,
        "bytes": row.nbytes,
        "complete": row.complete,
        "damaged": row.damaged,
        "why": row.why,
        "verified": row.verified,
        "problems": list(row.problems),
        "world_size": row.world_size or None,
        "replicas": row.replicas,
        "age_s": round(row.age, 3),
        "folders": [str(folder) for folder in row.folders],
    }


def size(nbytes: int) -> str:
    """A number of bytes, in the unit that leaves one to three digits before the point."""
    amount, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1000 and len(units) > 1:
        amount /= 1024
        units.pop(0)
    return f"{amount:.1f} {units[0]}" if amount < 10 and units[0] != "B" else f"{amount:.0f} {units[0]}"


def span(seconds: float) -> str:
    """A time, in its largest unit."""
    for limit, unit, length in ((100, "s", 1), (100 * 60, "min", 60), (48 * 3600, "h", 3600)):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
