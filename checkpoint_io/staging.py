"""The staging images of a rank: who has which, and their making in the background.

An image is PENDING (to be laid out), FREE, or BUSY (from `acquire` until the writer has said that it needs it no more).
Pending ones are laid out by a thread, one after the other; the training thread waits for it only if it comes to save
before the memory is there. A layout that changes makes all images pending, a busy one as soon as it is released: the
writer reads from it until then.
"""

import threading
from enum import Enum
from time import monotonic

from .image import Image, StagingError
from .layout import Layout
from .memory import room

__all__ = ["Image", "Staging", "StagingError"]

READY_S = 60.0
READY_S_PER_BYTE = 1e-8
"""How long laying out may take: a minute, and 10 s for each GB; several times what it takes on a busy machine."""
CLOSE_S = 30.0


class _State(Enum):
    PENDING = "pending"
    FREE = "free"
    BUSY = "busy"


def _check_room(layout: Layout, sizes: list[int]) -> None:
    """Before anything is allocated: the kernel would give it, and kill somebody for it later. sizes: of the images."""
    more, images = sum(max(layout.image_bytes - size, 0) for size in sizes), len(sizes)
    found = room()
    if more > found.nbytes:
        raise StagingError(
            f"staging needs {more:,} more bytes of memory ({images} images of {layout.image_bytes:,} bytes), and only"
            f" {found.nbytes:,} are left by account of {found.where}; save less on this rank, put fewer ranks on the"
            " node, or raise the limit"
        )


class Staging:
    """images: by index. `acquire`, `wait_free` and `close` are for the training thread, the others for any.

    Raises StagingError where memory cannot be had.
    """

    def __init__(self, layout: Layout, images: int = 2) -> None:
        _check_room(layout, [0] * images)
        self._layout = layout
        self._changed = threading.Condition()
        self.images = tuple(Image(index) for index in range(images))
        for image in self.images:
            image.reserve(layout)
        self._states = [_State.PENDING] * images
        self._thread: threading.Thread | None = None
        self._error: StagingError | None = None
        self._closing = False

    @property
    def layout(self) -> Layout:
        return self._layout

    def start(self) -> None:
        """Lay out what is pending, in the background."""
        with self._changed:
            self._start()

    def _start(self) -> None:
        if self._thread is None and not self._closing and _State.PENDING in self._states:
            self._thread = threading.Thread(target=self._lay_out, name="perdure-staging", daemon=True)
            self._thread.start()

    def _lay_out(self) -> None:
        while True:
            with self._changed:
                pending = [image for image in self.images if self._states[image.index] is _State.PENDING]
                if not pending or self._closing or self._error is not None:
                    self._thread = None
                    self._changed.notify_all()
                    return
                image, layout = pending[0], self._layout
            error: StagingError | None = None
            try:
                image.lay_out(layout, lambda: self._closing)
            except Exception as other:
                # It is told to the training thread, by `acquire`; here nobody would hear it.
                error = other if isinstance(other, StagingError) else StagingError(f"staging: {other!r}")
                error.__cause__ = None if error is other else other
            with self._changed:
                if layout is self._layout:
                    self._error = error
                    self._states[image.index] = _State.PENDING if error else _State.FREE
                self._changed.notify_all()

    def acquire(self) -> Image | None:
        """A free image, which is then the caller's until it is released. None: the writer has them all."""
        until = monotonic() + READY_S + READY_S_PER_BYTE * self._layout.image_bytes * len(self.images)
        with self._changed:
            while True:
                if (image := self._take()) is not None:
                    return image
                if _State.PENDING not in self._states:
                    return None
                self._start()
                if not self._changed.wait(until - monotonic()) and monotonic() >= until:
                    raise StagingError(
                        f"laying out {self._layout.image_bytes:,} bytes of staging memory is not done after"
                        f" {READY_S:g} s and more; the machine is short of memory"
                    )

    def _take(self) -> Image | None:
        if self._closing:
            raise StagingError("staging is closed")
        if self._error is not None:
            raise StagingError(str(self._error)) from self._error
        for image in self.images:
            if self._states[image.index] is _State.FREE:
                self._states[image.index] = _State.BUSY
                return image
        return None

    def wait_free(self, timeout: float) -> bool:
        """Wait until an image is free, or will be once it is laid out. False: none was within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closing or any(state is not _State.BUSY for state in self._states),
                timeout,
            )

    def release(self, index: int) -> None:
        """The image is needed no more. From any thread; a second time it changes nothing."""
        with self._changed:
            if self._states[index] is not _State.BUSY:
                return
            current = self.images[index].layout is self._layout
            self._states[index] = _State.FREE if current else _State.PENDING
            self._start()
            self._changed.notify_all()

    def resize(self, layout: Layout) -> None:
        """Use `layout` from now on. Images that are free are laid out again in the background, busy ones afterwards."""
        _check_room(layout, [image.size for image in self.images])
        with self._changed:
            self._layout = layout
            for image in self.images:
                image.reserve(layout)
            self._error = None
            for index, state in enumerate(self._states):
                if state is _State.FREE:
                    self._states[index] = _State.PENDING
            self._start()
            self._changed.notify_all()

    def close(self) -> None:
        """Give everything back. The writer's own fds and mappings keep what it still reads."""
        with self._changed:
            self._closing = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join(CLOSE_S)
            if thread.is_alive():
                # It still writes there; the memory goes with the process.
                return
        for image in self.images:
            image.close()
