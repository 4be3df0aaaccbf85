"""The checkpoint benchmark runs small, and says what it found in the agreed form. Speed is not tested."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ROW_FIELDS = {"case", "metric", "unit", "ours", "peer", "peer_name", "ratio", "runs", "ours_spread", "peer_spread"}
CASE = "ranks=1 8 MiB"


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "checkpoint.py"), *arguments]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("saves")
    small = ["--json", "--ranks", "1", "--size-mb", "8", "--saves", "2", "--methods", "torch_save", "dcp_save"]
    done = run(folder, *small, "--parts", "stall", "lost", "durable", "restore")
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == [], "the benchmark left files"
    return json.loads(done.stdout)


def test_it_explains_itself(tmp_path: Path) -> None:
    shown = run(tmp_path, "--help")
    assert shown.returncode == 0
    for option in ("--json", "--quick", "--ranks", "--size-mb", "--saves", "--methods", "--parts", "--tier"):
        assert option in shown.stdout


def test_nothing_fails_and_all_rows_have_the_agreed_form(result: dict[str, Any]) -> None:
    assert result["benchmark"] == "checkpoint"
    assert result["failures"] == []
    assert {"cpus", "python", "packages"} <= set(result["machine"])
    for row in result["rows"]:
        assert set(row) >= ROW_FIELDS
        assert row["case"] == CASE
        assert len(row["ours_spread"]) == len(row["peer_spread"]) == 2
        assert row["ours"] > 0 or row["metric"] == "lost"  # an excess over a base that drifts


def test_every_part_is_compared_with_the_machine_with_each_peer_and_with_the_best(result: dict[str, Any]) -> None:
    found = {(row["metric"], row["peer_name"].partition(":")[0]) for row in result["rows"]}
    limits = {("stall", "copy"), ("durable", "disk"), ("restore", "read")}
    parts = {"stall", "lost", "durable", "restore"}
    multiples = {f"{part} as a multiple" for part in parts - {"lost"}}
    peers = {(part, peer) for part in parts | multiples for peer in ("torch_save", "dcp_save")}
    first = {("stall of the first save", peer) for peer in ("torch_save", "dcp_save")}
    assert found == limits | peers | first | {(part, "best") for part in parts}


def test_both_sides_are_checked_for_torn_tensors(result: dict[str, Any]) -> None:
    assert {detail["method"] for detail in result["details"]} == {"ours", "torch_save", "dcp_save"}
    for detail in result["details"]:
        assert detail["torn"] == 0
        assert detail["tensors"] > 300
        assert detail["bytes"] == pytest.approx(8 << 20, rel=0.3)
