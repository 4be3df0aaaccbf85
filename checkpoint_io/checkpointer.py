"""`round.checkpointer`: saving and restoring, as a training function sees it.

Everything but `restore` is in `saver`. Restoring is each rank's own business too: from which save was decided by the
controller, the same for all ranks, and is in `round.resume`.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, SupportsIndex

from ..protocol.checkpoints import Fact, SaveId, Tier, What
from .fetching import Fetching
from .restore import Where, restore
from .saver import Note, Saver, Tell
from .saving import Saving
from .settings import CheckpointSettings
from .turn import Turn


class Checkpointer:
    """Saves and restores in all rounds of one process."""

    def __init__(self, settings: CheckpointSettings, tell: Tell, note: Note) -> None:
        self._settings = settings
        self._tell = tell
        self._note = note
        self._saver = Saver(settings, tell, note)
        self._fetching: Fetching | None = None
        self._has_folder = settings.save is not None or settings.local is not None

    # ---- for a training function ------------------------------------------------------------------------------

    def due(self, step: SupportsIndex) -> bool:
        """Whether `step` is one to save, by `save_interval` or `non_persistent_save_interval`."""
        return self._saver.due(step)

    def save(self, step: SupportsIndex, state: Mapping[str, Any]) -> Saving | None:
        """Save `state` as that of `step`. Returns when it is copied; what is changed afterwards is not saved.

        state: tensors and DTensors, on CPU or CUDA, and Python values, nested in dicts and lists. Names and their
        values are those of `torch.distributed.checkpoint`: a plain tensor or a value that several ranks have under the
        same name is the same on all of them, and is written once.

        Returns a `Saving` to follow this rank's part by, or None if the save was skipped: the log says why. A disk that
        fails raises nothing. TypeError or ValueError: a state that cannot be saved.

        A step of `save_interval`, and one of no interval, goes to the durable tier and, where there is one, to the
        local tier before; a step of `non_persistent_save_interval` alone goes to the local tier only.
        """
        return self._saver.save(step, state) if self._has_folder else None

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Lay out buffers for states like this one, in the background, so that the first save costs one copy, too."""
        if self._has_folder:
            self._saver.prepare(state)

    def restore(self, state: MutableMapping[str, Any]) -> int | None:
        """Fill `state` in place from the save that `round.resume` names; its step. None if there is none to resume.

        Tensors keep their memory and device, and are resharded as needed; values are replaced in the (nested) state.
        Every byte is verified. RestoreError: this save cannot be read; let it go on, and the next round gets another.
        """
        turn = self._saver.turn
        if turn is None:
            raise RuntimeError("no round has begun: restore inside the function that perdure.resilient runs")
        resume = turn.resume
        if resume is None:
            self.prepare(state)
            return None
        settings = self._settings
        self._end_fetching()
        fetching = self._fetching = Fetching(settings, turn, self._tell)
        where = Where(
            save=Path(settings.save) if settings.save is not None else None,
            local=Path(settings.local) if settings.local is not None else None,
            node=settings.node,
            fetch=fetching.fetch,
            on_bad=self._tell,
            rank=turn.rank,
            world_size=turn.world_size,
        )
        try:
            restored = restore(state, resume, where)
        finally:
            self._end_fetching()
        if turn.rank == 0:
            for text in restored.left_out:
                self._note("warning", f"restore: {text}")
        tier = Tier.LOCAL if all(tier is Tier.LOCAL for _, tier, _ in restored.shards) else Tier.DURABLE
        self._tell(
            Fact(
                resume.save,
                What.RESTORED,
                tier,
                turn.rank,
                settings.node,
                turn.world_size,
                nbytes=restored.nbytes,
                seconds=restored.seconds,
            )
        )
        self.prepare(state)
        return resume.step

    # ---- for the runtime --------------------------------------------------------------------------------------

    def begin(self, turn: Turn) -> None:
        self._end_fetching()
        self._saver.begin(turn)

    def drop(self, saves: Iterable[SaveId]) -> None:
        """In any thread, without waiting: give up what is not written of these, if anything."""
        self._saver.drop(saves)

    def finish(self) -> None:
        """Wait, at most `save_timeout`, until this round's saves are durable; say what is lost."""
        for lost in self._saver.finish(self._settings.save_timeout):
            self._note("error", lost)

    def close(self) -> None:
        self._end_fetching()
        self._saver.close()

    def _end_fetching(self) -> None:
        """At the end of a restore, and at the next occasion if the interrupt of the round came right there."""
        if self._fetching is not None:
            self._fetching.close()
            self._fetching = None
