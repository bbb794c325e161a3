"""Settings of promotion and of its hook that cannot be meant are refused when the entry is read."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from draftworks.config.registry_files import StrategyEntry, TargetSpec
from draftworks.config.service import HookSpec, ServiceSpec

SWAP = {"url": "http://127.0.0.1:8000", "folder": "/served"}
BOTH = {"eagle3": StrategyEntry(), "dflash": StrategyEntry()}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"margin": -0.1}, "greater than or equal to 0"),
        ({"margin": 0.03, "margins": {"heldout": 0.1}}, "margins.heldout 0.1 contradicts margin 0.03"),
        ({"margins": {"heldout": -1}}, "margins.heldout: expected 0 or more"),
        ({"margins": {"cod": 0.01}}, "not measured on that eval set; did you mean code"),
        ({"hook": {}}, "either a command or a url"),
        ({"hook": {"command": ["a"], "url": "https://a"}}, "either a command or a url"),
        ({"hook": {"command": []}}, "at least 1"),
        ({"hook": {"command": "reload --now"}}, "list"),
        ({"hook": {"url": "http://example.org/x"}}, "use https"),
        ({"hook": {"url": "http://127.0.0.1.example.org/x"}}, "use https"),
        ({"hook": {"url": "https://me:secret@example.org"}}, "must not contain a user"),
        ({"hook": {"command": ["a"], "api_key_env": "KEY"}}, "a command reads its environment"),
        ({"swap": {**SWAP, "strategy": "dflsh"}}, "no strategy dflsh; did you mean dflash"),
        ({"swap": SWAP}, "the draft of one strategy, and the target has eagle3, dflash: name it"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict, said: str):
    with pytest.raises(ValidationError, match=said):
        TargetSpec(name="t", model="m", dataset="d", evals=["code"], service=settings, strategies=BOTH)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000/x", "http://localhost/x", "http://[::1]:1/x", "https://example.org"]
)
def test_addresses_of_this_machine_and_encrypted_ones_are_taken(url: str):
    assert HookSpec(url=url).url == url


def test_an_eval_set_without_a_margin_has_the_common_one():
    service = ServiceSpec(margin=0.05, margins={"code": 0.01})
    assert (service.select_margin("code"), service.select_margin("heldout")) == (0.01, 0.05)
