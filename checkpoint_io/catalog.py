"""What lies in a folder of checkpoints, and which of it is whole.

Nothing is trusted by its name: a published save counts as complete when its manifest is intact, its sidecars are those
that the manifest names, and every file has its size; a local shard when its sidecar is intact and its files have their
sizes. What the bytes are is for `verify`, and for whoever reads them. Anything else is listed with the reason why it
does not count. Marked as bad means: a text file `BAD` (of one shard: `BAD-<rank>`) says why; nothing is deleted for it.

Others write and delete in these folders at the same time. What vanishes meanwhile is left out. A file system that fails
to answer is no evidence against a save: that is listed as `unsure`, and nobody is told that it is bad. Only a root
folder that cannot be listed raises OSError.
"""

import errno
import os
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path

import msgspec

from ..protocol.checkpoints import Fact, SaveId, Tier, What
from ..protocol.folders import sync_folder
from .files import write_atomic
from .formats import BadFormat, Manifest, Sidecar, decode_manifest, decode_sidecar, digest_of, digest_of_save
from .names import (
    DCP_METADATA,
    MANIFEST,
    TRASH,
    bad_save,
    data_name,
    local_save,
    published_name,
    published_step,
    saving_save,
    sidecar_name,
)

BAD = "BAD"
THREADS = 8
"""Reading many small files is waiting, on a shared file system."""

_SIDECAR = re.compile(r"__(\d{1,9})\.shard")


class Kind(str, Enum):
    PUBLISHED = "published"
    """`iter_N` of the durable tier, written by perdure."""
    SAVING = "saving"
    """Being written there, or left over."""
    FOREIGN = "foreign"
    """`iter_N` with DCP's `.metadata` and no sign of perdure: written by `dcp.save` or Megatron. Its metadata is a
    pickle: reading it needs the user's trust."""
    SHARD = "shard"
    """One rank's part of a save on the local tier."""
    OTHER = "other"
    """None of these."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """save: None where it cannot be told. path: of a shard: its sidecar; else the folder.

    digest: of the sidecar, or of all of the save's. nbytes: of data files. bad: marked so. why: if it is not complete,
    or is marked. unsure: not complete, but only because something could not be read: it may be fine.
    age: seconds since it was last changed, by the wall clock: for people.
    """

    kind: Kind
    path: Path
    save: SaveId | None = None
    step: int = -1
    node: str = ""
    rank: int = -1
    world_size: int = 0
    nbytes: int = 0
    digest: bytes = b""
    complete: bool = False
    bad: bool = False
    unsure: bool = False
    why: str = ""
    age: float = 0.0

    @property
    def usable(self) -> bool:
        return self.complete and not self.bad


# ---- shards ---------------------------------------------------------------------------------------------------


def read_sidecar(folder: Path, rank: int) -> tuple[Sidecar, bytes]:
    """The sidecar and its digest. Raises OSError, BadFormat."""
    data = (folder / sidecar_name(rank)).read_bytes()
    sidecar = decode_sidecar(data)
    if sidecar.rank != rank:
        raise BadFormat(f"{sidecar_name(rank)} is the sidecar of rank {sidecar.rank}")
    return sidecar, digest_of(data)


def check_sizes(folder: Path, sidecar: Sidecar) -> str:
    """Why the shard's data files cannot be whole; empty if they can. Raises OSError, other than for a missing file."""
    for number, file in enumerate(sidecar.files):
        name = data_name(sidecar.rank, number)
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if size != file.size:
            return f"{name} has {size} bytes, its sidecar says {file.size}"
    return ""


def nbytes_of(sidecar: Sidecar) -> int:
    return sum(file.size for file in sidecar.files)


def read_all(folder: Path, save: SaveId, world_size: int) -> list[tuple[Sidecar, bytes]]:
    """The sidecars of all ranks, each with its digest. Raises OSError or BadFormat, for the first that is not right."""

    def read(rank: int) -> tuple[Sidecar, bytes]:
        try:
            sidecar, digest = read_sidecar(folder, rank)
        except BadFormat as error:
            raise BadFormat(f"rank {rank}: {error}") from error
        if sidecar.save != save or sidecar.world_size != world_size:
            raise BadFormat(
                f"rank {rank}: its shard is of {sidecar.save}, world size {sidecar.world_size}, "
                f"not of {save}, world size {world_size}"
            )
        if why := check_sizes(folder, sidecar):
            raise BadFormat(f"rank {rank}: {why}")
        return sidecar, digest

    if world_size <= THREADS:
        return [read(rank) for rank in range(world_size)]
    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(read, range(world_size)))


# ---- marks ----------------------------------------------------------------------------------------------------


