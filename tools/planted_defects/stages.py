"""Which tests are asked about a module, nearest first.

Those of its room that are named after it or close to it by imports, a few of other rooms that are as close, the rest of its
room, then the rooms that import it, one by one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PRODUCT = ("draftworks", "spec_assets", "resources", "jobs", "sensors")
CLOSE_STEPS, CLOSE_FILES = 2, 12
"""Test files that are asked before the rest of the own room: by steps of imports, and of other rooms how many at most."""
_FOLDERS = {"mooncake": "mooncake_room", "sglang": "sglang_room"}
"""Rooms whose tests would shadow a library of the same name."""


@dataclass(frozen=True)
class Stage:
    """Test files that are run together."""

    name: str
    files: list[str]


class ImportMap:
    """Who imports what in a checkout: product, toys and tests, by the text of their imports."""

    def __init__(self, root: Path) -> None:
        self._root = root
        paths = [path for folder in (*PRODUCT, "tests") for path in sorted((root / folder).rglob("*.py"))]
        self._modules = {self._name_module(path): path for path in paths}
        self._importers: dict[str, set[str]] = {}
        for module, path in self._modules.items():
            for name in _list_imports(path) & set(self._modules):
                self._importers.setdefault(name, set()).add(module)

    def order_stages(self, file: str) -> list[Stage]:
        """Return the stages for a file of the product; each test file is in one stage at most."""
        distances = self._measure_distances(self._name_module(self._root / file))
        room = _find_room(Path(file))
        tests = self._list_tests(distances)
        own = [path for path in tests if _find_room(Path(path)) == room]
        near = [path for path in own if tests[path] <= CLOSE_STEPS]
        near = list(dict.fromkeys([*self._list_mirrors(Path(file)), *near]))
        close = [path for path in tests if path not in own and tests[path] <= CLOSE_STEPS][:CLOSE_FILES]
        stages = [Stage("near", near), Stage("close", close), Stage("room", self._add_rest(room, own, near))]
        for other in self._order_rooms(distances, room):
            reached = [path for path in tests if _find_room(Path(path)) == other]
            stages.append(Stage(other, self._add_rest(other, reached, close)))
        return [stage for stage in stages if stage.files]

    def list_importing_tests(self, file: str) -> list[str]:
        """Return the test files that reach a file by imports, nearest first."""
        return list(self._list_tests(self._measure_distances(self._name_module(self._root / file))))

    def _name_module(self, path: Path) -> str:
        """Return the dotted name; of toys, which lie on the path of imports, the last part."""
        parts = path.relative_to(self._root).with_suffix("").parts
        if parts[:2] == ("tests", "toys"):
            parts = parts[2:]
        return ".".join(parts).removesuffix(".__init__")

    def _measure_distances(self, module: str) -> dict[str, int]:
        """Return the modules that reach a module by imports, with the number of steps; nearest first."""
        distances, edge, steps = {module: 0}, [module], 0
        while edge:
            edge = sorted({each for name in edge for each in self._importers.get(name, ()) if each not in distances})
            steps += 1
            distances.update(dict.fromkeys(edge, steps))
        return distances

    def _list_tests(self, distances: dict[str, int]) -> dict[str, int]:
        """Return the test files among the modules, with their distance, nearest first."""
        found = {str(self._modules[name].relative_to(self._root)): steps for name, steps in distances.items()}
        return {path: steps for path, steps in found.items() if _is_test(Path(path))}

    def _list_mirrors(self, file: Path) -> list[str]:
        """Return the test files that are named as the file is, then those of the folder that mirrors its folder."""
        room = _find_room(file)
        folder = self._root / "tests" / _FOLDERS.get(room, room)
        named = sorted(folder.rglob(f"test_*_{file.stem}.py"))
        inner = file.parts[2:-1] if file.parts[0] == "draftworks" else file.parts[1:-1]
        mirrored = sorted(folder.joinpath(*inner).rglob("test_*.py")) if inner else []
        return list(dict.fromkeys(str(path.relative_to(self._root)) for path in [*named, *mirrored]))

    def _add_rest(self, room: str, first: Iterable[str], without: Iterable[str]) -> list[str]:
        """Return the test files of a room, those of `first` before the others."""
        folder = self._root / "tests" / _FOLDERS.get(room, room)
        every = [str(path.relative_to(self._root)) for path in sorted(folder.rglob("test_*.py"))]
        left_out = set(without)
        return [path for path in dict.fromkeys([*first, *every]) if path not in left_out]

    def _order_rooms(self, distances: dict[str, int], own: str) -> list[str]:
        """Return the other rooms with a module that reaches this one, nearest first."""
        product = [self._modules[name].relative_to(self._root) for name in distances]
        rooms = dict.fromkeys(_find_room(path) for path in product if path.parts[0] in PRODUCT)
        return [room for room in rooms if room != own]


def _find_room(path: Path) -> str:
    parts = path.parts
    if parts[0] == "tests":
        return next((room for room, folder in _FOLDERS.items() if folder == parts[1]), parts[1])
    return parts[1] if parts[0] == "draftworks" else parts[0]


def _is_test(path: Path) -> bool:
    return path.parts[0] == "tests" and path.name.startswith("test_")


def _list_imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names
