"""The sources of the configuration: file, environment, command line."""

import argparse
import re
from pathlib import Path

import pytest

import perdure
from perdure.bin.configuration import RESERVED, Configuration, add_arguments, load
from perdure.protocol.knobs import KNOBS, show
from perdure.protocol.settings import OFF, Settings
from perdure.protocol.settings_rules import ConfigurationError


def read(folder: Path, toml: str = "", environ: dict[str, str] | None = None, words: str = "") -> Configuration:
    if toml:
        (folder / "perdure.toml").write_text(toml)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    return load(parser.parse_args(words.split()), environ or {}, folder)


def errors(folder: Path, toml: str = "", environ: dict[str, str] | None = None, words: str = "") -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        read(folder, toml, environ, words)
    return [str(each) for each in caught.value.violations]


def test_without_any_source_the_defaults_hold(tmp_path: Path) -> None:
    found = read(tmp_path, environ={"HOME": "/root", "PERDURE_NODE": "n0"})
    assert found.settings == Settings()
    assert found.chosen == {}
    assert "soft_timeout = 60 s (default)" in found.lines


def test_the_stronger_source_wins_and_each_value_says_its_source(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        'soft_timeout = "10s"\nhard_timeout = 20\nheartbeat_interval = 1\n',
        {"PERDURE_HARD_TIMEOUT": "30", "PERDURE_HEARTBEAT_INTERVAL": "2s"},
        "--heartbeat-interval 3s --no-respawn",
    )
    settings = found.settings
    assert (settings.soft_timeout, settings.hard_timeout, settings.heartbeat_interval) == (10.0, 30.0, 3.0)
    assert settings.respawn is False
    assert len(found.lines) == len(KNOBS)
    assert "soft_timeout = 10 s (perdure.toml)" in found.lines
    assert "hard_timeout = 30 s (PERDURE_HARD_TIMEOUT)" in found.lines
    assert "heartbeat_interval = 3 s (--heartbeat-interval)" in found.lines
    assert "respawn = false (--no-respawn)" in found.lines
    assert found.chosen["hard_timeout"] == "30 s"


TEXTS = {
    "granularity": "rank",
    "monitor_process_logdir": "/tmp",
    "save": "/ckpt",
    "ckpt_format": "torch_dist",
    "on_busy": "wait",
    "non_persistent_local_ckpt_dir": "/local",
    "non_persistent_local_ckpt_algo": "atomic",
}
DURABLE = 'save = "/ckpt"\n'
LOCAL = 'non_persistent_local_ckpt_dir = "/local"\n'
BESIDE = {
    "heartbeat_interval": "heartbeat_timeout = 100\n",
    "barrier_timeout": "hard_timeout = 61\nheartbeat_timeout = 61\n",
    "non_persistent_local_ckpt_dir": "non_persistent_save_interval = 3\n",
    "non_persistent_save_interval": LOCAL,
    **dict.fromkeys(("save_interval", "most_recent_k", "ckpt_step", "async_save", "on_busy", "save_timeout"), DURABLE),
    **dict.fromkeys(("non_persistent_local_ckpt_algo", "replication"), LOCAL + "non_persistent_save_interval = 3\n"),
}
"""What must stand in the file so that a knob may have a value of its own."""


@pytest.mark.parametrize("name", KNOBS)
def test_every_knob_can_be_set_from_every_source(tmp_path: Path, name: str) -> None:
    knob, default = KNOBS[name], getattr(Settings(), name)
    if isinstance(default, bool):
        value, in_file, as_text = not default, str(not default).lower(), str(not default)
        words = knob.flag if value else knob.flag.replace("--", "--no-", 1)
    else:
        text = TEXTS.get(name)
        value = text or (61.5 if isinstance(default, float) else 3)
        in_file, as_text, words = (f'"{text}"' if text else str(value)), str(value), f"{knob.flag}={value}"
    beside = BESIDE.get(name, "#\n")
    for found in (
        read(tmp_path, beside + f"{name} = {in_file}\n"),
        read(tmp_path, beside, {knob.variable: as_text}),
        read(tmp_path, beside, words=words),
    ):
        assert getattr(found.settings, name) == value


