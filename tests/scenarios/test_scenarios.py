"""Restart rounds as people read them: each *.txt beside this file is played, and must still read the same."""

from pathlib import Path

import pytest

from .theatre import Theatre

FOLDER = Path(__file__).resolve().parent
SCENARIOS = sorted(path.stem for path in FOLDER.glob("*.txt"))


def split(text: str) -> tuple[str, list[tuple[str, str]]]:
    """The heading, and the blocks: commands and result."""
    heading, *blocks = text.strip().split("\n\n")
    found = [block.partition("\n----")[::2] for block in blocks]
    return heading, [(commands, result.strip("\n")) for commands, result in found]


def play(text: str) -> str:
    heading, blocks = split(text)
    theatre = Theatre()
    played = [f"{commands}\n----\n{theatre.play(commands)}".rstrip() for commands, _ in blocks]
    return "\n\n".join([heading, *played]) + "\n"


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, rewrite: bool) -> None:
    path = FOLDER / f"{name}.txt"
    before = path.read_text()
    now = play(before)
    if rewrite:
        path.write_text(now)
    else:
        assert now == before, "it reads otherwise now; if that is right: pytest tests/scenarios --rewrite-scenarios"


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 8
