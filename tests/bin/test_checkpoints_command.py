"""`perdure checkpoints` on folders with real saves, whole, unfinished and damaged."""

import fcntl
import os
import re
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from perdure.bin.checkpoint_list import read_rows, size, span
from perdure.bin.checkpoint_verify import verify
from perdure.bin.main import main
from perdure.checkpoint_io.catalog import mark_bad
from perdure.checkpoint_io.names import TRACKER, data_name, local_name, saving_name, sidecar_name
from perdure.protocol.checkpoints import Tier

from ..checkpoint_io.made_saves import flip_bit, small_shard
from .checkpoint_folders import PERDURE, aged, call, objects, save_of, steps

# ---- list -----------------------------------------------------------------------------------------------------


def test_the_table_has_both_tiers_the_newest_last(save: Path, local: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "--save", save, "--local", local, "list")
    head, *lines = out.splitlines()
    assert (code, err) == (0, "")
    assert head.split() == ["step", "tier", "size", "complete", "verified", "world", "replicas", "age", "folder"]
    assert [line.split()[:2] for line in lines] == [
        ["10", "durable"],
        ["20", "durable"],
        ["25", "local"],
        ["30", "durable"],
        ["35", "local"],
        ["40", "durable"],
        ["45", "local"],
    ]
    assert lines[0].split()[2:8] == ["8.1", "KiB", "yes", "-", "2", "-"]
    assert lines[0].endswith(" s  iter_0000010")
    assert lines[2].split()[2:8] == ["8.1", "KiB", "yes", "-", "2", "2"]
    assert lines[2].endswith(" s  n0/iter_0000025.abc-1 (+1)")
    assert " no: not published: " in lines[5]
    assert " no: 1 of 2 shards are not here (rank 0)  " in lines[6]
    assert call(capsys, "list", "--save", save, "--local", local)[1] == out
    assert call(capsys, "--save", save, "--local", local)[1] == out


