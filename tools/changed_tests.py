"""Runs the tests of `make test` that are near what was changed: minutes before a commit, where all of them take a quarter of an hour.

    python -m tools.changed_tests [--since REVISION] [--list] [PYTEST_ARGUMENT ...]

For a file of the product these are the tests that are close to it by imports or name, and those of its room: what noticed all
planted defects. For a toy those that import it, for a test that file, for documents and entries their examples. Layout, words
and identities are always asked.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tools.planted_defects.judging import read_marks
from tools.planted_defects.stages import PRODUCT, ImportMap

ROOT = Path(__file__).resolve().parents[1]
ALWAYS = tuple(f"tests/house/test_house_{name}.py" for name in ("layout", "words", "identities", "golden_identities"))
OWN_STAGES = ("near", "close", "room")
DOCUMENTS = (".md", ".yaml", ".yml")


def list_changed_files(root: Path, since: str) -> list[str]:
    """Return the files that differ from a revision, or that git does not know yet, without deleted ones.

    Raises:
        subprocess.CalledProcessError: no such revision.
    """
    commands = [["diff", "--name-only", since], ["ls-files", "--others", "--exclude-standard"]]
    found = [
        subprocess.run(["git", *one], cwd=root, check=True, capture_output=True, text=True).stdout for one in commands
    ]
    return [name for name in dict.fromkeys("\n".join(found).splitlines()) if (root / name).is_file()]


def select_tests(root: Path, changed: Iterable[str]) -> list[str]:
    """Return the test files and folders to run for changed files, nearest first, each once."""
    imports = ImportMap(root)
    selected = (test for file in changed for test in _select(root, imports, Path(file)))
    found = [name for name in dict.fromkeys([*selected, *ALWAYS]) if (root / name).exists()]
    folders = {name for name in found if (root / name).is_dir()}
    return [name for name in found if not any(str(folder) in folders for folder in Path(name).parents)]


def _select(root: Path, imports: ImportMap, file: Path) -> Iterator[str]:
    top, inner = file.parts[0], file.parts[1:-1]
    if file.suffix == ".j2":  # a page, by the module of its name beside it
        file = file.with_name(f"{file.name.split('.')[0]}.py")
    if file.suffix == ".py" and top in PRODUCT:
        yield from (
            test for stage in imports.order_stages(str(file)) if stage.name in OWN_STAGES for test in stage.files
        )
    elif file.suffix == ".py" and top == "tests" and inner == ("toys",):
        yield from imports.list_importing_tests(str(file))
    elif top == "tests" and file.name.startswith("test_"):
        yield str(file)
    elif top == "tests" and file.name == "conftest.py":
        yield str(file.parent)
    elif top == "benchmarks":
        yield "tests/benchmarks"
    elif file.suffix in DOCUMENTS:
        yield "tests/docs"
    else:
        yield "tests/house"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", default="HEAD", help="revision that changes are looked for against, such as main")
    parser.add_argument("--list", action="store_true", help="print the tests' files only")
    known, rest = parser.parse_known_args(arguments)
    tests = select_tests(ROOT, list_changed_files(ROOT, known.since))
    if known.list:
        print("\n".join(tests))
        return 0
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-m", read_marks(ROOT / "Makefile"), *rest, *tests], cwd=ROOT
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
