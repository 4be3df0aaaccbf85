"""Giving a complete save its final name.

`iter_N.saving-<epoch>-<round>/` gets a bundle of its sidecars, DCP's `.metadata`, Megatron's `metadata.json` and the
manifest, and becomes `iter_N` by one rename: from then on it is published, and no file in it changes. Then the tracker
names it. Every step can be killed and done again, by this process or another one at the same time: files appear by
rename, all content but the time of day in the manifest follows from the sidecars, and whoever finds the folder under
its final name is done.

A step is published once. A second save of a step gives way to the first, unless the first is unusable or the order
names it as the one to be replaced: then that one moves to `iter_N.bad-<epoch>-<round>`.
"""

import errno
import os
from pathlib import Path

from ..protocol.checkpoints import Publish, SaveId
from ..protocol.folders import sync_folder
from .bundle import NoBundle, write_bundle
from .catalog import Found, Kind, look_published, mark_bad, nbytes_of, newest_usable, read_all, read_manifest, whose
from .dcp_metadata import BadSave, encode
from .files import NEW, delete_tree, remove_file, write_atomic
from .formats import VERSION, BadFormat, Manifest, decode_manifest, digest_of, digest_of_save, encode_manifest
from .names import DCP_METADATA, MANIFEST, MCORE_METADATA, TRACKER, bad_name, published_name, saving_name

MCORE = (
    b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, '
    b'"common_backend": "torch", "common_backend_version": 1}'
)
"""Megatron-Core reads which format a folder has from `metadata.json`."""

_ATTEMPTS = 5
"""Another publisher of the same save takes the folder away at most once; a sweep may take a temporary file."""


class PublishFailed(Exception):
    """The save cannot be published, and trying again will not change that. Says why."""


def publish(save_dir: Path, order: Publish, *, created: float) -> Manifest:
    """Publish a save whose shards are all written. The manifest of what is published as that step afterwards: another
    save's, if that came first. Raises PublishFailed, or OSError when the file system fails; then nothing is published,
    or this save is and only the tracker is late."""
    ours = save_dir / saving_name(order.save)
    for attempt in range(_ATTEMPTS):
        try:
            if (manifest := _publish(save_dir, order, created)) is not None:
                sync_folder(save_dir)
                point_tracker(save_dir)
                return manifest
        except FileNotFoundError:
            if attempt == _ATTEMPTS - 1:
                raise
        except (BadSave, BadFormat) as error:
            if not ours.exists() and attempt < _ATTEMPTS - 1:
                continue  # another publisher renamed it while it was read
            raise PublishFailed(f"{order.save} cannot be published: {error}") from error
    raise OSError(errno.EBUSY, f"{order.save} cannot be published: {published_name(order.save.step)} keeps changing")


def _publish(save_dir: Path, order: Publish, created: float) -> Manifest | None:
    """None: somebody else was there first, look again."""
    ours = save_dir / saving_name(order.save)
    final = save_dir / published_name(order.save.step)
    written = ours.exists()  # looked at before the other: a rename in between is seen at its end
    there = look_published(final)
    if there is not None:
        _check_replaceable(there, order.save)
        if there.usable and there.save != order.over:
            delete_tree(ours)
            return read_manifest(final)
    if not written:
        what = f"{final} is unusable ({there.why})" if there is not None else f"{final} is not there either"
        raise PublishFailed(f"{order.save} cannot be published: there is no {ours}, and {what}")
    manifest = _complete(ours, order, created)
    if there is not None and (there.kind is Kind.PUBLISHED or there.bad) and not _move_away(there, order.save):
        return None
    return manifest if _rename(ours, final) else None


def _rename(folder: Path, target: Path) -> bool:
    """False: there is a folder of that name, and not an empty one, which a rename replaces."""
    try:
        os.rename(folder, target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    return True


def _check_replaceable(there: Found, save: SaveId) -> None:
    """What is no save of perdure's stays, unless it is marked as bad, or an empty folder."""
    if there.unsure and not there.bad:
        raise OSError(errno.EIO, f"{save} cannot be published: {there.path} cannot be read now: {there.why}")
    if there.kind is Kind.PUBLISHED or there.bad:
        return
    if there.path.is_dir() and not os.listdir(there.path):
        return
    raise PublishFailed(
        f"{save} cannot be published: {there.path} exists and is not perdure's ({there.why}); "
        f"move it away, or save to another folder"
    )


def _complete(ours: Path, order: Publish, created: float) -> Manifest:
    """Write what a published folder has beside its shards."""
    sidecars = read_all(ours, order.save, order.world_size)
    digest = digest_of_save(each for _, each in sidecars)
    if digest != order.digest:
        raise BadSave(
            f"the sidecars in {ours.name} have the digest {digest.hex()}, the ranks reported {order.digest.hex()}"
        )
    metadata = encode([sidecar for sidecar, _ in sidecars])
    manifest = encode_manifest(
        Manifest(
            version=VERSION,
            step=order.save.step,
            epoch=order.save.epoch,
            round=order.save.round,
            world_size=order.world_size,
            nbytes=sum(nbytes_of(sidecar) for sidecar, _ in sidecars),
            digest=digest.hex(),
            metadata=digest_of(metadata).hex(),
            created=created,
        )
    )
    try:
        write_bundle(ours, [each for _, each in sidecars])
    except NoBundle as error:
        raise BadSave(str(error)) from error
    write_atomic(ours / DCP_METADATA, metadata)
    write_atomic(ours / MCORE_METADATA, MCORE)
    write_atomic(ours / MANIFEST, manifest)
    for name in os.listdir(ours):
        if name.startswith(NEW):
            remove_file(ours / name)  # of a publisher or a writer that was killed
    sync_folder(ours)
    return decode_manifest(manifest)


def _move_away(there: Found, save: SaveId) -> bool:
    """An unusable published save makes room for `save`, with a note of why. False: look again.

    That its new name is taken may mean that another publisher has moved it already, and that what is published by now
    is `save`: so the move comes before the mark, and what has the new name goes only if that is not so.
    """
    target = there.path.with_name(bad_name(there.save or save))
    if not _rename(there.path, target):
        if whose(there.path) != save:
            delete_tree(target)
        return False
    mark_bad(target, there.why or f"unusable, or of an earlier job: {save} has taken its place")
    return True


def point_tracker(save_dir: Path) -> None:
    """Let `latest_checkpointed_iteration.txt` name the newest good save. Raises OSError.

    Others do the same at the same time: after each write one more look, until what is named is the newest. One that is
    killed between the two can leave the name of an older good save, until the next call.
    """
    tracker = save_dir / TRACKER
    for _ in range(10):
        newest = newest_usable(save_dir)
        if newest is None or read_tracker(save_dir) == newest:
            return
        try:
            write_atomic(tracker, str(newest).encode())
            sync_folder(save_dir)
        except FileNotFoundError:
            continue  # the temporary file was swept


def read_tracker(save_dir: Path) -> int | None:
    """The step that the tracker names; None if there is no tracker, or it names none."""
    try:
        text = (save_dir / TRACKER).read_bytes().strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdigit() else None
