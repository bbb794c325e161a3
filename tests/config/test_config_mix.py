"""A mix says what is wrong with its shares, and takes the on and off of YAML for what they are meant to be."""

from __future__ import annotations

import pytest
import yaml
from pydantic import ValidationError

from draftworks.config.data import MixSpec
from draftworks.config.registry_files import TargetSpec

BOTH = {"shares": {"thinking": {"on": 0.25, "off": 0.75}}}
HTTP = {"server": "openai", "base_urls": ["http://a/v1"], "token_ids": False}


def test_on_and_off_of_yaml_are_slices_of_thinking():
    mix = MixSpec.model_validate(yaml.safe_load("shares: {thinking: {on: 0.25, off: 0.75}}"))
    assert mix == MixSpec.model_validate(BOTH)
    assert mix.asks_both_ways
    assert not MixSpec.model_validate({"shares": {"stars": {1: 0.5, 5: 0.5}}}).asks_both_ways


@pytest.mark.parametrize(
    ("shares", "match"),
    [
        ({"language": {"en": 0.5, "de": 0.4}}, "add up to 1, found en 0.5, de 0.4"),
        ({"language": {"en": 1.5, "de": -0.5}}, "from 0 on"),
        ({"language": {}}, "add up to 1, found none"),
        ({"thinking": {"on": 1.0}}, "a share for on and one for off, found on"),
        ({"thinking": {"on": 0.5, "default": 0.5}}, "found on, default"),
        ({"thinking": {"on": 1, "off": 0}, "source": {"a": 1}}, "shares by one column, found thinking, source"),
    ],
)
def test_shares_that_mean_nothing_are_refused(shares, match):
    with pytest.raises(ValidationError, match=match):
        MixSpec(shares=shares)


@pytest.mark.parametrize(
    ("responses", "match"),
    [
        ({"mode": "passthrough"}, "set mode to regenerate"),
        ({"thinking": True}, "leave responses.thinking out"),
        ({"endpoint": HTTP}, "set responses.endpoint.server to what runs there"),
    ],
)
def test_shares_of_thinking_need_answers_that_can_be_asked_for_both_ways(responses, match):
    entry = {"name": "t", "model": "m", "dataset": "d", "responses": responses}
    TargetSpec.model_validate(entry)
    with pytest.raises(ValidationError, match=match):
        TargetSpec.model_validate({**entry, "mix": BOTH})
