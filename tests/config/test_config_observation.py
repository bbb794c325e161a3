"""The servers of a target: addresses that may be asked, strategies that it has, names and addresses once each."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from draftworks.config.observation import ObservationSpec, ObservedServerSpec
from draftworks.config.registry_files import TargetSpec

SERVER = {"name": "front", "url": "https://a.example:30000/", "kind": "sglang", "strategy": "eagle3"}


def make_target(*servers: dict[str, Any]) -> TargetSpec:
    return TargetSpec.model_validate({"name": "t", "model": "m", "dataset": "d", "servers": list(servers)})


def test_a_server_needs_four_keys_and_the_hours_have_defaults():
    target = make_target(SERVER)
    assert target.servers[0].url == "https://a.example:30000"
    assert target.observation == ObservationSpec(baseline_hours=24, recent_hours=24)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"url": "http://a.example"}, "http is for this machine alone"),
        ({"url": "https://me:pass@a.example"}, "must not contain a user or password"),
        ({"url": "a.example"}, "expected an address"),
        ({"name": "../a"}, "name"),
        ({"kind": "tgi"}, "kind"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"key": "secret"}, "key"),
    ],
)
def test_what_cannot_be_asked_is_refused(change: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        ObservedServerSpec.model_validate({**SERVER, **change})


@pytest.mark.parametrize("url", ["http://127.0.0.1:30000", "http://localhost:1", "http://[::1]:1"])
def test_http_is_allowed_on_this_machine(url: str):
    assert ObservedServerSpec.model_validate({**SERVER, "url": url}).url == url


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({}, "the name front is given to more than one server"),
        ({"name": "back"}, "the url https://a.example:30000 is given to more than one server"),
        ({"name": "back", "url": "https://b", "strategy": "dflash"}, "back: the target has no strategy dflash"),
    ],
)
def test_servers_that_contradict_each_other_or_the_target_are_refused(other: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        make_target(SERVER, {**SERVER, **other})


def make_logged(**requests: Any) -> TargetSpec:
    logs = {"files": ["logs/*.jsonl"], **requests}
    entry = {"name": "t", "model": "m", "dataset": "d", "evals": ["code"], "observation": {"requests": logs}}
    return TargetSpec.model_validate(entry)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": []}, "files"),
        ({"files": ["a", "a"]}, "found a twice"),
        ({"files": ["s3://bucket/a.jsonl"]}, "expected files of this machine"),
        ({"eval_set": "cod"}, "eval_set: the target has no cod; did you mean code"),
        ({"strategy": "dflash"}, "strategy: the target has no dflash"),
        ({"max_lines": 0}, "max_lines"),
        ({"file": "a"}, "file"),
    ],
)
def test_logs_that_cannot_be_read_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        make_logged(**change)


def test_the_strategies_that_are_observed_are_those_of_servers_and_that_of_other_logs():
    assert make_logged(eval_set="code").observed_strategies == ["eagle3"]
    two = {"eagle3": {}, "dflash": {}}
    entry = {"name": "t", "model": "m", "dataset": "d", "strategies": two}
    logs = {"observation": {"requests": {"files": ["a"]}}}
    assert TargetSpec.model_validate({**entry, **logs}).observed_strategies == []
    assert TargetSpec.model_validate({**entry, **logs, "servers": [SERVER]}).observed_strategies == ["eagle3"]
    logs["observation"]["requests"]["strategy"] = "dflash"  # pyright: ignore[reportArgumentType]
    assert TargetSpec.model_validate({**entry, **logs}).observed_strategies == ["dflash"]
