"""Counters of speculative decoding, parsed from recorded answers of a real SGLang server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftworks.errors import EngineError
from draftworks.servers.client import Counters
from draftworks.sglang.speculation import parse_answer, parse_counters, read_accept_length, read_verified_tokens

RECORDED = Path(__file__).parent / "recorded"
ANSWERS = json.loads((RECORDED / "generate_eagle3.json").read_text())
INFO = json.loads((RECORDED / "server_info_eagle3.json").read_text())
BEFORE, AFTER = ((RECORDED / f"metrics_{when}.txt").read_text() for when in ("before", "after"))


def answer(name: str, **meta: Any) -> dict[str, Any]:
    recorded = ANSWERS[name]
    return {**recorded, "meta_info": {**recorded["meta_info"], **meta}}


def test_every_token_of_an_answer_is_accounted_for():
    for name in ("whole", "cut", "one_token"):
        found = parse_answer(ANSWERS[name])
        accepted = found.list_accepted_per_pass()
        assert len(accepted) == found.passes
        # The prefill gave the first; a pass gives what it accepted and the target's own, which may be past the end.
        assert len(found.output_ids) - 1 - found.passes <= sum(accepted) <= len(found.output_ids) - 1


def test_what_was_accepted_beyond_the_end_of_an_answer_does_not_count():
    found = parse_answer(ANSWERS["whole"])
    assert (found.passes, found.histogram) == (14, (8, 1, 3, 2))
    assert sum(found.list_accepted_per_pass()) == 12  # 13 by the server: 1 + 13 + 14 is two more than the 26 tokens
    assert sum(parse_answer(ANSWERS["cut"]).list_accepted_per_pass()) == 4


def test_counters_of_requests_and_of_the_server_are_the_same():
    answers = [parse_answer(ANSWERS[name]) for name in ("whole", "cut", "one_token")]
    counted = parse_counters(AFTER).subtract(parse_counters(BEFORE))
    assert counted.passes == sum(found.passes for found in answers) == 18
    assert counted.tokens == sum(len(found.output_ids) for found in answers) == 36


def test_a_counter_that_has_counted_nothing_yet_is_0_and_an_unknown_one_an_error():
    fresh = "\n".join(line for line in AFTER.splitlines() if line.startswith("#"))
    assert parse_counters(fresh) == Counters(0, 0)
    with pytest.raises(EngineError, match="expected the counter sglang:spec_verify_calls_total, found none"):
        parse_counters(AFTER.replace("spec_verify_calls", "spec_calls"))


def test_ranks_of_a_data_parallel_server_count_together():
    line = next(line for line in AFTER.splitlines() if line.startswith("sglang:spec_verify_calls_total"))
    assert parse_counters(f"{AFTER}{line}\n").passes == 48


def test_the_server_info_says_how_many_tokens_are_verified_and_accepted_on_average():
    assert read_verified_tokens(INFO) == 6
    assert read_accept_length(INFO) == pytest.approx(1.7438, abs=1e-4)
    assert read_accept_length({"internal_states": [{}]}) is None
    with pytest.raises(EngineError, match="runs without speculative decoding"):
        read_verified_tokens({"speculative_num_draft_tokens": None})


def test_an_answer_without_counters_is_refused():
    plain = {**ANSWERS["whole"], "meta_info": {**ANSWERS["one_token"]["meta_info"], "completion_tokens": 26}}
    with pytest.raises(EngineError, match="without counters of speculative decoding"):
        parse_answer(plain)
    with pytest.raises(EngineError, match="spec_verify_ct is 15, and the histogram .* has 14 passes"):
        parse_answer(answer("whole", spec_verify_ct=15))
    with pytest.raises(EngineError, match="aborted a request: out of memory"):
        parse_answer(answer("whole", finish_reason={"type": "abort", "message": "out of memory"}))
