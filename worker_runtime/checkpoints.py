"""A process's `Checkpointer`, made when a training function first asks for it.

It stays for all rounds, with its buffers and its writer process; each round tells it which it is. What becomes of saves
goes to the controller as facts. Where the job has no folder for checkpoints it says so once, and saves nothing: the
same trainer runs with and without.
"""

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..checkpoint_io.settings import CheckpointSettings, from_environment
from ..protocol.checkpoints import Fact, SaveId
from ..protocol.rank_messages import Enter

if TYPE_CHECKING:
    from ..checkpoint_io.checkpointer import Checkpointer
    from .round import Round

PAUSE_LIMIT_S = 86_400.0
"""At most, for one wait of a save; save_timeout may be switched off."""
STORE_LIMIT_S = 60.0
"""To connect to the round's store."""
NO_FOLDER = (
    "round.checkpointer: the job has no folder for checkpoints, so nothing is saved; "
    "set save in perdure.toml, or --save of perdure run, to a folder that all nodes see"
)


class Checkpoints:
    """What `Round.checkpointer` leads to. `drop` is for the runtime thread, all else for the main thread."""

    def __init__(
        self, environ: Mapping[str, str], tell: Callable[[Fact], None], note: Callable[[str, str], None]
    ) -> None:
        self._environ = environ
        self._tell = tell
        self._note = note
        self._enter: Enter | None = None
        self._checkpointer: Checkpointer | None = None
        self._told_of: Round | None = None
        self._vain: set[SaveId] = set()
        """Of the present round. The runtime thread adds, the main thread only asks whether one is in it."""
        self._handing = threading.Lock()
        """Held for moments only: `drop` has no checkpointer in its hands that is being closed."""

    def begin(self, enter: Enter, round: "Round") -> None:
        """A round begins. What an earlier one has left unfinished is dropped."""
        self._enter = enter
        self._vain = set()  # nothing can be vain yet: the agent says so only of a round that it knows to be entered
        if self._checkpointer is not None:
            self._tell_round(self._checkpointer, round)

    def get(self, round: "Round") -> "Checkpointer":
        """The checkpointer, for `round`. Raises ValueError if the environment is damaged."""
        made = self._checkpointer
        if made is None:
            made = self._checkpointer = self._make()
        if self._told_of is not round:
            self._tell_round(made, round)
        return made

    def drop(self, saves: tuple[SaveId, ...]) -> None:
        """Other ranks did not save these: give up what is not written, and do not begin what is not begun.

        First they are made known, then what is being written is given up; `save` does it the other way round: first it
        gives the image to the writer, then it looks whether the save is vain. So one of the two sees the other.
        """
        self._vain.update(saves)
        with self._handing:
            if self._checkpointer is not None:
                self._checkpointer.drop(saves)

    def finish(self) -> None:
        """The function has returned on all ranks: wait until what it saved is durable, at most `save_timeout`.

        Not before all have returned: the limit for that is another, and shorter.
        """
        if self._checkpointer is not None:
            self._checkpointer.finish()

    def close(self) -> None:
        with self._handing:
            made, self._checkpointer, self._told_of = self._checkpointer, None, None
        if made is not None:
            made.close()

    def _make(self) -> "Checkpointer":
        settings = from_environment(self._environ)
        if settings is None:
            self._note("warning", NO_FOLDER)
            settings = CheckpointSettings(node="")
        from ..checkpoint_io.checkpointer import Checkpointer  # needs torch, which the trainer has by now

        return Checkpointer(settings, self._tell, self._note)

    def _tell_round(self, checkpointer: "Checkpointer", round: "Round") -> None:
        from ..checkpoint_io.turn import Turn

        self._told_of = round
        enter = self._enter
        checkpointer.begin(
            Turn(
                rank=round.rank,
                world_size=round.world_size,
                epoch=enter.epoch if enter is not None else 0,
                round=round.index,
                resume=round.resume,
                store=None if enter is None else lambda: _store_of(enter),
                section=lambda: _section_of(round),
                atomic=round.atomic,
                pause=lambda limit_s: round.pause(max=min(limit_s, PAUSE_LIMIT_S)),
                vain=self._vain,
            )
        )


def _section_of(round: "Round") -> AbstractContextManager[None]:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "round.checkpointer.save works in the main thread only: no other one is interrupted when the round ends"
        )
    return round.section("checkpointing")


def _store_of(enter: Enter) -> Any:
    """A connection to the round's store."""
    distributed = sys.modules["torch.distributed"]
    limit = timedelta(seconds=STORE_LIMIT_S)
    return distributed.TCPStore(enter.master_addr, enter.master_port, is_master=False, timeout=limit)
