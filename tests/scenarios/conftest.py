"""`pytest tests/scenarios --rewrite-scenarios` keeps what is played now as what is expected; read the difference."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-scenarios", action="store_true", help="write the results of tests/scenarios/*.txt anew")


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    # The option is not there when pytest starts in another folder than this one.
    return bool(request.config.getoption("--rewrite-scenarios", default=False))
