"""Imports of the drafts of each strategy: spellings of several trainers, keys with two meanings, tensors that may be missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_toys import FORMATS, Toys, assert_same_draft
from import_toys import (
    Config,
    Tensors,
    changed,
    having,
    layer,
    learn_embedding,
    nothing,
    projector,
    renamed,
    without,
)

from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import ConfigError, StoreError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.exporting import export_draft
from draftworks.export.importing import import_draft, recognise_format
from draftworks.strategies.eagle3.export_speculators import LAYERS

HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
BLOCKS = [name for name, strategy in FORMATS.items() if strategy in ("dflash", "domino", "dspark")]


def specforges_keys(config: Config) -> None:
    """Keys as SpecForge's first recipes write them: all inside `dflash_config`, under the class name of DFlash."""
    for key in (*HEADS, "sample_from_anchor"):
        del config[key]
    config["architectures"] = ["DFlashDraftModel"]


def deepspecs_keys(config: Config) -> None:
    """All keys at the top level, without those that mark a variant of DFlash."""
    inside = config.pop("dflash_config")
    config |= {"mask_token_id": inside["mask_token_id"], "target_layer_ids": inside["target_layer_ids"]}
    config |= {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
    del config["sample_from_anchor"]


def modelopts_keys(config: Config) -> None:
    specforges_keys(config)
    inside = config["dflash_config"]
    del inside["enable_confidence_head"], inside["confidence_head_with_markov"]
    inside |= {"use_confidence_head": True, "shift_label": True, "causal": False}


def modelopts_names(tensors: Tensors) -> None:
    renamed("markov_head.", "")(tensors)
    renamed("confidence_head.proj.", "confidence_proj.")(tensors)


def copies_of_the_targets(tensors: Tensors, toys: Toys) -> None:
    parts = TargetParts.load(toys.target)
    tensors |= {"embed_tokens.weight": parts.embedding.clone(), "lm_head.weight": parts.head.clone()}


def beside_dflash_config(config: Config) -> None:
    for key in ("projector_type", "shift_label", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim"):
        config[key] = config["dflash_config"].pop(key)


def specforges_class(config: Config) -> None:
    config["architectures"] = ["DominoDraftModel"]
    config["emb_dim"] = config["dflash_config"]["emb_dim"]
    del config["dflash_config"]["projector_type"]


PEERS: dict[str, tuple[str, Callable[[Tensors, Toys], Any], Callable[[Config], Any]]] = {
    "Domino, SpecForge": ("zlab_domino", lambda t, toys: renamed("", "model.")(t), specforges_class),
    "Domino, its keys at the top": ("zlab_domino", lambda t, toys: renamed("", "model.")(t), beside_dflash_config),
    "SpecForge": ("zlab_dspark", lambda t, toys: None, specforges_keys),
    "DeepSpec": ("zlab_dspark", copies_of_the_targets, deepspecs_keys),
    "ModelOpt": ("zlab_dspark", lambda t, toys: modelopts_names(t), modelopts_keys),
    "below model": ("zlab_dspark", lambda t, toys: renamed("", "model.")(t), nothing),
    "as SGLang fills it in": (
        "zlab_dspark",
        lambda t, toys: None,
        lambda c: [where.pop(key) for where in (c, c["dflash_config"]) for key in HEADS[2:]],
    ),
}


@pytest.mark.parametrize("name", PEERS)
def test_a_draft_of_another_trainer_is_the_same_here(toys: Toys, tmp_path: Path, name: str):
    source, tensors, config = PEERS[name]
    foreign = changed(toys.folder / source, tmp_path / "foreign", lambda t: tensors(t, toys), config)
    imported = import_draft(foreign, toys.target, tmp_path / "imported")
    own = toys.folder / FORMATS[source]
    expected, found = (CanonicalDraft.load(folder, toys.target) for folder in (own, imported.folder))
    assert (imported.format, imported.strategy) == (source, FORMATS[source])
    assert_same_draft(found, expected)
    assert found.options.select_structural() == expected.options.select_structural()


def test_a_draft_that_sglang_does_not_take_can_still_be_imported(toys: Toys, tmp_path: Path):
    bare = toys.draft("dspark", name="bare", markov_rank=0, confidence_with_markov=False)
    export_draft(bare, "speculators_dspark", tmp_path / "exported", "float32")
    imported = import_draft(changed(tmp_path / "exported", tmp_path / "foreign"), toys.target, tmp_path / "imported")
    found = CanonicalDraft.load(imported.folder, toys.target)
    assert_same_draft(found, bare)
    with pytest.raises(ConfigError, match="markov_rank 0: SGLang.*exported as speculators_dspark"):
        export_draft(found, "zlab_dspark", tmp_path / "refused")


@pytest.mark.parametrize("name", BLOCKS)
def test_no_strategy_built_on_dflash_is_taken_for_another(toys: Toys, tmp_path: Path, name: str):
    source = changed(toys.folder / name, tmp_path / "foreign")
    imported = import_draft(source, toys.target, tmp_path / "imported")
    assert (imported.format, imported.strategy) == (name, FORMATS[name])


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ({}, "zlab_dflash"),
        ({"dflash_config": {"projector_type": "domino"}}, "zlab_domino"),
        ({"dflash_config": {"projector_type": "domino", "markov_rank": 8}}, "zlab_domino"),
        ({"dflash_config": {"projector_type": "dspark"}}, "zlab_dspark"),
        ({"projector_type": "dspark"}, "zlab_dspark"),
        ({"dflash_config": {"markov_rank": 8}}, "zlab_dspark"),
        ({"markov_rank": 8}, "zlab_dspark"),
        ({"markov_rank": None}, "zlab_dflash"),
        ({"dflash_config": {"projector_type": "lilicorr", "markov_rank": 8}}, "zlab_dflash"),
        ({"architectures": ["DominoDraftModel"], "markov_rank": 8}, "zlab_domino"),
        ({"architectures": ["DSparkDraftModel"]}, "zlab_dspark"),
        ({"architectures": ["Qwen3DSparkModel"]}, "zlab_dspark"),
        ({"architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark"}, "speculators_dspark"),
        ({"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash"}, "speculators_dflash"),
    ],
)
def test_the_marks_of_a_strategy_decide_whose_it_is(marks: dict[str, Any], expected: str):
    """Recognition comes first; whether the draft can be imported is decided later."""
    config = {"architectures": ["DFlashDraftModel"], **marks}
    assert recognise_format(Path("peer"), config).name == expected


