"""An MTP layer from exported files: the names of Qwen3-Next, Qwen3.5 and DeepSeek-V3, and those of speculators.

The layer's arithmetic is that of the target's class in SGLang and transformers, written for one sequence:

* Qwen: norms add one to their weights; the query projection gives query and gate of each head side by side; the first
  `partial_rotary_factor` of a head is rotated; experts are chosen by softmax, a shared expert is gated by itself.
* DeepSeek-V3: queries and keys have a part without and a part with position, the latter in adjacent pairs and one for all
  heads; experts are chosen by sigmoid and a bias, in the best groups.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftworks.errors import StoreError
from draftworks.export.readers.arithmetic import RopeTable, attend, gated_mlp, read_rope, rms_norm, rotate, split_heads
from draftworks.export.readers.reader import DraftVocabulary, ExportFolder, ExportReader, Features, TargetTensors
from draftworks.storage.identity import LayerTap

LAST = "last"


@dataclass(frozen=True)
class LayerNames:
    """Names of the projection and of the norms of state, token and output, and what the layer's begin with."""

    fc: str
    hidden_norm: str
    token_norm: str
    norm: str
    layer: str


_QWEN = LayerNames("mtp.fc", "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding", "mtp.norm", "mtp.layers.0.")
_SPECULATORS = LayerNames(
    *(f"mtp_layers.0.{name}" for name in ("input_proj", "hidden_layernorm", "token_layernorm", "final_layernorm", ""))
)


