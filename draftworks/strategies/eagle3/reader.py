"""EAGLE-3 from exported files: SGLang's layout (`midlayer.*`) and that of speculators (`layers.0.*`).

Where the formats normalise, and which settings are what our own draft computes (draftworks.strategies.eagle3.model):

* `norm_before_residual` (speculators): whether the residual stream starts from the normed state. vLLM takes true where the
  key is missing, so a file must have it. SGLang always computes false and does not know the key.
* `norm_output`: speculators, vLLM and SGLang from #24663 on feed the state after the final norm to the next step if true
  (our feedback `post_norm`), the one before it if false or missing (`pre_norm`); the head reads the normed state in both
  cases. In SpecForge up to 0.2.0 the same key says whether the head reads the normed state, and the feedback is never
  normed: its true, which it takes where the key is missing, is what the others call false, and its false is what none of
  them computes. So files in SGLang's layout, which SpecForge reads too, do not have the key: all mean the same then.
* `fc_norm`: a norm for each tap before `fc`; `norm_before_fc` (speculators): one norm over all of them.
* `layer_types`, `sliding_window` (speculators): see `Eagle3Reader.window`. SGLang reads neither for EAGLE-3.

Position t reads the streams at t and the token after it, and has rotary position t. (speculators counts from 1 when it
trains: only differences enter the scores.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftworks.export.readers.arithmetic import LayerSizes, attend, gated_mlp, rms_norm, rotate, split_heads
from draftworks.export.readers.reader import (
    DraftVocabulary,
    ExportFolder,
    ExportReader,
    Features,
    TargetTensors,
    read_taps,
    read_vocabulary,
)
from draftworks.storage.identity import LayerTap


@dataclass(frozen=True)
class Eagle3Norms:
    """Where the draft normalises beyond EAGLE-3 as published; see the module."""

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


@dataclass(frozen=True)
class Eagle3Reader(ExportReader):
    """A chain of steps, each computed as the last position of a causal layer over the text and all steps before it.

    Attributes:
        window: the chain sees this many of the text's newest positions, counted from the one where it begins, as
            speculators trains; vLLM counts from each token. None: all.
        layer: prefix of the first decoder layer's tensors.
    """

    taps: tuple[LayerTap, ...]
    sizes: LayerSizes
    norms: Eagle3Norms
    window: int | None
    layer: str
    vocabulary: DraftVocabulary
    weights: dict[str, Tensor] = field(repr=False)
    embedding: Tensor = field(repr=False)
    dtype: torch.dtype

    def logits(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        return self.norm(self.states(features, next_tokens, drawn), "norm") @ self.weights["lm_head.weight"].T

    def states(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        """Return the state of each step before the final norm, (k, H). Arguments as for `logits`."""
        inputs = self.fuse(self.join_taps(features))  # (n, H)
        outputs = []
        for step in range(len(drawn)):
            tokens = torch.cat([next_tokens, drawn[:step]])  # (n + step,)
            output = self.run_first_layer(tokens, inputs, given=len(next_tokens))[-1]
            outputs.append(output)
            fed_back = self.norm(output, "norm") if self.norms.norm_output else output
            inputs = torch.cat([inputs, fed_back[None]])  # (n + step + 1, H)
        return torch.stack(outputs)

    def fuse(self, streams: Tensor) -> Tensor:
        """Return the first states of the text's positions, (n, H), from its streams (n, taps · H)."""
        if self.norms.norm_before_fc:
            streams = self.norm(streams, "input_norm")
        if self.norms.fc_norm:
            chunks = streams.chunk(len(self.taps), dim=-1)
            streams = torch.cat([self.norm(chunk, f"fc_norm.{i}") for i, chunk in enumerate(chunks)], dim=-1)
        return streams @ self.weights["fc.weight"].T

    def run_first_layer(self, tokens: Tensor, states: Tensor, given: int) -> Tensor:
        """Return the first layer's output (m, H) for tokens (m,) and states (m, H), the first `given` of the text."""
        normed = self.norm(states, f"{self.layer}hidden_norm")
        embedded = self.norm(self.embedding[tokens].to(self.dtype), f"{self.layer}input_layernorm")
        attended = self.attend(torch.cat([embedded, normed], dim=-1), self.layer, given)
        hidden = (normed if self.norms.norm_before_residual else states) + attended
        after = self.norm(hidden, f"{self.layer}post_attention_layernorm")
        return hidden + gated_mlp(after, self.weights, f"{self.layer}mlp.")

    def attend(self, inputs: Tensor, layer: str, given: int) -> Tensor:
        """Return the causal self-attention of a layer, (m, H), over inputs (m, columns of its projections)."""
        positions = torch.arange(len(inputs))
        heads = {name: split_heads(self._project(inputs, layer, name), self.sizes.head_dim) for name in "qkv"}
        query, key = (rotate(heads[name], positions, self.sizes.rope) for name in "qk")
        visible = positions[:, None] >= positions  # (m, m)
        if self.window is not None:
            begins = positions.clamp(max=given - 1)[:, None]
            visible &= positions > begins - self.window
        return self._project(attend(query, key, heads["v"], visible), layer, "o")

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.sizes.eps)

    def _project(self, x: Tensor, layer: str, name: str) -> Tensor:
        return x @ self.weights[f"{layer}self_attn.{name}_proj.weight"].T


