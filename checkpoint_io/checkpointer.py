"""`round.checkpointer`: saving and restoring, as a training function sees it.

Everything but `restore` is in `saver`. Restoring is each rank's own business too: from which save was decided by the
controller, the same for all ranks, and is in `round.resume`.
"""

import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, SupportsIndex

import msgspec

from ..protocol.checkpoints import Fact, Place, SaveId, Tier, What
from .fetch_task import Answer, Task
from .restore import Where, restore
from .saver import Note, Saver, Tell
from .saving import Saving
from .settings import CheckpointSettings
from .turn import Turn

FETCH_S = 600.0
"""For one shard of another node. What is silent is given up much sooner."""


class Checkpointer:
    """Saves and restores in all rounds of one process."""

    def __init__(self, settings: CheckpointSettings, tell: Tell, note: Note) -> None:
        self._settings = settings
        self._tell = tell
        self._note = note
        self._saver = Saver(settings, tell, note)
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
        where = Where(
            save=Path(settings.save) if settings.save is not None else None,
            local=Path(settings.local) if settings.local is not None else None,
            node=settings.node,
            fetch=self._fetch,
            on_bad=self._tell,
        )
        restored = restore(state, resume, where)
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
        self._saver.begin(turn)

    def finish(self) -> None:
        """Wait, at most `save_timeout`, until this round's saves are durable; say what is lost."""
        for lost in self._saver.finish(self._settings.save_timeout):
            self._note("error", lost)

    def close(self) -> None:
        self._saver.close()

    def _fetch(self, save: SaveId, place: Place) -> None:
        """Bring another node's shard here, by a process of its own: ranks do not load ZeroMQ."""
        settings, turn = self._settings, self._saver.turn
        pause = turn.pause if turn is not None else nullcontext
        task = Task(place.address, save, place.rank, str(settings.local), FETCH_S, settings.keys)
        command = [sys.executable, "-P", "-m", "perdure.checkpoint_io.fetch"]
        try:
            with pause(FETCH_S + 5.0):  # a large shard takes its time, which is no hang
                done = subprocess.run(
                    command, input=msgspec.json.encode(task), capture_output=True, timeout=FETCH_S + 5.0
                )
        except subprocess.TimeoutExpired:
            raise OSError(
                f"reading from {place.address} into {settings.local} took longer than {FETCH_S:g} s"
            ) from None
        try:
            answer = msgspec.json.decode(done.stdout, type=Answer)
        except msgspec.DecodeError:
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise OSError(f"reading from {place.address} ended with code {done.returncode}: {last}") from None
        if answer.error:
            raise OSError(answer.error)
        world_size = turn.resume.world_size if turn is not None and turn.resume is not None else 0
        # It is one more copy, which must be known to be deleted one day.
        self._tell(Fact(save, What.WRITTEN, Tier.LOCAL, place.rank, settings.node, world_size, nbytes=answer.nbytes))
