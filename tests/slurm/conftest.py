"""Each test here has jobs on a real Slurm cluster, and leaves no process of theirs behind."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .harness import SlurmJob

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Callable[..., SlurmJob]]:
    """Submits jobs, see `SlurmJob.submit`."""
    jobs: list[SlurmJob] = []

    def start(*command: str, **options: Any) -> SlurmJob:
        job = SlurmJob(tmp_path / f"job{len(jobs)}")
        job.folder.mkdir()
        jobs.append(job)
        return job.submit(*command, **options)

    yield start
    for job in jobs:
        job.clean_up()
