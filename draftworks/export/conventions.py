"""What writers, readers and the asset layer agree on: names, layer ids, what each release of vLLM reads. Torch-free.

Layer ids are converted here alone, in two ways of counting. "Layers passed" is `hf_index` itself; "layer output" is the
0-based number of the layer that wrote the stream, one less. A draft with ids of the wrong kind loads and runs, on the
streams of the next layer.

What a release of vLLM reads of a draft in speculators' layout is read in the wheels: `SUPPORTED_SPECULATORS_TYPES` of
transformers_utils/configs/speculators/algos.py, and whether transformers_utils/config.py wants the verifier on a hub ("must
name a remote model repository"). A test compares this table with the wheels, and commands are printed by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftworks.config.service import ServingEngine
from draftworks.config.strategies import LayerCounting, resolve_export
from draftworks.errors import ConfigError
from draftworks.storage.identity import LayerTap

DRAFT_FOLDER = "DRAFT_FOLDER"
"""Placeholder in command lines for the path of the exported folder, which is moved and copied."""
CARD = "README.md"
"""The model card, in a report and beside exported weights."""
NORM_OUTPUT_MEANS = "norm_output_means"
"""Key of a config.json, or argument of an import: `specforge` or `sglang`, whose meaning of `norm_output` applies."""
LAYER_IDS_MEAN = "layer_ids_mean"
"""The same for layer ids of SGLang's layout: `sglang`, layers whose output is taken, or `vllm`, indices of hidden_states."""
SERVER_COMMANDS: dict[ServingEngine, str] = {"sglang": "SGLang", "vllm": "vLLM, target first"}
"""Key of the command in an export's metadata by which an engine serves target and draft."""
PROVENANCE = "provenance"
"""Key of config.json for the origin of the draft; loaders ignore it."""
GGUF_PROVENANCE = "draftworks.provenance"
"""The same in a GGUF file, as the text of a JSON object."""
READABLE = "readable"
GATE_MEANINGS = {
    READABLE: "config.json and the weights can be read.",
    "key_set": "The file holds exactly the tensors that the loader takes: loaders initialise missing ones and skip unknown ones.",
    "shapes": "Every tensor has the shape that follows from the draft's sizes.",
    "tensors_equal": "Every tensor is, bit for bit, the draft's own in the exported dtype.",
    "finite": "All numbers are finite.",
    "vocabulary": "d2t holds offsets, not ids, and t2d marks the tokens that it leads to.",
    "fc_width": "fc has as many columns as the layers that config.json names.",
    "layer_ids": "The layer ids, as the format counts them, name the streams that the draft was trained on.",
    "config_round_trip": "config.json describes the draft (sizes, norms, rope, options), and every key of it is as the format writes it.",
    "server_config": "The configuration class by which servers read config.json accepts it; classes that were not run are named.",
    "same_logits": "A reader that shares no code with the draft computes the same from the exported files.",
}
"""Of every gate over an exported folder, in the order in which they are looked at."""


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


@dataclass(frozen=True)
class VllmRelease:
    """A release of vLLM.

    Attributes:
        version: major and minor number.
        speculators_types: values of `speculators_model_type` that it reads; it refuses every other.
        serves_local_verifier: whether `vllm serve DRAFT_FOLDER` takes a folder that names its target by a path.
    """

    version: str
    speculators_types: frozenset[str]
    serves_local_verifier: bool


_TYPES = frozenset({"eagle3", "peagle", "dflash", "dflash2", "dspark"})
RELEASES = (VllmRelease("0.32", _TYPES, True), VllmRelease("0.33", _TYPES, False))
"""Oldest first. A command is printed if all of them take it."""


def is_read(speculators_type: str) -> bool:
    """Return whether every known release reads this type."""
    return all(speculators_type in release.speculators_types for release in RELEASES)


def is_served_alone(speculators_type: str, is_local: bool) -> bool:
    """Return whether every known release serves a draft's folder alone, whose target is local or on a hub."""
    return is_read(speculators_type) and (not is_local or all(each.serves_local_verifier for each in RELEASES))


def name_releases() -> str:
    """Return the known versions as words: `0.32 and 0.33`."""
    return " and ".join(release.version for release in RELEASES)
