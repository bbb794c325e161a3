"""One round of the check tells all problems of an entry: whatever else is wrong, none of them waits for another."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from draftworks.config.registry_files import TargetSpec
from draftworks.errors import ConfigError
from draftworks.programs.cli import app
from draftworks.targets.entry_reading import parse_all

SOUND = {
    "model": None,
    "dataset": "chats",
    "max_length": 96,
    "responses": {"max_new_tokens": 24},
    "strategies": {"eagle3": {"options": {"ttt_length": 2, "draft_vocab_size": 64}}},
}
MISTAKES: dict[str, tuple[Mapping[str, Any], str]] = {
    "a key that nobody knows": ({"responce": {}}, "unknown key responce"),
    "a value that is no number": ({"capture": {"batch_tokens": "many"}}, "capture.batch_tokens"),
    "a value that another forbids": ({"responses": {"temperature": -1}}, "responses.temperature"),
    "an option that nobody knows": (
        {"strategies": {"dflash": {"options": {"blok_size": 4}}}},
        "dflash.options: unknown key blok_size",
    ),
    "options that contradict each other": (
        {"strategies": {"peagle": {"options": {"num_depths": 9, "sliding_window": 4, "draft_vocab_size": 64}}}},
        "sliding_window 4 is shorter",
    ),
    "a format that nobody knows": (
        {"strategies": {"eagle3": {"export": {"formats": ["sglang_eagle4"]}}}},
        "no export format 'sglang_eagle4'",
    ),
    "a strategy that nobody knows": ({"strategies": {"eagle9": {}}}, "unknown strategy 'eagle9'"),
    "a batch that does not divide": (
        {"strategies": {"eagle3": {"training": {"global_batch_size": 7, "micro_batch_size": 2}}}},
        "global_batch_size 7 is not a multiple",
    ),
    "a launcher's key": ({"launcher": {"thread": 2}}, "launcher: unknown key thread"),
    "an eval set that is absent": ({"evals": ["nosuch"]}, "nosuch.yaml"),
    "layers that the model lacks": (
        {"strategies": {"domino": {"options": {"layer_ids": [1, 99], "mask_token_id": 3}}}},
        "[99] outside",
    ),
    "a token that the model lacks": (
        {"strategies": {"dspark": {"options": {"mask_token_id": 9999, "layer_ids": [1, 2]}}}},
        "mask_token_id 9999 is outside",
    ),
    "a draft that no format holds": (
        {"strategies": {"lilicorr": {"options": {"candidate_topk": 3, "mask_token_id": 3, "layer_ids": [1, 2]}}}},
        "candidate_topk 3",
    ),
    "a stream that starves": (
        {"streaming": {"watermark": {"samples": 2}}},
        "streaming.watermark.samples is 2",
    ),
    "a template that is absent": ({"chat_template": "no.jinja"}, "no.jinja is not a file"),
}


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(dict(below))
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def check(fleet, *mistakes: str) -> list[str]:
    entry = merge(SOUND, {"model": str(fleet.tiny_folder)})
    for mistake in mistakes:
        entry = merge(entry, MISTAKES[mistake][0])
    (fleet.registry.root / "targets" / "small.yaml").write_text(yaml.safe_dump(entry))
    return fleet.check().errors


def find_untold(errors: list[str], mistakes: tuple[str, ...]) -> list[str]:
    return [each for each in mistakes if not any(MISTAKES[each][1] in error for error in errors)]


def test_a_sound_entry_has_none_of_them(fleet):
    assert check(fleet) == []


def test_all_mistakes_are_told_at_once(fleet):
    """But for what only a model whose template was found can be asked."""
    every = tuple(each for each in MISTAKES if each != "a template that is absent")
    assert find_untold(check(fleet, *every), every) == []
    assert find_untold(check(fleet, *MISTAKES), ("a template that is absent", "an eval set that is absent")) == []


PAIRS = list(itertools.combinations([each for each in MISTAKES if each != "a template that is absent"], 2))


@pytest.mark.parametrize("pair", PAIRS[::13], ids="+".join)
def test_no_mistake_hides_another(fleet, pair: tuple[str, str]):
    assert find_untold(check(fleet, *pair), pair) == []


def test_what_is_wrong_in_the_data_is_told_beside_what_is_wrong_in_the_entry(fleet):
    fleet.write_rows([{"messages": []}] * 3)
    errors = check(fleet, "a key that nobody knows", "a draft that no format holds")
    assert find_untold(errors, ("a key that nobody knows", "a draft that no format holds")) == []
    assert any("none of its first 3 rows can be used" in error for error in errors)


def test_a_problem_is_told_once(fleet):
    errors = check(fleet, *MISTAKES)
    assert len(errors) == len(set(errors))


def test_a_run_refuses_the_entry_with_all_of_them(fleet):
    check(fleet, "a key that nobody knows", "an option that nobody knows", "a launcher's key")
    with pytest.raises(ConfigError) as refusal:
        fleet.registry.load_target("small")
    assert len(str(refusal.value).splitlines()) == 3


def test_the_command_ends_with_an_error_for_an_entry_that_is_salvaged(fleet):
    check(fleet, "a key that nobody knows")
    found = CliRunner().invoke(app, ["check", "--registry", str(fleet.registry.root), "--json"])
    assert found.exit_code == 1
    assert "unknown key responce" in json.loads(found.output)["targets"]["small"]["errors"][0]


@pytest.mark.parametrize(
    ("values", "problems"),
    [
        ({"dataset": "d", "model": "m"}, 0),
        ({"dataset": 5, "model": "m"}, 1),
        ({"model": "m"}, 1),
        ({}, 2),
        ({"model": "m", "dataset": "d", "decision": {}}, 1),
        ({"model": "m", "dataset": "d", "mix": {"datasets": 3}, "capture": {"device": "gpu"}, "max_length": 0}, 3),
    ],
)
def test_values_are_parsed_as_far_as_they_are_right(values: dict[str, Any], problems: int):
    found = parse_all(TargetSpec, {"name": "t", **values}, "t.yaml")
    assert len(found.problems) == problems
    assert found.spec is None or TargetSpec.model_validate(found.spec.model_dump()) == found.spec
    assert (found.spec is None) == ("decision" in values or not isinstance(values.get("dataset"), str))
