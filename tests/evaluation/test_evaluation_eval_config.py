"""Which fields are the identity of an evaluation; different identities have different keys."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.errors import ConfigError
from draftworks.evaluation.eval_cache import EvalConfig

CONFIG = EvalConfig(
    eval_data_path="evals/chat.jsonl",
    target_model_path="org/model",
    target_revision="abc",
    tokenizer_path="org/tokenizer",
    chat_template="{{ messages }}",
    aux_hidden_state_layer_ids=(1, 3, 4),
    max_len=512,
)
TEXT_FIELDS = ("eval_data_path", "target_model_path", "target_revision", "tokenizer_path", "chat_template")


def test_the_identity_is_that_of_the_reference():
    expected = ("evals/chat.jsonl", "org/model", "abc", "org/tokenizer", "{{ messages }}", "1,3,4", "512")
    assert CONFIG.identity_fields() == expected
    assert EvalConfig("x").identity_fields() == ("x", "", "", "", "", "", "2048")


def test_keys_stay_what_they_were():
    assert CONFIG.cache_key == "22f155f3c86d982e"
    assert replace(CONFIG, eval_data_path="évals/聊天.jsonl").cache_key == "a35315c861e06246"


CHANGES = [*((name, "other") for name in TEXT_FIELDS), ("aux_hidden_state_layer_ids", (1, 34)), ("max_len", 511)]


@pytest.mark.parametrize(("name", "value"), CHANGES)
def test_every_identity_field_is_in_the_key(name: str, value: object):
    assert replace(CONFIG, **{name: value}).cache_key != CONFIG.cache_key


@pytest.mark.parametrize(("name", "value"), [("micro_batch_size", 64), ("cache_dir", "/elsewhere")])
def test_how_and_where_it_runs_is_not_in_the_key(name: str, value: object):
    assert replace(CONFIG, **{name: value}).cache_key == CONFIG.cache_key


def test_no_revision_and_an_empty_one_are_the_same():
    assert replace(CONFIG, target_revision=None).cache_key == replace(CONFIG, target_revision="").cache_key


def test_a_list_of_layers_is_as_good_as_a_tuple():
    listed = replace(CONFIG, aux_hidden_state_layer_ids=[1, 3, 4])
    assert listed == CONFIG
    assert hash(listed) == hash(CONFIG)


def test_a_config_does_not_change():
    with pytest.raises(FrozenInstanceError):
        CONFIG.max_len = 1


def test_a_shifted_boundary_is_another_key():
    left, right = EvalConfig("a|b", target_model_path="c"), EvalConfig("a", target_model_path="b|c")
    assert "|".join(left.identity_fields()[:2]) == "|".join(right.identity_fields()[:2])
    assert left.cache_key != right.cache_key


@given(
    pieces=st.lists(st.text(max_size=3), min_size=6, max_size=6),
    separator=st.sampled_from(["|", ",", '"', '","', '", "', "\\", "\\u0022", ""]),
)
def test_texts_that_join_to_the_same_have_different_keys(pieces: list[str], separator: str):
    """Six pieces make five fields in five ways, by which two neighbours are one field; joined they are all the same."""
    cuts = [(*pieces[:at], separator.join(pieces[at : at + 2]), *pieces[at + 2 :]) for at in range(len(TEXT_FIELDS))]
    assert len({separator.join(cut) for cut in cuts}) == 1
    keys = {EvalConfig(**dict(zip(TEXT_FIELDS, cut))).cache_key for cut in cuts}
    assert len(keys) == len(set(cuts))


CONFIGS = st.builds(
    EvalConfig,
    **{name: st.text(alphabet="a|", max_size=2) for name in TEXT_FIELDS},
    aux_hidden_state_layer_ids=st.lists(st.integers(0, 1), max_size=2).map(tuple),
    max_len=st.integers(1, 2),
)
"""Few letters, so that what could collide does."""


@given(st.lists(CONFIGS, min_size=2, max_size=40))
def test_keys_are_equal_where_identities_are(configs: list[EvalConfig]):
    assert len({c.cache_key for c in configs}) == len({c.identity_fields() for c in configs})


@pytest.mark.parametrize("ids", [("1,2",), (1.0,), (True,)])
def test_layers_that_are_no_integers_are_refused(ids: tuple):
    with pytest.raises(ConfigError, match="aux_hidden_state_layer_ids: expected integers, found"):
        EvalConfig("x", aux_hidden_state_layer_ids=ids)


@pytest.mark.parametrize("path", ["\ud83d\ude00", "latin-\udce9", Path("x")])
def test_texts_that_utf8_cannot_write_are_refused(path: object):
    with pytest.raises(ConfigError, match="expected strings valid in UTF-8, found"):
        EvalConfig(path)
