"""One round in this process, by the main thread: prepare, call the training function, judge how it ended, clean up.

The judgement, in order: a forked child is no rank and goes its own way; a process that was asked to leave leaves;
whatever the function raised while an interrupt was wanted is a consequence of it; anything else is a fault, and is
told before the clean-up so that the peers learn of it at once.
"""

import os
import sys
from collections.abc import Callable
from time import monotonic
from typing import Any

from ..protocol.faults import Fault, FaultKind
from ..protocol.names import NO_ROUND
from ..protocol.rank_messages import Enter, Entered, Facts, Leaving, Raised, Ready
from . import beats
from .abort import Hook, RoundAbort
from .beats import W_STEP, BeatPage
from .checkpoints import Checkpoints
from .evidence import Witness, exit_status, forget
from .gloo import Connections
from .health import HealthChecks, Unfit, destroy_groups, run_finalize
from .interrupt import Flight, RoundInterrupted
from .link import Link, say
from .round import Round
from .store import Port, host_store
from .torch_hooks import TorchHooks


class Hooks:
    """What the user hung on `resilient`."""

    def __init__(self, abort: tuple[Hook, ...], finalize: tuple[Hook, ...], health: HealthChecks) -> None:
        self.abort = abort
        self.finalize = finalize
        self.health = health


class Surroundings:
    """What outlives a round in one call of a decorated function."""

    def __init__(self, link: Link, page: BeatPage, witness: Witness, torch: TorchHooks, hooks: Hooks) -> None:
        self.link = link
        self.checkpoints = Checkpoints(os.environ, lambda fact: link.send(Facts((fact,))), link.note)
        self.page = page
        self.witness = witness
        self.torch = torch
        self.hooks = hooks
        self.pid = os.getpid()


class Attempt:
    """One round. Made by the runtime thread when `Enter` arrives, so that an `Interrupt` behind it finds its flight."""

    def __init__(self, enter: Enter, around: Surroundings) -> None:
        self.enter = enter
        self.returned = False
        self.value: Any = None
        self.fault: Fault | None = None
        self._around = around
        self._connections = Connections(enter.master_port, enter.world_size)
        self._abort = RoundAbort(around.hooks.abort, self._connections, around.link.note)
        self.flight = Flight(enter.round, self._abort, around.link.wake)
        self._store: Any = None
        self._left_at = 0.0

    # ---- in the function ------------------------------------------------------------------------------------

    def fly(self, run: Callable[[Round], Any], port: Port | None) -> None:
        """Run the training function. Comes back, unless the process is to leave; then that exception goes on."""
        flight = self.flight
        entered = False
        try:
            self._prepare(port)
            round = self._round()
            self._around.checkpoints.begin(self.enter, round)
            self._around.link.send(Entered(flight.index))
            entered = True
            try:
                flight.inside = flight.wanted is None
                if flight.inside:
                    self.value = run(round)
                    self.returned = True
            finally:
                flight.inside = False
        except BaseException as error:
            self._left_at = monotonic()
            if os.getpid() != self._around.pid:
                raise
            self._judge(error, entered)
        if os.getpid() == self._around.pid and flight.close() is not None:
            self.returned = False

    def _prepare(self, port: Port | None) -> None:
        enter, around = self.enter, self._around
        around.page.begin_round(enter.round)
        os.environ.update(
            RANK=str(enter.rank),
            WORLD_SIZE=str(enter.world_size),
            LOCAL_RANK=str(enter.local_rank),
            LOCAL_WORLD_SIZE=str(enter.local_world_size),
            MASTER_ADDR=enter.master_addr,
            MASTER_PORT=str(enter.master_port),
            PERDURE_ROUND=str(enter.round),
        )
        around.torch.connections = self._connections
        around.torch.store_port = enter.master_port
        if enter.rank == 0:
            self._store = host_store(port, enter.master_addr, enter.master_port)
        elif port is not None:
            port.close()

    def _round(self) -> Round:
        enter = self.enter
        return Round(
            self.flight,
            self._around.page.words,
            rank=enter.rank,
            world_size=enter.world_size,
            local_rank=enter.local_rank,
            local_world_size=enter.local_world_size,
            resume=enter.resume,
            checkpoints=self._around.checkpoints,
        )

    @property
    def _step(self) -> int:
        return self._around.page.words[W_STEP]

    def _judge(self, error: BaseException, entered: bool) -> None:
        wanted = self.flight.close()
        if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and not self._follows(error)):
            self._last_words(error)
            raise error
        if wanted is None:
            self.fault = self._around.witness.exception(error, self.enter.round, self._step, entered=entered)
            self._around.link.send(Raised(self.fault))
            self._around.page.last_words(beats.RAISED, 0)
        elif not isinstance(error, RoundInterrupted) and not self.flight.where:
            self.flight.where = self._around.witness.exception(error, self.enter.round, self._step).place
        self._abort.run()
        if self.fault is not None and not self.fault.peer_error:
            say(f"rank {self.enter.rank} failed in round {self.enter.round}:\n{self.fault.detail}")
        forget(error)

    def _follows(self, error: SystemExit) -> bool:
        # `except RuntimeError: sys.exit(1)` around an aborted collective is a consequence of the interrupt, too.
        return self.flight.wanted is not None and error.__context__ is not None

    def _last_words(self, error: BaseException) -> None:
        code = exit_status(error)
        self._around.page.last_words(beats.EXITING, code)
        fault = self._around.witness.exit(error, code, self.enter.round, self._step)
        self._around.link.send(Leaving(code, fault))

    # ---- out of it ------------------------------------------------------------------------------------------

    def come_back(self) -> Ready:
        """Abort if nobody has, clean up, and see whether this process is fit. `port` is for the caller to fill in."""
        began = monotonic()
        flight, around = self.flight, self._around
        timings: dict[str, float] = {}
        if flight.wanted_at and self._left_at:
            timings["unwind"] = self._left_at - flight.wanted_at
        self.value = None
        self._abort.run()
        timings["abort"] = self._abort.seconds
        self._connections.close()
        around.torch.connections = None
        mark = monotonic()
        fault = self.fault
        try:
            destroy_groups()
            self._store = None
            run_finalize(around.hooks.finalize)
            timings["finalize"] = monotonic() - mark
            mark = monotonic()
            around.hooks.health.run()
            timings["health"] = monotonic() - mark
        except Exception as error:
            fault = self._unfit(error)
        timings["total"] = monotonic() - began
        around.page.set_stage(beats.GATE)
        return Ready(
            round=self.enter.round,
            fault=fault,
            where=flight.where,
            in_collective=flight.in_collective,
            swallowed=tuple(flight.swallowed),
            timings=timings,
        )

    def _unfit(self, error: Exception) -> Fault:
        detail = str(error.__cause__ or "")
        text = str(error) if isinstance(error, Unfit) else f"{type(error).__name__}: {error}"
        return self._around.witness.unhealthy(text, detail, self.enter.round, self._step)

    def end(self) -> None:
        """The job is over. A group that the user's function left behind keeps its store."""
        self._connections.close()
        self._around.torch.connections = None
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            _Kept.store = self._store
        self._store = None


class _Kept:
    store: Any = None


def is_unfit(ready: Ready) -> bool:
    return ready.fault is not None and ready.fault.kind is FaultKind.HEALTH_CHECK


def first_ready() -> Ready:
    _Kept.store = None
    return Ready(round=NO_ROUND, torch="torch" in sys.modules)
