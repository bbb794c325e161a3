"""Defects as data: a text of a file of the product, and the text that a mistake would leave in its place."""

from __future__ import annotations

import ast
import hashlib
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Defect:
    """One change of one file that a user would suffer from.

    Attributes:
        id: words with hyphens.
        file: below the checkout.
        before, after: `before` is in the file exactly once.
        harm: what a user would suffer.
        origin: the subject of the commit that mended it (`fix: ...`), `survived an earlier trial`, or `made up`.
    """

    id: str
    file: str
    before: str
    after: str
    harm: str
    origin: str

    @property
    def room(self) -> str:
        """The room of the engine, or the folder beside it."""
        parts = Path(self.file).parts
        return parts[1] if parts[0] == "draftworks" else parts[0]

    @property
    def edit(self) -> str:
        """A digest of the change: a verdict of another change says nothing of this one."""
        return hashlib.sha256("\0".join((self.file, self.before, self.after)).encode()).hexdigest()[:12]

    def find_problem(self, root: Path) -> str | None:
        """Return why the defect cannot be planted in a checkout; None if it can."""
        path = root / self.file
        if not path.is_file():
            return f"{self.id}: {self.file} does not exist"
        text = path.read_text()
        if (count := text.count(self.before)) != 1:
            return f"{self.id}: expected `before` once in {self.file}, found it {count} times"
        try:
            planted = ast.dump(ast.parse(self.plant_in(text)))
        except SyntaxError as error:
            return f"{self.id}: {self.file} would not compile: {error}"
        return f"{self.id}: `after` says the same as `before`" if planted == ast.dump(ast.parse(text)) else None

    def plant_in(self, text: str) -> str:
        return text.replace(self.before, self.after)


def read_defects(tests: Path) -> list[Defect]:
    """Return the defects of `planted_defects/` and of the folders of strategies, in the order of names and lines."""
    names = {field.name for field in fields(Defect)}
    found: list[Defect] = []
    of_strategies = sorted(tests.glob("strategies/*/planted_defects.toml"))
    for path in (*sorted(tests.glob("planted_defects/*.toml")), *of_strategies):
        for entry in tomllib.loads(path.read_text())["defect"]:
            if set(entry) != names:
                raise ValueError(
                    f"{path.name}, {entry.get('id')}: expected the keys {sorted(names)}, found {sorted(entry)}"
                )
            found.append(Defect(**entry))
    return found
