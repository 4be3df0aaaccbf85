"""Skips what this machine cannot run, with the reason; a test that needs something says so with a marker."""

import os
import shutil
import signal

import pytest

# torch asks the name server for the name of 127.0.0.1 whenever it connects to a store, and waits 5 s for an answer that
# was lost. Over TCP none is lost, and where there is no answer that is known at once.
os.environ.setdefault("RES_OPTIONS", "use-vc")


# A shell that starts this in the background has it ignore SIGINT, and so everything that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def missing() -> dict[str, str]:
    """Marker -> why its tests cannot run here."""
    reasons: dict[str, str] = {}
    if not os.environ.get("SLURM_CONF"):
        reasons["slurm"] = "no Slurm cluster: SLURM_CONF is not set"
    if os.geteuid() != 0:
        reasons["netns"] = "network namespaces need root"
    elif not shutil.which("ip"):
        reasons["netns"] = "network namespaces need the ip command (iproute2)"
    return reasons


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker, reason in missing().items():
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