def test_options_are_handed_on_as_they_were_given(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    given = ["--soft-timeout=50s", "--save=/my disk/a", "--save-interval=5", "--no-async-save"]
    found = load(parser.parse_args(given), {"PERDURE_MOST_RECENT_K": "2"}, tmp_path)
    assert sorted(found.command_line()) == sorted(given)
    assert found.settings.most_recent_k == 2


def test_off_in_a_file_and_in_the_environment(tmp_path: Path) -> None:
    found = read(tmp_path, 'soft_timeout = "off"\n', {"PERDURE_MAX_ITERATIONS": "null"})
    assert found.settings.soft_timeout == OFF
    assert found.settings.max_iterations is None
    assert "max_iterations = off (PERDURE_MAX_ITERATIONS)" in found.lines


def test_all_errors_of_all_sources_come_at_once(tmp_path: Path) -> None:
    found = errors(
        tmp_path,
        'soft_timeout = "2m"\nsoft_timout = 3\nbarrier_timeout = "off"\n',
        {"PERDURE_MAX_ITERATIONS": "0", "PERDURE_HARD_TIMEOT": "1"},
        "--min-world-size many",
    )
    assert [text.splitlines()[0] for text in found] == [
        "perdure.toml: soft_timout = 3",
        'perdure.toml: barrier_timeout = "off"',
        "PERDURE_MAX_ITERATIONS=0",
        "PERDURE_HARD_TIMEOT=1",
        "--min-world-size=many",
        "soft_timeout = 120 s (perdure.toml), hard_timeout = 90 s",
    ]
    assert "did you mean soft_timeout?" in found[0]
    assert "did you mean PERDURE_HARD_TIMEOUT?" in found[3]


def test_a_wrong_value_is_an_error_even_where_it_is_overridden(tmp_path: Path) -> None:
    (found,) = errors(tmp_path, 'soft_timeout = "soon"\n', words="--soft-timeout 10s")
    assert found.startswith('perdure.toml: soft_timeout = "soon"')


def test_no_rule_is_judged_on_a_knob_whose_value_is_unusable(tmp_path: Path) -> None:
    (found,) = errors(tmp_path, 'hard_timeout = "soon"\nsoft_timeout = 100\n')
    assert found.startswith("perdure.toml: hard_timeout")


def test_a_pasted_bridge_configuration_is_told_which_lines_to_delete(tmp_path: Path) -> None:
    pasted = """
        enabled = true
        max_iterations = "none"
        monitor_thread_interval = 1.0
        monitor_process_interval = 1.0
        progress_watchdog_interval = 1.0
        heartbeat_interval = 30.0
        soft_timeout = 60.0
        hard_timeout = 90.0
        heartbeat_timeout = 60.0
        barrier_timeout = 120.0
        completion_timeout = 120.0
        last_call_wait = 1.0
        termination_grace_time = 1.0
        granularity = "node"
        active_world_size = "none"
        empty_cuda_cache = true
        max_rank_faults = "none"
        monitor_process_logdir = "none"
    """
    (found,) = errors(tmp_path, pasted)
    dead = ["enabled", "monitor_thread_interval", "monitor_process_interval", "progress_watchdog_interval"]
    assert found.startswith(f"perdure.toml: {', '.join(dead)}\n")
    assert "delete these 4 lines" in found
    kept = "\n".join(line for line in pasted.splitlines() if not any(name in line for name in dead))
    assert read(tmp_path, kept).settings == Settings()


def test_a_pasted_checkpoint_configuration_of_bridge_is_made_right_by_its_errors(tmp_path: Path) -> None:
    pasted = """
        save = "/ckpt"
        load = "/ckpt"
        save_interval = 100
        most_recent_k = -1
        ckpt_format = "fsdp_dtensor"
        async_save = true
        use_persistent_ckpt_worker = true
        fully_parallel_save = true
        ckpt_assume_constant_structure = false
        non_persistent_save_interval = 10
        non_persistent_ckpt_type = "local"
        non_persistent_local_ckpt_dir = "/local"
        replication = true
        replication_jump = 8
        replication_factor = 2
    """
    refused, *wrong = errors(tmp_path, pasted)
    assert "delete these 7 lines" in refused
    assert "a factor of 2 is replication = 1" in refused
    fixes = [text.rpartition("fix:  ")[2] for text in wrong]
    assert fixes == [
        'write "off" to keep all of them',
        'write "torch_dist", the one format that is written here',
        "write replication = 1, the number of other nodes",
    ]


def test_needs_are_judged_on_the_effective_values_and_cite_their_sources(tmp_path: Path) -> None:
    (found,) = errors(tmp_path, 'save = "/ckpt"\nsave_interval = 5\n', {"PERDURE_SAVE": "off"})
    assert found.startswith("save_interval = 5 (perdure.toml), save = off (PERDURE_SAVE)\n")
    (found,) = errors(tmp_path, "#\n", words="--on-busy skip")
    assert found.startswith("on_busy = skip (--on-busy), save = off, non_persistent_local_ckpt_dir = off\n")
    assert read(tmp_path, "replication = 0\nsave_interval = 'off'\n").settings == Settings()


def test_no_need_is_judged_on_a_folder_that_is_unusable(tmp_path: Path) -> None:
    (found,) = errors(tmp_path, 'save = "ckpt"\nsave_interval = 5\n')
    assert found.startswith('perdure.toml: save = "ckpt"')


def test_a_refused_name_in_the_environment(tmp_path: Path) -> None:
    (found,) = errors(tmp_path, environ={"PERDURE_MONITOR_THREAD_INTERVAL": "1"})
    assert found.startswith("environment: PERDURE_MONITOR_THREAD_INTERVAL\n")
    assert "delete this variable" in found


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[perdure]\nsoft_timeout = 1\n", "delete the line [perdure]"),
        ("soft_timeout = \n", "line 1"),
        ("soft_timeout = 1\nsoft_timeout = 2\n", "the configuration file is TOML"),
        ("soft_timeout = [1, 2]\n", "soft_timeout is a time"),
        ("hard_timeout = 2020-01-01\n", "hard_timeout is a time"),
        ("zzz = 1\n", "there is no knob zzz"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, toml: str, words: str) -> None:
    (found,) = errors(tmp_path, toml)
    assert words in found


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "perdure.toml").write_bytes(b"\xff\xfe\x00")
    (found,) = errors(tmp_path)
    assert "the configuration file is TOML" in found


