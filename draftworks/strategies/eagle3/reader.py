"""The EAGLE-3 chain, step by step, from the weights of an exported draft.

EAGLE-3 from exported files: SGLang's layout (`midlayer.*`) and that of speculators (`layers.0.*`).

Where they normalise, and which settings are what our own draft computes (draftworks.strategies.eagle3.model):

* `norm_before_residual` (speculators): whether the residual stream starts from the normed state. vLLM takes true where the
  key is missing, so a file must say it. SGLang always computes false and does not know the key.
* `norm_output`: speculators, vLLM and SGLang from #24663 on feed the state after the final norm to the next step if true
  (our feedback `post_norm`), the one before it if false or missing (`pre_norm`); the head reads the normed state in both
  cases. In SpecForge up to 0.2.0 the same key says whether the head reads the normed state, and the feedback is never
  normed: its true, which it takes where the key is missing, is what the others call false, and its false is what none of
  them computes. So SGLang's layout, which SpecForge reads too, must not have the key: all mean the same then.
* `fc_norm`: a norm for each tap before `fc`; `norm_before_fc` (speculators): one norm over all of them.
* `layer_types`, `sliding_window` (speculators): see `Eagle3Reader.window`. SGLang reads neither for EAGLE-3.

Row t reads the streams at position t and the token after it, and has rotary position t. (speculators counts rows from 1
when it trains: only differences enter the scores.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftworks.export.readers.arithmetic import attend, gated_mlp, rms_norm, rotate, split_heads
from draftworks.export.readers.files import (
    DraftVocabulary,
    Expected,
    ExportFolder,
    check_speculators_header,
    read_vocabulary,
    vocabulary_tensors,
)
from draftworks.export.readers.reader import ExportReader, Features, TargetTensors, check_target, read_taps
from draftworks.export.readers.sizes import LayerSizes, named_weights
from draftworks.storage.identity import LayerTap


@dataclass(frozen=True)
class Eagle3Norms:
    """Where the draft normalises beyond its plain form; see the module's description."""

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


@dataclass(frozen=True)
class Eagle3Reader(ExportReader):
    """A chain of steps, each computed as the last row of a plain causal layer over all rows so far."""

    taps: tuple[LayerTap, ...]
    sizes: LayerSizes
    norms: Eagle3Norms
    window: int | None
    """Of the rows of the text, the newest so many that the chain sees, counted from where it begins: as speculators
    trains. (vLLM counts from each token.)"""
    layer: str
    """Prefix of the decoder layer's tensors."""
    vocabulary: DraftVocabulary
    weights: dict[str, Tensor] = field(repr=False)
    embedding: Tensor = field(repr=False)
    dtype: torch.dtype

    @torch.no_grad()
    def logits(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        states = self.fused(self.joined(features))
        rows = []
        for step in range(len(drawn)):
            tokens = torch.cat([next_tokens, drawn[:step]])
            hidden = self.layer_rows(tokens, states, given=len(next_tokens))[-1]
            normed = self.norm(hidden, "norm")
            rows.append(normed @ self.weights["lm_head.weight"].T)
            states = torch.cat([states, (normed if self.norms.norm_output else hidden)[None]])
        return torch.stack(rows)

    def fused(self, streams: Tensor) -> Tensor:
        """(n, taps · H) to the states (n, H) of the first rows."""
        if self.norms.norm_before_fc:
            streams = self.norm(streams, "input_norm")
        if self.norms.fc_norm:
            chunks = streams.chunk(len(self.taps), dim=-1)
            streams = torch.cat([self.norm(chunk, f"fc_norm.{i}") for i, chunk in enumerate(chunks)], dim=-1)
        return streams @ self.weights["fc.weight"].T

    def layer_rows(self, tokens: Tensor, states: Tensor, given: int) -> Tensor:
        """The decoder layer over rows of a token (m,) and a state (m, H) each, `given` of them of the text; its output
        (m, H)."""
        normed = self.norm(states, f"{self.layer}hidden_norm")
        embedded = self.norm(self.embedding[tokens].to(self.dtype), f"{self.layer}input_layernorm")
        attended = self.attended(torch.cat([embedded, normed], dim=-1), self.layer, given)
        hidden = (normed if self.norms.norm_before_residual else states) + attended
        after = self.norm(hidden, f"{self.layer}post_attention_layernorm")
        return hidden + gated_mlp(after, self.weights, f"{self.layer}mlp.")

    def attended(self, inputs: Tensor, layer: str, given: int) -> Tensor:
        """Causal attention of a layer over rows (m, columns of its projections) at positions 0 … m-1: (m, H)."""
        positions = torch.arange(len(inputs))
        heads = {name: split_heads(self._projected(inputs, layer, name), self.sizes.head_dim) for name in "qkv"}
        query, key = (rotate(heads[name], positions, self.sizes.rope) for name in "qk")
        visible = positions[:, None] >= positions[None]
        if self.window is not None:
            begins = positions.clamp(max=given - 1)[:, None]
            visible &= positions[None] > begins - self.window
        return self._projected(attend(query, key, heads["v"], visible), layer, "o")

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.sizes.eps)

    def _projected(self, x: Tensor, layer: str, name: str) -> Tensor:
        return x @ self.weights[f"{layer}self_attn.{name}_proj.weight"].T


