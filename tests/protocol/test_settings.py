"""Knobs one by one, and the rules between them."""

import math

import msgspec
import pytest

from perdure.protocol.knobs import KNOBS, REFUSED, Kind, Unusable, nearest, parse, show
from perdure.protocol.settings import OFF, Settings
from perdure.protocol.settings_rules import ConfigurationError, check, size_violations, violations

BRIDGE_NAMES = frozenset(
    {
        "enabled",
        "max_iterations",
        "monitor_thread_interval",
        "monitor_process_interval",
        "progress_watchdog_interval",
        "heartbeat_interval",
        "soft_timeout",
        "hard_timeout",
        "heartbeat_timeout",
        "barrier_timeout",
        "completion_timeout",
        "last_call_wait",
        "termination_grace_time",
        "granularity",
        "active_world_size",
        "empty_cuda_cache",
        "max_rank_faults",
        "monitor_process_logdir",
        "save",
        "save_interval",
        "most_recent_k",
        "load",
        "ckpt_step",
        "ckpt_format",
        "async_save",
        "use_persistent_ckpt_worker",
        "fully_parallel_save",
        "fully_parallel_load",
        "ckpt_assume_constant_structure",
        "non_persistent_save_interval",
        "non_persistent_ckpt_type",
        "non_persistent_global_ckpt_dir",
        "non_persistent_local_ckpt_dir",
        "non_persistent_local_ckpt_algo",
        "replication",
        "replication_jump",
        "replication_factor",
    }
)
"""Of its in-process restart, all; of its checkpoints, those that say when, where and how is saved."""


NODES_OWN = {"non_persistent_local_ckpt_dir": "/local", "non_persistent_save_interval": 10}


def test_every_setting_has_a_knob_and_every_knob_a_setting() -> None:
    assert tuple(KNOBS) == Settings.__struct_fields__


def test_every_name_of_bridge_is_known_once() -> None:
    assert set(KNOBS).union(REFUSED) >= BRIDGE_NAMES
    assert not REFUSED.keys() & KNOBS.keys()


def test_the_defaults_break_no_rule() -> None:
    assert violations(Settings()) == []


def test_settings_cross_the_wire_with_limits_that_are_off() -> None:
    sent = Settings(soft_timeout=OFF, active_world_size=4, monitor_process_logdir="/logs")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Settings) == sent


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (90, 90.0),
        (0.5, 0.5),
        ("90", 90.0),
        ("90s", 90.0),
        ("2m", 120.0),
        ("2 min", 120.0),
        ("500ms", 0.5),
        ("1.5h", 5400.0),
        (" .5S ", 0.5),
        ("1e3", 1000.0),
        ("off", OFF),
        ("None", OFF),
        ("null", OFF),
    ],
)
def test_a_time_is_a_number_of_seconds_or_a_text_with_a_unit(given: object, seconds: float) -> None:
    assert parse(KNOBS["soft_timeout"], given, text=isinstance(given, str)) == seconds


@pytest.mark.parametrize(
    "given", [0, -1, "0", "-5s", "90x", "s", "", "1m30s", True, None, [], math.nan, math.inf, "inf"]
)
def test_what_is_no_time_is_an_error(given: object) -> None:
    with pytest.raises(Unusable, match="soft_timeout is"):
        parse(KNOBS["soft_timeout"], given, text=False)


@pytest.mark.parametrize("name", [knob.name for knob in KNOBS.values() if knob.kind is Kind.DURATION])
def test_only_hang_detection_can_be_off(name: str) -> None:
    knob = KNOBS[name]
    if name in ("soft_timeout", "hard_timeout"):
        assert parse(knob, "off", text=True) == OFF
    else:
        with pytest.raises(Unusable, match=f"{name} cannot be off: every wait has an end"):
            parse(knob, "off", text=True)


@pytest.mark.parametrize("name", ["termination_grace_time", "last_call_wait"])
def test_a_wait_may_be_zero_but_not_negative(name: str) -> None:
    assert parse(KNOBS[name], 0, text=False) == 0.0
    with pytest.raises(Unusable, match=f"{name} is 0 or more seconds"):
        parse(KNOBS[name], -0.1, text=False)


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("active_world_size", 8, 8),
        ("active_world_size", "off", None),
        ("max_iterations", "none", None),
        ("granularity", "rank", "rank"),
        ("respawn", False, False),
        ("monitor_process_logdir", "/var/log/job", "/var/log/job"),
        ("monitor_process_logdir", "none", None),
        ("save", "/ckpt", "/ckpt"),
        ("most_recent_k", "off", None),
        ("async_save", False, False),
        ("on_busy", "wait", "wait"),
        ("replication", 0, 0),
        ("replication", 2, 2),
    ],
)
def test_values_of_a_file(name: str, given: object, value: object) -> None:
    assert parse(KNOBS[name], given, text=False) == value


