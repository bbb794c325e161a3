"""Names that the asset layer and the engine both use for exports. Torch-free."""

from __future__ import annotations

DRAFT_FOLDER = "DRAFT_FOLDER"
"""Placeholder in command lines for the path of the exported folder, which is moved and copied."""
CARD = "README.md"
"""The model card, in a report and beside exported weights."""
NORM_OUTPUT_MEANS = "norm_output_means"
"""Key of a config.json, or argument of an import: `specforge` or `sglang`, whose meaning of `norm_output` applies."""
PROVENANCE = "provenance"
"""Key of config.json for the origin of the draft; loaders ignore it."""
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