def read_sglang_eagle3(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> Eagle3Reader:
    """Read a draft as SGLang's `LlamaForCausalLMEagle3` does, in the spelling that all of its generations know."""
    norms = Eagle3Norms(
        fc_norm=folder.find_setting("fc_norm", False), norm_output=folder.find_setting("norm_output", False)
    )
    taps = read_taps(folder, "sglang_eagle3", "eagle_config.eagle_aux_hidden_state_layer_ids")
    return _read(folder, target, dtype, taps, norms, section="", layer="midlayer.")


def read_speculators_eagle3(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> Eagle3Reader:
    """Read a draft as speculators 0.9.0 and vLLM do."""
    norms = Eagle3Norms(
        norm_before_residual=folder.require_setting("norm_before_residual"),
        norm_before_fc=folder.find_setting("norm_before_fc", False),
        fc_norm=folder.find_setting("fc_norm", False),
        norm_output=folder.find_setting("norm_output", False),
    )
    return read_speculators(folder, target, dtype, "speculators_eagle3", norms)


def read_speculators(
    folder: ExportFolder, target: TargetTensors, dtype: torch.dtype, export_format: str, norms: Eagle3Norms
) -> Eagle3Reader:
    """Read what EAGLE-3 and P-EAGLE have in common in speculators' layout: the fusion, first layer, norm and head."""
    taps = read_taps(folder, export_format, "eagle_aux_hidden_state_layer_ids")
    return _read(folder, target, dtype, taps, norms, section="transformer_layer_config.", layer="layers.0.")


def _read(
    folder: ExportFolder,
    target: TargetTensors,
    dtype: torch.dtype,
    taps: tuple[LayerTap, ...],
    norms: Eagle3Norms,
    section: str,
    layer: str,
) -> Eagle3Reader:
    """Read the files; `section` is the prefix of the layers' config keys, `layer` that of the first layer's tensors."""
    weights = folder.cast_weights(dtype)
    slides = "sliding_attention" in folder.find_setting(f"{section}layer_types", [])
    return Eagle3Reader(
        taps=taps,
        sizes=LayerSizes.read(folder, section),
        norms=norms,
        window=folder.require_setting(f"{section}sliding_window") if slides else None,
        layer=layer,
        vocabulary=read_vocabulary(folder, len(target.embedding)),
        weights=weights,
        embedding=weights.get("embed_tokens.weight", target.embedding.to(dtype)),
        dtype=dtype,
    )
