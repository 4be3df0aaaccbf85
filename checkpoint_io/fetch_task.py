"""What `python -m perdure.checkpoint_io.fetch` is asked, and answers. By itself, since ranks do not load ZeroMQ."""

import msgspec

from ..protocol.checkpoints import SaveId


class Task(msgspec.Struct, frozen=True):
    """What is read, as JSON, from standard input. keys: where the job's keys.json is, or would be; empty if the job
    runs in plain text. into: this node's folder of the local tier. digest: in hex, or empty."""

    address: str
    save: SaveId
    rank: int
    into: str
    deadline_s: float
    keys: str
    digest: str = ""


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is written, as JSON, to standard output. error: empty if the shard is there, with `nbytes`."""

    nbytes: int = 0
    error: str = ""
