"""The writer process of one rank: it writes what the rank's images hold, while the rank trains on.

Rules:
- It imports nothing heavy, knows no torch and no process group, and outlives the rounds of its rank.
- The main thread only reads the socket. One thread writes the local tier, another the durable one, each in the order
  in which the saves came: a slow durable tier never holds up a local write.
- An image is released as early as can be: once the local copy is written, the durable one is made from that copy,
  each chunk verified on the way.
- A save that is dropped is out of the way at once: one that waits for its turn does not wait any longer, and one that
  is being written ends with its present chunk. Of each tier that a save was to go to there is an answer in any case.
- An error on one tier is that tier's alone. On the durable tier, one that may pass is tried again until the deadline,
  or until a newer save waits for its turn.
- It ends when its socket does: what is unfinished is removed. It stays in the session and process group of its rank,
  whose end is its own, but the signals that ask a job to stop are not for it: a Ctrl-C must not tear a save.
- It is not niced. Where trainers use every core, a save that gives way to them takes longer, and was seen to cost them
  up to twice as much in all: what all ranks wait for at each step is the slowest of them.
"""

import mmap
import os
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from time import monotonic

from ..protocol.checkpoints import GIVEN_UP, SaveId, Tier
from .disk import TRANSIENT, Copy, DamagedCopy, Memory, Shard, Source, Unwritable, name_of, write_shard
from .formats import CHUNK, VERSION, DataFile, Item, Sidecar, digest_of, encode_sidecar
from .names import data_name, local_name, saving_name
from .writer_messages import (
    LAYOUTS,
    Abandon,
    Damaged,
    Drop,
    Failed,
    FromWriter,
    Ready,
    Released,
    Remark,
    ToWriter,
    UseImage,
    UseLayout,
    Write,
    Written,
    clip,
    encode,
    receive_order,
)

IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
STOP_LIMIT_S = 5.0
"""How long the end waits for the threads to remove what is unfinished."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""Between two tries of a durable write."""
ALIGNMENT = 64
"""Of values in file 1."""


class Dropped(Exception):
    """Nobody wants the save any more."""


class Late(Exception):
    """The deadline has passed."""


class Job:
    """One save. Given from thread to thread, changed by one at a time; `dropped` is set by the main thread."""

    def __init__(self, order: Write, layout: UseLayout, image: memoryview) -> None:
        self.order = order
        self.due = order.began + order.deadline_s
        self.dropped = False
        self.unanswered = list(order.tiers)
        """Tiers of which the rank has not been told what became of them."""
        self.copy: Copy | None = None
        """From which the durable tier is written once the image is released."""
        self._layout = layout
        self._image: memoryview | None = image
        self._values, self._value_items, self._share_end = lay_out_values(order)

    def folder(self, tier: Tier) -> str:
        if tier is Tier.LOCAL:
            return os.path.join(self.order.local_dir or "", local_name(self.order.save))
        return os.path.join(self.order.durable_dir or "", saving_name(self.order.save))

    def sources(self, tier: Tier) -> list[Source]:
        durable = tier is Tier.DURABLE
        size = self._layout.share_bytes if durable else self._layout.size
        tensors = self.copy if self.copy is not None else Memory(self.image[:size])
        values = self._values[: self._share_end] if durable else self._values
        return [tensors, Memory(values)] if values else [tensors]

    @property
    def image(self) -> memoryview:
        if self._image is None:
            raise RuntimeError(f"the image of {self.order.save} is read after its release")
        return self._image

    def sidecar(self, tier: Tier, files: tuple[DataFile, ...]) -> bytes:
        order, layout = self.order, self._layout
        share = layout.items[: layout.share] + self._value_items[: order.value_share]
        extra = layout.items[layout.share :] + self._value_items[order.value_share :]
        if tier is Tier.DURABLE:
            extra = ()
        items = share + extra
        return encode_sidecar(
            Sidecar(
                VERSION, order.save, order.rank, order.world_size, items, files, len(extra), layout.held, layout.writers
            )
        )

    def copy_from(self, local: Shard, buffer: bytearray) -> None:
        """From now on the durable tier is written from the local one's file, which stays open."""
        path = os.path.join(self.folder(Tier.LOCAL), data_name(self.order.rank, 0))
        self.copy = Copy(path, local.files[0], self._layout.share_bytes, buffer)

    def forget_image(self) -> bool:
        """Whether it was not forgotten before."""
        held, self._image = self._image is not None, None
        return held

    def check(self) -> None:
        if self.dropped:
            raise Dropped
        if monotonic() >= self.due:
            raise Late

    def late(self, tier: Tier) -> str:
        order = self.order
        return (
            f"{self.folder(tier)}: not written within {order.deadline_s:g} s of the save; the disk is too slow for it"
        )


