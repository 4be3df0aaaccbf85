"""`perdure checkpoints copy`: a verified copy of a checkpoint, or nothing."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.bin.checkpoint_copy import CopyError, Source, copy
from perdure.checkpoint_io.catalog import mark_bad
from perdure.checkpoint_io.names import data_name, saving_name

from ..checkpoint_io.made_saves import flip_bit
from .checkpoint_folders import call, objects, published, save_of, steps


def test_a_copy_is_a_checkpoint_of_its_own(save: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "archive" / "run-7"
    code, out, _ = call(capsys, "copy", "--save", save, "--step", 20, to)
    assert (code, out) == (0, f"copied step 20, 8.1 KiB, every byte verified: {to / 'iter_0000020'}\n")
    assert steps(to) == ["iter_0000020"]
    source = save / "iter_0000020"
    assert {path.name: path.read_bytes() for path in (to / "iter_0000020").iterdir()} == {
        path.name: path.read_bytes() for path in source.iterdir()
    }
    shutil.rmtree(save)
    (only,) = objects(capsys, "verify", "--save", to)
    assert (only["complete"], only["verified"]) == (True, True)
    code, _, err = call(capsys, "copy", "--save", to, "--step", 20, to)
    assert code == 1
    assert "is there already" in err


@pytest.mark.parametrize("name", [data_name(1, 0), ".metadata"])
def test_a_damaged_checkpoint_is_not_copied(
    save: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_bit(save / "iter_0000020" / name, 99)
    code, out, err = call(capsys, "copy", "--save", save, "--step", 20, tmp_path / "to")
    assert (code, out) == (1, "")
    assert f"{name} is damaged" in err
    assert steps(tmp_path / "to") == []


def test_what_cannot_be_copied_says_why(save: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark_bad(save / "iter_0000030", "no good")
    assert "no good" in call(capsys, "copy", "--save", save, "--step", 30, tmp_path)[2]
    assert "complete are 10, 20\n" in call(capsys, "copy", "--save", save, "--step", 40, tmp_path)[2]
    assert "--save" in call(capsys, "copy", "--local", save, "--step", 10, tmp_path)[2]
    (tmp_path / "file").touch()
    assert "is not a folder" in call(capsys, "copy", "--save", save, "--step", 10, tmp_path / "file")[2]
    (tmp_path / saving_name(save_of(10))).mkdir()
    assert "is in the way" in call(capsys, "copy", "--save", save, "--step", 10, tmp_path)[2]
    assert not (tmp_path / "iter_0000010").exists()


def test_a_copy_that_fails_midway_leaves_nothing(save: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"

    def lose(_count: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CopyError, match=r"given up and deleted: .*No space left"):
        copy(Source(save / "iter_0000020"), to, lose)
    assert steps(to) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_copy_that_is_interrupted_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    save = tmp_path / "save"
    source = published(save, 10)
    # The copy waits for the FIFO's other end, where a sidecar was when the source was looked at.
    program = """
import os, sys
from perdure.bin import checkpoint_copy, main
whole = checkpoint_copy.Source.small_files
def small_files(source):
    os.unlink(source.folder / "__0.shard")
    os.mkfifo(source.folder / "__0.shard")
    print("waiting", flush=True)
    return whole(source)
checkpoint_copy.Source.small_files = small_files
sys.exit(main.main())
"""
    command = [
        sys.executable,
        "-c",
        program,
        "checkpoints",
        "copy",
        "--save",
        str(save),
        "--step",
        "10",
        str(tmp_path / "to"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as copying:
        assert copying.stdout is not None
        assert copying.stdout.readline() == "waiting\n"
        copying.send_signal(number)
        assert copying.wait(30) == 128 + number
    assert steps(tmp_path / "to") == []
    assert source.exists()
