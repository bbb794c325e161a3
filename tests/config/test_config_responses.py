"""Options of answers: those that decide them are in the identity; unsupported ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftworks.config.registry_files import CaptureSpec, ResponseSpec
from draftworks.config.run_files import RegenerateRun
from draftworks.config.strict_yaml import parse_spec
from draftworks.errors import ConfigError

SGLANG = {"base_urls": ["http://a:1/v1"], "server": "sglang"}
OPENAI = {"base_urls": ["http://a:1/v1"], "server": "openai", "token_ids": False}


def responses(**options) -> ResponseSpec:
    return parse_spec(ResponseSpec, options, where="target.yaml")


def test_the_identity_of_options_from_before_endpoints_has_not_moved():
    assert ResponseSpec(temperature=0.7).to_identity() == {
        "mode": "regenerate", "max_new_tokens": 512, "temperature": 0.7, "top_p": 1.0, "top_k": 0,
        "repetition_penalty": 1.0, "seed": 0,
    }  # fmt: skip


def test_where_the_servers_are_and_how_they_are_asked_decides_nothing():
    elsewhere = {"base_urls": ["https://b/v1", "https://c/v1"], "api_key_env": "KEY", "timeout_s": 1, "attempts": 9}
    moved = responses(endpoint={**SGLANG, **elsewhere, "max_outstanding": 3}, batch_size=2)
    assert moved.to_identity() == responses(endpoint=SGLANG).to_identity()


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"endpoint": SGLANG, "thinking": True},
        {"endpoint": SGLANG, "thinking": False},
        {"endpoint": {**SGLANG, "model": "other"}},
        {"endpoint": {**SGLANG, "token_ids": False}},
        {"endpoint": {**SGLANG, "server": "vllm"}},
    ],
    ids=str,
)
def test_what_the_answers_depend_on_is_told_apart(other):
    assert responses(**other).to_identity() != responses(endpoint=SGLANG).to_identity()


@pytest.mark.parametrize("option", [{"top_k": 5}, {"repetition_penalty": 1.1}, {"thinking": False}], ids=str)
def test_what_openai_has_no_field_for_is_refused_rather_than_dropped(option):
    responses(endpoint=SGLANG, **option)
    (name,) = option
    with pytest.raises(ConfigError, match=f"OpenAI's interface has no field for {name}, and such a server"):
        responses(endpoint=OPENAI, **option)


def test_token_ids_are_not_expected_of_those_who_have_none():
    with pytest.raises(ConfigError, match="server openai returns no token ids: set token_ids to false"):
        responses(endpoint={**OPENAI, "token_ids": True})


def test_an_endpoint_that_nobody_asks_is_refused():
    with pytest.raises(ConfigError, match="mode passthrough generates no answers"):
        responses(mode="passthrough", endpoint=SGLANG)


def test_the_key_itself_cannot_stand_in_for_the_name_of_its_variable():
    with pytest.raises(ConfigError, match="endpoint.api_key_env: .*not shown") as raised:
        responses(endpoint={**SGLANG, "api_key_env": "sk-1234-5678"})
    assert "1234" not in str(raised.value)


def test_a_run_file_keeps_the_endpoint(tiny_target, tmp_path: Path):
    run = RegenerateRun(
        out=tmp_path, target=tiny_target, conversations=tmp_path, answers=tmp_path, max_length=9, capture=CaptureSpec(),
        responses=responses(endpoint={**SGLANG, "api_key_env": "GATEWAY_KEY"}, thinking=True),
    )  # fmt: skip
    assert RegenerateRun.load(run.save(tmp_path / "run.yaml")) == run
