"""Exported drafts with random weights, written by hand from the format tables, without any exporter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 2048, 128, 4, 2, 32, 96
"""The first two are those of the embedded target `tiny`, so that the real library can load its parts."""
DRAFT_VOCAB = 48
"""Ids in a reduced draft vocabulary."""
BLOCK_SIZE, MASK_TOKEN, DFLASH_LAYERS = 6, 2047, 2
EMB_DIM, GRU_HIDDEN_DIM = 24, 20
MARKOV_RANK = 12
REFINER_RANK = 10
DFLASH2_SIZES = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 12, "selector_top_k": 7}
PEAGLE_LAYERS, NUM_DEPTHS = 2, 5
_ARCHITECTURES = {
    "eagle3": "Eagle3Speculator",
    "peagle": "PEagleSpeculator",
    "dflash": "DFlashSpeculator",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkSpeculator",
    "xpress": "XPressSpeculator",
}


@dataclass(frozen=True)
class RandomExport:
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        save_file(dict(self.tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def with_config(self, **changes: Any) -> RandomExport:
        """Other values; a name `a__b` is key b of object a."""
        config = json.loads(json.dumps(self.config))
        for name, value in changes.items():
            *outer, last = name.split("__")
            place = config
            for key in outer:
                place = place[key]
            place[last] = value
        return replace(self, config=config)

    def without_config(self, name: str) -> RandomExport:
        """Without a top-level key."""
        return replace(self, config={key: value for key, value in self.config.items() if key != name})

    def with_tensors(self, **changes: Tensor) -> RandomExport:
        """More or other tensors; dots of their names are written `__`."""
        return replace(self, tensors={**self.tensors, **{k.replace("__", "."): v for k, v in changes.items()}})

    def without_tensor(self, name: str) -> RandomExport:
        return replace(self, tensors={key: tensor for key, tensor in self.tensors.items() if key != name})

    def renamed(self, old: str, new: str) -> RandomExport:
        """With another prefix of tensor names."""
        return replace(self, tensors={name.replace(old, new): tensor for name, tensor in self.tensors.items()})


def speculators_eagle3(target: Path, embedding: Tensor, **settings: Any) -> RandomExport:
    tensors = {**_eagle3_tensors("layers.0.", settings), "embed_tokens.weight": embedding.clone()}
    config = {
        **_speculators_config("eagle3", target, speculative_tokens=4),
        "transformer_layer_config": _layer_config("llama", layers=1),
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    }
    return RandomExport(config | settings, tensors)


def speculators_peagle(target: Path, window: int | None = None, **settings: Any) -> RandomExport:
    """With an embedding of its own, and in all layers the window."""
    tensors = {
        **_eagle3_tensors("layers.0.", settings),
        "embed_tokens.weight": _matrix(VOCAB, HIDDEN, seed=110),
        "mask_hidden": torch.randn(1, 1, 3 * HIDDEN, generator=torch.Generator().manual_seed(111)),
    }
    for i in range(1, PEAGLE_LAYERS):
        tensors |= _layer_tensors(f"layers.{i}.", HIDDEN, seed=120 + 20 * i)
    layers = _layer_config("llama", PEAGLE_LAYERS)
    if window is not None:
        kinds = ["sliding_attention"] * PEAGLE_LAYERS
        layers |= {"layer_types": kinds, "sliding_window": window, "use_sliding_window": True}
    config = {
        **_speculators_config("peagle", target, speculative_tokens=NUM_DEPTHS),
        "transformer_layer_config": layers,
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": True,
        "mask_token_id": MASK_TOKEN,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    }
    return RandomExport(config | settings, tensors)


def sglang_eagle3(**settings: Any) -> RandomExport:
    config = {
        **_layer_config("llama", layers=1),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
    }
    return RandomExport(config | settings, _eagle3_tensors("midlayer.", settings))


def speculators_dflash(
    target: Path, draft_vocab: int = VOCAB, window: int | None = None, **settings: Any
) -> RandomExport:
    tensors = _dflash_tensors()
    if draft_vocab != VOCAB:
        tensors |= {"lm_head.weight": _matrix(draft_vocab, HIDDEN, seed=90), **draft_vocabulary(draft_vocab)}
    config = {
        **_speculators_config("dflash", target, speculative_tokens=BLOCK_SIZE - 1),
        "transformer_layer_config": _layer_config("qwen3", DFLASH_LAYERS) | _window_config(window),
        "draft_vocab_size": draft_vocab,
        "block_size": BLOCK_SIZE,
        "mask_token_id": MASK_TOKEN,
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "sliding_window_non_causal": window is None,
        "sample_from_anchor": False,
    }
    return RandomExport(config | settings, tensors)


def zlab_dflash(window: int | None = None, **settings: Any) -> RandomExport:
    config = {
        **_layer_config("qwen3", DFLASH_LAYERS),
        **_window_config(window),
        "architectures": ["DFlashDraftModel"],
        "block_size": BLOCK_SIZE,
        "num_target_layers": 8,
        "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": [1, 3, 4]},
    }
    return RandomExport(config | settings, _dflash_tensors())


def zlab_dflash2(**sizes: int) -> RandomExport:
    """`sizes` are those of convolutions and selector, where they are not `DFLASH2_SIZES`."""
    sizes, backbone = DFLASH2_SIZES | sizes, zlab_dflash()
    dflash = {**backbone.config["dflash_config"], "block_size": BLOCK_SIZE, **sizes}
    config = {**backbone.config, "architectures": ["DFlash2DraftModel"], "dflash_config": dflash}
    return RandomExport(config, {**backbone.tensors, **_dflash2_tensors(sizes)})


def speculators_dflash2(target: Path, **sizes: int) -> RandomExport:
    """`sizes` as for `zlab_dflash2`."""
    sizes, backbone = DFLASH2_SIZES | sizes, speculators_dflash(target)
    own = _speculators_config("dflash2", target, speculative_tokens=BLOCK_SIZE - 1)
    return RandomExport({**backbone.config, **own, **sizes}, {**backbone.tensors, **_dflash2_tensors(sizes)})


def _dflash2_tensors(sizes: Mapping[str, int]) -> dict[str, Tensor]:
    taps, groups, rank = sizes["conv_kernel_size"], HIDDEN // sizes["conv_group_size"], sizes["selector_rank"]
    tensors = {
        "candidate_selector.predecessor_codebook": _matrix(VOCAB, rank, seed=110),
        "candidate_selector.successor_codebook": _matrix(VOCAB, rank, seed=111),
        "candidate_selector.hidden_projection.weight": _matrix(rank, HIDDEN, seed=112),
    }
    for layer in range(DFLASH_LAYERS):
        for seed, part in enumerate(("attention", "mlp"), start=120 + 10 * layer):
            name = f"layers.{layer}.{part}_conv"
            tensors[f"{name}.base_kernel"] = _matrix(2 * taps, HIDDEN, seed).view(2, taps, HIDDEN) + 1
            tensors[f"{name}.kernel_projection.weight"] = _matrix(2 * taps * groups, HIDDEN, seed + 5)
    return tensors


def zlab_domino(**settings: Any) -> RandomExport:
    projector = {
        "projector_type": "domino",
        "shift_label": True,
        "pure_draft_prefix_len": 1,
        "emb_dim": EMB_DIM,
        "gru_hidden_dim": GRU_HIDDEN_DIM,
    }
    backbone = zlab_dflash()
    tensors = {
        "prefix_gru.weight_ih_l0": _matrix(3 * GRU_HIDDEN_DIM, HIDDEN, seed=100),
        "prefix_gru.weight_hh_l0": _matrix(3 * GRU_HIDDEN_DIM, GRU_HIDDEN_DIM, seed=101),
        "embed_proj.0.weight": _matrix(EMB_DIM, HIDDEN + GRU_HIDDEN_DIM, seed=102),
        "embed_proj.2.weight": _matrix(VOCAB, EMB_DIM, seed=103),
    }
    config = {**backbone.config, "dflash_config": {**backbone.config["dflash_config"], **projector}}
    return RandomExport(config | settings, {**backbone.tensors, **tensors})


def zlab_dspark(**settings: Any) -> RandomExport:
    """`settings` are keys of the heads."""
    heads, backbone = _dspark_heads(settings), zlab_dflash()
    return RandomExport(
        {
            **backbone.config,
            **heads,
            "architectures": ["DSparkDraftModel"],
            "dflash_config": {**backbone.config["dflash_config"], "projector_type": "dspark", **heads},
        },
        {**backbone.tensors, **_dspark_tensors(heads, VOCAB)},
    )


def speculators_dspark(target: Path, draft_vocab: int = VOCAB, **settings: Any) -> RandomExport:
    """`settings` are keys of the heads."""
    heads, backbone = _dspark_heads(settings), speculators_dflash(target, draft_vocab)
    return RandomExport(
        {
            **backbone.config,
            **_speculators_config("dspark", target, speculative_tokens=BLOCK_SIZE),
            **heads,
            "sample_from_anchor": True,
        },
        {**backbone.tensors, **_dspark_tensors(heads, draft_vocab)},
    )


def speculators_xpress(target: Path, draft_vocab: int = VOCAB, **settings: Any) -> RandomExport:
    backbone, r = speculators_dflash(target, draft_vocab), REFINER_RANK
    refiner = {
        "token_embed.weight": _matrix(VOCAB, r, seed=140) * r**0.5,
        "down_h.weight": _matrix(r, HIDDEN, seed=141),
        "down_g.weight": _matrix(r, HIDDEN, seed=142) * 3,
        "in_proj.weight": _matrix(r, 3 * r, seed=143),
        "mix_l": torch.randn(r, BLOCK_SIZE, BLOCK_SIZE, generator=torch.Generator().manual_seed(144)) / 2,
        "mlp_gate.weight": _matrix(2 * r, r, seed=145),
        "mlp_up.weight": _matrix(2 * r, r, seed=146),
        "mlp_down.weight": _matrix(r, 2 * r, seed=147),
        "readout.weight": _matrix(draft_vocab, r, seed=148) * 3,
    }
    config = {
        **backbone.config,
        **_speculators_config("xpress", target, speculative_tokens=BLOCK_SIZE - 1),
        "xpress_rank": r,
        "xpress_mlp_ratio": 2,
        "num_jacobi_passes": 3,
    }
    tensors = {f"refiner_head.{name}": tensor for name, tensor in refiner.items()}
    return RandomExport(config | settings, {**backbone.tensors, **tensors})


def draft_vocabulary(draft_vocab: int) -> dict[str, Tensor]:
    """d2t and t2d of some of the target's tokens."""
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(80))[:draft_vocab].sort().values
    members = torch.zeros(VOCAB, dtype=torch.bool)
    members[ids] = True
    return {"d2t": ids - torch.arange(draft_vocab), "t2d": members}


