"""Names of this code base's classes, and where they stand as words in a text."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("draftworks", "spec_assets", "jobs", "sensors", "resources", "registry", "deploy")
COMPOUND = re.compile(r"[A-Z]\w*[a-z0-9][A-Z]\w*")
"""A name that no English word is, such as `ReportScore`; `Report` could be one."""
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
CLASS = re.compile(r"^\s*class (\w+)", re.MULTILINE)
WORD = re.compile(r"(?<![\w./:#-])[A-Z]\w+")


def parse_rooms() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))}


@functools.cache
def list_class_names() -> frozenset[str]:
    """Return the compound names of all classes."""
    paths = (path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    names = (name for path in paths for name in CLASS.findall(path.read_text()))
    return frozenset(name for name in names if COMPOUND.fullmatch(name))


def find_own_names(text: str) -> set[str]:
    """Return the names of classes that stand in a text as words: outside code, and not part of a path."""
    return set(WORD.findall(CODE.sub("`", text))) & list_class_names()
