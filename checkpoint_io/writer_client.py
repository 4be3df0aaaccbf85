"""The trainer's side of its writer process: orders go out at once, what became of them is called back.

Rules:
- No call waits for a disk. A process that does not answer is killed when the deadline of a save has passed, and
  replaced at the next save; training goes on.
- An image is released when the process says so, or when the process is surely gone. One that is killed but stuck in
  the kernel keeps its images until the kernel lets it go: nothing may be overwritten while it may still be read.
- Each save has one outcome for each tier, whatever happens: Written, or Failed with the reason. A dead process is
  noticed at once.
- A process that dies again and again without a single success is started at growing intervals only; saves meanwhile
  fail with that reason.
- What happens is told by one thread, in order; it holds no lock meanwhile. It sleeps until there is something to hear
  or a deadline passes.
- A forked child of the trainer closes what it has inherited, and may not use it.
"""

import os
import select
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf
from time import monotonic

import msgspec

from ..protocol.checkpoints import SaveId
from .writer_child import Child, Flight, Outcome, Starts
from .writer_messages import (
    LAYOUTS,
    BadPacket,
    Failed,
    FromWriter,
    Released,
    Remark,
    UseImage,
    UseLayout,
    Write,
    Written,
    encode,
)

GRACE_S = 2.0
"""Given on top of a save's deadline: the process keeps the deadline itself, if it can."""
ABANDON_LIMIT_S = 60.0
"""How long an abandoned save may keep its image."""
STOP_LIMIT_S = 7.0
"""For the process to remove what is unfinished, at the end."""
DEFECTS = 10


class Refused(Exception):
    """No process is started now."""


_writers: "weakref.WeakSet[Writer]" = weakref.WeakSet()


def _after_fork() -> None:
    for writer in list(_writers):
        writer.after_fork()


os.register_at_fork(after_in_child=_after_fork)


