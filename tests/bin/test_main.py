"""The `perdure` command finds its subcommands."""

import subprocess
import sys
from pathlib import Path

import pytest

import perdure
from perdure.bin.main import COMMANDS, load, main
from perdure.protocol.exit_codes import ExitCode


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_module_and_a_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(load(name).main)
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: perdure {name}")


@pytest.mark.parametrize("words", [[], ["dance"], ["run", "--no-such-option"], ["--no-such-option"]])
def test_what_is_not_understood_is_a_usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == ExitCode.USAGE
    assert "usage: perdure" in capsys.readouterr().err


def test_the_installed_command_says_its_version() -> None:
    command = Path(sys.executable).with_name("perdure")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == f"perdure {perdure.__version__}\n"
