"""Carries out a depot's orders: publishes, prunes, replicates. One of each order at a time, each with a deadline.

Rules.
1. Orders are states: what is no longer ordered and has not begun is forgotten. What has been answered is not done again
   while it stays ordered; it is if it was withdrawn in between, or if a new session begins.
2. An order runs in a thread of its own. If the file system does not answer within the limit, the order is answered as
   failed and its thread left to itself: nothing else waits for it. Should it succeed after all, that is told as well;
   until then the same order is not begun a second time.
3. Publishing comes one after the other, oldest first, as given; so does pruning. A few replicas are fetched at once.
4. Nothing here raises: whatever goes wrong is a fact, or a line in the log.
"""

import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import trio

from ..protocol.checkpoints import DepotOrders, Fact, Prune, Publish, Replicate, SaveId, Tier, What
from .catalog import BAD, Found, Kind, facts_of, read_sidecar, scan_durable, scan_local
from .depot_messages import AnOrder, Begin, describe, failures
from .fetch import FetchError, fetch_shard
from .fetch import sweep as sweep_fetches
from .files import remove_file
from .formats import BadFormat
from .names import local_name
from .prune import prune, sweep
from .publish import PublishFailed, publish

REPLICAS_AT_ONCE = 2
STUCK_LIMIT = 8
"""Threads that may be left waiting for a file system, before orders are answered without trying."""

PASSED_OVER_TOLD = 4

Tell = Callable[[tuple[Fact, ...]], None]
Log = Callable[[str, str], None]


class OrderFailed(Exception):
    """An order cannot be carried out; the text says why."""


class _Call:
    """One order in its thread, which writes `facts` and `why`, and then lets the trio thread read them.

    why: it failed, empty if not.
    """

    def __init__(self, order: AnOrder) -> None:
        self.order = order
        self.facts: tuple[Fact, ...] = ()
        self.why = ""
        self.done = trio.Event()
        self.abandoned = False


