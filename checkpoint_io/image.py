"""One staging image: a piece of shared memory that always holds a whole data file, but for the tensors' numbers.

It is a memfd: it has no name, so nothing is left of it once the trainer and its writer are gone, however they went.
The fd stays the same for the image's life, also when the memory grows: the writer is given it once and reads by offset.

The memory is allocated and touched before it is used: a first touch costs several times what the copy does, and memory
that is missing shows here as an error instead of as a SIGBUS in the middle of a save.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .layout import PAGE, Layout
from .memory import room

_MADV_POPULATE_WRITE = 23
_STRIDE = 64 << 20
"""Allocated, and touched, at once; in between it is looked whether somebody wants to stop, and what is left."""
_SPARED = 128 << 20
"""Bytes that are not taken: the kernel would have to kill somebody before the last one is."""
_SMALL = 32 << 10
_LARGE = 8 << 20
"""Between these sizes memcpy copies a CPU tensor. torch would start its threads for each and wait for all of them: that
is a third faster on idle cores, but many times slower where other processes use them, as a writer does. Below, torch
uses no threads and is the faster one for many tensors; above, threads are worth it."""
_PORTABLE = 1
"""cudaHostRegisterPortable: the memory counts as pinned for every device."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memcpy.restype = ctypes.c_void_p


class StagingError(RuntimeError):
    """The staging memory cannot be had, or is not what the state needs."""


_copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
"""One call for all tensors."""


