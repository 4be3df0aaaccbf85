"""Names of files and folders of checkpoints, on both tiers.

    <save>/                                           durable tier, seen by all nodes
        iter_0000100/                                 published
        iter_0000200.saving-<epoch>-<round>/          being written, by all ranks of that round
        iter_0000100.bad-<epoch>-<round>/             was published, and another one took its name: it was found bad,
                                                      or was of an earlier job
        latest_checkpointed_iteration.txt
    <non_persistent_local_ckpt_dir>/<node>/           local tier, of one node
        iter_0000150.<epoch>-<round>/
            __<rank>_0.distcp  __<rank>_1.distcp  __<rank>.shard

What is not named so is none of ours and never touched. Whatever begins with `.trash-` is being deleted.
"""

import re

from ..protocol.checkpoints import SaveId

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
DCP_METADATA = ".metadata"
MCORE_METADATA = "metadata.json"
BUNDLE = "sidecars.bundle"
"""All sidecars of a published save in one file."""
TRASH = ".trash-"

_SAVE = re.compile(r"iter_(\d{7,18})(?:\.(saving-|bad-|)([0-9a-f]{1,16})-(\d{1,9}))?")


def published_name(step: int) -> str:
    return f"iter_{step:07d}"


def saving_name(save: SaveId) -> str:
    """On the durable tier, while it is written."""
    return f"iter_{save.step:07d}.saving-{save.epoch:x}-{save.round}"


def bad_name(save: SaveId) -> str:
    return f"iter_{save.step:07d}.bad-{save.epoch:x}-{save.round}"


def local_name(save: SaveId) -> str:
    """On the local tier."""
    return f"iter_{save.step:07d}.{save.epoch:x}-{save.round}"


def published_step(name: str) -> int | None:
    """The step of a published folder's name, None for any other name."""
    found = _SAVE.fullmatch(name)
    return int(found[1]) if found and found[3] is None else None


def _save(name: str, kind: str) -> SaveId | None:
    found = _SAVE.fullmatch(name)
    if found is None or found[3] is None or found[2] != kind:
        return None
    return SaveId(int(found[1]), int(found[3], 16), int(found[4]))


def saving_save(name: str) -> SaveId | None:
    return _save(name, "saving-")


def bad_save(name: str) -> SaveId | None:
    return _save(name, "bad-")


def local_save(name: str) -> SaveId | None:
    return _save(name, "")


def data_name(rank: int, number: int) -> str:
    """File `number` of a shard: 0 holds tensors, 1 other values. DCP's own naming."""
    return f"__{rank}_{number}.distcp"


def sidecar_name(rank: int) -> str:
    return f"__{rank}.shard"
