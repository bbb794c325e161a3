"""Changes of an exported draft that loaders of servers do not report, and the gate that must notice each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Config = dict[str, Any]
EAGLE3, DFLASH = ("sglang_eagle3", "speculators_eagle3"), ("zlab_dflash", "speculators_dflash")
DFLASH2 = ("zlab_dflash2", "speculators_dflash2")
DOMINO = ("zlab_domino",)
PEAGLE = ("speculators_peagle",)
DSPARK = ("zlab_dspark", "speculators_dspark")
BLOCKS = (*DFLASH, *DFLASH2, *DOMINO, *DSPARK)
EAGLES = (*EAGLE3, *PEAGLE)
SPECULATORS_EAGLES = (*EAGLE3[1:], *PEAGLE)
SPECULATORS = (*SPECULATORS_EAGLES, "speculators_dflash", "speculators_dflash2", "speculators_dspark")
ALL = (*EAGLES, *BLOCKS)


@dataclass(frozen=True)
class Damage:
    """A change of tensors or config.json, and the gate that must fail."""

    name: str
    gate: str
    formats: tuple[str, ...] = ALL
    tensors: Callable[[Tensors], Any] = lambda tensors: None
    config: Callable[[Config], Any] = lambda config: None

    def __str__(self) -> str:
        return self.name

    def do(self, source: Path, folder: Path) -> None:
        shutil.copytree(source, folder)
        weights, path = load_file(folder / "model.safetensors"), folder / "config.json"
        config = json.loads(path.read_text())
        self.tensors(weights)
        self.config(config)
        save_file(weights, folder / "model.safetensors")
        path.write_text(json.dumps(config))


def rename(tensors: Tensors, old: str, new: str) -> None:
    for name in [name for name in tensors if name.startswith(old)]:
        tensors[name.replace(old, new, 1)] = tensors.pop(name)


def as_ids(tensors: Tensors) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def mark_another(tensors: Tensors) -> None:
    """Exchange one of the marked tokens."""
    marked = tensors["t2d"]
    marked[int(marked.nonzero()[0])], marked[int((~marked).nonzero()[0])] = False, True


def swap_taps(tensors: Tensors) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].roll(tensors["fc.weight"].shape[1] // 3, dims=1)


def exchange_codebooks(tensors: Tensors) -> None:
    names = [f"candidate_selector.{which}_codebook" for which in ("predecessor", "successor")]
    tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]


def exchange_sides(tensors: Tensors) -> None:
    tensors["layers.0.attention_conv.base_kernel"] = tensors["layers.0.attention_conv.base_kernel"].flip(0).contiguous()


def overflow(tensors: Tensors) -> None:
    """Make weights overflow to inf, as a cast to fp16 does with large ones."""
    tensors["norm.weight"] = (tensors["norm.weight"].float() * 1e6).half().bfloat16()


def cut_fc(tensors: Tensors) -> None:
    tensors["fc.weight"] = tensors["fc.weight"][:, 1:].contiguous()


def nudge(tensors: Tensors) -> None:
    tensors["norm.weight"].view(torch.int16)[0] += 1


def layer_ids(config: Config) -> list[int]:
    """Return the config's list of layer ids itself, which tests change in place."""
    places = (config.get("eagle_config", {}), config, config.get("dflash_config", {}))
    keys = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids")
    return next(place[key] for place in places for key in keys if key in place)


def count_from_the_other_end(config: Config) -> None:
    layer_ids(config)[:] = [layer + 1 for layer in layer_ids(config)]


def other_rope(config: Config) -> None:
    layer = config.get("transformer_layer_config", config)
    layer["rope_parameters"]["rope_theta"] = layer["rope_theta"] = 1e6


def without(key: str) -> Callable[[dict], Any]:
    return lambda found: found.pop(key)


def having(**values: Any) -> Callable[[dict], Any]:
    return lambda found: found.update(values)


def in_layers(**values: Any) -> Callable[[Config], Any]:
    return lambda config: config.get("transformer_layer_config", config).update(values)


def having_size(**values: int) -> Callable[[Config], Any]:
    """Change sizes of DFlash 2 where the format has them."""
    return lambda config: config.get("dflash_config", config).update(values)


def windowed(config: Config) -> None:
    layer = config["transformer_layer_config"]
    layer |= {"layer_types": ["sliding_attention"] * layer["num_hidden_layers"], "sliding_window": 3}


def proposing(tokens: int) -> Callable[[Config], Any]:
    return lambda config: config["speculators_config"]["proposal_methods"][0].update(speculative_tokens=tokens)


def in_projector(**values: Any) -> Callable[[Config], Any]:
    return lambda config: config["dflash_config"].update(values)