class Image:
    """`fill` is for the training thread, `lay_out` for whoever has taken the image for that; one at a time.

    size: of its memory, once it is laid out: what the writer maps. It only grows.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.fd = os.memfd_create(f"perdure-image-{index}", os.MFD_CLOEXEC)
        self.layout: Layout | None = None
        self.size = self._capacity = 0
        self._map: mmap.mmap | None = None
        self._bytes: Tensor | None = None
        self._views: list[Tensor] = []
        self._places: list[tuple[int, int]] = []
        self._shapes: list[torch.Size] = []
        self._dtypes: list[torch.dtype] = []
        self._pinned = 0
        self._streams: dict[torch.device, Any] = {}

    def reserve(self, layout: Layout) -> None:
        """Say which layout is next. At least a page: nothing maps a file without bytes."""
        self.size = max(self.size, layout.image_bytes, PAGE)

    def lay_out(self, layout: Layout, stopped: Callable[[], bool] = lambda: False) -> None:
        """Make this an image of `layout`. Memory is reused where it is enough. Raises StagingError."""
        self.layout = None
        self._views, self._places, self._shapes, self._dtypes = [], [], [], []
        if self.size > self._capacity:
            self._unmap()
            self._grow(self.size, stopped)
            self._populate(stopped)
        if layout.device is not None and not self._pinned:
            self._pin(layout.device)
        if (whole := self._bytes) is not None:
            _write_frames(whole, layout)
            for item, dtype in zip(layout.items, layout.dtypes, strict=True):
                if item.nbytes:
                    data = whole[item.data_at : item.data_at + item.nbytes]
                    self._views.append(data.view(dtype).view(item.sizes))
        self._places = [(view.data_ptr(), view.nbytes) for view in self._views]
        self._shapes = [view.shape for view in self._views]
        self._dtypes = [view.dtype for view in self._views]
        self.layout = layout

    def _grow(self, size: int, stopped: Callable[[], bool]) -> None:
        try:
            os.ftruncate(self.fd, size)
            for at in range(0, size, _STRIDE):
                if stopped():
                    break
                self._check_room(at, min(_STRIDE, size - at))
                os.posix_fallocate(self.fd, at, min(_STRIDE, size - at))
        except OSError as error:
            os.ftruncate(self.fd, 0)
            raise StagingError(
                f"cannot get {size:,} bytes of shared memory for staging: {error.strerror}; save less on this rank"
                " or give the job more memory"
            ) from error
        self._map = mmap.mmap(self.fd, size)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._capacity = size

    def _check_room(self, at: int, nbytes: int) -> None:
        """Asked part by part, since other ranks of the node take theirs meanwhile, and each alone would have fitted."""
        found = room()
        if found.nbytes < nbytes + _SPARED:
            os.ftruncate(self.fd, 0)
            raise StagingError(
                f"staging stopped at {at:,} of {self.size:,} bytes of an image: only {found.nbytes:,} bytes are left by"
                f" account of {found.where}, where other ranks take theirs too; save less on this rank, put fewer ranks"
                " on the node, or raise the limit"
            )

    def _populate(self, stopped: Callable[[], bool]) -> None:
        whole = self._bytes
        if whole is None:
            return
        for at in range(0, self._capacity, _STRIDE):
            if stopped():
                return
            part = whole[at : at + _STRIDE]
            # Through ctypes, which lets other threads run meanwhile; mmap.madvise does not.
            if _libc.madvise(part.data_ptr(), part.numel(), _MADV_POPULATE_WRITE):
                if ctypes.get_errno() in (errno.ENOMEM, errno.EFAULT):
                    raise StagingError(f"cannot touch staging memory: {os.strerror(ctypes.get_errno())}")
                # Kernels before 5.14 do not know it.
                part[::PAGE].bitwise_or_(0)

    def _pin(self, device: torch.device) -> None:
        """So that a GPU copies into it directly. Written from CUDA's documentation; never run on a GPU."""
        whole = self._bytes
        if whole is None:
            return
        # Any thread that has not set its device would make a context on the first one.
        torch.cuda.set_device(device)
        runtime = cast("Any", torch.cuda.cudart())
        result = int(runtime.cudaHostRegister(whole.data_ptr(), self._capacity, _PORTABLE))
        if result == 0:
            self._pinned = whole.data_ptr()

    def _unmap(self) -> None:
        """Views go first: memory that is exported cannot be unmapped."""
        self._views, self._places, self._shapes, self._dtypes = [], [], [], []
        if self._pinned:
            runtime = cast("Any", torch.cuda.cudart())
            runtime.cudaHostUnregister(self._pinned)
            self._pinned = 0
        self._bytes = None
        if self._map is not None:
            self._map.close()
            self._map = None
        self._capacity = 0

    def fill(self, sources: Sequence[Tensor]) -> None:
        """Copy the state into the image: `layout.sources(flat)`. All of it is there on return.

        With GPU tensors: never run on a GPU.
        """
        # A copy would broadcast or convert without a word.
        if [source.shape for source in sources] != self._shapes or [each.dtype for each in sources] != self._dtypes:
            raise StagingError("the tensors to copy are not those of the image's layout: lay it out again")
        by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for view, (to, nbytes), source in zip(self._views, self._places, sources, strict=True):
            if _SMALL <= nbytes < _LARGE and source.is_cpu and _lies_plainly(source):
                _libc.memcpy(to, source.data_ptr(), nbytes)
                continue
            views, origins = by_device.setdefault(source.device, ([], []))
            views.append(view)
            origins.append(source)
        with torch.no_grad():
            self._fill_from(by_device)

    def _fill_from(self, by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]]) -> None:
        busy: list[Any] = []
        for device, (views, sources) in by_device.items():
            if device.type != "cuda":
                _copy(views, sources)
                continue
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream: Any = self._streams[device]
            # What the trainer has queued so far is what is to be saved.
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                _copy(views, sources, non_blocking=True)
            busy.append(stream)
        for stream in busy:
            stream.synchronize()

    def close(self) -> None:
        if self.fd >= 0:
            self.layout = None
            self._unmap()
            os.close(self.fd)
            self.fd = -1


def _lies_plainly(source: Tensor) -> bool:
    """Whether its memory is, byte for byte, what is to be saved."""
    return source.is_contiguous() and not source.is_conj() and not source.is_neg()


def _write_frames(whole: Tensor, layout: Layout) -> None:
    """What is not data: the archives around it, and zeros up to the next item, where an older layout may have been."""
    raw = memoryview(cast("Any", whole.numpy()))
    for at, frame in layout.frames:
        raw[at : at + len(frame)] = frame
    for item in layout.items:
        end = item.at + item.length
        raw[end : -(-end // PAGE) * PAGE] = bytes(-end % PAGE)