@dataclass(frozen=True)
class MtpReader(ExportReader):
    """Positions 0 … n-1 read the target's last states; each proposal after the first reads the state before it.

    Attributes:
        taps: none.
        section: prefix of the layer's settings in config.json.
        numbered: whether experts are stored one by one.
    """

    taps: tuple[LayerTap, ...]
    vocabulary: DraftVocabulary
    dtype: torch.dtype
    folder: ExportFolder = field(repr=False)
    section: str
    names: LayerNames
    weights: Mapping[str, Tensor] = field(repr=False)
    target: TargetTensors = field(repr=False)
    rope: RopeTable = field(repr=False)

    def logits(self, features: Features, next_tokens: Tensor, drawn: Tensor) -> Tensor:
        states = features if isinstance(features, Tensor) else features[LAST]
        rows = self._join(states.to(self.dtype), next_tokens)  # (n, H)
        found: list[Tensor] = []
        for step in range(len(drawn)):
            output = self._run_layer(rows)[-1:]  # earlier rows see nothing of the last one
            found.append(output)
            rows = torch.cat([rows, self._join(output, drawn[step : step + 1])])
        return torch.cat(found) @ self.target.head.to(self.dtype).T

    def _join(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return the layer's input (n, H) of states and the tokens after them."""
        embedded = self.norm(self.target.embedding[tokens].to(self.dtype), f"{self.names.token_norm}.weight")
        joined = torch.cat([embedded, self.norm(states, f"{self.names.hidden_norm}.weight")], dim=-1)
        return joined @ self.weights[f"{self.names.fc}.weight"].T

    def _run_layer(self, rows: Tensor) -> Tensor:
        layer = self.names.layer
        rows = rows + self.attend(self.norm(rows, f"{layer}input_layernorm.weight"), f"{layer}self_attn.")
        after = self.norm(rows, f"{layer}post_attention_layernorm.weight")
        return self.norm(rows + self.feed_forward(after, f"{layer}mlp."), f"{self.names.norm}.weight")

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a setting of the layer. Raises StoreError if it is missing and has no default."""
        name = f"{self.section}{key}"
        return self.folder.require_setting(name) if default is None else self.folder.find_setting(name, default)

    def run_experts(self, x: Tensor, prefix: str, shares: Tensor) -> Tensor:
        """Return Σ_e shares[:, e] · expert_e(x), (n, H), with shares (n, E)."""
        total = torch.zeros_like(x)
        for number in range(shares.shape[1]):
            total = total + shares[:, number : number + 1] * gated_mlp(x, self._expert(prefix, number), "")
        return total

    def _expert(self, prefix: str, number: int) -> dict[str, Tensor]:
        parts = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
        if f"{prefix}experts.{number}.{parts[0]}" in self.weights:
            return {part: self.weights[f"{prefix}experts.{number}.{part}"] for part in parts}
        gate, up = self.weights[f"{prefix}experts.gate_up_proj"][number].chunk(2)
        return dict(zip(parts, (gate, up, self.weights[f"{prefix}experts.down_proj"][number])))

    @abstractmethod
    def norm(self, x: Tensor, name: str) -> Tensor:
        """Return x (…, W) normed by the weight of that name."""

    @abstractmethod
    def attend(self, x: Tensor, prefix: str) -> Tensor:
        """Return the attention's output (n, H) of normed rows (n, H), each of which sees those up to itself."""

    @abstractmethod
    def feed_forward(self, x: Tensor, prefix: str) -> Tensor:
        """Return the output (n, H) of the MLP or the experts."""


class QwenReader(MtpReader):
    """The layer of Qwen3-Next and Qwen3.5."""

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, 1 + self.weights[name], self.setting("rms_norm_eps"))

    def attend(self, x: Tensor, prefix: str) -> Tensor:
        width, turned = self.setting("head_dim"), 2 * len(self.rope.inverse)
        both = (x @ self.weights[f"{prefix}q_proj.weight"].T).unflatten(-1, (-1, 2 * width))
        queries, gates = both.chunk(2, dim=-1)  # (n, heads, D) each
        keys, values = (split_heads(x @ self.weights[f"{prefix}{each}_proj.weight"].T, width) for each in "kv")
        turn = torch.arange(len(x))

        def place(heads: Tensor, name: str) -> Tensor:
            heads = self.norm(heads, f"{prefix}{name}_norm.weight")
            return torch.cat([rotate(heads[..., :turned], turn, self.rope), heads[..., turned:]], dim=-1)

        seen = attend(place(queries.transpose(0, 1), "q"), place(keys, "k"), values, turn[:, None] >= turn)
        return (seen * gates.flatten(1).sigmoid()) @ self.weights[f"{prefix}o_proj.weight"].T

    def feed_forward(self, x: Tensor, prefix: str) -> Tensor:
        router = self.weights.get(f"{prefix}gate.weight")
        if router is None:
            return gated_mlp(x, self.weights, prefix)
        chances = (x @ router.T).softmax(-1)
        best = chances.topk(self.setting("num_experts_per_tok"), dim=-1)
        chosen = torch.zeros_like(chances).scatter(1, best.indices, best.values)
        if self.folder.find_setting(f"{self.section}norm_topk_prob", True):
            chosen = chosen / chosen.sum(-1, keepdim=True)
        shared = gated_mlp(x, self.weights, f"{prefix}shared_expert.")
        gate = (x @ self.weights[f"{prefix}shared_expert_gate.weight"].T).sigmoid()
        return self.run_experts(x, prefix, chosen) + gate * shared


