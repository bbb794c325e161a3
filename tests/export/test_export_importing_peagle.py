"""Imports of P-EAGLE drafts keep a trained embedding; what no draft here computes is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_toys import Toys, assert_same_draft
from test_export_importing import Config, Tensors, changed, having, layer, nothing

from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import DraftworksError, StoreError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.exporting import export_draft
from draftworks.export.importing import import_draft
from draftworks.strategies.eagle3.export_speculators import LAYERS

FORMAT, EMBEDDING = "speculators_peagle", "embed_tokens.weight"


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    """A target, drafts of it, and their exports in fp32: `own` and `shared` embeddings, and an EAGLE-3 draft `chain`."""
    made = Toys.make(tmp_path_factory.mktemp("importing"))
    for name, train in (("own", True), ("shared", False)):
        draft = made.draft("peagle", name=f"{name}-draft", train_embeddings=train)
        export_draft(draft, FORMAT, made.folder / name, "float32")
    for name in ("speculators_eagle3", "sglang_eagle3"):
        export_draft(made.draft("eagle3", name="chain"), name, made.folder / name, "float32")
    return made


def learn_embedding(tensors: Tensors) -> None:
    tensors[EMBEDDING] += 0.1 * torch.randn(tensors[EMBEDDING].shape, generator=torch.Generator().manual_seed(9))


def without(*keys: str) -> Callable[[dict[str, Any]], None]:
    def remove(found: dict[str, Any]) -> None:
        for key in keys:
            del found[key]

    return remove


def imported(toys: Toys, source: Path, folder: Path) -> CanonicalDraft:
    return CanonicalDraft.load(import_draft(source, toys.target, folder).folder, toys.target)


def test_a_trained_embedding_is_imported(toys: Toys, tmp_path: Path):
    source = changed(toys.folder / "own", tmp_path / "foreign")
    found, target = imported(toys, source, tmp_path / "imported"), TargetParts.load(toys.target)
    assert found.options.train_embeddings
    assert not torch.allclose(found.weights[EMBEDDING], target.embedding.float(), atol=0.1)
    assert_same_draft(found, CanonicalDraft.load(toys.folder / "own-draft", toys.target))
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
    found = imported(toys, changed(toys.folder / "own", tmp_path / "foreign", config=config), tmp_path / "imported")
    expected = CanonicalDraft.load(toys.folder / "own-draft", toys.target)
    assert_same_draft(found, expected)
    assert found.options.select_structural() == expected.options.select_structural()


def no_methods(config: Config) -> None:
    config["speculators_config"]["proposal_methods"] = []


def lose_second_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("layers.1.")]:
        del tensors[name]


def halve_embedding(tensors: Tensors) -> None:
    tensors[EMBEDDING] = tensors[EMBEDDING][:20].clone()


REFUSED: dict[str, tuple[str, Callable[[Tensors], Any], Callable[[Config], Any], str]] = {
    "norm before fc": ("own", nothing, having(norm_before_fc=True), "norm_before_fc: true: no draft here"),
    "a window in one layer of two": (
        "own",
        nothing,
        layer(layer_types=["full_attention", "sliding_attention"], sliding_window=4),
        "peagle drafts here have the same window in all layers",
    ),
    "layers of Qwen3": ("own", nothing, layer(model_type="qwen3"), "model_type 'qwen3': peagle drafts here are llama"),
    "another width": ("own", nothing, having(target_hidden_size=32), "target_hidden_size 32, hidden_size 16"),
    "fewer embeddings": (
        "own",
        halve_embedding,
        nothing,
        r"embed_tokens\.weight: expected \(40, 16\).*found \(20, 16\)",
    ),
    "no embedding": ("own", without(EMBEDDING), nothing, r"missing tensors: embed_tokens\.weight"),
    "no embedding, and no key": (
        "own",
        without(EMBEDDING),
        without("embed_requires_grad"),
        r"missing tensors: embed_tokens\.weight",
    ),
    "another embedding than was said": (
        "shared",
        learn_embedding,
        nothing,
        r"embed_tokens\.weight differs from the target's",
    ),
    "no mask token": ("own", nothing, having(mask_token_id=None), "key mask_token_id is missing"),
    "a mask token that is none": ("own", nothing, having(mask_token_id=40), "mask_token_id 40"),
    "number of proposals unsaid": ("own", nothing, no_methods, "proposal_methods: expected a method with its number"),
    "no state of a mask": ("own", without("mask_hidden"), nothing, "missing tensors: mask_hidden"),
    "a layer less": ("own", lose_second_layer, nothing, r"missing tensors: layers\.1\.input_layernorm"),
    "a layer more": ("own", nothing, layer(num_hidden_layers=1), r"unknown tensors: layers\.1\.input_layernorm"),
    "EAGLE-3 by the name of P-EAGLE": (
        "speculators_eagle3",
        nothing,
        having(speculators_model_type="peagle", mask_token_id=3),
        "missing tensors: mask_hidden",
    ),
    "P-EAGLE by the name of EAGLE-3": (
        "own",
        nothing,
        having(speculators_model_type="eagle3"),
        "num_hidden_layers 2: EAGLE-3 drafts here have one layer",
    ),
    "P-EAGLE of one layer by the name of EAGLE-3": (
        "speculators_eagle3",
        lambda t: t.update(mask_hidden=torch.ones(1, 1, 48)),
        nothing,
        "unknown tensors: mask_hidden",
    ),
    "P-EAGLE in vLLM's layout of EAGLE-3": (
        "sglang_eagle3",
        nothing,
        having(ptd_token_id=3),
        "ptd_token_id: a P-EAGLE draft",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_draft_here_can_be_is_refused(toys: Toys, tmp_path: Path, name: str):
    source, tensors, config, message = REFUSED[name]
    folder = changed(toys.folder / source, tmp_path / "foreign", tensors, config)
    with pytest.raises(DraftworksError, match=message) as caught:
        import_draft(folder, toys.target, tmp_path / "imported")
    assert str(folder) in str(caught.value)
    assert not (tmp_path / "imported").exists()


def test_an_eagle3_draft_cannot_bring_an_embedding_of_its_own(toys: Toys, tmp_path: Path):
    source = changed(
        toys.folder / "speculators_eagle3", tmp_path / "foreign", learn_embedding, having(embed_requires_grad=True)
    )
    with pytest.raises(StoreError, match="by its config.json the draft has none of its own"):
        import_draft(source, toys.target, tmp_path / "imported")
