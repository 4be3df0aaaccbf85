"""A rank's end of saving: one copy in the training thread, and a message to the process that writes.

Rules:
1. `save` never waits for the disk, unless `async_save` is off or `on_busy` is `wait`; then the wait has an end. It
   never raises for what a disk does: a save that fails is told, and training goes on.
2. Nothing here speaks to other ranks, but for one exchange when a layout is made (`buffers`), in a thread.
3. What belongs to a round: its id, its rank's share of the state, its saves. `begin` drops what an earlier round has
   not finished. Buffers and the writer process are kept from round to round.
4. What another rank did not save cannot be complete: it is given up here, whether it is being written or not yet begun,
   so that all ranks have free buffers for the same save. That is told like any failure, and said by nobody.
"""

import io
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import index
from time import monotonic
from typing import Any, SupportsIndex

import msgspec
import torch

from ..protocol.checkpoints import GIVEN_UP, Fact, SaveId, Tier, What, due_tiers
from .buffers import Buffers, Unavailable
from .flatten import Flat, flatten
from .image import Image
from .layout import Layout
from .saving import Saving
from .settings import CheckpointSettings
from .turn import Turn
from .writer_client import Outcome
from .writer_messages import Damaged, Failed, Value, Write, Written

__all__ = ["Saver", "Turn"]

Tell = Callable[[Fact], None]
Note = Callable[[str, str], None]
_STEPS = 1 << 63
"""A step is written in 8 bytes, with a sign."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """One call of `save`. local, durable: the tiers' folders to write to."""

    save: SaveId
    turn: Turn
    began: float
    local: str | None
    durable: str | None


