"""What controller and depot do to a save, for `checkpoint_ours.py`: publish it when all shards are durable.

Each rank writes a JSON line into a pipe for a shard of its own; when a save is published, a file of its step's name
appears, with the digest of the save. On the local tier, where nothing is published, when it is complete.
"""

import argparse
import json
import os
import time
from pathlib import Path

from perdure.checkpoint_io.formats import digest_of_save
from perdure.checkpoint_io.publish import publish
from perdure.protocol.checkpoints import Publish, SaveId


def announce(folder: Path, step: int, digest: bytes) -> None:
    temporary = folder / f"{step}.new"
    temporary.write_text(digest.hex())
    os.rename(temporary, folder / str(step))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipe", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="of the checkpoints; without it nothing is published")
    parser.add_argument("--published", type=Path, required=True, help="where to say what is published")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--round", type=int, required=True)
    options = parser.parse_args()
    told: dict[int, dict[int, bytes]] = {}
    with os.fdopen(os.open(options.pipe, os.O_RDWR), "rb", buffering=0) as pipe:
        while line := pipe.readline():
            fact = json.loads(line)
            shards = told.setdefault(fact["step"], {})
            shards[fact["rank"]] = bytes.fromhex(fact["digest"])
            if len(shards) < options.world_size:
                continue
            digest = digest_of_save(shards[rank] for rank in range(options.world_size))
            save = SaveId(fact["step"], options.epoch, options.round)
            if options.folder is not None:
                publish(options.folder, Publish(save, options.world_size, digest), created=time.time())
            announce(options.published, save.step, digest)


if __name__ == "__main__":
    main()
