"""Published configurations pass `draftworks check` at full size with every strategy, or are refused with the reason.

published/SOURCES.md says where each was read. The table in docs/strategies.md is compared with what is found here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from coverings import gate_or_long
from model_families import DRAFT_OPTIONS
from published_targets import GivenDigests, respell_rope, save_published_target

from draftworks.drafts.target_parts import TargetParts
from draftworks.preflight.examine import examine_entry
from draftworks.targets.resolve import resolve_target

FOLDER = Path(__file__).parent / "published"
CONFIGS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
WITH_MTP = ("deepseek-v3", "qwen3-next-80b-a3b-thinking", "qwen3.5-9b", "qwen3.5-35b-a3b", "qwen3.5-397b-a17b")
FIRST_OF_ITS_TYPE = {*{config["model_type"]: name for name, config in reversed(CONFIGS.items())}.values()}
"""Of these the gate asks those that differ in more than their sizes."""
LIKE_OTHERS = {"qwen2.5-7b-instruct", "qwen3-30b-a3b", "qwen3.5-35b-a3b", "mistral-7b-instruct-v0.3", "gemma-3-1b-it"}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "strategies.md"


def documented() -> dict[str, str]:
    """Return what the page says of each configuration: of the draft's own, or the reason of a refusal."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {name: row[1] for row in rows for name in re.findall(r"`([^`]+)`", row[0])}


def examine(fleet, model: Path, strategies: Iterable[str]) -> list[str]:
    """Return the errors of a target with the default options of these strategies.

    XPress has one format, whose loaders do not scale embeddings as Gemma does: without an export it can be trained. Two
    layers of the largest targets are more than the probe reads by default.
    """
    gemma = "Gemma3" in (model / "config.json").read_text()
    unwritten = {"export": {"formats": []}}
    entries = {name: unwritten if gemma and name == "xpress" else {} for name in strategies}
    fleet.write(model=str(model), strategies=entries, capture={"probe_gb": 64})
    found = examine_entry("small", fleet.registry, GivenDigests())
    return [one.text for one in found if one.severity == "error"]


def read_parts(fleet) -> TargetParts:
    target = fleet.registry.load_target("small")
    return TargetParts.load(resolve_target(target, fleet.registry, GivenDigests()), tensors=False)


def say_of(errors: list[str], own: Iterable[str]) -> str:
    if errors:
        return f"refused: {errors[0].rsplit('config.json: ')[-1]}"
    return "; ".join(own) or "nothing"


@pytest.mark.parametrize("name", gate_or_long(CONFIGS, FIRST_OF_ITS_TYPE - LIKE_OTHERS))
def test_a_published_target_is_taken_or_refused_as_the_page_says(fleet, name: str):
    model = fleet.root / "model"
    config = {key: value for key, value in CONFIGS[name].items() if key != "quantization_config"}  # of other files
    save_published_target(config, model)
    errors = examine(fleet, model, (*DRAFT_OPTIONS, *(["mtp"] if name in WITH_MTP else [])))
    own: tuple[str, ...] = ()
    if not errors:
        first = read_parts(fleet)
        own = first.own
        respelled: Mapping[str, Any] = respell_rope(config, model)
        (model / "config.json").write_text(json.dumps(respelled))
        assert examine(fleet, model, ["eagle3", "dflash"]) == []
        assert (read_parts(fleet).rope, read_parts(fleet).own) == (first.rope, own)
    assert len(errors) <= 1
    assert documented()[name] == say_of(errors, own)


LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
ROPES = {
    "llama-3.1-8b-instruct": {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192},
    "llama-3.2-1b-instruct": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
    "deepseek-v3": {
        **{"rope_type": "yarn", "rope_theta": 10000, "factor": 40, "original_max_position_embeddings": 4096},
        **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "gemma-3-4b-it": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "qwen3.5-9b": {"rope_type": "default", "rope_theta": 1e7},
}


@pytest.mark.parametrize("name", ROPES)
def test_the_rope_of_a_draft_is_the_published_one(fleet, name: str):
    save_published_target(CONFIGS[name], fleet.root / "model")
    fleet.write(model=str(fleet.root / "model"))
    assert {key: value for key, value in read_parts(fleet).rope.items() if key != "type"} == ROPES[name]