@dataclass(frozen=True)
class Eagle3Layout:
    """Where a format keeps things.

    Attributes:
        section: prefix of the config keys of the decoder layer.
        layer: prefix of the decoder layer's tensors.
        layer_ids: config key of the taps.
        own_embedding: whether the file has the target's embedding.
        maps_all: whether d2t and t2d may be there for a draft that says all of the target's tokens.
    """

    export_format: str
    section: str
    layer: str
    layer_ids: str
    own_embedding: bool
    maps_all: bool


SGLANG = Eagle3Layout(
    export_format="sglang_eagle3",
    section="",
    layer="midlayer.",
    layer_ids="eagle_config.eagle_aux_hidden_state_layer_ids",
    own_embedding=False,
    maps_all=True,
)
SPECULATORS = Eagle3Layout(
    export_format="speculators_eagle3",
    section="transformer_layer_config.",
    layer="layers.0.",
    layer_ids="eagle_aux_hidden_state_layer_ids",
    own_embedding=True,
    # The library has no such buffers then, and drops the tensors without a word.
    maps_all=False,
)


def read_sglang_eagle3(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> Eagle3Reader:
    """A draft as SGLang's `LlamaForCausalLMEagle3` loads it, in the spelling that all of its generations know.

    Raises:
        StoreError: files that SGLang would load as another draft than the one that was trained.
    """
    folder.must_be("architectures", ["LlamaForCausalLMEagle3"])
    folder.must_be("eagle_config.use_aux_hidden_state", True)
    folder.must_not_differ("norm_before_residual", False)
    folder.must_not_differ("norm_before_fc", False)
    if folder.has("target_hidden_size") and folder.optional("target_hidden_size", int) is None:
        folder.refuse("target_hidden_size", "a number or no such key (SGLang tests for the key alone)", "null")
    if len(folder.setting(SGLANG.layer_ids, list)) == 1:
        # SGLang applies `fc` only to streams that are wider than the embedding.
        folder.refuse(SGLANG.layer_ids, "two layers or more, else fc is skipped", "one")
    folder.must_be("num_hidden_layers", 1)
    if folder.has("norm_output"):
        folder.refuse("norm_output", "no such key: SpecForge and servers mean different things by it", "one")
    norms = Eagle3Norms(fc_norm=folder.optional("fc_norm", bool, False))
    return read_eagle3(folder, SGLANG, norms, target, dtype)


def read_speculators_eagle3(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> Eagle3Reader:
    """A draft as speculators 0.9.0 and vLLM load it.

    Raises:
        StoreError: files that one of the two would load as another draft than the one that was trained.
    """
    check_speculators_header(folder, "eagle3")
    folder.must_be("transformer_layer_config.model_type", "llama")
    folder.must_be(f"{SPECULATORS.section}num_hidden_layers", 1)
    norms = Eagle3Norms(
        norm_before_residual=folder.setting("norm_before_residual", bool),
        norm_before_fc=folder.optional("norm_before_fc", bool, False),
        fc_norm=folder.optional("fc_norm", bool, False),
        norm_output=folder.optional("norm_output", bool, False),
    )
    return read_eagle3(folder, SPECULATORS, norms, target, dtype, window=_window(folder, SPECULATORS.section))


def _window(folder: ExportFolder, section: str) -> int | None:
    """Of a draft of one layer."""
    types = folder.optional(f"{section}layer_types", list, ["full_attention"])
    if types == ["full_attention"]:
        return None
    folder.must_be(f"{section}layer_types", ["sliding_attention"])
    folder.must_not_differ(f"{section}use_sliding_window", True)
    return folder.setting(f"{section}sliding_window", int)


def read_eagle3(
    folder: ExportFolder,
    layout: Eagle3Layout,
    norms: Eagle3Norms,
    target: TargetTensors,
    dtype: torch.dtype,
    more: Mapping[str, Expected] | None = None,
    window: int | None = None,
) -> Eagle3Reader:
    """A draft whose file holds the tensors of EAGLE-3, and `more` where it is another strategy's; with a `window`, or
    else with full attention in all layers."""
    if norms.norm_before_fc and norms.fc_norm:
        folder.refuse("norm_before_fc", "false together with fc_norm", "true")
    layers = folder.setting(f"{layout.section}num_hidden_layers", int)
    if window is None:
        folder.must_not_differ(f"{layout.section}layer_types", ["full_attention"] * layers)
    folder.must_not_differ("target_hidden_size", folder.setting(f"{layout.section}hidden_size", int))
    sizes = LayerSizes.read(folder, layout.section)
    check_target(folder, sizes, target)
    taps = read_taps(folder, layout.export_format, layout.layer_ids)
    folder.must_not_differ(f"{layout.section}num_aux_hidden_states", len(taps))
    folder.check_tensors(_tensors(folder, layout, sizes, norms, len(taps)) | (more or {}))
    weights = {name: tensor.to(dtype) for name, tensor in folder.tensors.items() if tensor.is_floating_point()}
    return Eagle3Reader(
        taps=taps,
        sizes=sizes,
        norms=norms,
        window=window,
        layer=layout.layer,
        vocabulary=read_vocabulary(folder, sizes.vocab),
        weights=weights,
        embedding=weights.get("embed_tokens.weight", target.embedding.to(dtype)),
        dtype=dtype,
    )


def _tensors(
    folder: ExportFolder, layout: Eagle3Layout, sizes: LayerSizes, norms: Eagle3Norms, taps: int
) -> dict[str, Expected]:
    """What the file must hold."""
    says, wide = folder.setting("draft_vocab_size", int), taps * sizes.hidden
    shapes = {
        "fc": (sizes.hidden, wide),
        f"{layout.layer}hidden_norm": (sizes.hidden,),
        "norm": (sizes.hidden,),
        "lm_head": (says, sizes.hidden),
    }
    if norms.norm_before_fc:
        shapes["input_norm"] = (wide,)
    if norms.fc_norm:
        shapes |= {f"fc_norm.{i}": (sizes.hidden,) for i in range(taps)}
    if layout.own_embedding:
        shapes["embed_tokens"] = (sizes.vocab, sizes.hidden)
    expected = named_weights(shapes) | sizes.list_layer_tensors(layout.layer, inputs=2 * sizes.hidden)
    if says != sizes.vocab or (layout.maps_all and "d2t" in folder.tensors):
        expected |= vocabulary_tensors(says, sizes.vocab)
    return expected
