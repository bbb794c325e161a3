"""Names that whoever shows an export shares with the engine that makes it. Torch-free."""

from __future__ import annotations

DRAFT_FOLDER = "DRAFT_FOLDER"
"""Stands in command lines where the path of the exported folder belongs: it is moved and copied about."""
CARD = "README.md"
"""The model card, in a report and beside exported weights."""
NORM_OUTPUT_MEANS = "norm_output_means"
"""Key of a config.json, or said by who imports it: `specforge` or `sglang`, by whom its `norm_output` is to be understood."""
PROVENANCE = "provenance"
"""Key of config.json that says where the draft is from; loaders ignore it."""
READABLE = "readable"
GATE_MEANINGS = {
    READABLE: "config.json and the weights can be read.",
    "key_set": "The file holds exactly the tensors that the loader takes: it fills in what it misses and skips the rest.",
    "shapes": "Every tensor has the shape that follows from the draft's sizes.",
    "tensors_equal": "Every tensor is, bit for bit, the draft's own in the exported dtype.",
    "finite": "All numbers are finite.",
    "vocabulary": "d2t holds offsets, not ids, and t2d marks the tokens that it leads to.",
    "fc_width": "fc reads as many columns as the layers that config.json names have.",
    "layer_ids": "The layer ids, as the format counts them, name the streams that the draft was trained on.",
    "config_round_trip": "config.json says of the draft what it is: sizes, norms, rope and options.",
    "server_config": "The configuration class by which servers read config.json takes it; whose was not run is said.",
    "same_logits": "A reader that shares no code with the draft computes the same from the exported files.",
}
"""Of every gate over an exported folder, in the order in which they are looked at."""
