"""The loop cache finds an entry by its identity alone, and never uses a damaged or another entry."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from report_toys import prompts

from draftworks.config.decoding import GREEDY, Decoding
from draftworks.errors import StoreError
from draftworks.evaluation.ladder.differences import Difference
from draftworks.evaluation.ladder.loop_cache import LoopCache, LoopIdentity
from draftworks.evaluation.ladder.measurement import LoopMeasurement, TimingContext
from draftworks.storage.identity import digest

IDENTITY = LoopIdentity(
    weights_digest="a",
    strategy="eagle3",
    options={"ttt_length": 4, "layer_ids": [2, 4, 5]},
    target_digest="b",
    prompts="c",
    decoding=GREEDY,
    draft_tokens=4,
    stop_ids=(0, 2),
    max_new_tokens=64,
    max_length=None,
    compute_dtype="float32",
    seed=1,
    revision=1,
)
OTHERS: dict[str, Any] = {
    "weights_digest": "a2",
    "strategy": "dflash",
    "options": {"ttt_length": 4, "layer_ids": [2, 4, 6]},
    "target_digest": "b2",
    "prompts": "c2",
    "decoding": Decoding(0.5, "rejection"),
    "draft_tokens": 5,
    "stop_ids": (0,),
    "max_new_tokens": 65,
    "max_length": 512,
    "compute_dtype": "bfloat16",
    "seed": 2,
    "revision": 2,
}
MEASURED = LoopMeasurement(
    GREEDY,
    prompts([3, 1], [0], []),
    seconds=1.25,
    plain_seconds=0.1 + 0.2,
    tokens=9,
    plain_tokens=9,
    differences=(Difference("s0", "target", 3, 7, None, gap=1e-7), Difference("s1", "draft", 2, 7, 8, 0, 1, 0.25)),
    timing_context=TimingContext("a GPU", datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)),
)


@pytest.fixture
def cache(tmp_path: Path) -> LoopCache:
    return LoopCache.open(tmp_path / "new" / "loops")


def test_what_was_kept_is_found_with_when_and_where_it_was_timed(cache: LoopCache) -> None:
    for measured in (
        MEASURED,
        replace(MEASURED, differences=None, timing_context=None),
        replace(MEASURED, differences=()),
    ):
        cache.store(IDENTITY, measured)
        assert cache.find(IDENTITY).measurement == measured


def test_nothing_is_found_where_nothing_was_kept(cache: LoopCache) -> None:
    found = cache.find(IDENTITY)
    assert (found.measurement, found.problem) == (None, None)


@pytest.mark.parametrize("name", [field.name for field in fields(LoopIdentity)])
def test_everything_that_decides_a_loop_changes_its_key(name: str, cache: LoopCache) -> None:
    cache.store(IDENTITY, MEASURED)
    other = replace(IDENTITY, **{name: OTHERS[name]})
    assert other.key != IDENTITY.key
    assert cache.find(other).measurement is None


@pytest.mark.parametrize(
    "other",
    [
        Decoding(0.5, "greedy_draft"),
        Decoding(0.5, "block"),
        Decoding(0.7, "rejection"),
        Decoding(0.5, "rejection", top_k=9),
        Decoding(0.5, "rejection", top_p=0.9),
    ],
    ids=lambda each: each.suffix,
)
def test_rule_temperature_and_cuts_of_a_sampled_loop_are_in_its_key(other: Decoding, cache: LoopCache) -> None:
    sampled = replace(IDENTITY, decoding=Decoding(0.5, "rejection"))
    measured = replace(MEASURED, decoding=other, differences=None)
    cache.store(replace(sampled, decoding=other), measured)
    assert cache.find(sampled).measurement is None
    assert cache.find(replace(sampled, decoding=other)).measurement == measured


def test_a_sampled_loop_of_before_rules_were_named_is_measured_anew(cache: LoopCache) -> None:
    """Its draws were others; the rule was that of no server by default."""
    sampled = replace(IDENTITY, decoding=Decoding(0.5, "rejection"))
    without_rule = {name: value for name, value in sampled.to_json().items() if name != "rule"}
    assert digest(without_rule) != sampled.key
    assert digest(IDENTITY.to_json()) == IDENTITY.key
    assert "rule" not in IDENTITY.to_json()


def altered(entry: str) -> str:
    values = json.loads(entry)
    values["measurement"]["plain_seconds"] = 30.0
    return json.dumps(values)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda entry: "", "Invalid JSON"),
        (lambda entry: entry[: len(entry) // 2], "Invalid JSON"),
        (lambda entry: "{}", "measurement is missing"),
        (lambda entry: entry.replace('"schema_version": 1', '"schema_version": 2'), "schema_version.*found 2"),
        (altered, "is altered: expected"),
    ],
)
def test_damaged_entry_is_none_and_says_why(damage, reason: str, cache: LoopCache) -> None:
    path = cache.store(IDENTITY, MEASURED)
    path.write_text(damage(path.read_text()))
    found = cache.find(IDENTITY)
    assert found.measurement is None
    assert str(path) in found.problem
    assert re.search(reason, found.problem)
    cache.store(IDENTITY, MEASURED)
    assert cache.find(IDENTITY).measurement == MEASURED


def test_entry_of_another_loop_under_this_name_is_none_and_names_what_differs(cache: LoopCache) -> None:
    other = replace(IDENTITY, seed=7)
    cache.store(other, MEASURED).rename(cache.path(IDENTITY))
    found = cache.find(IDENTITY)
    assert found.measurement is None
    assert "of another loop: seed: expected 1, found 7" in found.problem


def test_entry_that_is_a_folder_is_none_and_says_so(cache: LoopCache) -> None:
    cache.path(IDENTITY).mkdir()
    assert "cannot be read" in cache.find(IDENTITY).problem
    with pytest.raises(StoreError, match="a loop measurement cannot be stored"):
        cache.store(IDENTITY, MEASURED)


def test_folder_that_is_a_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "loops").write_text("")
    with pytest.raises(StoreError, match="loops: expected the folder of the loop cache, which cannot be made"):
        LoopCache.open(tmp_path / "loops")


def test_no_staging_is_left_behind(cache: LoopCache) -> None:
    path = cache.store(IDENTITY, MEASURED)
    assert list(cache.folder.iterdir()) == [path]
