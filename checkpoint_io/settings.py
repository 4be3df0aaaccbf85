"""What a rank must know to save and restore, as its agent hands it down in `PERDURE_CHECKPOINTS`."""

from collections.abc import Mapping

import msgspec

from ..protocol.settings import Settings

VARIABLE = "PERDURE_CHECKPOINTS"


class CheckpointSettings(msgspec.Struct, frozen=True):
    """The knobs of `protocol.settings.Settings` that concern a rank, on its node.

    save: the durable tier's folder. local: this node's folder of the local tier, its own part of
    `non_persistent_local_ckpt_dir`. algo: non_persistent_local_ckpt_algo. keys: where the job's keys.json is, which
    opens other nodes' depots; empty if the job runs in plain text.
    """

    node: str
    save: str | None = None
    save_interval: int | None = None
    local: str | None = None
    non_persistent_save_interval: int | None = None
    algo: str = "fully_parallel"
    async_save: bool = True
    on_busy: str = "skip"
    save_timeout: float = 600.0
    keys: str = ""

    @classmethod
    def of(cls, settings: Settings, node: str, keys: str) -> "CheckpointSettings | None":
        """What the ranks of `node` need; None if the job has no checkpoints."""
        local = settings.non_persistent_local_ckpt_dir
        if settings.save is None and local is None:
            return None
        return cls(
            node=node,
            save=settings.save,
            save_interval=settings.save_interval,
            local=None if local is None else f"{local}/{node}",
            non_persistent_save_interval=settings.non_persistent_save_interval,
            algo=settings.non_persistent_local_ckpt_algo,
            async_save=settings.async_save,
            on_busy=settings.on_busy,
            save_timeout=settings.save_timeout,
            keys=keys,
        )

    def text(self) -> str:
        """For the environment."""
        return msgspec.json.encode(self).decode()


def from_environment(environ: Mapping[str, str]) -> CheckpointSettings | None:
    """None if the job has no checkpoints. Raises ValueError if the text is damaged."""
    text = environ.get(VARIABLE)
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=CheckpointSettings)
    except msgspec.DecodeError as error:
        raise ValueError(f"{VARIABLE} is damaged: {error}; it is set by `perdure run`") from error
