"""What vLLM is told so that it captures: which layers, by which connector, and where hidden states go. Torch-free.

An id of vLLM is an index of transformers' `hidden_states`: 0 the embeddings, n the state after the last of n layers and
before the final norm, for every class that supports the method. Source: vLLM 0.32 and 0.33, `EagleModelMixin`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftworks.handover.destination import make_destination
from draftworks.storage.identity import LayerTap

CONNECTOR = "DraftworksConnector"
MODULE = "draftworks.vllm.connector"
CAPTURING = ("--max-logprobs", "-1", "--logprobs-mode", "raw_logits")
"""Arguments with which an answer can bring the logits that captured states are verified against."""


def list_ids(layer_ids: Sequence[int], num_layers: int) -> list[int]:
    """Return vLLM's ids of layer outputs (0-based, -1 is the embeddings), and of the state before the final norm."""
    return [*sorted(LayerTap.from_layer_output(layer).hf_index for layer in layer_ids), num_layers]


def make_speculative_config(ids: Sequence[int]) -> dict[str, Any]:
    """Return the value of `--speculative-config` with which vLLM keeps these hidden states; it proposes nothing."""
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(ids)}},
    }


def make_transfer_config(spool: Path, mooncake: Path | None = None) -> Mapping[str, Any]:
    """Return the value of `--kv-transfer-config` that loads the connector; see `make_destination`."""
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": make_destination(spool, mooncake),
    }