class Saver:
    """Saves in all rounds of one process. Its methods are for the main thread, but for `drop`."""

    def __init__(self, settings: CheckpointSettings, tell: Tell, note: Note) -> None:
        self._settings = settings
        self._tell = tell
        self._note = note
        self.turn: Turn | None = None
        """The present round."""
        self._buffers = Buffers(atomic=settings.algo == "atomic" and settings.local is not None, note=note)
        self._buffers.heard = self._heard
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._savings: dict[SaveId, tuple[Saving, Turn]] = {}
        """Those that are not done, and some that are."""
        self._steps: set[int] = set()
        """Saved in this round."""

    # ---- rounds -----------------------------------------------------------------------------------------------

    def begin(self, turn: Turn) -> None:
        """A round begins: what earlier ones have not finished is dropped, and never published."""
        self.turn = turn
        self._steps.clear()
        self._buffers.begin(turn)
        for saving, _ in self._present():
            for tier in Tier:
                saving.settle(tier, "its round is over")

    def finish(self, timeout: float) -> list[str]:
        """Wait until this round's saves are durable; what is not, one text for each save."""
        deadline = monotonic() + timeout
        late: list[str] = []
        for saving, turn in self._present():
            if turn is self.turn and not saving.wait(max(deadline - monotonic(), 0.0)):
                late.append(f"step {saving.step} was not durable {timeout:g} s after the end (save_timeout)")
        return late

    def drop(self, saves: Iterable[SaveId]) -> None:
        """In any thread, without waiting: give up what is not written of these, if anything. Not during `close`."""
        self._buffers.drop(saves)

    def close(self) -> None:
        """End the writer process and give the memory back."""
        self._buffers.close()

    # ---- saving -----------------------------------------------------------------------------------------------

    def due(self, step: SupportsIndex) -> bool:
        """Whether `step` is one to save, by save_interval or non_persistent_save_interval."""
        return bool(self._due(_number(step)))

    def _due(self, step: int) -> list[Tier]:
        return due_tiers(step, self._settings.non_persistent_save_interval, self._settings.save_interval)

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Begin to lay out buffers for states like this one, in a thread, so that the first save need not."""
        self._buffers.prepare(flatten(state), self._present_turn())

    def save(self, step: SupportsIndex, state: Mapping[str, Any], *, into: str | None = None) -> Saving | None:
        """Save `state` as that of `step`; None if it was skipped. What is changed afterwards is not saved.

        into: the durable tier's folder for this save, if it is not that of the settings.

        A step of save_interval, and one of no interval, goes to the durable tier and, where there is one, to the local
        tier before; a step of non_persistent_save_interval alone goes to the local tier only.
        """
        began = monotonic()
        if os.getpid() != self._pid:
            # The memory of the images is shared with the parent, which may be writing them.
            raise RuntimeError(
                f"save works in process {self._pid} only: a forked child, as of a DataLoader, is no rank"
            )
        turn = self._present_turn()
        number = _number(step)
        if not 0 <= number < _STEPS:
            raise ValueError(f"save(step={number}): a step is from 0 to {_STEPS - 1}")
        local, durable = self._folders(number)
        asked = _Asked(SaveId(number, turn.epoch, turn.round), turn, began, local, into or durable)
        with turn.section():
            return self._save(asked, state)

    def _folders(self, step: int) -> tuple[str | None, str | None]:
        """Where `step` goes: the local tier's folder, the durable one's."""
        settings = self._settings
        only_local = self._due(step) == [Tier.LOCAL]
        return settings.local, None if only_local else settings.save

    def _save(self, asked: _Asked, state: Mapping[str, Any]) -> Saving | None:
        turn, step = asked.turn, asked.save.step
        if step in self._steps:
            self._note("warning", f"step {step} is saved already in this round; it is not saved again")
            return None
        flat = flatten(state)
        limit_s = self._settings.save_timeout
        try:
            layout, number = self._buffers.layout_for(flat, turn, limit_s)
            if asked.save in turn.vain:  # not before: layouts are counted, and all ranks count the same
                self._tell_not_saved(asked, GIVEN_UP)
                return None
            with turn.pause(limit_s):
                image = self._buffers.take(limit_s if self._settings.on_busy == "wait" else 0.0)
        except Unavailable as error:
            self._give_up(asked, str(error))
            return None
        with turn.atomic():
            order = self._fill(image, layout, flat, asked, number)
            saving = Saving(asked.save, order.tiers)
            with self._lock:
                self._savings = {save: known for save, known in self._savings.items() if not known[0].done}
                self._savings[asked.save] = (saving, turn)
            self._steps.add(step)
            self._buffers.write(order)
        if asked.save in turn.vain:  # since a moment ago; `drop` may have found nothing to drop
            self._buffers.drop((asked.save,))
        if not self._settings.async_save:
            with turn.pause(limit_s):
                saving.wait(limit_s)
            if not saving.done:
                self._note("error", f"step {step} is not durable after {limit_s:g} s")
        return saving

    def _give_up(self, asked: _Asked, why: str) -> None:
        """A save that is not even begun. The controller must know that it will never be complete; it also says so, once
        for all ranks."""
        busy = ", ".join(str(saving.step) for saving, _ in self._present() if not saving.done)
        text = f"{why} (being written: step {busy})" if busy else why
        self._tell_not_saved(asked, f"skipped: {text}")

    def _tell_not_saved(self, asked: _Asked, why: str) -> None:
        self._steps.add(asked.save.step)
        for tier, folder in ((Tier.LOCAL, asked.local), (Tier.DURABLE, asked.durable)):
            if folder is not None:
                self._tell(self._fact(asked.save, What.FAILED, tier, asked.turn, why=why))

    def _fill(self, image: Image, layout: Layout, flat: Flat, asked: _Asked, number: int) -> Write:
        """Copy the state, and say what is to be written. If that fails the image is free again."""
        try:
            image.fill(layout.sources(flat))
            values = tuple(self._value(flat, fqn) for fqn in layout.values)
        except BaseException:
            self._buffers.release(image.index)
            raise
        return Write(
            save=asked.save,
            rank=asked.turn.rank,
            world_size=asked.turn.world_size,
            layout=number,
            image=image.index,
            began=asked.began,
            deadline_s=self._settings.save_timeout,
            values=values,
            value_share=layout.value_share,
            local_dir=asked.local,
            durable_dir=asked.durable,
        )

    def _value(self, flat: Flat, fqn: str) -> Value:
        buffer = io.BytesIO()
        try:
            torch.save(flat.values[fqn], buffer)
        except Exception as error:
            kind = type(flat.values[fqn]).__name__
            raise TypeError(
                f"{fqn}, a {kind}, cannot be saved: {error}; keep in the state what pickle takes"
            ) from error
        return fqn, flat.paths[fqn], buffer.getvalue()

    # ---- what the writer says, in its client's thread ---------------------------------------------------------

    def _heard(self, outcome: Outcome) -> None:
        if isinstance(outcome, Written):
            self._settle(outcome.save, outcome.tier, What.WRITTEN, "", outcome)
        elif isinstance(outcome, Failed):
            self._settle(outcome.save, outcome.tier, What.FAILED, outcome.why)
        elif isinstance(outcome, Damaged):
            self._settle(outcome.save, outcome.tier, What.BAD, outcome.why)
        else:
            self._buffers.release(outcome.image)

    def _settle(self, save: SaveId, tier: Tier, what: What, why: str, written: Written | None = None) -> None:
        with self._lock:
            known = self._savings.get(save)
        if known is None:
            return
        saving, turn = known
        fact = self._fact(save, what, tier, turn, why=why)
        if written is not None:
            digest, seconds = written.digest, written.seconds
            fact = msgspec.structs.replace(fact, nbytes=written.nbytes, digest=digest, seconds=seconds)
        self._tell(fact)
        saving.settle(tier, why)

    def _fact(self, save: SaveId, what: What, tier: Tier, turn: Turn, *, why: str) -> Fact:
        node = self._settings.node if tier is Tier.LOCAL else ""
        return Fact(save, what, tier, turn.rank, node, turn.world_size, why=why)

    def _present(self) -> list[tuple[Saving, Turn]]:
        with self._lock:
            return list(self._savings.values())

    def _present_turn(self) -> Turn:
        if self.turn is None:
            raise RuntimeError("no round has begun: a Saver saves between `begin` and the end of the round")
        return self.turn


def _number(step: SupportsIndex) -> int:
    try:
        return index(step)
    except TypeError:
        raise TypeError(f"a step is an int, not a {type(step).__name__}; the call is save(step, state)") from None