def mark_bad(folder: Path, why: str, rank: int = -1) -> None:
    """Say that a save's folder, or one rank's shard in it, is unusable. The first reason stays. Raises OSError."""
    mark = folder / (BAD if rank < 0 else f"{BAD}-{rank}")
    if not mark.exists():
        write_atomic(mark, why.encode("utf-8", "replace") + b"\n")
        sync_folder(folder)


def bad_mark(folder: Path, rank: int = -1) -> str | None:
    """Why the folder is marked as bad, or the rank's shard; None if it is not. One bad shard makes a save bad."""
    names = [BAD, f"{BAD}-{rank}"] if rank >= 0 else _bad_marks(folder)
    for name in names:
        try:
            return (folder / name).read_text(errors="replace").strip()[:1000] or "no reason given"
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{name} cannot be read: {error}"
    return None


def _bad_marks(folder: Path) -> list[str]:
    return [name for name in _names(folder) if name == BAD or re.fullmatch(BAD + r"-\d{1,9}", name)]


def _names(folder: Path) -> list[str]:
    """Raises OSError. Sorted."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries)


# ---- the durable tier -----------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    """Raises OSError, BadFormat."""
    return decode_manifest((folder / MANIFEST).read_bytes())


def is_unsure(error: Exception) -> bool:
    """Whether another try may end otherwise: what is missing or damaged will stay so."""
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError | NotADirectoryError)


def look_published(folder: Path) -> Found | None:
    """What `iter_N` is; None if it is not there. Never raises OSError."""
    step = published_step(folder.name)
    found = Found(kind=Kind.OTHER, path=folder, step=-1 if step is None else step)
    try:
        names = _names(folder)
        mark = bad_mark(folder)
        found = msgspec.structs.replace(found, age=_age(folder))
    except FileNotFoundError:
        return None
    except OSError as error:
        return msgspec.structs.replace(found, why=f"cannot be read: {error}", unsure=is_unsure(error))
    if MANIFEST in names or any(_SIDECAR.fullmatch(name) for name in names):
        found = _checked(msgspec.structs.replace(found, kind=Kind.PUBLISHED))
    elif DCP_METADATA in names:
        found = msgspec.structs.replace(found, kind=Kind.FOREIGN, complete=True, why="not written by perdure")
    else:
        found = msgspec.structs.replace(found, why="neither a manifest nor DCP's .metadata is in it")
    if mark is not None:
        return msgspec.structs.replace(found, bad=True, why=mark)
    return found if found.complete or folder.exists() else None


def _checked(found: Found) -> Found:
    folder = found.path
    try:
        manifest = read_manifest(folder)
    except (OSError, BadFormat) as error:
        why = f"{MANIFEST} is missing" if isinstance(error, FileNotFoundError) else f"{MANIFEST}: {error}"
        return msgspec.structs.replace(found, save=whose(folder), why=why, unsure=is_unsure(error))
    save = SaveId(manifest.step, manifest.epoch, manifest.round)
    digest = bytes.fromhex(manifest.digest)
    found = msgspec.structs.replace(
        found, save=save, world_size=manifest.world_size, nbytes=manifest.nbytes, digest=digest
    )
    if manifest.step != found.step:
        return msgspec.structs.replace(found, why=f"its {MANIFEST} is of step {manifest.step}")
    try:
        sidecars = read_all(folder, save, manifest.world_size)
        (folder / DCP_METADATA).stat()
    except (OSError, BadFormat) as error:
        return msgspec.structs.replace(found, why=str(error), unsure=is_unsure(error))
    if digest_of_save(each for _, each in sidecars) != digest:
        return msgspec.structs.replace(found, why=f"its sidecars are not those that {MANIFEST} names")
    return msgspec.structs.replace(found, complete=True)


def whose(folder: Path) -> SaveId | None:
    """Which save a published folder is of: by its manifest, else by the first sidecar that can be read."""
    try:
        manifest = read_manifest(folder)
        return SaveId(manifest.step, manifest.epoch, manifest.round)
    except (OSError, BadFormat):
        pass
    try:
        names = _names(folder)
    except OSError:
        return None
    for name in names:
        try:
            if match := _SIDECAR.fullmatch(name):
                return read_sidecar(folder, int(match[1]))[0].save
        except (OSError, BadFormat):
            continue
    return None


def _age(path: Path) -> float:
    return max(0.0, time.time() - path.stat().st_mtime)


def _listed(root: Path, look: Callable[[Path], Iterable[Found]]) -> list[Found]:
    """What `look` says of every entry of `root`, newest step first. A root that is not there has none."""
    try:
        names = _names(root)
    except FileNotFoundError:
        return []
    found = [each for name in names for each in look(root / name)]
    return sorted(found, key=lambda each: (-each.step, each.save or SaveId(0, 0, 0), each.rank, each.path.name))


def scan_durable(save_dir: Path) -> list[Found]:
    return _listed(save_dir, _look_durable)


def _look_durable(path: Path) -> list[Found]:
    if not path.name.startswith(("iter_", TRASH)):
        return []  # the tracker, and whatever else people keep beside it
    if _is_published(path.name):
        found = look_published(path)
        return [] if found is None else [found]
    try:
        age = _age(path)
    except OSError:
        return []
    if (save := saving_save(path.name)) is not None:
        why = "not published: it is being written, or was left unfinished"
        return [Found(kind=Kind.SAVING, path=path, save=save, step=save.step, age=age, why=why)]
    if (save := bad_save(path.name)) is not None:
        why = bad_mark(path) or "found bad, and replaced"
        return [Found(kind=Kind.OTHER, path=path, save=save, step=save.step, age=age, bad=True, why=why)]
    why = "is being deleted" if path.name.startswith(TRASH) else "its name is none of perdure's"
    return [Found(kind=Kind.OTHER, path=path, age=age, why=why)]


def _is_published(name: str) -> bool:
    step = published_step(name)
    return step is not None and published_name(step) == name


def newest_usable(save_dir: Path) -> int | None:
    """The newest step that is published and good; one of `dcp.save` counts. Looks no further than it must.

    Raises OSError, also when a newer one cannot be read just now.
    """
    steps = (step for name in _names(save_dir) if _is_published(name) and (step := published_step(name)) is not None)
    for step in sorted(steps, reverse=True):
        found = look_published(save_dir / published_name(step))
        if found is not None and found.unsure and not found.bad:
            raise OSError(errno.EIO, f"{found.path} cannot be read now: {found.why}")
        if found is not None and found.usable:
            return step
    return None


# ---- the local tier -------------------------------------------------------------------------------------------


def scan_local(local_dir: Path, node: str) -> list[Found]:
    """Every shard of the node, those of a save together."""
    return _listed(local_dir / node, lambda path: _look_local(path, node))


def _look_local(folder: Path, node: str) -> list[Found]:
    save = local_save(folder.name)
    if save is None:
        why = "is being deleted" if folder.name.startswith(TRASH) else "its name is none of perdure's"
        return [Found(kind=Kind.OTHER, path=folder, node=node, why=why)]
    try:
        names = _names(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        why = f"cannot be read: {error}"
        return [Found(kind=Kind.OTHER, path=folder, node=node, save=save, step=save.step, why=why)]
    ranks = [int(match[1]) for name in names if (match := _SIDECAR.fullmatch(name))]
    if not ranks:
        why = "no shard in it is finished"
        return [Found(kind=Kind.OTHER, path=folder, node=node, save=save, step=save.step, why=why)]
    return [found for rank in ranks if (found := _look_shard(folder, save, rank, node)) is not None]


def _look_shard(folder: Path, save: SaveId, rank: int, node: str) -> Found | None:
    path = folder / sidecar_name(rank)
    found = Found(kind=Kind.SHARD, path=path, save=save, step=save.step, node=node, rank=rank)
    try:
        sidecar, digest = read_sidecar(folder, rank)
        why = check_sizes(folder, sidecar)
        if sidecar.save != save:
            why = f"its sidecar is of {sidecar.save}"
        age = _age(path)
        mark = bad_mark(folder, rank)
    except (OSError, BadFormat) as error:
        if not folder.exists():
            return None
        bad = bad_mark(folder, rank) is not None
        return msgspec.structs.replace(found, why=str(error), bad=bad, unsure=is_unsure(error))
    return msgspec.structs.replace(
        found,
        world_size=sidecar.world_size,
        nbytes=nbytes_of(sidecar),
        digest=digest,
        age=age,
        complete=not why,
        bad=mark is not None,
        why=why if mark is None else mark,
    )


# ---- for the controller ---------------------------------------------------------------------------------------


def facts_of(founds: Iterable[Found]) -> tuple[Fact, ...]:
    """What the controller is to know of them: what is usable, and that the rest of perdure's is bad, in case that it
    was told otherwise before. Unfinished and foreign ones are no facts, nor are those that could not be read."""
    facts: list[Fact] = []
    for each in founds:
        if each.save is None or each.kind not in (Kind.PUBLISHED, Kind.SHARD) or (each.unsure and not each.bad):
            continue
        tier = Tier.LOCAL if each.kind is Kind.SHARD else Tier.DURABLE
        about = Fact(each.save, What.BAD, tier, each.rank, each.node, each.world_size, digest=each.digest, why=each.why)
        if each.usable:
            good = What.WRITTEN if each.kind is Kind.SHARD else What.PUBLISHED
            about = msgspec.structs.replace(about, what=good, nbytes=each.nbytes, why="")
        facts.append(about)
    return tuple(facts)
