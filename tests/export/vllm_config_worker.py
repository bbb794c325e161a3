"""What the configuration modules of a vLLM say of exports: `python vllm_config_worker.py PACKAGE FOLDER...`, one JSON object.

PACKAGE holds `config.py`, `algos.py` and `base.py` of a wheel (see vllm_wheels). Nothing else of vLLM is there, so the two
modules that they ask for are made here; a process of its own, as they go by vLLM's names.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOM = "vllm.transformers_utils.configs.speculators"


def load(package: Path) -> tuple[ModuleType, ModuleType]:
    """Load algos.py and base.py under their own names."""
    parts = ROOM.split(".")
    for count in range(1, len(parts) + 1):
        sys.modules[".".join(parts[:count])] = ModuleType(".".join(parts[:count]))
    utils = ModuleType("vllm.transformers_utils.utils")
    utils.without_trust_remote_code = lambda kwargs: kwargs  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules[utils.__name__] = utils
    found = []
    for part in ("algos", "base"):
        spec = importlib.util.spec_from_file_location(f"{ROOM}.{part}", package / f"{part}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found.append(module)
    return found[0], found[1]


def describe(config: dict[str, Any], reader: Any) -> dict[str, Any]:
    """Return what vLLM makes of a config.json, or why it refuses it."""
    try:
        asked = reader.extract_vllm_speculative_config(json.loads(json.dumps(config)))
        made = reader.extract_transformers_pre_trained_config(json.loads(json.dumps(config)))
    except (ValueError, TypeError, KeyError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"asked": asked, "layers": made.get("eagle_aux_hidden_state_layer_ids")}


def main(package: Path, folders: list[Path]) -> dict[str, Any]:
    algos, base = load(package)
    configs = {folder.name: json.loads((folder / "config.json").read_text()) for folder in folders}
    return {
        "types": sorted(algos.SUPPORTED_SPECULATORS_TYPES),
        "wants_hub": "must name a remote model repository" in (package / "config.py").read_text(),
        "exports": {name: describe(config, base.SpeculatorsConfig) for name, config in configs.items()},
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), list(map(Path, sys.argv[2:])))))
