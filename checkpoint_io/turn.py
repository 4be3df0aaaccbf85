"""What a round is to the saves of one of its ranks."""

from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from ..protocol.checkpoints import Resume, SaveId

Around = Callable[[], AbstractContextManager[None]]


def _no_pause(limit_s: float) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Turn:
    """store: connects to the round's store, for ranks to agree; None: there is none.

    section, atomic: put around a save: its time is told apart, and an interrupt waits for its end. pause: put around
    what waits for others, at most so many seconds: that is no hang.

    vain: saves of this round that cannot be complete, since another rank did not save them; another thread adds to it.
    """

    rank: int
    world_size: int
    epoch: int
    round: int
    resume: Resume | None = None
    store: Callable[[], Store] | None = None
    section: Around = nullcontext
    atomic: Around = nullcontext
    pause: Callable[[float], AbstractContextManager[None]] = _no_pause
    vain: Set[SaveId] = frozenset()
