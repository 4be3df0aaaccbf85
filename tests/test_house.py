"""The rules of the house that a tool can check: who may import whom, how long things get, what is packaged."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE_FOLDERS = ("bin", "checkpoint_io", "controller", "protocol", "worker_runtime")
CODE_FOLDERS = (*PACKAGE_FOLDERS, "tests", "examples", "benchmarks")

MAY_IMPORT = {
    "protocol": {"protocol"},
    "controller": {"controller", "protocol"},
    "worker_runtime": {"worker_runtime", "protocol", "checkpoint_io"},
    "checkpoint_io": {"checkpoint_io", "protocol"},
    "bin": {*PACKAGE_FOLDERS, "__version__"},
}

CORE_IMPORTS = frozenset({"msgspec"})
IMPURE = frozenset(
    {
        "asyncio",
        "concurrent",
        "datetime",
        "glob",
        "io",
        "logging",
        "multiprocessing",
        "os",
        "pathlib",
        "queue",
        "random",
        "secrets",
        "select",
        "selectors",
        "shutil",
        "socket",
        "sqlite3",
        "ssl",
        "subprocess",
        "tempfile",
        "threading",
        "time",
        "urllib",
        "uuid",
    }
)
"""Modules of the standard library that read a clock, do IO, or bring chance or threads: not for the core."""

FUNCTION_LINES = 60
FILE_LINES = 400
NESTING = 4
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


def files_of(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(path: Path) -> Iterator[str]:
    """Every module that `path` imports, by its full name; ours start with `perdure.`."""
    package = ["perdure", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from ..protocol import names` may name modules: the longer name is the one to judge.
            yield from (f"{module}.{alias.name}" for alias in node.names) if node.level else [module]


def test_folders_import_only_what_they_may() -> None:
    wrong: list[str] = []
    for path in files_of(*PACKAGE_FOLDERS):
        home = path.relative_to(ROOT).parts[0]
        for module in imports_of(path):
            first, _, rest = module.partition(".")
            if first == "perdure" and rest.split(".")[0] not in MAY_IMPORT[home]:
                wrong.append(f"{name_of(path)} imports {module}")
    assert wrong == []


def test_inside_the_package_imports_of_ours_are_relative() -> None:
    wrong: list[str] = []
    for path in files_of(*PACKAGE_FOLDERS):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("perdure."):
                wrong.append(f"{name_of(path)}:{node.lineno} from {node.module}")
    assert wrong == []


def test_the_core_is_pure() -> None:
    wrong: list[str] = []
    for path in files_of("controller/core"):
        for module in imports_of(path):
            first, _, rest = module.partition(".")
            ours = first == "perdure" and rest.startswith(("protocol", "controller.core"))
            pure = first in CORE_IMPORTS or (first in sys.stdlib_module_names and first not in IMPURE)
            if not ours and not pure:
                wrong.append(f"{name_of(path)} imports {module}")
    assert wrong == []


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_functions_are_short() -> None:
    wrong: list[str] = []
    for path in files_of(*CODE_FOLDERS):
        for function in functions_of(path):
            lines = (function.end_lineno or 0) - function.lineno + 1
            if lines > FUNCTION_LINES:
                wrong.append(f"{name_of(path)}:{function.lineno} {function.name} has {lines} lines")
    assert wrong == []


def test_files_are_short() -> None:
    counted = {name_of(path): len(path.read_text().splitlines()) for path in files_of(*CODE_FOLDERS)}
    assert {name: lines for name, lines in counted.items() if lines > FILE_LINES} == {}


def depth(node: ast.AST, around: int = 0) -> int:
    """How many blocks are inside each other; an `elif` stands beside its `if`, not in it."""
    deepest = around
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            is_elif = isinstance(node, ast.If) and field == "orelse" and isinstance(child, ast.If) and len(value) == 1
            inner = around + (isinstance(child, BLOCKS) and not is_elif)
            deepest = max(deepest, depth(child, inner))
    return deepest


def test_nesting_is_shallow() -> None:
    wrong: list[str] = []
    for path in files_of(*CODE_FOLDERS):
        for function in functions_of(path):
            if (levels := depth(function)) > NESTING:
                wrong.append(f"{name_of(path)}:{function.lineno} {function.name} is {levels} deep")
    assert wrong == []


def test_every_module_begins_with_what_it_is_for() -> None:
    wrong = [
        name_of(path) for path in files_of(*CODE_FOLDERS) if ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert wrong == []


def test_every_module_is_packaged() -> None:
    """A folder that pyproject.toml does not list is there in an editable install, and missing from the wheel."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    needed = {".".join(("perdure", *path.relative_to(ROOT).parent.parts)) for path in files_of(*PACKAGE_FOLDERS)}
    assert sorted(needed | {"perdure"}) == sorted(setuptools["packages"])
    bare = [
        name for name in needed if not (ROOT / name.replace(".", "/").removeprefix("perdure/") / "__init__.py").exists()
    ]
    assert bare == [], "folders without __init__.py"


def test_no_module_of_bin_has_a_name_of_the_standard_library() -> None:
    """Python puts a script's own folder first on its path: bin/inspect.py would replace the standard module."""
    assert {path.stem for path in files_of("bin")} & sys.stdlib_module_names == {"__init__"} & sys.stdlib_module_names


def loaded_by(code: str, *watched: str) -> list[str]:
    """Which of the modules `watched` a fresh interpreter has loaded after `code`."""
    script = f"{code}\nimport sys\nprint(*[name for name in {watched!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def test_importing_perdure_is_light() -> None:
    assert loaded_by("import perdure; perdure.__version__", "torch", "numpy", "trio", "zmq", "msgspec") == []


@pytest.mark.parametrize("folder", ["worker_runtime/agent", "controller", "protocol", "bin"])
def test_agent_controller_and_commands_never_import_torch(folder: str) -> None:
    """Torch costs seconds and hundreds of megabytes; only ranks pay that."""
    modules = [
        ".".join(("perdure", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for path in files_of(folder)
    ]
    assert loaded_by("\n".join(f"import {module}" for module in modules), "torch", "numpy") == []


def test_importing_the_runtime_does_not_import_torch() -> None:
    """The trainer decides when torch is imported; a reserve may wait with only what its program needs."""
    assert loaded_by("import perdure.worker_runtime", "torch", "numpy", "trio") == []


# The parts are joined here so that this file does not contain what it forbids.
FORBIDDEN = re.compile(
    "|".join(
        (
            "/wor" + "k/",
            "/op" + r"t/(?:wheels|pypi)",
            "/tmp/" + "(?:perdure/|bash_jobs)",
            "/roo" + "t/",
            r"pythonho" + r"sted|pyp" + r"i\.org|npmj" + r"s\.|deb\.debi" + "an",
            "[0-9]+ help" + "ers|other help" + "ers|sub-?ag" + "ent",
            "(?i:clau" + "de|anthro" + "pic|chatg" + "pt|copi" + "lot)",
            r"\bTO" + r"DO\b|\bFIX" + r"ME\b|\bX" + r"XX\b",
        )
    )
)


def tracked_files() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_machine_or_leaves_work_undone() -> None:
    wrong: list[str] = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if found := FORBIDDEN.search(line):
                wrong.append(f"{name_of(path)}:{number} {found[0]}")
    assert wrong == []


def test_constraints_pin_every_direct_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split(r"[\[<>=]", each)[0] for each in wanted}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0] for line in lines if line and not line.startswith("#")}
    assert pinned == names