def _speculators_config(algorithm: str, target: Path, speculative_tokens: int) -> dict[str, Any]:
    method = {"proposal_type": "greedy", "speculative_tokens": speculative_tokens}
    return {
        "speculators_model_type": algorithm,
        "architectures": [_ARCHITECTURES[algorithm]],
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]},
        },
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def _layer_config(model_type: str, layers: int) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": layers,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
    }


def _window_config(window: int | None) -> dict[str, Any]:
    if window is None:
        return {"layer_types": ["full_attention"] * DFLASH_LAYERS}
    kinds = ["sliding_attention"] * DFLASH_LAYERS
    return {"layer_types": kinds, "sliding_window": window, "use_sliding_window": True}


def _eagle3_tensors(layer: str, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = {
        "fc.weight": _matrix(HIDDEN, 3 * HIDDEN, seed=1),
        "norm.weight": _norm(HIDDEN, seed=2),
        "lm_head.weight": _matrix(DRAFT_VOCAB, HIDDEN, seed=3),
        f"{layer}hidden_norm.weight": _norm(HIDDEN, seed=4),
        **_layer_tensors(layer, 2 * HIDDEN, seed=5),
        **draft_vocabulary(DRAFT_VOCAB),
    }
    if settings.get("norm_before_fc"):
        tensors["input_norm.weight"] = _norm(3 * HIDDEN, seed=60)
    if settings.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": _norm(HIDDEN, seed=61 + i) for i in range(3)}
    return tensors


def _dflash_tensors() -> dict[str, Tensor]:
    tensors = {
        "fc.weight": _matrix(HIDDEN, 3 * HIDDEN, seed=1),
        "hidden_norm.weight": _norm(HIDDEN, seed=2),
        "norm.weight": _norm(HIDDEN, seed=3),
    }
    for i in range(DFLASH_LAYERS):
        layer = f"layers.{i}."
        tensors |= _layer_tensors(layer, HIDDEN, seed=20 * (i + 1))
        tensors |= {f"{layer}self_attn.{n}_norm.weight": _norm(HEAD_DIM, seed=70 + i) for n in "qk"}
    return tensors


def _dspark_heads(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "markov_rank": MARKOV_RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        **settings,
    }


def _dspark_tensors(heads: Mapping[str, Any], draft_vocab: int) -> dict[str, Tensor]:
    rank, tensors = heads["markov_rank"], {}
    if rank:
        tensors["markov_head.markov_w1.weight"] = _matrix(VOCAB, rank, seed=130) * rank**0.5
        tensors["markov_head.markov_w2.weight"] = _matrix(draft_vocab, rank, seed=131) * 3
    if heads["markov_head_type"] == "gated":
        tensors |= _affine("markov_head.gate_proj", rank, HIDDEN + rank, seed=132)
    if heads["markov_head_type"] == "rnn":
        tensors |= _affine("markov_head.joint_proj", 3 * rank, 2 * rank + HIDDEN, seed=134)
    if heads["enable_confidence_head"]:
        read = rank if heads["confidence_head_with_markov"] else 0
        tensors |= _affine("confidence_head.proj", 1, HIDDEN + read, seed=136)
    return tensors


def _affine(name: str, outputs: int, inputs: int, seed: int) -> dict[str, Tensor]:
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(seed + 1))
    return {f"{name}.weight": _matrix(outputs, inputs, seed), f"{name}.bias": bias}


def _layer_tensors(layer: str, inputs: int, seed: int) -> dict[str, Tensor]:
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, inputs),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, inputs),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, inputs),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    tensors = {
        f"{layer}{name}.weight": _matrix(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    return tensors | {f"{layer}{name}.weight": _norm(HIDDEN, seed=seed + 10 + i) for i, name in enumerate(norms)}


def _matrix(outputs: int, inputs: int, seed: int) -> Tensor:
    """Wide enough that attention is not even, so that every weight shows in the logits."""
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) / inputs**0.5


def _norm(size: int, seed: int) -> Tensor:
    """Away from 1, so that a forgotten norm shows."""
    return 1 + 0.3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))