@pytest.mark.parametrize("name", ["zlab_dflash", "zlab_domino", "zlab_dspark"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_swa", True),
        ("causal", True),
        ("attention_value_scale", 0.5),
        ("output_multiplier", 2.0),
        ("final_logit_softcapping", 30.0),
    ],
)
def test_keys_by_which_servers_compute_something_else_are_refused(
    toys: Toys, tmp_path: Path, name: str, key: str, value: Any
):
    source = changed(toys.folder / name, tmp_path / "foreign", config=lambda c: c["dflash_config"].update({key: value}))
    with pytest.raises(ConfigError, match=f"{key} {value}"):
        import_draft(source, toys.target, tmp_path / "imported")


def test_a_draft_that_no_server_takes_can_still_be_imported(toys: Toys, tmp_path: Path):
    source = changed(toys.folder / "zlab_domino", tmp_path / "foreign", config=projector(pure_draft_prefix_len=0))
    imported = import_draft(source, toys.target, tmp_path / "imported")
    assert imported.options["pure_draft_prefix_len"] == 0
    with pytest.raises(ConfigError, match="pure_draft_prefix_len 0"):
        export_draft(CanonicalDraft.load(imported.folder, toys.target), "zlab_domino", tmp_path / "exported")


FORMAT, EMBEDDING = "speculators_peagle", "embed_tokens.weight"


def imported(toys: Toys, source: Path, folder: Path) -> CanonicalDraft:
    return CanonicalDraft.load(import_draft(source, toys.target, folder).folder, toys.target)


def test_a_trained_embedding_is_imported(toys: Toys, tmp_path: Path):
    source = changed(toys.folder / FORMAT, tmp_path / "foreign")
    found, target = imported(toys, source, tmp_path / "imported"), TargetParts.load(toys.target)
    assert found.options.train_embeddings
    assert not torch.allclose(found.weights[EMBEDDING], target.embedding.float(), atol=0.1)
    assert_same_draft(found, CanonicalDraft.load(toys.folder / "peagle", toys.target))
    assert export_draft(found, FORMAT, tmp_path / "again", "float32").passed


def test_the_window_that_speculators_trains_by_default_goes_out_and_comes_in(toys: Toys, tmp_path: Path):
    draft = toys.draft("peagle", name="windowed-draft", sliding_window=9)
    assert export_draft(draft, FORMAT, tmp_path / "out", "float32").passed
    config = json.loads((tmp_path / "out" / "config.json").read_text())[LAYERS]
    assert (config["layer_types"], config["sliding_window"]) == (["sliding_attention"] * 2, 9)
    found = imported(toys, tmp_path / "out", tmp_path / "imported")
    assert found.options.sliding_window == 9
    assert_same_draft(found, draft)


def test_an_embedding_that_was_not_trained_stays_the_targets(toys: Toys, tmp_path: Path):
    source = changed(toys.folder / "shared", tmp_path / "foreign")
    found = imported(toys, source, tmp_path / "imported")
    assert not found.options.train_embeddings
    assert EMBEDDING not in found.weights
    assert_same_draft(found, CanonicalDraft.load(toys.folder / "shared-draft", toys.target))


@pytest.mark.parametrize(
    "config",
    [
        having(norm_output=True),  # would be fed to a next pass, and there is none
        having(target_hidden_size=16),
        without("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad"),
        layer(layer_types=["full_attention"] * 2),
    ],
    ids=["next-pass", "width-said", "defaults", "layers-without-windows"],
)
def test_keys_that_change_nothing_are_optional(toys: Toys, tmp_path: Path, config: Callable[[Config], None]):
    found = imported(toys, changed(toys.folder / FORMAT, tmp_path / "foreign", config=config), tmp_path / "imported")
    expected = CanonicalDraft.load(toys.folder / "peagle", toys.target)
    assert_same_draft(found, expected)
    assert found.options.select_structural() == expected.options.select_structural()


def test_an_eagle3_draft_cannot_bring_an_embedding_of_its_own(toys: Toys, tmp_path: Path):
    source = changed(
        toys.folder / "speculators_eagle3", tmp_path / "foreign", learn_embedding, having(embed_requires_grad=True)
    )
    with pytest.raises(StoreError, match="by its config.json the draft has none of its own"):
        import_draft(source, toys.target, tmp_path / "imported")


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