def test_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "perdure.toml").mkdir()
    (found,) = errors(tmp_path)
    assert "can be read" in found


def test_a_file_that_was_named_must_exist(tmp_path: Path) -> None:
    (found,) = errors(tmp_path, words="--config gone.toml")
    assert "gone.toml" in found
    (found,) = errors(tmp_path, environ={"PERDURE_CONFIG": "gone2.toml"})
    assert "gone2.toml" in found


def test_a_named_file_is_read_in_place_of_the_usual_one(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("soft_timeout = 5\n")
    found = read(tmp_path, "soft_timeout = 6\n", words="--config other.toml")
    assert found.settings.soft_timeout == 5.0
    assert found.sources == {"soft_timeout": "other.toml"}


def test_the_help_names_every_knob_and_its_default() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    text = " ".join(parser.format_help().split())
    for knob in KNOBS.values():
        assert knob.flag in text
        assert f"{knob.summary} (default: {show(getattr(Settings(), knob.name))})" in text


def test_every_variable_of_ours_in_the_source_is_known() -> None:
    """A variable that the code reads and that this list lacks would be refused as a misspelt knob."""
    root = Path(str(perdure.__file__)).parent
    folders = ("bin", "checkpoint_io", "controller", "protocol", "worker_runtime")
    sources = [path for folder in folders for path in (root / folder).rglob("*.py")]
    used = {name for path in sources for name in re.findall(r"\bPERDURE_[A-Z0-9_]*[A-Z0-9]\b", path.read_text())}
    known = {knob.variable for knob in KNOBS.values()} | RESERVED
    assert used - known == set()


def test_the_page_for_users_has_every_knob_with_its_default() -> None:
    page = (Path(str(perdure.__file__)).parent / "docs" / "configuration.md").read_text()
    rows = {
        row[1].strip(" `"): row for line in page.splitlines() if (row := line.split("|"))[0] == "" and len(row) == 6
    }
    for knob in KNOBS.values():
        row = rows[knob.name]
        assert row[2].strip(" `") == show(getattr(Settings(), knob.name))
        assert bool(row[3].strip()) == knob.off
