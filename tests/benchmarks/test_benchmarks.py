"""The benchmarks run, and say what they found in the agreed form. How fast anything is, is not tested."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = ["restart.py", "overhead.py", "scale.py"]
ROW_FIELDS = {"case", "metric", "unit", "ours", "peer", "peer_name", "ratio", "runs", "ours_spread", "peer_spread"}


def harness() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_harness", BENCHMARKS / "harness.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def check_result(output: str, benchmark: str) -> list[dict[str, Any]]:
    result = json.loads(output)
    assert result["benchmark"] == benchmark
    assert {"cpus", "python", "packages"} <= set(result["machine"])
    for row in result["rows"]:
        assert set(row) >= ROW_FIELDS
    return result["rows"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_benchmark_explains_itself(script: str) -> None:
    shown = run(script, "--help")
    assert shown.returncode == 0
    assert "--json" in shown.stdout
    assert "--quick" in shown.stdout


def test_a_ratio_says_how_many_times_better_ours_is() -> None:
    row = harness().Row("exception ranks=2", "restart", "ms", [10.0, 20.0, 30.0], [400.0, 100.0], "peer 1.0").as_dict()
    assert row["ours"] == 20.0
    assert row["peer"] == 250.0
    assert row["ratio"] == 12.5
    assert row["ours_spread"] == [10.0, 30.0]
    assert row["runs"] == 3


def test_a_job_leaves_neither_processes_nor_files() -> None:
    module = harness()
    daemon = "import os, time\nif os.fork() == 0:\n os.setsid()\n print('up', flush=True)\n time.sleep(600)"
    with module.Job() as job:
        job.start([sys.executable, "-c", daemon])
        job.wait_for("daemon", lambda: "up" in job.tail(), 10.0)
        assert job.members()
        folder = job.folder
    assert not job.members()
    assert not folder.exists()


@pytest.mark.parametrize("reserves", [0, 1])
def test_a_recovery_is_measured(reserves: int) -> None:
    """One job on our side, without a peer: the workers' events add up to a recovery."""
    code = (
        "import json, systems\n"
        f"found = systems.perdure(systems.Scenario(2, 'sigkill', 1, {reserves}, 'fast'))\n"
        "print(json.dumps(found))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    ((enter_ms, collective_ms),) = json.loads(done.stdout.splitlines()[-1])
    assert 0 < enter_ms <= collective_ms
