"""Every draft that a format can hold passes every gate in it, and comes back as it was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from coverings import gate_or_long
from export_toys import CASES, Case, Toys, assert_same_draft
from safetensors import safe_open

from draftworks.export.canonical import CanonicalDraft
from draftworks.export.exporting import ExportResult, export_draft
from draftworks.export.importing import import_draft


@dataclass(frozen=True)
class Export:
    """A draft in a format, with weights of that dtype."""

    case: Case
    dtype: str

    def __str__(self) -> str:
        """The test's id."""
        return f"{self.case}-{self.dtype}"


@dataclass(frozen=True)
class Exported:
    asked: Export
    toys: Toys
    draft: CanonicalDraft
    result: ExportResult


EXPORTS = [Export(case, dtype) for dtype in ("bfloat16", "float32") for case in CASES]


def has_a_tied_target(export: Export) -> bool:
    """One case of each format."""
    return export.case.tied


# A tensor that is not rounded shows in bfloat16 only. What is rounded against the wish shows in any case of a format.
@pytest.fixture(
    scope="module",
    ids=str,
    params=gate_or_long(EXPORTS, lambda export: export.dtype == "bfloat16" or has_a_tied_target(export)),
)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    asked, folder = request.param, tmp_path_factory.mktemp("exported")
    toys = asked.case.toys(folder)
    draft = toys.draft(asked.case.strategy, **asked.case.options)
    return Exported(asked, toys, draft, export_draft(draft, asked.case.format, folder / "out", asked.dtype))


def test_every_gate_passes(exported: Exported):
    assert [gate for gate in exported.result.gates if not gate.passed] == []
    assert len(exported.result.gates) == 11
    with safe_open(exported.result.path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        floating = {file.get_tensor(name).dtype for name in file.keys() if name not in ("d2t", "t2d")}  # noqa: SIM118
    assert floating == {getattr(torch, exported.asked.dtype)}


def test_what_was_exported_comes_back(exported: Exported, tmp_path: Path):
    case, draft = exported.asked.case, exported.draft
    imported = import_draft(exported.result.path, exported.toys.target, tmp_path / "imported")
    found = CanonicalDraft.load(tmp_path / "imported", exported.toys.target)
    assert_same_draft(found, draft, getattr(torch, exported.asked.dtype))
    assert found.config["options"] == draft.config["options"]
    assert (imported.format, imported.strategy) == (case.format, case.strategy)
    assert found.build_strategy().drafter() is not None
