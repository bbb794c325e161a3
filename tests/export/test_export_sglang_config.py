"""SGLang's configuration class accepts every export in its formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from export_toys import FORMATS, HIDDEN, VOCAB, Toys
from judge_process import PeerJudge

from draftworks.export.exporting import export_draft

ARCHITECTURES = {
    "sglang_eagle3": "LlamaForCausalLMEagle3",
    "zlab_dflash": "DFlashDraftModel",
    "zlab_dflash2": "DFlash2DraftModel",
    "zlab_domino": "DFlashDraftModel",
    "zlab_dspark": "DSparkDraftModel",
    "sglang_lilicorr": "LiLiCorrDraftModel",
}
LAYERS = {"sglang_eagle3": 1}
"""Of blocks two; see `export_toys`."""


@pytest.mark.sglang
def test_the_server_reads_every_export_as_the_draft_is(sglang_judge: PeerJudge, tmp_path: Path):
    toys = Toys.make(tmp_path)
    for name in ARCHITECTURES:
        export_draft(toys.draft(FORMATS[name], name=f"draft-{name}"), name, tmp_path / name, "bfloat16")
    said = sglang_judge.ask("config", [tmp_path / name for name in ARCHITECTURES])
    found = dict(zip(ARCHITECTURES, said, strict=True))
    for name, architecture in ARCHITECTURES.items():
        assert found[name] == {
            "architecture": architecture,
            "hidden_size": HIDDEN,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "num_hidden_layers": LAYERS.get(name, 2),
            "vocab_size": VOCAB,
            "dtype": "bfloat16",
            "context_len": 64,
        }


@pytest.mark.sglang
def test_what_no_server_loads_is_refused_by_its_class_too(sglang_judge: PeerJudge, tmp_path: Path):
    """Shows that the judge does not accept every configuration."""
    toys = Toys.make(tmp_path)
    export_draft(toys.draft("eagle3"), "sglang_eagle3", tmp_path / "out", "bfloat16")
    sound = json.loads((tmp_path / "out" / "config.json").read_text())
    spoilt = {"architecture": {"architectures": ["NoSuchDraft"]}, "type": {"model_type": "no_such_model"}}
    for name, change in spoilt.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**sound, **change}))
    architecture, kind = sglang_judge.ask("config", [tmp_path / name for name in spoilt])
    assert "refused" in kind
    assert architecture.get("architecture") != "LlamaForCausalLMEagle3"  # it falls back to transformers' code
