"""Whether a target's checkpoint is quantised, and why its layers then cannot be compared with an engine's. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftworks.config.run_files import TargetFiles
from draftworks.config.sglang import find_quantizing_args
from draftworks.storage.hub import fetch_hub_file
from draftworks.storage.regular_files import read_json

_MODEL_OPT = "hf_quant_config.json"
_LOADED_IN = {"load_in_4bit", "load_in_8bit"}
"""Keys by which older checkpoints of bitsandbytes are known."""


def explain_unprobable(target: TargetFiles, engine_args: Sequence[str]) -> str:
    """Return why an engine cannot be compared with the target's files; an empty text if it can."""
    quantizing = find_quantizing_args(engine_args)
    if quantizing:
        return f"capture.server.args has {', '.join(quantizing)}, which changes the numerical results"
    method = read_quantization(target)
    return f"the checkpoint is quantised ({method}), and its layers are not run here" if method else ""


def read_quantization(target: TargetFiles) -> str:
    """Return the name of the checkpoint's quantisation, as its files give it; empty without one.

    NVIDIA's ModelOpt writes a file of its own beside config.json.
    """
    path = Path(target.model) / "config.json"
    if target.revision is not None:
        path = fetch_hub_file(f"target {target.name}", target.model, target.revision, "config.json") or path
    try:
        config = read_json(path)
    except (OSError, ValueError):
        return ""  # building the model from this file raises an error that names the problem
    if not isinstance(config, dict):
        return ""
    text = config.get("text_config")
    found = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if isinstance(found, dict):
        return str(found.get("quant_method", "bitsandbytes" if _LOADED_IN & found.keys() else "quantization_config"))
    return "modelopt" if target.revision is None and (path.parent / _MODEL_OPT).is_file() else ""