class _Lane:
    """Orders of one kind, in the order in which they came; `width` tasks at most take from it."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.busy = 0
        self.queue: deque[AnOrder] = deque()


class Work:
    """All orders of one depot. Runs its tasks in `nursery`; `tell` and `log` must return at once."""

    def __init__(self, begin: Begin, nursery: trio.Nursery, tell: Tell, log: Log) -> None:
        self._begin = begin
        self._nursery = nursery
        self._tell = tell
        self._log = log
        self._session = 0
        self._wanted: frozenset[AnOrder] = frozenset()
        self._pending: set[AnOrder] = set()
        self._answered: set[AnOrder] = set()
        self._stuck: set[AnOrder] = set()
        self._lanes = {Publish: _Lane(1), Prune: _Lane(1), Replicate: _Lane(REPLICAS_AT_ONCE)}
        self._quiet = trio.Event()

    def order(self, session: int, orders: DepotOrders) -> None:
        """From now on this is what should be done."""
        wanted: list[AnOrder] = [*orders.publish, *orders.prune, *orders.replicate]
        self._wanted = frozenset(wanted)
        self._answered = self._answered & self._wanted if session == self._session else set()
        self._session = session
        for order in wanted:
            if order not in self._answered and order not in self._pending:
                self._pending.add(order)
                lane = self._lanes[type(order)]
                lane.queue.append(order)
                if lane.busy < lane.width:
                    lane.busy += 1
                    self._nursery.start_soon(self._drain, lane)

    async def finish(self) -> None:
        """Do nothing but publish what is ordered; returns when that is done."""
        self._wanted = frozenset(order for order in self._wanted if isinstance(order, Publish))
        while any(isinstance(order, Publish) for order in self._pending):
            self._quiet = trio.Event()
            await self._quiet.wait()

    async def _drain(self, lane: "_Lane") -> None:
        while lane.queue:
            await self._carry_out(lane.queue.popleft())
        lane.busy -= 1

    async def _carry_out(self, order: AnOrder) -> None:
        facts = await self._result(order) if order in self._wanted else ()
        self._pending.discard(order)
        if order in self._wanted:
            self._answered.add(order)
        if facts:
            self._tell(facts)
        self._quiet.set()

    async def _result(self, order: AnOrder) -> tuple[Fact, ...]:
        if order in self._stuck or len(self._stuck) >= STUCK_LIMIT:
            return self._failed(order, "the file system has not answered an earlier attempt yet")
        call = _Call(order)
        token = trio.lowlevel.current_trio_token()
        threading.Thread(target=self._run, args=(call, token), name=f"depot {order}", daemon=True).start()
        with trio.move_on_after(self._begin.limit_s):
            await call.done.wait()
            return self._failed(order, call.why) if call.why else call.facts
        call.abandoned = True
        self._stuck.add(order)
        return self._failed(order, f"not done within {self._begin.limit_s:g} s (save_timeout)")

    def _run(self, call: _Call, token: trio.lowlevel.TrioToken) -> None:
        """In the thread."""
        try:
            call.facts = carry_out(call.order, self._begin)
        except (OrderFailed, PublishFailed, FetchError, BadFormat, OSError) as error:
            call.why = str(error)
        except Exception as error:
            traceback.print_exc()
            call.why = f"{type(error).__name__}: {error}"
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(self._ended, call)

    def _ended(self, call: _Call) -> None:
        call.done.set()
        if call.abandoned:
            self._stuck.discard(call.order)
            if call.facts:
                self._tell(call.facts)

    def _failed(self, order: AnOrder, why: str) -> tuple[Fact, ...]:
        if order not in self._wanted:
            return ()  # what is copied may be deleted meanwhile
        self._log("warning", f"depot: cannot {describe(order)}: {why}")
        return failures((order,), self._begin.node, why)


# ---- the work itself, in threads ------------------------------------------------------------------------------


def carry_out(order: AnOrder, begin: Begin) -> tuple[Fact, ...]:
    """Do it now; what became of it. Raises OrderFailed, PublishFailed, FetchError, BadFormat, OSError."""
    match order:
        case Publish():
            return _publish(order, begin)
        case Prune():
            return _prune(order, begin)
        case Replicate():
            return _replicate(order, begin)


def _publish(order: Publish, begin: Begin) -> tuple[Fact, ...]:
    started = time.monotonic()
    manifest = publish(_folder(begin.save, "save"), order, created=time.time())
    save = SaveId(manifest.step, manifest.epoch, manifest.round)
    published = Fact(
        save,
        What.PUBLISHED,
        Tier.DURABLE,
        world_size=manifest.world_size,
        nbytes=manifest.nbytes,
        digest=bytes.fromhex(manifest.digest),
        seconds=time.monotonic() - started,
    )
    if save == order.save:
        return (published,)
    return (published, *failures((order,), begin.node, f"{save} has been published before it"))


def _prune(order: Prune, begin: Begin) -> tuple[Fact, ...]:
    local = order.tier is Tier.LOCAL
    root = _folder(begin.local, "non_persistent_local_ckpt_dir") if local else _folder(begin.save, "save")
    problems = prune(root, order.save, order.tier, begin.node)
    if problems:
        raise OrderFailed("; ".join(problems))
    return (Fact(order.save, What.PRUNED, order.tier, node=begin.node if local else ""),)


def _replicate(order: Replicate, begin: Begin) -> tuple[Fact, ...]:
    started = time.monotonic()
    home = _folder(begin.local, "non_persistent_local_ckpt_dir") / begin.node
    folder, rank = home / local_name(order.save), order.place.rank
    # A little earlier than we give up its thread: it can say which address did not answer.
    nbytes = fetch_shard(order.place.address, begin.keys, order.save, rank, home, 0.9 * begin.limit_s)
    remove_file(folder / f"{BAD}-{rank}")  # it spoke of what has just been replaced
    sidecar, digest = read_sidecar(folder, rank)
    seconds = time.monotonic() - started
    written = Fact(order.save, What.WRITTEN, Tier.LOCAL, rank, begin.node, sidecar.world_size, nbytes, digest, seconds)
    return (written,)


def _folder(setting: str | None, name: str) -> Path:
    if setting is None:
        raise OrderFailed(f"the job has no such tier: its setting {name} is off")
    return Path(setting)


# ---- taking stock, in threads ---------------------------------------------------------------------------------


class Stock(NamedTuple):
    """What is in a folder. remark: what a person would take for a checkpoint there and is none; empty if nothing."""

    facts: tuple[Fact, ...] = ()
    remark: str = ""


def local_stock(begin: Begin) -> Stock:
    """What this node's folder holds, after what killed processes left half done in it was removed. Raises OSError."""
    if begin.local is None:
        return Stock()
    home = Path(begin.local) / begin.node
    os.makedirs(home, exist_ok=True)
    sweep(home)
    sweep_fetches(home)
    return Stock(facts_of(scan_local(Path(begin.local), begin.node)))


def durable_stock(begin: Begin) -> Stock:
    """What is published there, and what is unfinished: the controller knows who is still at it. What was half deleted
    is removed. Raises OSError."""
    if begin.save is None:
        return Stock()
    founds = scan_durable(Path(begin.save))
    unfinished = [each.save for each in founds if each.kind is Kind.SAVING and each.save is not None]
    sweep(Path(begin.save), unfinished)
    left = (Fact(save, What.UNPUBLISHED, Tier.DURABLE, why="unfinished") for save in unfinished)
    return Stock((*facts_of(founds), *left), _passed_over(begin.save, founds))


def _passed_over(save: str, founds: list[Found]) -> str:
    """Folders with the names of steps that are no saves of ours, as far as they are newer than the newest good one."""
    newest = max((each.step for each in founds if each.kind is Kind.PUBLISHED and each.usable), default=-1)
    strange = [each for each in founds if each.kind in (Kind.FOREIGN, Kind.OTHER) and each.save is None]
    named = [f"{each.path.name} ({each.why})" for each in strange if each.step > newest]
    more = f" and {len(named) - PASSED_OVER_TOLD} more" if len(named) > PASSED_OVER_TOLD else ""
    names = ", ".join(named[:PASSED_OVER_TOLD])
    return f"depot: not resumed from, in {save}: {names}{more}" if named else ""