class Writer:
    """The writer process of this rank, and those that came before it and are not gone yet."""

    def __init__(self, on_fact: Callable[[Outcome], None], note: Callable[[str, str], None]) -> None:
        self._on_fact = on_fact
        self._note = note
        self._changed = threading.Condition(threading.Lock())
        """Guards all that follows; told when a save is through."""
        self._children: list[Child] = []
        """Those that are not buried yet; the last one is the present one, if it is not lost."""
        self._layouts: dict[int, bytes] = {}
        self._images: dict[int, tuple[int, int]] = {}
        """Descriptor (ours) and size."""
        self._told: deque[Outcome | Remark] = deque()
        """What is to be called back."""
        self._telling = False
        self._starts = Starts()
        self._wakes = 0.0
        """When the thread looks at deadlines next."""
        self._closed = False
        self._drops: deque[SaveId] = deque()  # not under the lock, for which `drop` must not wait
        self._pid = 0
        self._bell = -1
        self._thread = threading.Thread(target=self._run, name="perdure-writer", daemon=True)

    # ---- orders, from any thread ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread and the process. Raises OSError if no thread can be started; a process that cannot be is
        tried again at the first save."""
        self._pid = os.getpid()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        _writers.add(self)
        with self._changed, suppress(OSError):
            self._present()
        self._thread.start()

    def use_layout(self, layout: UseLayout) -> None:
        """Make a layout known. The newest LAYOUTS are remembered, for a process that has to be replaced."""
        data = encode(layout)
        with self._open():
            self._layouts.pop(layout.layout, None)
            self._layouts[layout.layout] = data
            while len(self._layouts) > LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            for child in self._children:
                child.layouts.discard(layout.layout)
            self._introduce_now(layout.layout, None)

    def use_image(self, image: int, descriptor: int, size: int) -> None:
        """Make the memory behind `descriptor` known as `image`. Whatever was known so is none of our business any
        more: nothing is said of its release."""
        with self._open():
            former = self._images.get(image)
            self._images[image] = (os.dup(descriptor), size)
            if former is not None:
                os.close(former[0])
            for child in self._children:
                child.forget_image(image)
            self._introduce_now(None, image)

    def write(self, order: Write) -> None:
        """Give a save to the process. Whatever goes wrong is an outcome, called back later; a save that is in flight
        already is a ValueError."""
        order = msgspec.structs.replace(order, local_dir=_full(order.local_dir), durable_dir=_full(order.durable_dir))
        if not order.tiers:
            raise ValueError(f"{order.save}: no tier is given to be written; give local_dir, durable_dir, or both")
        with self._open():
            if any(order.save in child.flights for child in self._children):
                raise ValueError(f"{order.save} is being written already; save each step once in a round")
            try:
                self._give(order)
            except (Refused, OSError, BadPacket) as error:
                reason = "it reads no more orders" if isinstance(error, BlockingIOError) else str(error)
                for tier in order.tiers:
                    self._told.append(Failed(order.save, tier, f"the writer process cannot be used: {reason}"))
                self._told.append(Released(order.save, order.image))
                self._ring()

    def abandon(self, epoch: int, round: int) -> None:
        """Drop every save that is not of this epoch and round. Of those, only the release of images is told, and what
        was written before this came."""
        with self._open():
            for child in self._children:
                child.abandon(epoch, round, monotonic() + ABANDON_LIMIT_S)
            self._changed.notify_all()
            self._ring()

    def drop(self, saves: Iterable[SaveId]) -> None:
        """Give up what is not written of these, if anything. Waits for nobody; not to be called after `close`."""
        self._drops.extend(saves)
        self._ring()

    def pending(self) -> tuple[SaveId, ...]:
        """Saves of which an outcome is missing, in the order in which they were given."""
        with self._changed:
            return self._pending()

    def wait(self, deadline: float) -> tuple[SaveId, ...]:
        """Wait until every outcome has been called back, or until `deadline` (monotonic); what is still missing."""
        with self._changed:
            self._changed.wait_for(self._idle, max(deadline - monotonic(), 0))
            return self._pending()

    def close(self, deadline_s: float) -> tuple[SaveId, ...]:
        """Wait so long for what is in flight, then end the process; what was not finished is told and returned."""
        if self._pid != os.getpid() or self._closed:
            return ()
        lost = self.wait(monotonic() + deadline_s)
        with self._changed:
            self._closed = True
            for child in self._children:
                self._lose(child, "the job ended before it was written")
            self._ring()
        # The process may be stuck in the kernel: then it is left behind, killed.
        self._thread.join(STOP_LIMIT_S + 2 * GRACE_S)
        with self._changed:
            for descriptor, _ in self._images.values():
                os.close(descriptor)
            self._images.clear()
            if self._bell >= 0 and not self._thread.is_alive():
                os.close(self._bell)
                self._bell = -1
        return lost

    # ---- under the lock -------------------------------------------------------------------------------------

    def _open(self) -> threading.Condition:
        if self._pid != os.getpid():
            raise RuntimeError(f"this writer belongs to process {self._pid}; a forked child cannot save")
        if self._closed:
            raise RuntimeError("the writer is closed: nothing can be saved any more")
        return self._changed

    def _ring(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_write(self._bell, 1)

    def _pending(self) -> tuple[SaveId, ...]:
        return tuple(save for child in self._children for save, flight in child.flights.items() if flight.left)

    def _idle(self) -> bool:
        return not self._telling and not self._told and not self._pending()

    def _present(self) -> Child:
        """The process that takes orders, started if there is none."""
        if self._children and not self._children[-1].lost:
            return self._children[-1]
        if refusal := self._starts.refusal(monotonic()):
            raise Refused(refusal)
        child = Child()
        self._children.append(child)
        self._ring()
        return child

    def _give(self, order: Write) -> None:
        data = encode(order)
        for again in (True, False):
            child = self._present()
            try:
                self._introduce(child, order.layout, order.image)
                child.send(data)
                break
            except ConnectionError:
                # It died and the thread has not noticed yet.
                self._lose(child, "the writer process died")
                if not again:
                    raise
        flight = Flight(order, order.began + order.deadline_s + GRACE_S)
        child.flights[order.save] = flight
        if flight.due < self._wakes:
            self._ring()

    def _introduce(self, child: Child, layout: int | None, image: int | None) -> None:
        """Send what an order is going to name and the process does not know."""
        if layout in self._layouts and layout not in child.layouts:
            child.send(self._layouts[layout])
            child.layouts.add(layout)
        if image in self._images and image not in child.images:
            descriptor, size = self._images[image]
            child.send(encode(UseImage(image, size)), descriptor)
            child.images.add(image)

    def _introduce_now(self, layout: int | None, image: int | None) -> None:
        """Ahead of the first order, if it can be. If not, the order finds out."""
        with suppress(OSError):
            if self._children and not self._children[-1].lost:
                self._introduce(self._children[-1], layout, image)

    def _lose(self, child: Child, why: str) -> None:
        """Give it no more work and wait for its end; what it had is reported once."""
        if child.lost:
            return
        child.lost = why
        if not self._closed:
            self._starts.failed(monotonic())

    # ---- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        for _ in range(DEFECTS):
            try:
                while self._turn():
                    pass
                return
            except Exception:
                # Without this thread nothing is heard any more: it goes on.
                with suppress(Exception):
                    self._note(
                        "error", f"the checkpoint writer's thread: a defect of perdure: {traceback.format_exc()}"
                    )

    def _turn(self) -> bool:
        """Wait for the next thing, and see to it; False when all is over."""
        self._sleep()
        with self._changed:
            now = monotonic()
            for child in list(self._children):
                self._hear(child)
            while self._drops:
                save = self._drops.popleft()
                for child in self._children:
                    child.drop(save)
            for child in list(self._children):
                self._judge(child, now)
            over = self._closed and not self._children
        self._tell()
        return not over

    def _sleep(self) -> None:
        poller = select.poll()
        poller.register(self._bell, select.POLLIN)
        with self._changed:
            for child in self._children:
                poller.register(child.pidfd, select.POLLIN)
                if child.fileno() >= 0:
                    poller.register(child.fileno(), select.POLLIN)
            self._wakes = min((child.next_due() for child in self._children), default=inf)
            limit = None if self._wakes == inf else max(self._wakes - monotonic(), 0) * 1000 + 1
        poller.poll(limit)
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def _hear(self, child: Child) -> None:
        gone = child.wait(0)
        while child.fileno() >= 0:
            try:
                reply = child.receive()
            except BlockingIOError:
                break
            except BadPacket as error:
                self._lose(child, f"the writer process said what it must not: {error}")
                reply = None
            if reply is None:
                child.hang_up()
                # It has nothing to say any more, and no business but to end.
                child.kill()
            else:
                self._take(child, reply)
        if gone:
            self._bury(child)

    def _take(self, child: Child, reply: FromWriter) -> None:
        if isinstance(reply, Written):
            self._starts.succeeded()
        told = child.take(reply)
        if told is not None:
            self._told.append(told)

    def _bury(self, child: Child) -> None:
        how = f"process {child.pid} {child.bury()}{'' if child.ready else ' before it was ready'}"
        self._children.remove(child)
        why = f"{child.lost}; {how}" if child.lost else f"the writer process died: {how}"
        if not self._closed:
            self._told.append(Remark("warning", f"checkpoints: {why}; another one is started for the next save"))
        self._lose(child, why)
        self._told.extend([*child.fail(why), *child.release()])

    def _judge(self, child: Child, now: float) -> None:
        if self._closed:
            self._end(child, now)
        elif not child.lost and (where := child.stuck(now)):
            why = f"{where}; the writer process {child.pid} is stuck and was killed"
            self._lose(child, why)
            self._told.extend(child.fail(why))
            child.kill()

    def _end(self, child: Child, now: float) -> None:
        if child.ends == inf:
            self._told.extend(child.fail(child.lost))
            child.hang_up()
            child.ends = now + STOP_LIMIT_S
        elif now >= child.ends:
            child.kill()
            if child.wait(now + GRACE_S):
                self._bury(child)
                return
            # Its images are not released: it may read them yet.
            self._told.append(Remark("warning", f"checkpoints: process {child.pid} is stuck in the kernel, killed"))
            self._children.remove(child)
            child.close()

    def _tell(self) -> None:
        while True:
            with self._changed:
                self._telling = bool(self._told)
                if not self._telling:
                    self._changed.notify_all()
                    return
                told = self._told.popleft()
            if isinstance(told, Remark):
                self._note(told.level, told.text)
                continue
            try:
                self._on_fact(told)
            except Exception:
                self._note("error", f"checkpoints: {told} was not taken: {traceback.format_exc()}")

    def after_fork(self) -> None:
        """In a forked child of the trainer. Locks are left alone: whoever held them is not here."""
        for child in self._children:
            child.close()
        for descriptor, _ in self._images.values():
            os.close(descriptor)
        if self._bell >= 0:
            os.close(self._bell)
        self._children, self._images, self._bell = [], {}, -1


def _full(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(path)
