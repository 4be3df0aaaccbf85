"""Kills processes at chosen moments of a save, or makes disks slow. Every Python process of a job imports this when its
folder is in PYTHONPATH, and acts only if FAULTS_KILLS names a file of kills, or FAULTS_SLOW says which disks are slow.

Kills happen one after the other, each once: just before the first file operation of the named program that fits, after
the one before it has happened and a save has been published since. `signal`: another one than SIGKILL.

How slow a disk is, is told in steps of the trainer, not in seconds: FAULTS_SLOW is a list, by rank, of how many steps
the first shard takes to be written, and how many each further one, one after the other. The trainer says
`at-<rank>-<step>`.
"""

import contextlib
import json
import os
import re
import signal
import sys
import time
from typing import Any


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/children") as file:
            found += map(int, file.read().split())
    return found


def command_of(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().replace(b"\0", b" ").decode()


def victims_of(kill: dict[str, Any]) -> list[int]:
    me = os.getpid()
    if kill["victim"] == "itself":
        return [me]
    if kill["victim"] == "parent":
        return [parent_of(me)]
    if kill["victim"] == "controller":
        with open(kill["endpoint"]) as file:
            return [json.load(file)["process"][1]]
    # All ranks: this is a writer, and its parent's siblings that run the trainer are the others.
    agent = parent_of(parent_of(me))
    return [pid for pid in children_of(agent) if "train.py" in command_of(pid) or pid == parent_of(me)]


def fits(kill: dict[str, Any], event: str, arguments: tuple[Any, ...]) -> bool:
    if event != kill["event"]:
        return False
    paths = [os.fsdecode(each) for each in arguments[:2] if isinstance(each, str | bytes | os.PathLike)]
    path = paths[-1 if event == "os.rename" and kill["to"] else 0] if paths else ""
    return all(part in path for part in kill["parts"])


def is_due(kill: dict[str, Any], folder: str) -> bool:
    """Whether the one before it is over: a save has been published since."""
    try:
        since = os.stat(f"{folder}/done-{kill['after']}").st_mtime_ns if kill["after"] else 0
        return any(
            "." not in each.name and each.stat().st_ctime_ns > since
            for each in os.scandir(kill["saves"])
            if each.name.startswith("iter_")
        )
    except FileNotFoundError:
        return False


def install(kills: list[dict[str, Any]], folder: str) -> None:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in events:
            return
        for kill in mine:
            if fits(kill, event, arguments) and is_due(kill, folder) and claim(folder, kill["name"]):
                for pid in victims_of(kill):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, kill.get("signal", signal.SIGKILL))

    program = " ".join(sys.orig_argv)
    mine = [kill for kill in kills if f"checkpoint_io.{kill['program']}" in program]
    events = {kill["event"] for kill in mine}
    if mine:
        sys.addaudithook(hook)


def claim(folder: str, name: str) -> bool:
    """Whether nobody has done it before. Its own `open` is looked at as well, and fits nothing."""
    try:
        os.close(os.open(f"{folder}/done-{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


class SlowDisk:
    """Of one rank. Its shards are written one after the other, in one thread."""

    def __init__(self, said: str, rank: int, first: int, further: int) -> None:
        self._said = said
        self._rank = rank
        self._lasts = first
        self._further = further
        self._free_at = 0
        self._seen: set[int] = set()

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        found = re.search(rf"/iter_(\d+)[^/]*/\.__{self._rank}_0\.", str(arguments[0])) if event == "open" else None
        if found is None or int(found[1]) in self._seen:
            return
        self._seen.add(int(found[1]))
        self._free_at = max(self._free_at, int(found[1])) + self._lasts
        self._lasts = self._further
        while not any(
            os.path.exists(f"{self._said}-{name}") for name in (f"at-{self._rank}-{self._free_at}", "release")
        ):
            time.sleep(0.001)


def slow_down(disks: list[list[int]], folder: str) -> None:
    """A writer does not know its rank, so it has the disks of all."""
    if "checkpoint_io.writer" in " ".join(sys.orig_argv):
        for rank, (first, further) in enumerate(disks):
            sys.addaudithook(SlowDisk(f"{folder}/said", rank, first, further).hook)


if "FAULTS_SLOW" in os.environ:
    slow_down(json.loads(os.environ["FAULTS_SLOW"]), os.environ["FAULTS_FOLDER"])
if "FAULTS_KILLS" in os.environ:
    with open(os.environ["FAULTS_KILLS"]) as described:
        install(json.load(described), os.environ["FAULTS_FOLDER"])
