"""What is checked of a process group that was just made. NCCL needs a device, so a stand-in speaks for its group."""

import math
import warnings
from datetime import timedelta
from types import SimpleNamespace

import pytest

from perdure.protocol.settings_rules import ConfigurationError
from perdure.worker_runtime.torch_hooks import check_nccl_timeout

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch tells of other packages when it is imported
    import torch


class ProcessGroupNCCL:
    def __init__(self, timeout_s: float) -> None:
        self.options = SimpleNamespace(_timeout=timedelta(seconds=timeout_s))


class Group:
    def __init__(self, timeout_s: float) -> None:
        self._backend = ProcessGroupNCCL(timeout_s)

    def _get_backend(self, device: torch.device) -> ProcessGroupNCCL:
        assert device.type == "cuda"
        return self._backend


@pytest.mark.parametrize("timeout_s", [30, 90])
def test_an_nccl_group_that_gives_up_first_is_refused(timeout_s: float) -> None:
    with pytest.raises(ConfigurationError, match="hard_timeout"):
        check_nccl_timeout((Group(timeout_s), None), 90.0)


def test_an_nccl_group_that_waits_longer_is_fine() -> None:
    check_nccl_timeout((Group(91), None), 90.0)
    check_nccl_timeout(Group(5), math.inf)