def test_one_object_a_line_for_machines(save: Path, local: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = objects(capsys, "--save", save, "--local", local)
    first, copied = found[0], found[2]
    assert (first["step"], first["tier"], first["epoch"], first["round"]) == (10, "durable", "abc", 1)
    assert (first["complete"], first["verified"], first["bytes"], first["world_size"]) == (True, None, 8262, 2)
    assert first["folders"] == [str(save / "iter_0000010")]
    assert 0 <= first["age_s"] < 60
    assert [(each["step"], each["replicas"]) for each in found if each["tier"] == "local"] == [
        (25, 2),
        (35, 1),
        (45, 0),
    ]
    assert len(copied["folders"]) == 2
    assert [each["step"] for each in found if not each["complete"]] == [40, 45]
    assert not any(each["damaged"] for each in found)
    (only,) = objects(capsys, "list", "--step", 25, "--save", save, "--local", local)
    assert only["tier"] == "local"


def test_what_is_not_whole_says_why(save: Path, local: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (save / "iter_0000010" / data_name(1, 0)).unlink()
    mark_bad(save / "iter_0000020", "its digest was wrong when rank 3 read it")
    (save / "iter_0009999").mkdir()
    with open(local / "n0" / local_name(save_of(35)) / data_name(0, 0), "ab") as file:
        file.write(b"more")
    found = {(each["step"], each["tier"]): each for each in objects(capsys, "--save", save, "--local", local)}
    reasons = {key: each["why"] for key, each in found.items() if each["damaged"]}
    assert "__1_0.distcp is missing" in reasons.pop((10, "durable"))
    assert reasons.pop((20, "durable")) == "its digest was wrong when rank 3 read it"
    assert "neither a manifest" in reasons.pop((9999, "durable"))
    assert reasons.pop((35, "local")).startswith(
        "rank 0 on n0: __0_0.distcp has 4100 bytes, its sidecar says 4096; 1 of 2"
    )
    assert reasons == {}
    assert "  BAD: its digest was wrong" in call(capsys, "--save", save)[1]


def test_a_checkpoint_of_plain_torch_is_listed_and_never_deleted(
    save: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = save / "iter_0000005"
    foreign.mkdir()
    (foreign / ".metadata").write_bytes(b"a pickle that nobody opens")
    assert "  yes, but not written by perdure  " in call(capsys, "--save", save)[1]
    assert call(capsys, "verify", "--save", save)[0] == 0
    assert call(capsys, "prune", "--save", save, "--keep", 1, "--yes")[0] == 0
    assert "iter_0000005 was not written by perdure" in call(capsys, "prune", "--save", save, "--step", 5)[2]
    assert foreign.exists()
    assert "was not written by perdure" in call(capsys, "copy", "--save", save, "--step", 5, save / "out")[2]


def test_a_reader_that_has_seen_enough_is_no_error(save: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as closed:
        command = [str(PERDURE), "checkpoints", "--save", str(save)]
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


# ---- folders --------------------------------------------------------------------------------------------------


def test_without_options_the_folders_are_those_of_the_configuration(
    save: Path, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("perdure.toml").write_text(
        f'save = "{save}"\nnon_persistent_local_ckpt_dir = "/no/such/disk"\nnon_persistent_save_interval = 5\n'
    )
    assert len(objects(capsys)) == 4
    assert "/no/such/disk is configured, and not on this machine" in call(capsys)[2]
    monkeypatch.setenv("PERDURE_NON_PERSISTENT_LOCAL_CKPT_DIR", str(local))
    assert len(objects(capsys)) == 7
    assert len(objects(capsys, "--local", "local")) == 3
    Path("perdure.toml").write_text("save_interval = 5\nno_such_knob = 1\n")
    code, _, err = call(capsys)
    assert (code, err.splitlines()[0]) == (2, "perdure checkpoints: 3 errors in the configuration:")


def test_folders_that_are_not_there(
    save: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys)
    assert (code, out) == (2, "")
    assert "no folder to look at" in err
    code, out, err = call(capsys, "--save", save, "--local", "typo")
    assert (code, out) == (2, "")
    assert err == f"perdure checkpoints: {tmp_path / 'typo'} is not a folder on this machine; correct the path\n"
    (tmp_path / "empty").mkdir()
    assert call(capsys, "--save", "empty")[:2] == (0, f"no checkpoints in {tmp_path / 'empty'}\n")
    code, _, err = call(capsys, "list", "--save", save, "--step", 11)
    assert (code, err) == (1, "perdure checkpoints: step 11 is in neither tier; complete are 10, 20, 30\n")


# ---- verify ---------------------------------------------------------------------------------------------------


def test_verify_reads_what_is_finished(save: Path, local: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = objects(capsys, "verify", "--save", save, "--local", local)
    assert {each["step"]: each["verified"] for each in found} == {
        **dict.fromkeys((10, 20, 25, 30, 35, 45), True),
        40: None,
    }
    assert call(capsys, "verify", "--save", save, "--local", local)[0] == 0


@pytest.mark.parametrize("name", [data_name(1, 0), data_name(0, 1), sidecar_name(0), ".metadata", "manifest.json"])
def test_verify_finds_a_flipped_bit_of_a_published_save(
    save: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_bit(save / "iter_0000020" / name, 200)
    code, out, err = call(capsys, "verify", "--save", save)
    assert code == 1
    assert [line.split()[0] for line in out.splitlines() if "  NO  " in line] == ["20"]
    assert err.startswith("perdure checkpoints: iter_0000020: ")
    assert call(capsys, "verify", "--save", save, "--step", 10)[0] == 0
    assert call(capsys, "verify", "--save", save, "--step", 20)[0] == 1


def test_verify_reads_every_copy_of_a_local_shard(local: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_bit(local / "n1" / local_name(save_of(25)) / data_name(0, 0), 77)
    code, _, err = call(capsys, "verify", "--local", local)
    assert code == 1
    assert err.count("\n") == 1
    assert "n0/iter_0000025.abc-1 (+1): on n1: " in err
    assert "their digest differs" in err


def test_verify_says_nothing_of_what_a_job_deletes_meanwhile(save: Path, local: Path) -> None:
    rows = {(row.step, row.tier): row for row in read_rows(save, local)}
    shutil.rmtree(save / "iter_0000010")
    shutil.rmtree(local / "n1" / local_name(save_of(25)))
    gone, half_gone = rows[10, Tier.DURABLE], rows[25, Tier.LOCAL]
    for row in (gone, half_gone):
        verify(row, lambda _count: None)
    assert (gone.verified, gone.good, half_gone.verified, half_gone.problems) == (None, True, True, ())


def test_verify_counts_what_is_marked_as_bad(save: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark_bad(save / "iter_0000030", "crashed the trainer twice")
    code, _, err = call(capsys, "verify", "--save", save)
    assert (code, err) == (1, "perdure checkpoints: iter_0000030: crashed the trainer twice\n")


# ---- prune ----------------------------------------------------------------------------------------------------


def test_prune_keeps_the_newest_and_only_tells_without_yes(
    save: Path, local: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("prune", "--keep", 2, "--save", save, "--local", local)
    code, out, _ = call(capsys, *words)
    assert code == 0
    assert re.sub(r"\d+ s old", "N s old", out).splitlines() == [
        "would delete n0/iter_0000025.abc-1 (+1): local, 8.1 KiB, N s old",
        "would delete iter_0000010: durable, 8.1 KiB, N s old",
        "nothing was deleted; add --yes to do it",
    ]
    assert len(steps(save)) == 4
    code, out, err = call(capsys, *words, "--yes")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["deleting", "deleting"]
    assert steps(save) == ["iter_0000020", "iter_0000030", saving_name(save_of(40))]
    assert steps(local / "n0") == [local_name(save_of(35))]
    assert steps(local / "n1") == [local_name(save_of(35)), local_name(save_of(45))]
    assert call(capsys, *words, "--yes")[1] == "there is nothing to delete\n"


def test_prune_counts_only_what_is_complete(save: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark_bad(save / "iter_0000030", "no good")
    (save / "iter_0000020" / data_name(0, 0)).unlink()
    assert call(capsys, "prune", "--keep", 1, "--yes", "--save", save)[1] == "there is nothing to delete\n"
    assert len(steps(save)) == 4


def test_prune_takes_unfinished_saves_that_nobody_writes_to(
    save: Path, local: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    aged(save / saving_name(save_of(40)))
    small_shard(save / saving_name(save_of(50)), save_of(50), 0, 2)
    unfinished = local / "n0" / local_name(save_of(46))
    unfinished.mkdir()
    (unfinished / data_name(0, 0)).write_bytes(b"half")
    words = ("prune", "--keep", 9, "--yes", "--save", save, "--local", local)
    assert call(capsys, *words)[0] == 0
    assert steps(save)[3:] == [saving_name(save_of(50))]
    assert unfinished.exists()
    aged(unfinished)
    assert call(capsys, *words)[0] == 0
    assert not unfinished.exists()
    assert steps(local / "n1") == [local_name(save_of(step)) for step in (25, 35, 45)]


def test_prune_sees_that_one_file_of_an_unfinished_save_still_grows(
    save: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = aged(save / saving_name(save_of(40)))
    os.utime(folder / data_name(0, 0))
    assert call(capsys, "prune", "--keep", 9, "--yes", "--save", save)[1] == "there is nothing to delete\n"
    code, _, err = call(capsys, "prune", "--step", 40, "--yes", "--save", save)
    assert code == 1
    assert "may be a save under way" in err


def test_prune_of_one_step_never_takes_the_newest_complete(
    save: Path, local: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark_bad(save / "iter_0000030", "no good")
    words = ("--yes", "--save", save, "--local", local)
    code, _, err = call(capsys, "prune", "--step", 20, *words)
    assert code == 1
    assert "iter_0000020 is the newest complete one of the durable tier, which is never deleted" in err
    assert call(capsys, "prune", "--step", 45, *words)[0] == 1
    assert call(capsys, "prune", "--step", 77, *words)[2] == "perdure checkpoints: there is nothing of step 77\n"
    assert call(capsys, "prune", "--step", 30, *words)[0] == 0
    assert call(capsys, "prune", "--step", 25, *words)[0] == 0
    assert steps(save) == ["iter_0000010", "iter_0000020", saving_name(save_of(40))]
    assert (save / TRACKER).read_text() == "20"
    assert len(steps(local / "n0") + steps(local / "n1")) == 3


@pytest.mark.parametrize(
    "words", [["prune"], ["prune", "--keep", "0"], ["prune", "--keep", "1", "--step", "2"], ["copy"]]
)
def test_what_must_be_said_is_asked_for(words: list[str], save: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["checkpoints", "--save", str(save), *words])
    assert caught.value.code == 2
    assert "usage: perdure checkpoints" in capsys.readouterr().err


# ---- terminals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["verify"], ["copy", "--step", "20", "out"]])
def test_long_work_shows_its_progress_on_a_terminal(save: Path, tmp_path: Path, words: list[str]) -> None:
    reader, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [str(PERDURE), "checkpoints", "--save", str(save), *words]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=terminal, timeout=60, check=True)
    os.close(terminal)
    shown = os.read(reader, 1 << 16).decode()
    os.close(reader)
    assert "0%|" in shown
    assert b"|" not in done.stdout


# ---- words ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KiB"), (20480, "20 KiB"), (3 << 20, "3.0 MiB"), (5 << 50, "5120 TiB")],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (99, "99 s"), (180, "3 min"), (7200, "2 h"), (86400 * 3, "3 d")]
)
def test_ages(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_the_command_is_torch_free(save: Path) -> None:
    program = "import sys; from perdure.bin import main; main.main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", program, "checkpoints", "verify", "--save", str(save)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"
