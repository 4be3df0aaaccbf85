"""`perdure.resilient`: the loop around the training function.

One pass: Ready at the gate -> Enter -> the function -> back to the gate, or Returned -> Finish. The loop reads top to
bottom; what a round needs hangs off one `Attempt` (see `attempt`) that is dropped with the round.
"""

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar, overload

import msgspec

from ..protocol.exit_codes import ExitCode
from ..protocol.rank_messages import Enter, Finish, Leaving, Ready, Returned
from . import beats
from .abort import Hook
from .attempt import Attempt, Hooks, Surroundings, first_ready, is_unfit
from .checkpoints import Checkpoints
from .evidence import Witness
from .health import HealthChecks, await_released
from .interrupt import Flight
from .link import Link, say
from .round import Round
from .store import Port
from .supervision import NotSupervised, Supervision, refuse_thread, supervision
from .torch_hooks import TorchHooks

P = ParamSpec("P")
T = TypeVar("T")


@overload
def resilient(function: Callable[Concatenate[Round, P], T], /) -> Callable[P, T | None]: ...
@overload
def resilient(
    *, abort: Sequence[Hook] = ..., finalize: Sequence[Hook] = ..., health_check: Sequence[Hook] = ...
) -> Callable[[Callable[Concatenate[Round, P], T]], Callable[P, T | None]]: ...
def resilient(
    function: Callable[..., Any] | None = None,
    /,
    *,
    abort: Sequence[Hook] = (),
    finalize: Sequence[Hook] = (),
    health_check: Sequence[Hook] = (),
) -> Any:
    """Run `function(round, ...)` again in every round, until it has returned on all ranks.

    Arguments of the call go through to the function after the `Round`. The call returns what the function returned, or
    None on a reserve that was never needed.

    abort: called, each for at most 10 s and in another thread, before the function is interrupted: unblock it here.
    finalize: called in the main thread when the function has been left and before the next round; an error makes the
    process leave. health_check: called after that; an error or False makes the process leave.
    """
    if function is None:
        return functools.partial(resilient, abort=abort, finalize=finalize, health_check=health_check)
    hooks = Hooks(tuple(abort), tuple(finalize), HealthChecks(tuple(health_check)))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            refuse_thread()
        run = functools.partial(_call, function, args, kwargs)
        supervised = _supervised()
        return run(_lone_round()) if supervised is None else _Session(supervised, hooks).serve(run)

    return call


def _supervised() -> Supervision | None:
    try:
        return supervision()
    except NotSupervised as error:
        say(f"not supervised, runs once and is not restarted: {error}")
        return None


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], round: Round) -> Any:
    return function(round, *args, **kwargs)


class _NoAbort:
    quick = True

    def run(self) -> None: ...

    def again(self) -> None: ...


def _lone_round() -> Round:
    """Round 0 without an agent; its beats go nowhere."""
    words = memoryview(bytearray(beats.PAGE_BYTES)).cast("q")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    return Round(
        Flight(0, _NoAbort(), lambda: None),
        words,
        rank=rank,
        world_size=world_size,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        checkpoints=Checkpoints({}, lambda fact: None, lambda level, text: say(text)),
    )


class _Session:
    """One call of a decorated function under an agent."""

    def __init__(self, supervised: Supervision, hooks: Hooks) -> None:
        self._page = supervised.page
        self._link = Link(supervised, self._new_attempt)
        witness = Witness(supervised.slot, supervised.life)
        self._around = Surroundings(
            self._link, self._page, witness, TorchHooks(supervised.gloo_limit_s, supervised.hard_s), hooks
        )
        self._link.on_drop = self._around.checkpoints.drop
        self._port: Port | None = None

    def _new_attempt(self, enter: Enter) -> Attempt:
        return Attempt(enter, self._around)

    def serve(self, run: Callable[[Round], Any]) -> Any:
        link, around = self._link, self._around
        with link.interrupter:
            around.torch.install()
            link.open()
            try:
                return self._rounds(run)
            except KeyboardInterrupt:
                self._tell_ctrl_c()
                raise
            finally:
                if os.getpid() == around.pid:
                    self._close_port()
                    around.checkpoints.close()
                    link.close()
                    await_released()
                around.torch.remove()

    def _rounds(self, run: Callable[[Round], Any]) -> Any:
        attempt = self._at_gate(first_ready())
        while isinstance(attempt, Attempt):
            attempt.fly(run, self._port)
            if os.getpid() != self._around.pid:
                return attempt.value
            following: Attempt | None = None
            if attempt.returned:
                order = self._returned(attempt)
                if isinstance(order, Finish):
                    self._around.checkpoints.finish()
                    attempt.end()
                    return attempt.value if order.code == 0 else _leave(order)
                following = order
            ready = attempt.come_back()
            if is_unfit(ready):
                self._leave_unfit(ready)
            attempt = following or self._at_gate(ready)
        return None if attempt.code == 0 else _leave(attempt)

    def _at_gate(self, ready: Ready) -> Attempt | Finish:
        """Say that we are here, and wait for a seat or the end. Ctrl-C is heard."""
        self._close_port()
        self._port = Port()
        self._page.set_stage(beats.GATE)
        self._link.send(msgspec.structs.replace(ready, port=self._port.number))
        while True:
            order = self._link.orders.get()
            if isinstance(order, Attempt | Finish):
                return order
            # A late interrupt of a round that we have left, or a reserve's seat: we are where we should be.

    def _returned(self, attempt: Attempt) -> Attempt | Finish | None:
        """The function returned: wait for the others. None if this round is to be left after all."""
        self._page.set_stage(beats.RETURNED)
        self._link.send(Returned(attempt.enter.round))
        while True:
            order = self._link.orders.get()
            if isinstance(order, Attempt | Finish):
                return order
            if isinstance(order, Enter) or order.round == attempt.enter.round:
                return None

    def _tell_ctrl_c(self) -> None:
        # In the training function it has been told already, with the place.
        if os.getpid() == self._around.pid and self._page.read().dying != beats.EXITING:
            self._page.last_words(beats.EXITING, ExitCode.INTERRUPTED)
            self._link.send(Leaving(ExitCode.INTERRUPTED))

    def _close_port(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None

    def _leave_unfit(self, ready: Ready) -> NoReturn:
        assert ready.fault is not None
        self._page.last_words(beats.EXITING, ExitCode.FAILED)
        self._link.send(ready)
        self._link.send(Leaving(ExitCode.FAILED, ready.fault))
        say(f"this process leaves: {ready.fault.message}")
        raise SystemExit(int(ExitCode.FAILED))


def _leave(order: Finish) -> NoReturn:
    say(f"the job ends with code {order.code}: {order.reason.partition(chr(10))[0]}")
    raise SystemExit(order.code)
