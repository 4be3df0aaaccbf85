"""The environment of a job: NCCL's variables and versions, Slurm's."""

import pytest

from perdure.protocol.settings import OFF, Settings
from perdure.worker_runtime.environment_rules import Stack, judge, judge_process_group, observe

GOOD = {"TORCH_CPP_LOG_LEVEL": "error", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0", "NCCL_NVLS_ENABLE": "0"}
GPU = Stack(cuda=True, torch="2.13.0+cu130", nccl="2.28.9")


def test_a_job_without_cuda_needs_nothing() -> None:
    assert judge({}, Stack(torch="1.0"), Settings()) == []


@pytest.mark.parametrize("level", ["error", "ERROR", "fatal", "3"])
def test_a_good_nccl_environment(level: str) -> None:
    assert judge(GOOD | {"TORCH_CPP_LOG_LEVEL": level}, GPU, Settings()) == []


def test_an_empty_nccl_environment_breaks_three_rules_at_once() -> None:
    found = judge({}, GPU, Settings())
    assert [each.fix for each in found] == [
        "export TORCH_CPP_LOG_LEVEL=error",
        "export TORCH_NCCL_RETHROW_CUDA_ERRORS=0",
        "export NCCL_NVLS_ENABLE=0",
    ]
    assert found[0].given == "TORCH_CPP_LOG_LEVEL is not set"


@pytest.mark.parametrize(
    ("environ", "stack", "settings", "rule"),
    [
        ({"TORCH_CPP_LOG_LEVEL": "INFO"}, GPU, Settings(), "TORCH_CPP_LOG_LEVEL is error or fatal"),
        ({"TORCH_NCCL_RETHROW_CUDA_ERRORS": "1"}, GPU, Settings(), "TORCH_NCCL_RETHROW_CUDA_ERRORS is 0"),
        ({"NCCL_NVLS_ENABLE": "2"}, GPU, Settings(), "NCCL_NVLS_ENABLE is 0"),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "90"}, GPU, Settings(), "hard_timeout < TORCH_NCCL_HEARTBEAT"),
        ({}, GPU, Settings(hard_timeout=480.0, barrier_timeout=900.0), "hard_timeout < TORCH_NCCL_HEARTBEAT"),
        ({}, Stack(cuda=True, torch="2.7.1", nccl="2.28.9"), Settings(), "torch is 2.8 or newer"),
        ({}, Stack(cuda=True, torch="2.13.0", nccl="2.26.1"), Settings(), "NCCL is 2.26.2 or newer"),
        ({"SLURM_STEP_ID": "0", "SLURM_KILL_BAD_EXIT": "1"}, Stack(), Settings(), "srun does not kill the step when"),
        ({"SLURM_STEP_ID": "0", "SLURM_WAIT": "30"}, Stack(), Settings(), "srun does not kill the step some seconds"),
    ],
)
def test_each_rule(environ: dict[str, str], stack: Stack, settings: Settings, rule: str) -> None:
    (found,) = judge(GOOD | environ, stack, settings)
    assert found.rule.startswith(rule)
    assert found.given
    assert found.fix


@pytest.mark.parametrize(
    ("environ", "settings"),
    [
        ({"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "10"}, Settings()),
        ({}, Settings(hard_timeout=OFF)),
        ({"SLURM_KILL_BAD_EXIT": "1", "SLURM_WAIT": "30"}, Settings()),  # the batch script: no step, no task to kill
        ({"SLURM_STEP_ID": "0", "SLURM_KILL_BAD_EXIT": "0", "SLURM_WAIT": "0"}, Settings()),
    ],
)
def test_what_is_fine(environ: dict[str, str], settings: Settings) -> None:
    assert judge(GOOD | environ, GPU, settings) == []


def test_a_process_group_outlives_hard_timeout() -> None:
    assert judge_process_group(91, Settings()) == []
    assert judge_process_group(5, Settings(hard_timeout=OFF)) == []
    (found,) = judge_process_group(90, Settings())
    assert found.given == "hard_timeout = 90 s, process group timeout = 90 s"
    assert "timedelta(seconds=180)" in found.fix


@pytest.mark.parametrize(
    ("environ", "devices", "cuda"),
    [
        ({}, ["null", "nvidia0", "nvidiactl"], True),
        ({}, ["null", "nvidiactl"], False),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, ["nvidia0"], True),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["nvidia0"], False),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ["nvidia0"], False),
    ],
)
def test_whether_a_rank_can_see_a_gpu(environ: dict[str, str], devices: list[str], cuda: bool) -> None:
    stack = observe(environ, lambda: devices)
    assert stack.cuda is cuda
    assert stack.torch is not None
