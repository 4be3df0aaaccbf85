"""Folders with checkpoints for the tests of `perdure checkpoints`, and how it is called."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.bin.main import main
from perdure.checkpoint_io.names import TRACKER, published_name
from perdure.checkpoint_io.publish import publish
from perdure.protocol.checkpoints import SaveId

from ..checkpoint_io.made_saves import written_save

PERDURE = Path(sys.executable).with_name("perdure")
HOURS_AGO = 7200


def save_of(step: int, round: int = 1) -> SaveId:
    return SaveId(step, 0xABC, round)


def published(folder: Path, step: int, world_size: int = 2) -> Path:
    publish(folder, written_save(folder, save_of(step), world_size), created=0.0)
    return folder / published_name(step)


def aged(folder: Path) -> Path:
    """As if nobody had written to it for two hours."""
    for path in [*folder.iterdir(), folder]:
        then = path.stat().st_mtime - HOURS_AGO
        os.utime(path, (then, then))
    return folder


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["checkpoints", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def objects(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in call(capsys, *words, "--json")[1].splitlines()]


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != TRACKER)
