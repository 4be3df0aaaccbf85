"""Does this torch read what `dcp_metadata` writes? Rank 0 asks before its first save: whoever publishes has no torch.

Importing this fails where torch lacks one of the classes.
"""

import pickle
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo  # pyright: ignore[reportPrivateUsage]

from ..protocol.checkpoints import SaveId
from .dcp_metadata import encode
from .formats import VERSION, DataFile, Item, Sidecar


class TorchDiffers(RuntimeError):
    """The classes behind DCP's `.metadata` are not those that perdure knows."""


def check_against_torch() -> None:
    """Raises TorchDiffers."""
    advice = f"this perdure cannot write checkpoints that DCP of torch {torch.__version__} reads; use torch 2.8 to 2.13"
    try:
        written: Any = pickle.loads(encode(_sample()))
        wanted = _wanted()
    except Exception as error:
        raise TorchDiffers(f"{advice} ({type(error).__name__}: {error})") from error
    for field in ("state_dict_metadata", "planner_data", "storage_data", "storage_meta"):
        if getattr(written, field, None) != getattr(wanted, field):
            raise TorchDiffers(f"{advice} ({field} is {getattr(written, field, None)}, not {getattr(wanted, field)})")
    tensor = written.state_dict_metadata["w"]
    index, info = next(iter(written.storage_data.items()))
    for each in (written, tensor, tensor.properties, tensor.chunks[0], index, info, written.storage_meta):
        missing = [
            field.name
            for field in fields(each)
            if field.name not in vars(each) and field.default is MISSING and field.default_factory is MISSING
        ]
        if missing:
            raise TorchDiffers(f"{advice} ({type(each).__name__} has the new fields {', '.join(missing)})")


def _sample() -> list[Sidecar]:
    """A tensor in two chunks, a scalar, and a value: of two ranks."""
    half = Item("w", ("w",), (4, 2), (0, 0), (2, 2), "bfloat16", None, 0, 0, 900, 64, 8)
    other = Item("w", ("w",), (4, 2), (2, 0), (2, 2), "bfloat16", None, 0, 0, 900, 64, 8)
    scalar = Item("o.s", ("o", "s"), (), (), (), "int64", None, 0, 1 << 40, 800, 0, 8)
    value = Item("o.0", ("o", 0), (), None, (), "", None, 1, 0, 70, 0, 0)
    files = (DataFile(0, ()), DataFile(0, ()))
    save = SaveId(7, 1, 2)
    return [
        Sidecar(VERSION, save, 0, 2, (half, scalar), files),
        Sidecar(VERSION, save, 1, 2, (other, value), files, held=("o.s",)),
    ]


def _wanted() -> dcp.Metadata:
    def described(dtype: torch.dtype, size: list[int], offsets: list[list[int]], sizes: list[int]) -> Any:
        chunks = [dcp.ChunkStorageMetadata(torch.Size(each), torch.Size(sizes)) for each in offsets]
        return dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype), torch.Size(size), chunks)

    return dcp.Metadata(
        {
            "w": described(torch.bfloat16, [4, 2], [[0, 0], [2, 0]], [2, 2]),
            "o.s": described(torch.int64, [], [[]], []),
            "o.0": dcp.BytesStorageMetadata(),
        },
        {"w": ("w",), "o.s": ("o", "s"), "o.0": ("o", 0)},
        {
            dcp.MetadataIndex("w", [0, 0], 0): StorageInfo("__0_0.distcp", 0, 900),
            dcp.MetadataIndex("w", [2, 0], 1): StorageInfo("__1_0.distcp", 0, 900),
            dcp.MetadataIndex("o.s", [], 0): StorageInfo("__0_0.distcp", 1 << 40, 800),
            dcp.MetadataIndex("o.0"): StorageInfo("__1_1.distcp", 0, 70),
        },
        dcp.StorageMeta(save_id="7-1-2"),
    )
