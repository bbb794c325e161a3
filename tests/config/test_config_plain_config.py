"""What is read from config.json without transformers is what transformers reads, or nothing."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from model_families import FAMILIES
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from draftworks.data.target_files import PlainConfig, read_plain_config

SIZES = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20, "vocab_size": 99}
SAVED = {
    **SIZES,
    **{"model_type": "llama", "intermediate_size": 64, "num_hidden_layers": 5, "max_position_embeddings": 512},
    **{"rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
CHANGES: list[dict[str, Any]] = [
    {"model_type": "gemma2"},
    {"final_logit_softcapping": 30.0},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}},
    {"rope_parameters": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 500000}},
    {"num_attention_heads": 5},
    {"num_attention_heads": 0},
    {"vocab_size": "99"},
    {"vocab_size": True},
    {"head_dim": None},
    {"auto_map": {"AutoConfig": "own.Config"}},
    {"text_config": {"hidden_size": 8}},
]


def read(folder: Path, config: Any) -> PlainConfig | None:
    (folder / "config.json").write_text(json.dumps(config))
    return read_plain_config(folder / "config.json")


def assert_as_transformers(folder: Path, found: PlainConfig) -> None:
    """By `repr`, since a number of another type would change what is written of it."""
    whole = AutoConfig.from_pretrained(folder).get_text_config()
    assert {each.name: repr(getattr(found, each.name)) for each in fields(found)} == {
        each.name: repr(getattr(whole, each.name)) for each in fields(found)
    }


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_config_that_says_all_is_read_as_transformers_does(tmp_path: Path, model_type: str, tied: bool) -> None:
    """As the class saves it, with all its other keys."""
    config = CONFIG_MAPPING[model_type](**{**SAVED, "tie_word_embeddings": tied})
    config.save_pretrained(tmp_path)
    found = read_plain_config(tmp_path / "config.json")
    assert found is not None
    assert_as_transformers(tmp_path, found)


@pytest.mark.parametrize("name", FAMILIES)
def test_of_every_family_transformers_reads_what_is_not_plain(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name].config
    CONFIG_MAPPING[family["model_type"]](**{k: v for k, v in family.items() if k != "model_type"}).save_pretrained(
        tmp_path
    )
    found = read_plain_config(tmp_path / "config.json")
    if found is not None:
        assert_as_transformers(tmp_path, found)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_what_only_transformers_understands_or_refuses_is_left_to_it(tmp_path: Path, change: dict[str, Any]) -> None:
    assert read(tmp_path, SAVED) is not None
    assert read(tmp_path, SAVED | change) is None


@pytest.mark.parametrize("missing", SAVED)
def test_a_value_that_is_missing_is_not_made_up(tmp_path: Path, missing: str) -> None:
    assert read(tmp_path, {key: value for key, value in SAVED.items() if key != missing}) is None


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_a_file_that_is_no_config_is_left_to_transformers(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert read_plain_config(tmp_path / "config.json") is None
    assert read_plain_config(tmp_path / "absent.json") is None
