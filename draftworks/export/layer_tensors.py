"""Names and shapes of a decoder layer's tensors, which are the same in all formats but for their prefix."""

from __future__ import annotations

from draftworks.export.export_format import DraftShape, Shapes


def layer_tensors(prefix: str, shape: DraftShape, inputs: int) -> Shapes:
    """Of one layer of the Llama family whose q, k and v projections read `inputs` columns.

    Args:
        prefix: of the names, with its dot.
    """
    hidden, wide = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
        f"{prefix}self_attn.q_proj.weight": (queries, inputs),
        f"{prefix}self_attn.k_proj.weight": (keys, inputs),
        f"{prefix}self_attn.v_proj.weight": (keys, inputs),
        f"{prefix}self_attn.o_proj.weight": (hidden, queries),
        f"{prefix}mlp.gate_proj.weight": (wide, hidden),
        f"{prefix}mlp.up_proj.weight": (wide, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, wide),
    }
