"""The pages for users say what the code does: tables are compared with it, paths exist, and the example runs."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import perdure
from perdure.protocol.exit_codes import ExitCode
from perdure.protocol.knobs import KNOBS, REFUSED, show
from perdure.protocol.settings import Settings
from perdure.protocol.settings_rules import LESS_THAN

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
TRAINER = (ROOT / "docs" / "trainer.md").read_text()
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()


def rows(page: str, columns: int) -> list[list[str]]:
    """The cells of every row of every table with so many columns, heads excepted."""
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    return [cells for cells in split if len(cells) == columns and cells[0].startswith("`")]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_the_table_of_knobs_is_what_the_command_line_says() -> None:
    wanted = [[f"`{knob.name}`", f"`{show(getattr(Settings(), knob.name))}`", knob.summary] for knob in KNOBS.values()]
    found = rows(CONFIGURATION, 4)
    assert [[row[0], row[1], row[3]] for row in found] == wanted
    assert [bool(row[2]) for row in found] == [knob.off for knob in KNOBS.values()]


def test_every_rule_between_knobs_is_on_the_page() -> None:
    chains = [code(chain) for line in CONFIGURATION.splitlines() if line[:3] == "- `" for chain in line.split(",")]
    pairs = {(names[i], later) for names in chains for i in range(len(names)) for later in names[i + 1 :]}
    assert {(smaller, larger) for smaller, larger, _ in LESS_THAN} <= pairs


def test_every_refused_name_is_on_the_page() -> None:
    assert [name for name in REFUSED if f"`{name}`" not in CONFIGURATION] == []


def test_the_table_of_exit_codes_is_the_enum() -> None:
    table = [(int(number), name) for number, name in re.findall(r"^\| (\d+) \| `(\w+)` \|", TRAINER, re.MULTILINE)]
    assert table == [(code.value, code.name) for code in ExitCode]


def test_the_table_of_round_has_all_that_it_offers() -> None:
    told = {name for cell in rows(TRAINER, 2) for name in (part.partition("(")[0] for part in code(cell[0]))}
    assert told == {name for name in dir(perdure.Round) if name[0] != "_"}


def test_the_table_of_hooks_has_all_that_resilient_takes() -> None:
    hooks = {
        name for name, each in inspect.signature(perdure.resilient).parameters.items() if each.kind.name[:2] == "KE"
    }
    assert {code(row[0])[0] for row in rows(TRAINER, 4)} == hooks


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    missing = [link for link in links if link and not (page.parent / link).exists()]
    paths = [word for word in code(text) if re.fullmatch(r"[\w./-]+/[\w.-]+\.py|[\w-]+/[\w/-]*/?", word)]
    known = [path for path in paths if path.split("/")[0] in {each.name for each in ROOT.iterdir()}]
    assert missing + [path for path in known if not (ROOT / path).exists()] == []


def test_the_batch_script_is_shown_as_it_is() -> None:
    script = (ROOT / "examples" / "slurm" / "job.sbatch").read_text()
    assert f"```bash\n{script}```\n" in (ROOT / "docs" / "slurm.md").read_text()


@pytest.mark.fault
def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(example.replace("train(200)", "print(train(3))"))
    command = [Path(sys.executable).with_name("perdure"), "run", "--nproc", "2", "--", sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tensor([-0.3000") == 2
