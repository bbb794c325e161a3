"""`norm_output` of EAGLE-3 drafts in SGLang's layout: two trainers give it two meanings, and an import reports which it used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from export_toys import Toys
from test_export_importing import changed, having, nothing

from draftworks.export.canonical import CanonicalDraft
from draftworks.export.exporting import export_draft
from draftworks.export.importing import import_draft


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    """A target, and an export of a plain draft in fp32."""
    made = Toys.make(tmp_path_factory.mktemp("meanings"))
    export_draft(made.draft("eagle3"), "sglang_eagle3", made.folder / "sglang_eagle3", "float32")
    return made


MEANINGS = [
    (None, None, {}),
    (True, None, {}),
    (False, None, {"norm_output": False}),
    (True, "specforge", {}),
    (True, "sglang", {"feedback": "post_norm"}),
    (False, "sglang", {}),
]


@pytest.mark.parametrize(("said", "means", "options"), MEANINGS)
def test_norm_output_is_what_specforge_means_unless_it_is_said_to_be_sglangs(
    toys: Toys, tmp_path: Path, said: bool | None, means: str | None, options: dict[str, Any]
):
    config = nothing if said is None else having(norm_output=said)
    source = changed(toys.folder / "sglang_eagle3", tmp_path / "foreign", config=config)
    imported = import_draft(source, toys.target, tmp_path / "imported", means)
    changes = {"norm_output": True, "feedback": "pre_norm"} | options
    assert {name: imported.options[name] for name in changes} == changes
    record = CanonicalDraft.load(tmp_path / "imported", toys.target).record
    assert record.provenance.get("remarks", []) == list(imported.remarks)
    if said is None:
        assert not imported.remarks
    else:
        assert f"norm_output: {str(said).lower()} was read as {'SGLang' if means == 'sglang' else 'SpecForge'}" in str(
            imported.remarks
        )


def test_a_trained_norm_that_nothing_should_read_is_reported(toys: Toys, tmp_path: Path):
    trained = changed(toys.folder / "sglang_eagle3", tmp_path / "trained", config=having(norm_output=False))
    untouched = changed(trained, tmp_path / "untouched", lambda t: t["norm.weight"].fill_(1))
    told = [
        import_draft(source, toys.target, tmp_path / f"{source.name}-in").remarks for source in (trained, untouched)
    ]
    assert ["although norm.weight is not 1" in str(remarks) for remarks in told] == [True, False]


def test_our_own_older_exports_say_norm_output_as_sglang_does(toys: Toys, tmp_path: Path):
    draft = toys.draft("eagle3", name="older", fc_norm=True)
    export_draft(draft, "sglang_eagle3", tmp_path / "export", "float32")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert "norm_output" not in config
    (tmp_path / "export" / "config.json").write_text(json.dumps(config | {"norm_output": False}))
    imported = import_draft(tmp_path / "export", toys.target, tmp_path / "imported")
    assert (imported.options["norm_output"], imported.options["feedback"]) == (True, "pre_norm")
