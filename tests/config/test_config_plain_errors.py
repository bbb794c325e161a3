"""Errors about values of a file: one short line each, in the words of YAML, with what may be meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from draftworks.config.base import LONGEST, _find_models_in
from draftworks.config.operations import DeploymentSpec
from draftworks.config.registry_files import DatasetSpec, EvalSpec, TargetSpec
from draftworks.config.strategies import list_option_models
from draftworks.config.strict_yaml import describe_validation_error

FILES: dict[type[BaseModel], dict[str, Any]] = {
    TargetSpec: {"name": "a-target-of-ours", "model": "models/m", "dataset": "chats"},
    DatasetSpec: {"name": "chats", "files": ["a.jsonl"]},
    EvalSpec: {"name": "gold", "dataset": "chats"},
    DeploymentSpec: {},
}
PLACE = "registry/targets/a-target-of-ours.yaml"
WRONG = [
    True,
    7,
    -1.5,
    float("nan"),
    "wrong",
    "",
    None,
    [],
    [None],
    ["wrong", 3],
    {},
    {"wrong": 1},
    [[1]],
    {"a": {"b": []}},
]
PYTHON = (
    "valid dictionary",
    "instance of",
    "Input should",
    "valid integer",
    "Value error",
    "pydantic",
    "True",
    "None",
    "Spec",
)
"""Words that only somebody who knows Python understands."""


def list_places(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key of a file, by NAME below mappings."""
    for name, field in model.model_fields.items():
        yield (*path, name)
        for nested in _find_models_in(field.annotation):
            yield from list_places(nested, (*path, name, *(("NAME",) if "dict[" in str(field.annotation) else ())))


def put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return the values with one more at a path."""
    first, *rest = path
    return {**values, first: put(values.get(first) or {}, tuple(rest), value) if rest else value}


def describe(model: type[BaseModel], values: dict[str, Any]) -> list[str]:
    try:
        model.model_validate(values)
    except ValidationError as error:
        return describe_validation_error(error, model, PLACE, list_option_models).splitlines()
    return []


@pytest.mark.parametrize("model", FILES, ids=lambda model: model.__name__)
def test_whatever_stands_at_whatever_key_gets_short_lines_in_plain_words(model: type[BaseModel]):
    told = 0
    for path in list_places(model):
        for value in WRONG:
            for line in describe(model, put(FILES[model], path, value)):
                told += 1
                assert len(line) <= LONGEST, line
                assert line.startswith(f"{PLACE}: "), line
                assert not any(word in line for word in PYTHON), line
    assert told > 20


@pytest.mark.parametrize("model", FILES, ids=lambda model: model.__name__)
def test_a_key_with_two_letters_swapped_is_suggested(model: type[BaseModel]):
    for path in list_places(model):
        *above, key = path
        if len(key) < 6 or key == "name":
            continue
        wrong = key[:2] + key[3] + key[2] + key[4:]
        if wrong == key:
            continue
        lines = describe(model, put(FILES[model], (*above, wrong), None))
        about = [line for line in lines if wrong in line and "unknown" in line]
        if "unknown" in " ".join(lines):
            assert any(key in line.partition(";")[2] for line in about), (path, lines)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"service": True},
            "service: expected keys with values, found true; write {} for its defaults, or leave the key out",
        ),
        (
            {"capture": None},
            "capture: expected keys with values, found nothing; write {} for its defaults, or leave the key out",
        ),
        (
            {"strategies": {"eagle3": {"training": {"trackers": "wandb"}}}},
            "strategies.eagle3.training.trackers: expected keys with values, found 'wandb'; did you mean {wandb: ...}?",
        ),
        ({"evals": "gold"}, "evals: expected a list, found 'gold'; write ['gold']"),
        (
            {"servers": {"name": "front"}},
            'servers: expected a list, found {"name": "front"}; write - before its first key',
        ),
        ({"max_length": "4k"}, "max_length: expected a whole number, found '4k'"),
        ({"description": 5}, "description: expected text, found 5; write it in quotes: '5'"),
        ({"lr": 0.1}, "unknown key lr; it belongs to strategies.NAME.training"),
        (
            {"strategies": {"eagle3": {"training": {"max_lenght": 64}}}},
            "unknown key strategies.eagle3.training.max_lenght; did you mean max_length, which belongs to the top of",
        ),
        (
            {"strategies": {"eagle3": {"lr": 0.1}}},
            "unknown key strategies.eagle3.lr; it belongs to strategies.NAME.training",
        ),
        (
            {"strategies": {"eagle3": {"training": {"ttt_length": 5}}}},
            "unknown key strategies.eagle3.training.ttt_length; it belongs to strategies.eagle3.options",
        ),
        (
            {"capture": {"device": "gpu"}},
            "capture.device: expected one of auto, cpu, cuda, found 'gpu'; did you mean cuda?",
        ),
        (
            {"decision": {"act": True}, "service": {}},
            "decision.act: expected one of none, tune, retrain, found true; YAML reads",
        ),
        (
            {"strategies": ["eagle3"]},
            'strategies: expected keys with values, found ["eagle3"]; write eagle3: {}, a line for each',
        ),
        (
            {"evaluation": {"loop": {"temperatures": "0.0, 1.0"}}},
            "evaluation.loop.temperatures: expected a list, found '0.0, 1.0'; write [0.0, 1.0]",
        ),
        (
            {"strategies": {"eagle3": {"training": {"epochs": True}}}},
            "strategies.eagle3.training: epochs: expected a number, found true",
        ),
        ({"max_length": 1}, "max_length: expected more than 2, found 1"),
    ],
)
def test_what_is_said(values: dict[str, Any], said: str):
    assert any(line.startswith(f"{PLACE}: {said}") for line in describe(TargetSpec, {**FILES[TargetSpec], **values}))


@pytest.mark.parametrize(
    ("values", "hint"), [({"features": "local"}, "{kind: local}"), ({"launcher": "slurm"}, "{kind: slurm}")]
)
def test_a_kind_in_place_of_its_section_is_understood(values: dict[str, Any], hint: str):
    [line] = describe(DeploymentSpec, values)
    assert line.endswith(f"did you mean {hint}?")


def test_a_secret_in_place_of_a_variable_is_not_shown():
    token = "https://hooks.slack.com/services/T0/B0/abcdef"
    for values in (
        {"notifications": [{"kind": "slack", "url_env": token}]},
        {"notifications": [{"kind": "webhook", "url": "https://a.example", "api_key_env": "sk-abcdef"}]},
    ):
        [line] = describe(DeploymentSpec, values)
        assert "abcdef" not in line
        assert "such as SERVER_KEY" in line


@pytest.mark.parametrize("page", ["metrics", "v1", "server_info", "health"])
def test_the_address_of_a_page_is_not_that_of_its_server(page: str):
    server = {"name": "a", "url": f"http://127.0.0.1:1/{page}", "kind": "sglang", "strategy": "eagle3"}
    [line] = describe(TargetSpec, {**FILES[TargetSpec], "servers": [server]})
    assert line.endswith(f"without /{page}; did you mean http://127.0.0.1:1?")
    assert not describe(TargetSpec, {**FILES[TargetSpec], "servers": [{**server, "url": "http://127.0.0.1:1/behind"}]})


def test_a_key_of_a_given_set_is_suggested_where_it_stands():
    [line] = describe(DeploymentSpec, {"retention": {"budget_gb": {"feature": 10}}})
    assert line == f"{PLACE}: unknown key retention.budget_gb.feature; did you mean features or eval_features?"