def lay_out_values(order: Write) -> tuple[bytes, tuple[Item, ...], int]:
    """The bytes of file 1, what is in it, and where the rank's share of it ends."""
    parts: list[bytes] = []
    items: list[Item] = []
    at = share_end = 0
    for number, (fqn, path, data) in enumerate(order.values):
        length, digest = len(data), digest_of(data)
        items.append(Item(fqn, path, (), None, (), "", None, 1, at, length, at, length, digest))
        gap = -len(data) % ALIGNMENT
        parts += (data, bytes(gap))
        at += len(data) + gap
        if number + 1 == order.value_share:
            share_end = at
    return b"".join(parts), tuple(items), share_end


class Desk:
    """All saves of this process, and the threads that write them."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._layouts: dict[int, UseLayout] = {}
        self._images: dict[int, memoryview] = {}
        self._news = threading.Condition()
        """Guards what follows; told of new jobs, dropped ones and the end."""
        self._queues: dict[Tier, deque[Job]] = {Tier.LOCAL: deque(), Tier.DURABLE: deque()}
        self._jobs: list[Job] = []
        self._ended = False
        self._buffer = bytearray()
        self._threads = [
            threading.Thread(target=self._serve, args=(tier,), name=f"perdure-{tier.value}", daemon=True)
            for tier in self._queues
        ]

    def run(self) -> None:
        """Until the rank closes the socket."""
        for thread in self._threads:
            thread.start()
        self._say(Ready())
        try:
            while (received := receive_order(self._end)) is not None:
                self._obey(*received)
        finally:
            self._stop()

    def _stop(self) -> None:
        with self._news:
            self._ended = True
            for job in self._jobs:
                job.dropped = True
            self._news.notify_all()
        until = monotonic() + STOP_LIMIT_S
        for thread in self._threads:
            thread.join(max(until - monotonic(), 0))

    # ---- the main thread ------------------------------------------------------------------------------------

    def _obey(self, order: ToWriter, descriptor: int) -> None:
        try:
            if isinstance(order, UseImage):
                memory = mmap.mmap(descriptor, order.size, mmap.MAP_SHARED, mmap.PROT_READ)
                self._images[order.image] = memoryview(memory)
            elif isinstance(order, UseLayout):
                self._layouts[order.layout] = order
                while len(self._layouts) > LAYOUTS:
                    del self._layouts[next(iter(self._layouts))]
            elif isinstance(order, Write):
                self._accept(order)
            elif isinstance(order, Abandon):
                wanted = (order.epoch, order.round)
                self._drop(lambda save: (save.epoch, save.round) != wanted)
            elif isinstance(order, Drop):
                self._drop(lambda save: save == order.save)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _accept(self, order: Write) -> None:
        layout, image = self._layouts.get(order.layout), self._images.get(order.image)
        if layout is None or image is None or len(image) < layout.size:
            why = f"layout {order.layout} and image {order.image} are not both known here, or do not fit: a defect"
            for tier in order.tiers:
                self._say(Failed(order.save, tier, why))
            self._say(Released(order.save, order.image))
            return
        job = Job(order, layout, image)
        with self._news:
            self._jobs.append(job)
            # Those without a local copy pass by there as well: so the durable tier sees them in order.
            self._queues[Tier.LOCAL].append(job)
            self._news.notify_all()

    def _drop(self, is_unwanted: Callable[[SaveId], bool]) -> None:
        with self._news:
            for job in self._jobs:
                job.dropped = job.dropped or is_unwanted(job.order.save)
            # Those that no thread has in its hands: what stands before them on a disk may take long.
            waiting = [job for queue in self._queues.values() for job in queue if job.dropped]
            for queue in self._queues.values():
                for job in waiting:
                    if job in queue:
                        queue.remove(job)
            self._news.notify_all()
        for job in waiting:
            self._finish(job)

    def _say(self, reply: FromWriter) -> None:
        try:
            self._end.send(encode(reply))
        except OSError:
            # The rank is gone: the main thread sees it too.
            pass

    # ---- the two threads ------------------------------------------------------------------------------------

    def _serve(self, tier: Tier) -> None:
        queue = self._queues[tier]
        work = self._do_local if tier is Tier.LOCAL else self._do_durable
        while True:
            with self._news:
                self._news.wait_for(lambda: queue or self._ended)
                if not queue:
                    return
                job = queue.popleft()
            try:
                work(job)
            except Exception:
                self._finish(job, f"a defect of perdure: {traceback.format_exc()}")

    def _do_local(self, job: Job) -> None:
        if job.order.local_dir is not None:
            error = self._write(job, Tier.LOCAL)
            if error is not None:
                self._fail(job, Tier.LOCAL, str(error))
        with self._news:
            goes_on = not job.dropped and job.order.durable_dir is not None
            if goes_on:
                self._queues[Tier.DURABLE].append(job)
                self._news.notify_all()
        if not goes_on:
            self._finish(job)

    def _free_image(self, job: Job, shard: Shard) -> None:
        if not self._buffer:
            self._buffer = bytearray(CHUNK)
        try:
            job.copy_from(shard, self._buffer)
        except OSError as error:
            text = f"{job.folder(Tier.LOCAL)}: {name_of(error)}; the durable copy is made from memory instead"
            self._say(Remark("warning", clip(text)))
        else:
            self._release(job)

    def _do_durable(self, job: Job) -> None:
        pause, tries = FIRST_PAUSE_S, 1
        while (error := self._write(job, Tier.DURABLE)) is not None:
            reason = self._wait_to_retry(job, pause) if error.code in TRANSIENT else "not tried again"
            if reason:
                self._fail(job, Tier.DURABLE, f"{error} ({tries} tries; {reason})" if tries > 1 else str(error))
                break
            if tries == 1:
                self._say(Remark("warning", clip(f"{job.order.save}, durable tier: {error}; this is tried again")))
            pause, tries = min(pause * 2, LONGEST_PAUSE_S), tries + 1
        self._finish(job)

    def _wait_to_retry(self, job: Job, pause: float) -> str:
        """Empty when it is time for the next try, else why there is none."""
        until = monotonic() + pause
        if until >= job.due:
            return f"the save's {job.order.deadline_s:g} s are over before the next"
        queue = self._queues[Tier.DURABLE]
        with self._news:
            self._news.wait_for(lambda: queue or job.dropped, max(until - monotonic(), 0))
            return f"it gives way to {queue[0].order.save}" if queue and not job.dropped else ""

    def _write(self, job: Job, tier: Tier) -> Unwritable | None:
        """Write once. An error is returned, and not told yet; a shard, or what can never become one, is told."""
        order = job.order
        try:
            sources = job.sources(tier)
            shard = write_shard(
                job.folder(tier), order.rank, sources, lambda files: job.sidecar(tier, files), job.check
            )
        except Unwritable as error:
            return error
        except Late:
            return Unwritable(job.late(tier))
        except DamagedCopy as error:
            self._say(Damaged(order.save, Tier.LOCAL, clip(str(error))))
            return Unwritable(f"its copy on the local tier is damaged: {error}")
        except Dropped:
            return None
        if tier is Tier.LOCAL and order.durable_dir is not None:
            self._free_image(job, shard)
        job.unanswered.remove(tier)
        self._say(Written(order.save, tier, shard.nbytes, shard.digest, monotonic() - order.began))
        return None

    def _finish(self, job: Job, why: str = GIVEN_UP) -> None:
        """Nothing more is done for it."""
        for tier in list(job.unanswered):
            self._fail(job, tier, why)
        self._release(job)
        if job.copy is not None:
            job.copy.close()
        with self._news:
            self._jobs.remove(job)

    def _release(self, job: Job) -> None:
        if job.forget_image():
            self._say(Released(job.order.save, job.order.image))

    def _fail(self, job: Job, tier: Tier, why: str) -> None:
        job.unanswered.remove(tier)
        self._say(Failed(job.order.save, tier, clip(why)))


def main(descriptor: int) -> None:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # Whoever started this kept them from it until they are ignored.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        Desk(socket.socket(fileno=descriptor)).run()
    except BaseException:
        sys.stderr.write(f"perdure: checkpoint writer (pid {os.getpid()}): {traceback.format_exc()}")
        os._exit(1)
    # A thread may be stuck in the kernel, and is not waited for.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
