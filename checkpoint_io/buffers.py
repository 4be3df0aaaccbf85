"""What a save needs before it can be: a layout of the state, images to copy into, and the process that writes them.

All three are made in a thread, when a state is seen for the first time (`prepare`, or the first save of it), and are
kept for as long as states look the same, over rounds too. Which rank writes what is agreed on anew in each round, since
ranks may have changed places, or be other processes.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..protocol.checkpoints import SaveId
from .agreement import agree
from .flatten import Flat
from .layout import Layout, build_layout
from .staging import Image, Staging, StagingError
from .turn import Turn
from .writer_client import Outcome, Writer
from .writer_messages import UseLayout, Write

AGREE_S = 60.0
"""How long the other ranks may take to come to their first save, or to `prepare`, after this one."""
AGREE_AGAIN_S = 5.0
"""The same for a state that has changed since: the training thread waits for it, and the others are hardly later."""


class Unavailable(RuntimeError):
    """A save cannot be now; the text says why."""


@dataclass(slots=True)
class _Ready:
    """A layout that is made in a thread. number: by which the writer knows it. nth: of its round, the same on all
    ranks."""

    signature: object
    number: int
    nth: int
    done: threading.Event = field(default_factory=threading.Event)
    layout: Layout | None = None
    error: BaseException | None = None
    why: str = ""
    """What the log should say if a state is saved so."""


class Buffers:
    """Its methods are for the training thread; only `release` is for the thread that hears the writer, and `drop` for
    any."""

    def __init__(self, *, atomic: bool, note: Callable[[str, str], None]) -> None:
        """atomic: a rank's image holds all that it has, not only its share."""
        self.heard: Callable[[Outcome], None] = lambda outcome: None
        """Is told what the writer says."""
        self._atomic = atomic
        self._note = note
        self._writer: Writer | None = None
        self._staging: Staging | None = None
        self._ready: _Ready | None = None
        self._layouts = self._nth = 0
        self._used: tuple[int, Layout | None] = (0, None)
        self._checked = False
        self._making = threading.Lock()
        self._known: dict[int, int] = {}
        """Images that the writer knows, and how large they were when it was told."""
        self._given: set[int] = set()
        """Images that the writer has to write."""
        self._giving = threading.Lock()

    def begin(self, turn: Turn) -> None:
        """A round begins. The writer drops what earlier ones have not finished."""
        if self._writer is not None:
            self._writer.abandon(turn.epoch, turn.round)
        self._ready = None
        self._nth = 0
        if self._staging is not None:
            # An interrupt may have come between taking an image and giving it to the writer.
            with self._giving:
                for image in self._staging.images:
                    if image.index not in self._given:
                        self._staging.release(image.index)

    def close(self) -> None:
        """End the writer process and give the memory back."""
        if self._writer is not None:
            self._writer.close(0.0)
        if self._staging is not None:
            self._staging.close()
        self._writer = self._staging = self._ready = None
        self._used = (0, None)
        self._known.clear()

    def prepare(self, flat: Flat, turn: Turn) -> None:
        """See to it, in a thread, that a state like `flat` can be saved."""
        self._find_or_make(flat, turn)

    def layout_for(self, flat: Flat, turn: Turn, limit_s: float) -> tuple[Layout, int]:
        """The layout of `flat` and its number. Raises Unavailable; TypeError or ValueError for what cannot be saved."""
        ready = self._find_or_make(flat, turn)
        with turn.pause(limit_s):
            ready.done.wait(limit_s)
        if not ready.done.is_set():
            raise Unavailable(f"its buffers were not ready within {limit_s:g} s (save_timeout)")
        if ready.layout is not None:
            if ready.why:
                self._note("warning", ready.why)
                ready.why = ""
            return ready.layout, ready.number
        self._ready = None  # the next save tries again
        if isinstance(ready.error, TypeError | ValueError):
            raise ready.error
        raise Unavailable(f"{type(ready.error).__name__}: {ready.error}")

    def take(self, patience_s: float) -> Image:
        """A free image, made known to the writer; it is the caller's until it is released. Raises Unavailable."""
        staging, writer = self._staging, self._writer
        assert staging is not None, "there is a layout, so there is memory for it"
        assert writer is not None, "there is a layout, and the writer knows it"
        try:
            image = staging.acquire()
            if image is None and patience_s:
                staging.wait_free(patience_s)
                image = staging.acquire()
        except StagingError as error:
            raise Unavailable(str(error)) from error
        if image is None:
            raise Unavailable("both buffers are in use")
        if self._known.get(image.index) != image.size:
            writer.use_image(image.index, image.fd, image.size)
            self._known[image.index] = image.size
        return image

    def write(self, order: Write) -> None:
        assert self._writer is not None, "there is an image, so there is a writer"
        with self._giving:
            self._given.add(order.image)
        self._writer.write(order)

    def drop(self, saves: Iterable[SaveId]) -> None:
        """Have the writer give up what it has not written of these. Does not wait."""
        writer = self._writer
        if writer is not None:
            writer.drop(saves)

    def release(self, index: int) -> None:
        with self._giving:
            self._given.discard(index)
            if self._staging is not None:
                self._staging.release(index)

    # ---- making them ------------------------------------------------------------------------------------------

    def _find_or_make(self, flat: Flat, turn: Turn) -> _Ready:
        ready = self._ready
        if ready is not None and ready.signature == flat.signature:
            return ready
        self._layouts += 1
        self._nth += 1
        ready = self._ready = _Ready(flat.signature, self._layouts, self._nth)
        try:
            self._start_writer(turn)
        except OSError as error:
            ready.error = error
            ready.done.set()
            return ready
        threading.Thread(target=self._make, args=(ready, flat, turn), name="perdure-layout", daemon=True).start()
        return ready

    def _start_writer(self, turn: Turn) -> None:
        if self._writer is None:
            with turn.atomic():
                writer = Writer(lambda outcome: self.heard(outcome), self._note)
                writer.start()
                self._writer = writer

    def _make(self, ready: _Ready, flat: Flat, turn: Turn) -> None:
        """In a thread, which forgets the state when it is through: nothing here keeps a tensor of the trainer's."""
        try:
            if turn.rank == 0:
                self._check_torch()
            shared = self._share(flat, ready, turn)
            layout = build_layout(flat, turn.rank, turn.world_size, shared=shared, atomic=self._atomic)
            with self._making:
                if ready is self._ready:
                    ready.number = self._use(layout, ready.number)
                    ready.layout = layout
        except BaseException as error:
            ready.error = error
        finally:
            ready.done.set()

    def _check_torch(self) -> None:
        """Once: a torch that cannot read what is written is better known now than when it has to."""
        if self._checked:
            return
        self._checked = True
        try:
            from .dcp_check import check_against_torch

            check_against_torch()
        except Exception as error:
            self._note(
                "warning",
                f"checkpoints: torch.distributed.checkpoint may not be able to load what is saved; perdure itself can:"
                f" {error}",
            )

    def _share(self, flat: Flat, ready: _Ready, turn: Turn) -> frozenset[str]:
        """The names of what all ranks hold, which is shared out among them."""
        answer = agree(
            turn.store() if turn.store is not None else None,
            flat,
            world_size=turn.world_size,
            generation=f"{turn.epoch:x}-{turn.round}-{ready.nth}",
            deadline_s=AGREE_S if ready.nth == 1 else AGREE_AGAIN_S,
        )
        if answer.why:
            ready.why = f"this rank writes all that it holds: {answer.why}"
        return answer.shared

    def _use(self, layout: Layout, number: int) -> int:
        """Make images for `layout`, unless those of the last one serve. Returns the number of the one that counts."""
        writer, (known, before) = self._writer, self._used
        if writer is None or (before is not None and before == layout):
            return known
        self._used = number, layout
        writer.use_layout(
            UseLayout(
                number, layout.items, layout.share, layout.share_bytes, layout.image_bytes, layout.held, layout.writers
            )
        )
        if self._staging is None:
            self._staging = Staging(layout)
        else:
            self._staging.resize(layout)
        self._staging.start()
        return number