def in_heads(**values: Any) -> Callable[[Config], Any]:
    """Change keys of DSpark's heads in every place where the format has them."""

    def change(config: Config) -> None:
        for place in (config, config.get("dflash_config")):
            if place is not None:
                place.update(values)

    return change


def exchange_markov(tensors: Tensors) -> None:
    first, second = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
    tensors[first], tensors[second] = tensors[second], tensors[first]


def reorder_gru(tensors: Tensors) -> None:
    """Put the update gate before the reset gate, the order of other libraries."""
    for name in ("prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0"):
        reset, update, new = tensors[name].chunk(3)
        tensors[name] = torch.cat([update, reset, new])


DAMAGES = (
    Damage("fc missing", "key_set", tensors=without("fc.weight")),
    Damage("layers under another name", "key_set", EAGLE3[:1], lambda t: rename(t, "midlayer.", "layers.0.")),
    Damage("layers under SGLang's name", "key_set", SPECULATORS_EAGLES, lambda t: rename(t, "layers.0.", "midlayer.")),
    Damage("layers below another module", "key_set", BLOCKS, lambda t: rename(t, "layers.", "decoder.layers.")),
    Damage("lm_head missing", "key_set", EAGLES, without("lm_head.weight")),
    Damage("embed_tokens missing", "key_set", SPECULATORS_EAGLES, without("embed_tokens.weight")),
    Damage("hidden_norm missing", "key_set", BLOCKS, without("hidden_norm.weight")),
    Damage("d2t missing", "key_set", EAGLES, without("d2t")),
    Damage("extra tensor", "key_set", tensors=having(extra=torch.zeros(2))),
    Damage("fc cut", "shapes", tensors=cut_fc),
    Damage("fc of another width than the layers", "fc_width", tensors=cut_fc),
    Damage("absolute ids in d2t", "vocabulary", EAGLES, as_ids),
    Damage("stale t2d", "vocabulary", EAGLES, mark_another),
    Damage("d2t in int32", "vocabulary", EAGLES, lambda t: t.update(d2t=t["d2t"].int())),
    Damage("swapped taps seen in the weights", "tensors_equal", tensors=swap_taps),
    Damage("swapped taps seen in the logits", "same_logits", tensors=swap_taps),
    Damage("fp16 overflow", "finite", tensors=overflow),
    Damage("one bit", "tensors_equal", tensors=nudge),
    Damage("another dtype", "tensors_equal", tensors=lambda t: t.update({"norm.weight": t["norm.weight"].half()})),
    Damage(
        "another target's embedding",
        "same_logits",
        SPECULATORS_EAGLES,
        lambda t: t["embed_tokens.weight"].copy_(t["embed_tokens.weight"].flip(0)),
    ),
    Damage("layer ids of the other convention", "layer_ids", config=count_from_the_other_end),
    Damage("layer ids of the other convention, logits", "same_logits", config=count_from_the_other_end),
    Damage("one layer id too few", "fc_width", config=lambda c: layer_ids(c).pop()),
    Damage("layer ids in another order", "layer_ids", config=lambda c: layer_ids(c).reverse()),
    Damage("rope theta", "config_round_trip", config=other_rope),
    Damage("rope theta, logits", "same_logits", config=other_rope),
    Damage("the two spellings of rope differ", "config_round_trip", config=in_layers(rope_theta=77.0)),
    Damage("dtype of the weights", "config_round_trip", config=having(dtype="float32")),
    Damage("norm epsilon", "config_round_trip", config=in_layers(rms_norm_eps=0.1)),
    Damage("number of heads", "config_round_trip", config=in_layers(num_attention_heads=2)),
    Damage("heads that servers do not take", "server_config", EAGLES, config=in_layers(num_attention_heads=3)),
    Damage("heads that cannot be grouped", "server_config", config=in_layers(num_key_value_heads=3)),
    Damage("kind of configuration", "server_config", config=in_layers(model_type="eagle")),
    Damage("text for a size", "server_config", config=in_layers(hidden_size="24")),
    Damage("draft vocabulary", "config_round_trip", EAGLES, config=having(draft_vocab_size=23)),
    Damage("feedback", "config_round_trip", EAGLE3, config=having(norm_output=True)),
    Damage("feedback, logits", "same_logits", EAGLE3, config=having(norm_output=True)),
    Damage("norms before fc", "config_round_trip", EAGLES, config=having(fc_norm=True)),
    Damage("normed residual", "config_round_trip", SPECULATORS_EAGLES, config=having(norm_before_residual=True)),
    Damage("normed residual left open", "config_round_trip", EAGLE3[1:], config=without("norm_before_residual")),
    Damage("block size", "config_round_trip", BLOCKS, config=having(block_size=5)),
    Damage("mask token", "same_logits", (*DFLASH[1:], *PEAGLE), config=having(mask_token_id=3)),
    Damage("anchor sampled from", "config_round_trip", DFLASH[1:], config=having(sample_from_anchor=True)),
    Damage("causal blocks in vLLM", "same_logits", DFLASH[1:], config=having(sliding_window_non_causal=False)),
    Damage(
        "a null where SGLang asks for the key", "config_round_trip", EAGLE3[:1], config=having(target_hidden_size=None)
    ),
    Damage("state of a mask missing", "key_set", PEAGLE, without("mask_hidden")),
    Damage(
        "state of a mask for other taps",
        "same_logits",
        PEAGLE,
        lambda t: t["mask_hidden"].copy_(t["mask_hidden"].flip(2)),
    ),
    Damage("a layer under another number", "key_set", PEAGLE, lambda t: rename(t, "layers.1.", "layers.2.")),
    Damage("a layer of two", "config_round_trip", PEAGLE, config=in_layers(num_hidden_layers=1)),
    Damage("layers with a window", "config_round_trip", SPECULATORS_EAGLES, config=windowed),
    Damage("layers with a window, logits", "same_logits", SPECULATORS_EAGLES, config=windowed),
    Damage("number of proposals", "config_round_trip", PEAGLE, config=proposing(9)),
    Damage("no proposals", "config_round_trip", PEAGLE, config=proposing(0)),
    Damage("embedding said to be the target's", "config_round_trip", PEAGLE, config=having(embed_requires_grad=False)),
    Damage("normed residual, logits", "same_logits", SPECULATORS_EAGLES, config=having(norm_before_residual=True)),
    Damage("one token at a time", "config_round_trip", PEAGLE, config=having(speculators_model_type="eagle3")),
    Damage("selector missing", "key_set", DFLASH2, without("candidate_selector.successor_codebook")),
    Damage("codebooks exchanged", "same_logits", DFLASH2, exchange_codebooks),
    Damage("sides of a convolution exchanged", "same_logits", DFLASH2, exchange_sides),
    Damage("candidates", "config_round_trip", DFLASH2, config=having_size(selector_top_k=9)),
    Damage("candidates, logits", "same_logits", DFLASH2, config=having_size(selector_top_k=9)),
    Damage("channels of a group", "config_round_trip", DFLASH2, config=having_size(conv_group_size=8)),
    Damage("correction missing", "key_set", DOMINO, without("embed_proj.2.weight")),
    Damage("parts of the GRU in another order", "same_logits", DOMINO, reorder_gru),
    Damage("label shift", "config_round_trip", DOMINO, config=in_projector(shift_label=False)),
    Damage("label shift, logits", "same_logits", DOMINO, config=in_projector(shift_label=False)),
    Damage("what is corrected", "config_round_trip", DOMINO, config=in_projector(pure_draft_prefix_len=0)),
    Damage("no projector", "config_round_trip", DOMINO, config=in_projector(projector_type=None)),
    Damage("two widths of the projector", "config_round_trip", DOMINO, config=having(emb_dim=7)),
    Damage("Markov head missing", "key_set", DSPARK, without("markov_head.markov_w2.weight")),
    Damage("Markov matrices exchanged", "tensors_equal", DSPARK, exchange_markov),
    Damage("Markov matrices exchanged, logits", "same_logits", DSPARK, exchange_markov),
    Damage("another kind of Markov head", "config_round_trip", DSPARK, config=in_heads(markov_head_type="gated")),
    Damage("rank of the Markov head", "config_round_trip", DSPARK, config=in_heads(markov_rank=5)),
    Damage("no Markov head", "same_logits", DSPARK, config=in_heads(markov_rank=0)),
    Damage("confidence missing", "key_set", DSPARK, without("confidence_head.proj.bias")),
    Damage(
        "confidence of the state alone", "config_round_trip", DSPARK, config=in_heads(confidence_head_with_markov=False)
    ),
    Damage("no confidence", "config_round_trip", DSPARK, config=in_heads(enable_confidence_head=False)),
    Damage("anchor passed over", "config_round_trip", DSPARK, config=having(sample_from_anchor=False)),
    Damage("anchor passed over, logits", "same_logits", DSPARK, config=having(sample_from_anchor=False)),
    Damage(
        "heads where SGLang checks and not where it builds", "same_logits", DSPARK[:1], config=without("markov_rank")
    ),
    Damage(
        "another class",
        "config_round_trip",
        EAGLE3[:1] + DFLASH[:1] + DOMINO + DSPARK[:1],
        config=having(architectures=["Llama"]),
    ),
    Damage("no speculators_config", "config_round_trip", SPECULATORS, config=without("speculators_config")),
    Damage("no config of the layers", "config_round_trip", SPECULATORS, config=without("transformer_layer_config")),
    Damage("a key by which servers compute otherwise", "config_round_trip", config=having(is_causal=True)),
)
