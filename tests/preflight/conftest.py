"""A small registry around the tiny target, in which each test breaks one thing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftworks.preflight.examine import examine_entry
from draftworks.programs.start import shorten_paths
from draftworks.storage.identity import FileDigests
from draftworks.targets.fitted_defaults import Machine
from draftworks.targets.registry import Registry

CHATS = [
    {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n} indeed."}]}
    for n in range(30)
]

LONGEST_FINDING = 200


@dataclass(frozen=True)
class Checked:
    errors: list[str]
    warnings: list[str]
    notes: list[str]


@dataclass(frozen=True)
class Fleet:
    """One target, `small`, whose entry, data and files a test may change."""

    root: Path
    tiny_folder: Path

    @property
    def registry(self) -> Registry:
        return Registry(self.root / "registry")

    @property
    def chats(self) -> Path:
        return self.root / "registry" / "chats.jsonl"

    def write(self, **entry: Any) -> None:
        small = {
            "model": str(self.tiny_folder),
            "dataset": "chats",
            "max_length": 96,
            "responses": {"max_new_tokens": 24},
        }
        strategies = {"eagle3": {"options": {"ttt_length": 2, "draft_vocab_size": 64}}}
        path = self.root / "registry" / "targets" / "small.yaml"
        path.write_text(yaml.safe_dump({**small, "strategies": strategies, **entry}))

    def write_rows(self, rows: list[dict[str, Any]]) -> None:
        self.chats.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def own_model(self) -> Path:
        """A copy of the model's folder, as the entry's."""
        copy = self.root / "model"
        shutil.copytree(self.tiny_folder, copy)
        self.write(model=str(copy))
        return copy

    def require_short(self, text: str) -> None:
        """Whatever is found has to be one line that fits two of a terminal, with the paths of a project."""
        shown = shorten_paths(text, self.root / "registry").replace(str(self.tiny_folder), "registry/models/tiny")
        assert len(shown.replace(str(self.root), "")) <= LONGEST_FINDING, shown

    def check(self) -> Checked:
        found = examine_entry("small", self.registry, FileDigests())
        for one in found:
            self.require_short(one.text)
        of = {kind: [one.text for one in found if one.severity == kind] for kind in ("error", "warning", "note")}
        return Checked(of["error"], of["warning"], of["note"])


@pytest.fixture
def fleet(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """On a machine whose processor has bfloat16 instructions, so that no default depends on the one that tests run on."""
    monkeypatch.setattr("draftworks.targets.fitted_defaults.read_machine", lambda: Machine(0, False, True))
    for folder in ("targets", "datasets", "evals"):
        (tmp_path / "registry" / folder).mkdir(parents=True)
    (tmp_path / "registry" / "datasets" / "chats.yaml").write_text("files: [chats.jsonl]\n")
    made = Fleet(tmp_path, tiny_folder)
    made.write()
    made.write_rows(CHATS)
    return made


Spoil = Callable[[Fleet], Any]