@pytest.mark.parametrize(
    ("name", "given", "rule"),
    [
        ("active_world_size", "8", "is a whole number"),
        ("active_world_size", 8.0, "is a whole number"),
        ("active_world_size", True, "is a whole number"),
        ("active_world_size", 0, "is 1 or more"),
        ("min_world_size", "off", "cannot be off"),
        ("max_iterations", 0, "is 1 or more"),
        ("max_rank_faults", -1, "is 1 or more"),
        ("granularity", "nodes", "is node or rank"),
        ("granularity", 1, "is node or rank"),
        ("granularity", "off", "cannot be off"),
        ("respawn", "true", "is true or false"),
        ("respawn", 1, "is true or false"),
        ("monitor_process_logdir", "logs", "is an absolute path"),
        ("monitor_process_logdir", 3, "is an absolute path"),
        ("save", "", "is an absolute path"),
        ("save_interval", 0, "is 1 or more"),
        ("ckpt_step", 0, "is 1 or more"),
        ("on_busy", "replace", "is skip or wait"),
        ("replication", -1, "is 0 or more"),
        ("replication", "off", "is a whole number"),
    ],
)
def test_wrong_values_of_a_file_say_the_rule(name: str, given: object, rule: str) -> None:
    with pytest.raises(Unusable) as caught:
        parse(KNOBS[name], given, text=False)
    assert caught.value.rule.startswith(f"{name} {rule}")
    assert caught.value.fix


@pytest.mark.parametrize(
    ("name", "given", "text", "fix"),
    [
        ("most_recent_k", -1, False, 'write "off" to keep all of them'),
        ("most_recent_k", "-1", True, 'write "off" to keep all of them'),
        ("most_recent_k", 0, False, 'write "off" to do without it'),
        ("save_interval", 0, False, 'write "off" to do without it'),
        ("replication", True, False, "write replication = 1, the number of other nodes"),
        ("replication", "True", True, "write replication = 1, the number of other nodes"),
        ("replication", False, False, "write replication = 0"),
        ("replication", "off", True, "write replication = 0"),
        ("ckpt_format", "zarr", False, 'write "torch_dist", the one format that is written here'),
        ("ckpt_format", "fsdp_dtensor", True, 'write "torch_dist", the one format that is written here'),
        ("ckpt_format", "torch_dcp", True, 'write "torch_dist", the one format that is written here'),
        ("ckpt_format", "torch", True, 'write "torch_dist", the one format that is written here'),
        ("ckpt_format", "hdf5", False, "write ckpt_format = torch_dist"),
    ],
)
def test_a_value_of_another_framework_is_told_what_to_write(name: str, given: object, text: bool, fix: str) -> None:
    with pytest.raises(Unusable) as caught:
        parse(KNOBS[name], given, text=text)
    assert caught.value.fix == fix


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("active_world_size", "8", 8),
        ("respawn", "no", False),
        ("respawn", "OFF", False),
        ("observe_only", "1", True),
    ],
)
def test_texts_of_the_environment(name: str, given: str, value: object) -> None:
    assert parse(KNOBS[name], given, text=True) == value


