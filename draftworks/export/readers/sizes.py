"""Sizes of a draft's decoder layers, and the names and shapes of the tensors that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from draftworks.export.readers.files import Expected, ExportFolder
from draftworks.export.readers.rope import RopeTable, read_rope


@dataclass(frozen=True)
class LayerSizes:
    """Of every decoder layer of a draft. All are explicit in its config: the defaults of Llama and Qwen3 differ."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int
    eps: float
    rope: RopeTable

    @classmethod
    def read(cls, folder: ExportFolder, section: str = "") -> LayerSizes:
        """From the keys below `section` (which ends with a dot, or is empty).

        Raises:
            StoreError: a key is missing, or asks for biases or another activation, which no draft here has.
        """
        for bias in ("attention_bias", "mlp_bias"):
            folder.must_not_differ(section + bias, False)
        folder.must_not_differ(section + "hidden_act", "silu")
        folder.must_not_differ(section + "tie_word_embeddings", False)
        head_dim = folder.setting(section + "head_dim", int)
        return cls(
            hidden=folder.setting(section + "hidden_size", int),
            intermediate=folder.setting(section + "intermediate_size", int),
            heads=folder.setting(section + "num_attention_heads", int),
            kv_heads=folder.setting(section + "num_key_value_heads", int),
            head_dim=head_dim,
            layers=folder.setting(section + "num_hidden_layers", int),
            vocab=folder.setting(section + "vocab_size", int),
            eps=folder.setting(section + "rms_norm_eps", float),
            rope=read_rope(folder, section, head_dim),
        )

    def list_layer_tensors(self, prefix: str, inputs: int) -> dict[str, Expected]:
        """Of one decoder layer whose q, k and v projections read `inputs` columns."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "self_attn.q_proj": (queries, inputs),
            "self_attn.k_proj": (keys, inputs),
            "self_attn.v_proj": (keys, inputs),
            "self_attn.o_proj": (self.hidden, queries),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
        }
        return named_weights(shapes, prefix)


def named_weights(shapes: Mapping[str, tuple[int, ...]], prefix: str = "") -> dict[str, Expected]:
    """`{prefix}{name}.weight` of floating point tensors."""
    return {f"{prefix}{name}.weight": Expected(shape) for name, shape in shapes.items()}
