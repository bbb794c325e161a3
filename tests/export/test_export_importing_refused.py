"""What no draft here can be is refused when it is imported, with the file and the key or tensor, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_toys import HIDDEN, VOCAB, Toys
from import_toys import (
    EMBEDDING,
    Config,
    Tensors,
    changed,
    having,
    heads,
    layer,
    learn_embedding,
    nothing,
    projector,
    without,
)

from draftworks.errors import DraftworksError
from draftworks.export.importing import import_draft


def absolute(tensors: Tensors) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def absolute_alone(tensors: Tensors) -> None:
    absolute(tensors)
    del tensors["t2d"]


def other_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = torch.ones(VOCAB, HIDDEN)


def without_markov(tensors: Tensors) -> None:
    """Without the columns of the confidence head for the Markov embedding too."""
    for name in [name for name in tensors if name.startswith("markov_head.")]:
        del tensors[name]
    tensors["confidence_head.proj.weight"] = tensors["confidence_head.proj.weight"][:, :HIDDEN].contiguous()


def no_methods(config: Config) -> None:
    config["speculators_config"]["proposal_methods"] = []


def lose_second_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("layers.1.")]:
        del tensors[name]


def halve_embedding(tensors: Tensors) -> None:
    tensors[EMBEDDING] = tensors[EMBEDDING][:20].clone()


NEITHER = {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}
"""Not the default list of a server, in its own meaning."""
REFUSED: dict[str, tuple[str, Callable[[Tensors], Any], Callable[[Config], Any], str]] = {
    "not a draft": (
        "sglang_eagle3",
        nothing,
        having(architectures=["LlamaForCausalLM"]),
        "not a draft format that Draftworks reads",
    ),
    "another strategy": ("speculators_eagle3", nothing, having(speculators_model_type="medusa"), "kind 'medusa'"),
    "built on DFlash": (
        "zlab_dflash",
        nothing,
        having(projector_type="lilicorr"),
        "another strategy .* built on DFlash",
    ),
    "hidden size": ("sglang_eagle3", nothing, having(hidden_size=32), "hidden_size: expected 16, found 32"),
    "vocabulary": ("speculators_eagle3", nothing, layer(vocab_size=41), "vocab_size: expected 40, found 41"),
    "head size": ("zlab_dflash", nothing, having(head_dim=8), r"q_proj\.weight: expected \(32, 16\).*found \(24, 16\)"),
    "epsilon": ("zlab_dflash", nothing, having(rms_norm_eps=-1.0), "rms_norm_eps: expected more than 0"),
    "rope": (
        "sglang_eagle3",
        nothing,
        having(rope_parameters=None, rope_theta=9.0, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        "rope_type: expected one of default, linear, llama3, yarn, found .dynamic",
    ),
    "two ropes": ("sglang_eagle3", nothing, having(rope_theta=9.0), "contradict each other in rope_theta"),
    "tap outside": (
        "speculators_dflash",
        nothing,
        having(aux_hidden_state_layer_ids=[2, 4, 8]),
        r"layers \[8\] as hf_index: the target has 0\.\.7",
    ),
    "target depth": ("zlab_dflash", nothing, having(num_target_layers=36), "num_target_layers 36: the target has 8"),
    "missing": ("zlab_dflash", lambda t: t.pop("fc.weight"), nothing, r"missing tensors: fc\.weight"),
    "unknown": ("zlab_dflash", lambda t: t.update(extra=torch.ones(1)), nothing, "unknown tensors: extra"),
    "shape": (
        "zlab_dflash",
        lambda t: t.update({"norm.weight": torch.ones(5)}),
        nothing,
        r"norm\.weight: expected \(16,\)",
    ),
    "twice": (
        "sglang_eagle3",
        lambda t: t.update({"model.norm.weight": torch.ones(16)}),
        nothing,
        r"norm\.weight is in the file twice",
    ),
    "not finite": ("zlab_dflash", lambda t: t["norm.weight"].fill_(torch.inf), nothing, r"not finite: norm\.weight"),
    "absolute ids": ("sglang_eagle3", absolute, nothing, "d2t holds the target's ids themselves"),
    "absolute ids alone": ("sglang_eagle3", absolute_alone, nothing, "d2t holds the target's ids themselves"),
    "a third meaning of norm_output": (
        "sglang_eagle3",
        nothing,
        having(norm_output=True, norm_output_means="vllm"),
        "norm_output_means: expected specforge or sglang, found 'vllm'",
    ),
    "layers of either meaning": (
        "sglang_eagle3",
        nothing,
        lambda c: (c.pop("eagle_aux_hidden_state_layer_ids"), c["eagle_config"].update(NEITHER)),
        r"eagle_config\.eagle_aux_hidden_state_layer_ids \[2, 3, 4\] are layers to SGLang .* --layer-ids-mean sglang or",
    ),
    "a third meaning of layers": (
        "sglang_eagle3",
        nothing,
        having(layer_ids_mean="trtllm"),
        "layer_ids_mean: expected sglang or vllm, found trtllm",
    ),
    "normed residual": ("sglang_eagle3", nothing, having(norm_before_residual=True), "norm_before_residual: true"),
    "residual left open": (
        "speculators_eagle3",
        nothing,
        lambda c: c.pop("norm_before_residual"),
        "norm_before_residual is missing",
    ),
    "norm before fc": ("sglang_eagle3", nothing, having(norm_before_fc=True), "norm_before_fc: true"),
    "norm without a tensor": (
        "speculators_eagle3",
        nothing,
        having(norm_before_fc=True),
        r"missing tensors: input_norm\.weight",
    ),
    "window of two sizes": (
        "speculators_eagle3",
        nothing,
        layer(layer_types=["sliding_attention"]),
        "names sliding_attention layers, but there is no sliding_window",
    ),
    "activation": ("zlab_dflash", nothing, having(hidden_act="gelu"), "hidden_act 'gelu'"),
    "biases": ("speculators_dflash", nothing, layer(attention_bias=True), "attention_bias: drafts here have no biases"),
    "reduced DFlash": ("speculators_dflash", nothing, having(draft_vocab_size=24), "draft_vocab_size 24 of 40"),
    "window that the library forgets": (
        "speculators_dflash",
        nothing,
        layer(sliding_window=4, layer_types=["sliding_attention"] * 2, use_sliding_window=False),
        "sliding_attention layers without use_sliding_window",
    ),
    "sampled anchor": ("speculators_dflash", nothing, having(sample_from_anchor=True), "sample_from_anchor"),
    "two layers": ("sglang_eagle3", nothing, having(num_hidden_layers=2), "EAGLE-3 drafts here have one layer"),
    "no layers": (
        "speculators_eagle3",
        nothing,
        lambda c: c.pop("transformer_layer_config"),
        "transformer_layer_config is missing",
    ),
    "Domino: part of a projector": (
        "zlab_domino",
        nothing,
        projector(shift_label=None),
        "dflash_config: key shift_label is missing",
    ),
    "Domino: two projectors": (
        "zlab_domino",
        nothing,
        lambda c: c.update(emb_dim=9),
        "emb_dim 6, but 9 beside dflash_config",
    ),
    "Domino: nothing corrected": (
        "zlab_domino",
        nothing,
        projector(pure_draft_prefix_len=4),
        "pure_draft_prefix_len 4 leaves none",
    ),
    "Domino: more than Domino": (
        "zlab_domino",
        nothing,
        lambda c: c.update(markov_rank=8),
        "markov_rank: a draft of another strategy",
    ),
    "Domino: no GRU": (
        "zlab_domino",
        lambda t: t.pop("prefix_gru.weight_hh_l0"),
        nothing,
        r"missing tensors: correction\.prefix_gru\.weight_hh_l0",
    ),
    "Domino: GRU of another size": (
        "zlab_domino",
        nothing,
        projector(gru_hidden_dim=7),
        r"prefix_gru\.weight_ih_l0: expected \(21, 16\)",
    ),
    "Domino: a bias": (
        "zlab_domino",
        lambda t: t.update({"embed_proj.0.bias": t["norm.weight"].clone()}),
        nothing,
        r"unknown tensors: correction\.embed_proj\.0\.bias",
    ),
    "DSpark: another first place": (
        "zlab_dspark",
        nothing,
        having(sample_from_anchor=False),
        "sample_from_anchor: false: DSpark",
    ),
    "DSpark: another first place, ModelOpt": (
        "zlab_dspark",
        nothing,
        heads(shift_label=False),
        "shift_label: false: DSpark",
    ),
    "DSpark: another first place, speculators": (
        "speculators_dspark",
        nothing,
        having(sample_from_anchor=False),
        "sample_from_anchor: false: DSpark drafts here propose from the anchor",
    ),
    "DSpark: reduced": ("zlab_dspark", nothing, having(draft_vocab_size=24), "draft_vocab_size 24 of 40: dspark"),
    "DSpark: reduced, speculators": (
        "speculators_dspark",
        nothing,
        having(draft_vocab_size=24),
        "draft_vocab_size 24 of 40",
    ),
    "DSpark: two ranks": ("zlab_dspark", nothing, having(markov_rank=9), "markov_rank 6, but 9 beside dflash_config"),
    "DSpark: no rank": ("zlab_dspark", nothing, heads(markov_rank=None), "markov_rank is missing"),
    "DSpark: an unknown head": (
        "zlab_dspark",
        nothing,
        heads(markov_head_type="lstm"),
        "markov_head_type: expected one of vanilla, gated, rnn, found 'lstm'",
    ),
    "DSpark: a rank in words": (
        "zlab_dspark",
        nothing,
        heads(markov_rank="6"),
        "markov_rank: expected an integer from 0, found '6'",
    ),
    "DSpark: another head": (
        "zlab_dspark",
        nothing,
        heads(markov_head_type="rnn"),
        r"missing tensors: markov_head\.joint_proj",
    ),
    "DSpark: a confidence of nothing": (
        "speculators_dspark",
        without_markov,
        having(markov_rank=0, markov_head_type="vanilla"),
        "markov_rank 0 leaves no Markov embedding",
    ),
    "DSpark: no confidence": (
        "zlab_dspark",
        lambda t: t.pop("confidence_head.proj.bias"),
        nothing,
        r"missing tensors: confidence_head\.proj\.bias",
    ),
    "DSpark: a head of its own": ("zlab_dspark", other_head, nothing, r"lm_head\.weight differs from the target's"),
    "DSpark: causal": ("zlab_dspark", nothing, having(is_causal=True), "is_causal True: in drafts here"),
    "DSpark: interleaved rope": ("zlab_dspark", nothing, having(rope_is_neox_style=False), "rope_is_neox_style False"),
    "DSpark: the embeddings": (
        "zlab_dspark",
        nothing,
        lambda c: c["dflash_config"].update(target_layer_ids=[-1, 1, 4]),
        r"expected ascending integers from 0, found \[-1, 1, 4\]",
    ),
    "DSpark: more than DSpark": ("zlab_dspark", nothing, heads(emb_dim=7), "emb_dim: a draft of another strategy"),
    "P-EAGLE: norm before fc": (
        "speculators_peagle",
        nothing,
        having(norm_before_fc=True),
        "norm_before_fc: true: no draft here",
    ),
    "P-EAGLE: a window in one layer of two": (
        "speculators_peagle",
        nothing,
        layer(layer_types=["full_attention", "sliding_attention"], sliding_window=4),
        "peagle drafts here have the same window in all layers",
    ),
    "P-EAGLE: layers of Qwen3": (
        "speculators_peagle",
        nothing,
        layer(model_type="qwen3"),
        "model_type 'qwen3': peagle drafts here are llama",
    ),
    "P-EAGLE: another width": (
        "speculators_peagle",
        nothing,
        having(target_hidden_size=32),
        "target_hidden_size 32, hidden_size 16",
    ),
    "P-EAGLE: fewer embeddings": (
        "speculators_peagle",
        halve_embedding,
        nothing,
        r"embed_tokens\.weight: expected \(40, 16\).*found \(20, 16\)",
    ),
    "P-EAGLE: no embedding": (
        "speculators_peagle",
        without(EMBEDDING),
        nothing,
        r"missing tensors: embed_tokens\.weight",
    ),
    "P-EAGLE: no embedding, and no key": (
        "speculators_peagle",
        without(EMBEDDING),
        without("embed_requires_grad"),
        r"missing tensors: embed_tokens\.weight",
    ),
    "P-EAGLE: another embedding than was said": (
        "shared",
        learn_embedding,
        nothing,
        r"embed_tokens\.weight differs from the target's",
    ),
    "P-EAGLE: no mask token": (
        "speculators_peagle",
        nothing,
        having(mask_token_id=None),
        "key mask_token_id is missing",
    ),
    "P-EAGLE: a mask token that is none": ("speculators_peagle", nothing, having(mask_token_id=40), "mask_token_id 40"),
    "P-EAGLE: number of proposals unsaid": (
        "speculators_peagle",
        nothing,
        no_methods,
        "proposal_methods: expected a method with its number",
    ),
    "P-EAGLE: no state of a mask": (
        "speculators_peagle",
        without("mask_hidden"),
        nothing,
        "missing tensors: mask_hidden",
    ),
    "P-EAGLE: a layer less": (
        "speculators_peagle",
        lose_second_layer,
        nothing,
        r"missing tensors: layers\.1\.input_layernorm",
    ),
    "P-EAGLE: a layer more": (
        "speculators_peagle",
        nothing,
        layer(num_hidden_layers=1),
        r"unknown tensors: layers\.1\.input_layernorm",
    ),
    "P-EAGLE: EAGLE-3 by the name of P-EAGLE": (
        "speculators_eagle3",
        nothing,
        having(speculators_model_type="peagle", mask_token_id=3),
        "missing tensors: mask_hidden",
    ),
    "P-EAGLE: P-EAGLE by the name of EAGLE-3": (
        "speculators_peagle",
        nothing,
        having(speculators_model_type="eagle3"),
        "num_hidden_layers 2: EAGLE-3 drafts here have one layer",
    ),
    "P-EAGLE: P-EAGLE of one layer by the name of EAGLE-3": (
        "speculators_eagle3",
        lambda t: t.update(mask_hidden=torch.ones(1, 1, 48)),
        nothing,
        "unknown tensors: mask_hidden",
    ),
    "P-EAGLE: P-EAGLE in vLLM's layout of EAGLE-3": (
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