@pytest.mark.parametrize(("name", "given"), [("active_world_size", "8.5"), ("respawn", "maybe"), ("respawn", "")])
def test_texts_that_mean_nothing_are_errors(name: str, given: str) -> None:
    with pytest.raises(Unusable):
        parse(KNOBS[name], given, text=True)


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"soft_timeout": 90.0}, "soft_timeout < hard_timeout"),
        ({"hard_timeout": 120.0}, "hard_timeout < barrier_timeout"),
        ({"hard_timeout": OFF, "soft_timeout": 120.0}, "soft_timeout < barrier_timeout"),
        ({"heartbeat_interval": 60.0}, "heartbeat_interval < heartbeat_timeout"),
        ({"heartbeat_timeout": 120.0}, "heartbeat_timeout < barrier_timeout"),
        ({"termination_grace_time": 120.0}, "termination_grace_time < barrier_timeout"),
        ({"last_call_wait": 200.0}, "last_call_wait < barrier_timeout"),
        ({"active_world_size": 4, "min_world_size": 5}, "min_world_size <= active_world_size"),
        ({"active_world_size": 6, "world_size_multiple_of": 4}, "active_world_size is a multiple of"),
        ({"save_interval": 10}, "save_interval needs save"),
        ({"most_recent_k": 2}, "most_recent_k needs save"),
        ({"most_recent_k": 2, **NODES_OWN}, "most_recent_k needs save"),
        ({"ckpt_step": 7}, "ckpt_step needs save or non_persistent_local_ckpt_dir"),
        ({"async_save": False}, "async_save needs save or non_persistent_local_ckpt_dir"),
        ({"on_busy": "wait"}, "on_busy needs save or non_persistent_local_ckpt_dir"),
        ({"on_busy": "wait", "async_save": False, "save": "/c"}, "on_busy needs async_save"),
        ({"save_timeout": 5.0}, "save_timeout needs save or non_persistent_local_ckpt_dir"),
        ({"non_persistent_save_interval": 5}, "non_persistent_save_interval needs non_persistent_local_ckpt_dir"),
        (
            {"non_persistent_local_ckpt_dir": "/local"},
            "non_persistent_local_ckpt_dir needs non_persistent_save_interval",
        ),
        ({"non_persistent_local_ckpt_algo": "atomic", "save": "/c"}, "non_persistent_local_ckpt_algo needs non_"),
        ({"replication": 1, "save": "/c"}, "replication needs non_persistent_local_ckpt_dir"),
        ({"save": "/local", **NODES_OWN}, "save is not in non_persistent_local_ckpt_dir"),
        ({"save": "/local/./durable/", **NODES_OWN}, "save is not in non_persistent_local_ckpt_dir"),
        ({"save": "/c", "save_interval": 10, **NODES_OWN}, "non_persistent_save_interval < save_interval"),
    ],
)
def test_each_rule_between_knobs(changed: dict[str, object], rule: str) -> None:
    (violation,) = violations(msgspec.structs.replace(Settings(), **changed))
    assert violation.rule.startswith(rule)
    for name in violation.knobs:
        assert f"{name} = " in violation.given
    assert violation.fix


@pytest.mark.parametrize(
    "changed",
    [
        {"soft_timeout": OFF},
        {"hard_timeout": OFF},
        {"soft_timeout": OFF, "hard_timeout": OFF},
        {"active_world_size": 8, "world_size_multiple_of": 4, "min_world_size": 8},
        {"min_world_size": 3, "world_size_multiple_of": 4},
        {"save": "/c"},
        {"save": "/c", "save_interval": 1, "most_recent_k": 1, "ckpt_step": 5, "async_save": False},
        {"save": "/c", "save_interval": 11, **NODES_OWN, "replication": 2, "non_persistent_local_ckpt_algo": "atomic"},
        {"save": "/local2", **NODES_OWN},
        {**NODES_OWN, "ckpt_step": 5, "on_busy": "wait", "save_timeout": 5.0},
    ],
)
def test_combinations_that_are_fine(changed: dict[str, object]) -> None:
    check(msgspec.structs.replace(Settings(), **changed))


def test_all_contradictions_come_in_one_error() -> None:
    broken = Settings(
        soft_timeout=500.0, hard_timeout=400.0, heartbeat_interval=70.0, active_world_size=3, min_world_size=4
    )
    with pytest.raises(ConfigurationError) as caught:
        check(broken)
    assert len(caught.value.violations) == 5
    text = str(caught.value)
    assert text.startswith("5 errors in the configuration:")
    for words in ("soft_timeout = 500 s, hard_timeout = 400 s", "heartbeat_interval = 70 s", "min_world_size = 4"):
        assert words in text


def test_a_default_that_was_asked_for_needs_what_it_is_about() -> None:
    given: dict[str, str] = dict.fromkeys(
        ("on_busy", "non_persistent_local_ckpt_algo", "replication", "save_interval"), "perdure.toml"
    )
    assert [each.knobs[0] for each in violations(Settings(), given)] == ["on_busy", "non_persistent_local_ckpt_algo"]


@pytest.mark.parametrize(
    ("ranks", "names"), [(8, []), (3, ["active_world_size"]), (1, ["active_world_size", "min_world_size"])]
)
def test_a_job_with_too_few_ranks(ranks: int, names: list[str]) -> None:
    found = size_violations(Settings(active_world_size=4, min_world_size=2), ranks)
    assert [name for each in found for name in each.knobs] == names


@pytest.mark.parametrize(
    ("wrong", "meant"), [("soft_timout", "soft_timeout"), ("max_iteration", "max_iterations"), ("zzz", None)]
)
def test_a_misspelt_name_is_recognised(wrong: str, meant: str | None) -> None:
    assert nearest(wrong, list(KNOBS)) == meant


@pytest.mark.parametrize(
    ("value", "text"), [(OFF, "off"), (None, "off"), (True, "true"), (0.5, "0.5 s"), (4, "4"), ("node", "node")]
)
def test_values_are_shown_as_they_are_written(value: object, text: str) -> None:
    assert show(value) == text
