"""Convert taps to the layer ids of an export format and back. Torch-free, and the only place that does it.

Two ways of counting are in use. "Layers passed" is `hf_index` itself; "layer output" is the 0-based number of the layer
that wrote the stream, one less. A draft with ids of the wrong kind loads and runs, on the streams of the next layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftworks.config.strategies import LayerCounting, resolve_export
from draftworks.errors import ConfigError
from draftworks.storage.identity import LayerTap


@dataclass(frozen=True)
class _Counting:
    """The two directions of one way of counting. The lowest id is 0 in both: no server takes -1 for the embeddings."""

    to_id: Callable[[LayerTap], int]
    from_id: Callable[[int], LayerTap]


_COUNTING: dict[LayerCounting, _Counting] = {
    "layers_passed": _Counting(LayerTap.to_vllm, LayerTap.from_vllm),
    "layer_output": _Counting(LayerTap.to_layer_output, LayerTap.from_layer_output),
}


def to_format(export_format: str, taps: Sequence[LayerTap]) -> list[int]:
    """Return the ids of `taps` as `export_format` counts them.

    Raises:
        ConfigError: unknown format; taps that do not ascend; the embeddings, where a format has no id for them.
    """
    ids = [_find_counting(export_format).to_id(tap) for tap in taps]
    return _require_ascending(export_format, ids)


def from_format(export_format: str, ids: Sequence[int]) -> tuple[LayerTap, ...]:
    """Return the taps that `ids` name in `export_format`, in their order.

    Raises:
        ConfigError: unknown format; ids that are no integers, do not ascend, or are negative.
    """
    counting = _find_counting(export_format)
    return tuple(counting.from_id(layer) for layer in _require_ascending(export_format, ids))


def _require_ascending(export_format: str, ids: Sequence[int]) -> list[int]:
    """Return `ids` if they ascend from 0 or more, else raise ConfigError.

    Servers append streams in the order in which layers run, whatever the order of the ids: only with an ascending list is
    it clear which columns of `fc` belong to which layer.
    """
    whole = all(isinstance(layer, int) and not isinstance(layer, bool) for layer in ids)
    if not ids or not whole or min(ids) < 0 or any(a >= b for a, b in zip(ids, ids[1:], strict=False)):
        raise ConfigError(f"{export_format}: layer ids: expected ascending integers from 0, found {list(ids)}")
    return list(ids)


def _find_counting(export_format: str) -> _Counting:
    return _COUNTING[resolve_export(export_format).counting]
