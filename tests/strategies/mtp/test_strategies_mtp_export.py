"""Exports of an MTP layer: gates, the names of the target's own files, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mtp_toys import KINDS, SHARD, mtp, save_tuned
from safetensors.torch import load_file

from draftworks.config.run_files import TargetFiles
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import ConfigError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.exporting import choose_formats, export_draft
from draftworks.export.importing import import_draft

MakeTarget = Callable[[str], TargetFiles]


@pytest.mark.parametrize("kind", KINDS)
def test_exports_pass_every_gate(kind: str, mtp_target: MakeTarget, tmp_path: Path):
    draft = save_tuned(mtp_target(kind), tmp_path / "draft", 0.01)
    choice = choose_formats(draft)
    assert list(choice.refused) == (["speculators_mtp"] if kind == "deepseek_v3" else [])
    for name in choice.chosen:
        result = export_draft(draft, name, tmp_path / name)
        assert result.passed, [gate for gate in result.gates if not gate.passed]


@pytest.mark.parametrize("kind", KINDS)
def test_an_untrained_layer_is_exported_as_it_was_read(kind: str, mtp_target: MakeTarget, tmp_path: Path):
    """The same names, shapes and bits as in the target's own file, but for DeepSeek's copies of embedding and head."""
    target = mtp_target(kind)
    export_draft(save_tuned(target, tmp_path / "draft", 0.0), "target_mtp", tmp_path / "out", "float32")
    stored, written = load_file(Path(target.model) / SHARD), load_file(tmp_path / "out" / "model.safetensors")
    copies = {name for name in stored if "embed_tokens" in name or "shared_head.head" in name}
    assert set(written) == set(stored) - copies
    assert all(torch.equal(written[name], stored[name]) for name in written)


def test_a_target_without_such_a_layer_is_refused(
    mtp_target: MakeTarget, tiny_target: TargetFiles, family_target: MakeTarget
):
    with pytest.raises(ConfigError, match="of type qwen3_next.*found llama. Choose another strategy"):
        mtp(TargetParts.load(tiny_target))
    with pytest.raises(ConfigError, match="it was published without one"):
        mtp(TargetParts.load(family_target("qwen3_5_text")))
    with pytest.raises(
        ConfigError, match=r"missing mtp.layers.0.input_layernorm.weight, .* and \d+ more; unknown none"
    ):
        mtp(TargetParts.load(family_target("qwen3_next")))
    with pytest.raises(ConfigError, match="expected a target with files"):
        mtp(replace(TargetParts.load(mtp_target("qwen3_next")), source=None))


def test_what_speculators_tuned_becomes_a_draft_here(mtp_target: MakeTarget, tmp_path: Path):
    target = mtp_target("qwen3_next")
    draft = save_tuned(target, tmp_path / "draft", 0.01)
    export_draft(draft, "speculators_mtp", tmp_path / "peer", "float32")
    imported = import_draft(tmp_path / "peer", target, tmp_path / "imported")
    assert imported.options == draft.options.model_dump(mode="json")
    found = CanonicalDraft.load(tmp_path / "imported", target).weights
    assert all(torch.equal(found[name], weight) for name, weight in draft.weights.items())
    with pytest.raises(ConfigError, match="a layer of other sizes than that of target qwen3_5_text"):
        import_draft(tmp_path / "peer", mtp_target("qwen3_5_text"), tmp_path / "other")
