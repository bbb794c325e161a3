"""Imports of DSpark drafts in the spellings of several trainers; other drafts with DFlash's tensors are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_toys import FORMATS, HIDDEN, VOCAB, Toys, assert_same_draft
from test_export_importing import Config, Tensors, changed, nothing, renamed

from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import ConfigError, DraftworksError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.exporting import export_draft
from draftworks.export.importing import import_draft, recognise_format

HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
BLOCKS = [name for name, strategy in FORMATS.items() if strategy in ("dflash", "domino", "dspark")]


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    """A target, a draft with a gated head, its exports in fp32, and those of plain drafts of the others."""
    made = Toys.make(tmp_path_factory.mktemp("importing"))
    gated = made.draft("dspark", markov_head_type="gated")
    for name in BLOCKS:
        draft = gated if FORMATS[name] == "dspark" else made.draft(FORMATS[name], name=FORMATS[name])
        export_draft(draft, name, made.folder / name, "float32")
    return made


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


PEERS: dict[str, tuple[Callable[[Tensors, Toys], Any], Callable[[Config], Any]]] = {
    "SpecForge": (lambda t, toys: None, specforges_keys),
    "DeepSpec": (copies_of_the_targets, deepspecs_keys),
    "ModelOpt": (lambda t, toys: modelopts_names(t), modelopts_keys),
    "below model": (lambda t, toys: renamed("", "model.")(t), nothing),
    "as SGLang fills it in": (
        lambda t, toys: None,
        lambda c: [where.pop(key) for where in (c, c["dflash_config"]) for key in HEADS[2:]],
    ),
}


@pytest.mark.parametrize("name", PEERS)
def test_a_draft_of_another_trainer_is_the_same_here(toys: Toys, tmp_path: Path, name: str):
    tensors, config = PEERS[name]
    source = changed(toys.folder / "zlab_dspark", tmp_path / "foreign", lambda t: tensors(t, toys), config)
    imported = import_draft(source, toys.target, tmp_path / "imported")
    expected, found = (CanonicalDraft.load(folder, toys.target) for folder in (toys.folder / "draft", imported.folder))
    assert (imported.format, imported.strategy) == ("zlab_dspark", "dspark")
    assert_same_draft(found, expected)
    assert found.options.select_structural() == expected.options.select_structural()


def heads(**values: Any) -> Callable[[Config], Any]:
    """Return a function that sets keys both in `dflash_config` and beside it."""
    return lambda config: [where.update(values) for where in (config, config["dflash_config"])]


def having(**values: Any) -> Callable[[Config], Any]:
    return lambda config: config.update(values)


def other_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = torch.ones(VOCAB, HIDDEN)


def without_markov(tensors: Tensors) -> None:
    """Without the columns of the confidence head for the Markov embedding too."""
    for name in [name for name in tensors if name.startswith("markov_head.")]:
        del tensors[name]
    tensors["confidence_head.proj.weight"] = tensors["confidence_head.proj.weight"][:, :HIDDEN].contiguous()


REFUSED: dict[str, tuple[str, Callable[[Tensors], Any], Callable[[Config], Any], str]] = {
    "another first place": (
        "zlab_dspark",
        nothing,
        having(sample_from_anchor=False),
        "sample_from_anchor: false: DSpark",
    ),
    "another first place, ModelOpt": ("zlab_dspark", nothing, heads(shift_label=False), "shift_label: false: DSpark"),
    "another first place, speculators": (
        "speculators_dspark",
        nothing,
        having(sample_from_anchor=False),
        "sample_from_anchor: false: DSpark drafts here propose from the anchor",
    ),
    "reduced": ("zlab_dspark", nothing, having(draft_vocab_size=24), "draft_vocab_size 24 of 40: dspark"),
    "reduced, speculators": ("speculators_dspark", nothing, having(draft_vocab_size=24), "draft_vocab_size 24 of 40"),
    "two ranks": ("zlab_dspark", nothing, having(markov_rank=9), "markov_rank 6, but 9 beside dflash_config"),
    "no rank": ("zlab_dspark", nothing, heads(markov_rank=None), "markov_rank is missing"),
    "an unknown head": (
        "zlab_dspark",
        nothing,
        heads(markov_head_type="lstm"),
        "markov_head_type: expected one of vanilla, gated, rnn, found 'lstm'",
    ),
    "a rank in words": (
        "zlab_dspark",
        nothing,
        heads(markov_rank="6"),
        "markov_rank: expected an integer from 0, found '6'",
    ),
    "another head": (
        "zlab_dspark",
        nothing,
        heads(markov_head_type="rnn"),
        r"missing tensors: markov_head\.joint_proj",
    ),
    "a confidence of nothing": (
        "speculators_dspark",
        without_markov,
        having(markov_rank=0, markov_head_type="vanilla"),
        "markov_rank 0 leaves no Markov embedding",
    ),
    "no confidence": (
        "zlab_dspark",
        lambda t: t.pop("confidence_head.proj.bias"),
        nothing,
        r"missing tensors: confidence_head\.proj\.bias",
    ),
    "a head of its own": ("zlab_dspark", other_head, nothing, r"lm_head\.weight differs from the target's"),
    "causal": ("zlab_dspark", nothing, having(is_causal=True), "is_causal True: in drafts here"),
    "interleaved rope": ("zlab_dspark", nothing, having(rope_is_neox_style=False), "rope_is_neox_style False"),
    "the embeddings": (
        "zlab_dspark",
        nothing,
        lambda c: c["dflash_config"].update(target_layer_ids=[-1, 1, 4]),
        r"expected ascending integers from 0, found \[-1, 1, 4\]",
    ),
    "more than DSpark": ("zlab_dspark", nothing, heads(emb_dim=7), "emb_dim: a draft of another strategy"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_draft_here_can_be_is_refused(toys: Toys, tmp_path: Path, name: str):
    source, tensors, config, message = REFUSED[name]
    folder = changed(toys.folder / source, tmp_path / "foreign", tensors, config)
    with pytest.raises(DraftworksError, match=message) as caught:
        import_draft(folder, toys.target, tmp_path / "imported")
    assert str(folder) in str(caught.value)
    assert not (tmp_path / "imported").exists()


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
