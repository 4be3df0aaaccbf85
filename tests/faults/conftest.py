"""Every test in this folder breaks real processes, and every job must leave nothing behind."""

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from .harness import Job

HERE = Path(__file__).parent
PASSED = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.fault)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.fixture
def launch(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Job]]:
    """Starts jobs: `launch(source, nproc=3, **knobs)`, see `Job`.

    When a test has passed, nothing of them may be left.
    """
    jobs: list[Job] = []

    def start(source: str = "run()", **options: Any) -> Job:
        job = Job(tmp_path / f"job{len(jobs)}", source, **options)
        jobs.append(job)
        return job.start()

    try:
        yield start
        for job in jobs if request.node.stash.get(PASSED, False) else ():
            assert all(process.poll() is not None for process in job.processes()), "the test left its job running"
            job.assert_nothing_left()
    finally:
        for job in jobs:
            job.kill_everything()