class DeepseekReader(MtpReader):
    """The layer of DeepSeek-V3."""

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[name], self.setting("rms_norm_eps"))

    def attend(self, x: Tensor, prefix: str) -> Tensor:
        plain, turned, rank = (self.setting(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank"))
        if f"{prefix}q_proj.weight" in self.weights:
            queries = x @ self.weights[f"{prefix}q_proj.weight"].T
        else:
            # The norms inside have transformers' default epsilon, whatever the config says of the others.
            low = rms_norm(
                x @ self.weights[f"{prefix}q_a_proj.weight"].T, self.weights[f"{prefix}q_a_layernorm.weight"], 1e-6
            )
            queries = low @ self.weights[f"{prefix}q_b_proj.weight"].T
        queries = split_heads(queries, plain + turned)  # (heads, n, D)
        both = x @ self.weights[f"{prefix}kv_a_proj_with_mqa.weight"].T
        low = rms_norm(both[:, :rank], self.weights[f"{prefix}kv_a_layernorm.weight"], 1e-6)
        rebuilt = split_heads(low @ self.weights[f"{prefix}kv_b_proj.weight"].T, plain + self.setting("v_head_dim"))
        turn = torch.arange(len(x))
        shared = self._turn(both[None, :, rank:], turn).expand(len(queries), -1, -1)
        keys = torch.cat([rebuilt[..., :plain], shared], dim=-1)
        queries = torch.cat([queries[..., :plain], self._turn(queries[..., plain:], turn)], dim=-1)
        seen = attend(queries * self._sharpness(), keys, rebuilt[..., plain:], turn[:, None] >= turn)
        return seen @ self.weights[f"{prefix}o_proj.weight"].T

    def _turn(self, heads: Tensor, turn: Tensor) -> Tensor:
        if self.setting("rope_interleave", True):
            heads = torch.cat([heads[..., ::2], heads[..., 1::2]], dim=-1)
        return rotate(heads, turn, self.rope)

    def _sharpness(self) -> float:
        """Return the factor of YaRN on attention scores, (0.1 · mscale_all_dim · ln factor + 1)²."""
        rope = self.folder.find_setting(f"{self.section}rope_parameters") or self.folder.find_setting(
            f"{self.section}rope_scaling", {}
        )
        factor, weight = rope.get("factor") or 1.0, rope.get("mscale_all_dim") or 0.0
        return (0.1 * weight * math.log(factor) + 1) ** 2 if factor > 1 else 1.0

    def feed_forward(self, x: Tensor, prefix: str) -> Tensor:
        router = self.weights.get(f"{prefix}gate.weight")
        if router is None:
            return gated_mlp(x, self.weights, prefix)
        scores = (x @ router.T).sigmoid()
        biased = scores + self.weights[f"{prefix}gate.e_score_correction_bias"]
        groups = biased.unflatten(-1, (self.setting("n_group"), -1))
        best = groups.topk(2, dim=-1).values.sum(-1).topk(self.setting("topk_group"), dim=-1).indices
        inside = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(1, best, True)
        allowed = biased.masked_fill(~inside[..., None].expand_as(groups).flatten(1), -math.inf)
        chosen = allowed.topk(self.setting("num_experts_per_tok"), dim=-1).indices
        shares = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        if self.folder.find_setting(f"{self.section}norm_topk_prob", True):
            shares = shares / shares.sum(-1, keepdim=True)
        shares = shares * self.setting("routed_scaling_factor", 1.0)
        return self.run_experts(x, prefix, shares) + gated_mlp(x, self.weights, f"{prefix}shared_experts.")


def read_target_mtp(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> MtpReader:
    """Read a layer as SGLang does from a folder of the target's own config and names."""
    section = "text_config." if folder.find_setting("text_config") else ""
    if folder.require_setting(f"{section}model_type") != "deepseek_v3":
        return _open(folder, target, dtype, section, _QWEN)
    layer = f"model.layers.{folder.require_setting(f'{section}num_hidden_layers')}."
    parts = ("eh_proj", "hnorm", "enorm", "shared_head.norm", "")
    return _open(folder, target, dtype, section, LayerNames(*(layer + part for part in parts)))


def read_speculators_mtp(folder: ExportFolder, target: TargetTensors, dtype: torch.dtype) -> MtpReader:
    """Read a layer as speculators 0.9.0 does."""
    return _open(folder, target, dtype, "transformer_layer_config.", _SPECULATORS)


def _open(
    folder: ExportFolder, target: TargetTensors, dtype: torch.dtype, section: str, names: LayerNames
) -> MtpReader:
    kind, size = folder.require_setting(f"{section}model_type"), len(target.embedding)
    if kind == "deepseek_v3":
        make, turned = DeepseekReader, folder.require_setting(f"{section}qk_rope_head_dim")
    elif kind.startswith("qwen3"):
        share = folder.find_setting(f"{section}rope_parameters", {}).get("partial_rotary_factor")
        share = share or folder.find_setting(f"{section}partial_rotary_factor", 1.0)
        make, turned = QwenReader, int(folder.require_setting(f"{section}head_dim") * share)
    else:
        raise StoreError(f"{folder.path}: {section}model_type: expected a kind with an MTP layer, found {kind!r}")
    vocabulary = DraftVocabulary(torch.arange(size), size)
    rope = read_rope(folder, section, turned)
    return make((), vocabulary, dtype, folder, section, names, folder.cast_weights(dtype), target, rope)
