"""`pytest tests/scenarios --rewrite-scenarios` writes down what is played now; read the difference before keeping it."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-scenarios", action="store_true", help="write the results of tests/scenarios/*.txt anew")


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--rewrite-scenarios"))
