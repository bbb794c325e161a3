"""A line is the request it was written from; counts are those that the three engines send, and contradictions are none."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftworks.errors import EngineError, StoreError
from draftworks.production.requests import (
    AnswerFacts,
    RequestCounts,
    ServedRequest,
    detect_engine,
    read_answer,
    read_counts,
)

COUNT = st.integers(0, 2**53)
TEXT = st.text(max_size=20)
REQUESTS = st.builds(
    ServedRequest,
    id=TEXT,
    server=TEXT,
    engine=st.sampled_from(["vllm", "sglang", "llamacpp"]),
    time=st.floats(allow_nan=False, allow_infinity=False),
    answers=COUNT,
    **{
        **{name: st.none() | TEXT for name in ("model", "draft", "weight_version", "source", "language", "finish")},
        **{name: st.none() | COUNT for name in ("turn", "prompt_tokens", "completion_tokens", "prompt_characters")},
        **{name: st.none() | COUNT for name in ("passes", "drafted", "accepted")},
        **{name: st.none() | st.booleans() for name in ("thinking", "lossy")},
        **{name: st.none() | st.lists(COUNT, max_size=4).map(tuple) for name in ("histogram", "per_pass")},
        "temperature": st.none() | st.floats(0, 2),
        "prompt": st.none() | TEXT,
        "text": st.none() | st.dictionaries(TEXT, TEXT, max_size=2),
    },
)
REQUEST = ServedRequest("a", 1000.0, "front", "vllm")


@given(REQUESTS)
def test_a_line_gives_back_the_request(request_: ServedRequest):
    line = request_.to_line()
    assert line.count(b"\n") == 1
    assert ServedRequest.from_line(line) == request_


def test_every_field_is_in_the_lines_that_are_tried():
    assert {each.name for each in fields(ServedRequest)} == set(replace(REQUEST).__dict__)
    assert REQUEST.to_json() == {
        "draftworks_request": 1,
        "id": "a",
        "time": 1000.0,
        "server": "front",
        "engine": "vllm",
        "answers": 1,
    }


@given(REQUESTS, st.data())
def test_no_half_of_a_line_is_a_request(request_: ServedRequest, data: st.DataObject):
    line = request_.to_line().rstrip(b"\n")
    with pytest.raises(StoreError):
        ServedRequest.from_line(line[: data.draw(st.integers(0, len(line) - 1))])


@pytest.mark.parametrize(
    "change",
    [
        {"draftworks_request": 2},
        {"id": None},
        {"time": "now"},
        {"time": float("inf")},
        {"accepted": -1},
        {"accepted": True},
        {"passes": 1.0},
        {"histogram": [1, "2"]},
        {"histogram": "12"},
        {"thinking": "on"},
        {"text": "hello"},
        {"answers": None},
        {"temperature": float("nan")},
        {"unknown": 1},
    ],
)
def test_a_line_with_a_value_that_cannot_be_is_refused(change: dict[str, Any]):
    with pytest.raises(StoreError, match="not a served request"):
        ServedRequest.from_json({**REQUEST.to_json(), **change})


VLLM_SUMMARY = {
    "mean_acceptance_length": 1.75,
    "draft_acceptance_rate": 0.375,
    "acceptance_histogram": [2, 1, 1, 0, 0],
    "num_spec_steps": 4,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 16,
    "num_spec_tokens": 4,
}
VLLM_DETAILED = {**VLLM_SUMMARY, "per_step_accepted": [0, 2, 1, 0], "per_step_drafted": [4, 4, 4, 4]}
USAGE = {"prompt_tokens": 9, "completion_tokens": 8, "total_tokens": 17}
SGLANG = {
    "spec_accept_rate": 0.25,
    "spec_accept_length": 2.0,
    "spec_cap_length": 0.0,
    "spec_num_correct_drafts": 3,
    "spec_num_proposed_drafts": 12,
    "spec_verify_ct": 4,
    "spec_correct_drafts_histogram": [2, 1, 1],
    "spec_cap_lens_histogram": [],
}
COUNTED = RequestCounts(4, 16, 3, (2, 1, 1, 0, 0))


def of_vllm(found: Any) -> dict[str, Any]:
    return {"id": "cmpl-1", "model": "m", "choices": [{"index": 0, "finish_reason": "stop"}], "usage": USAGE} | {
        "metrics": {"time_to_first_token_ms": None, "speculative_decoding": found}
    }


@pytest.mark.parametrize(
    ("engine", "answer", "counts"),
    [
        ("vllm", of_vllm(VLLM_SUMMARY), COUNTED),
        ("vllm", of_vllm(VLLM_DETAILED), replace(COUNTED, per_pass=(0, 2, 1, 0))),
        ("vllm", of_vllm(None), None),
        ("vllm", {"choices": [], "metrics": None}, None),
        ("vllm", {"choices": []}, None),
        ("sglang", {"sglext": {"spec_tokens_details": SGLANG}}, RequestCounts(4, 12, 3, (2, 1, 1))),
        ("sglang", {"sglext": {"spec_tokens_details": [SGLANG]}}, RequestCounts(4, 12, 3, (2, 1, 1))),
        ("sglang", {"sglext": {"spec_tokens_details": [SGLANG, SGLANG]}}, None),
        ("sglang", {"meta_info": {**SGLANG, "completion_tokens": 8}}, RequestCounts(4, 12, 3, (2, 1, 1))),
        ("sglang", {"meta_info": {"completion_tokens": 1}}, None),
        ("sglang", {"sglext": None}, None),
        ("llamacpp", {"timings": {"predicted_n": 8, "draft_n": 12, "draft_n_accepted": 3}}, RequestCounts(4, 12, 3)),
        ("llamacpp", {"timings": {"predicted_n": 8}}, None),
    ],
)
def test_counts_of_the_engines(engine: str, answer: dict[str, Any], counts: RequestCounts | None):
    assert read_counts(engine, answer) == counts


@pytest.mark.parametrize(
    ("engine", "answer"),
    [
        ("vllm", of_vllm({**VLLM_SUMMARY, "num_spec_steps": 5})),
        ("vllm", of_vllm({**VLLM_SUMMARY, "num_accepted_draft_tokens": 4})),
        ("vllm", of_vllm({**VLLM_SUMMARY, "num_draft_tokens": 2})),
        ("vllm", of_vllm({**VLLM_SUMMARY, "acceptance_histogram": None})),
        ("vllm", of_vllm({**VLLM_DETAILED, "per_step_accepted": [3]})),
        ("vllm", of_vllm({"mean_acceptance_length": 2.0})),
        ("vllm", {"metrics": 1}),
        ("sglang", {"meta_info": {**SGLANG, "spec_verify_ct": 3}}),
        ("sglang", {"meta_info": {**SGLANG, "spec_verify_ct": -1}}),
        ("sglang", {"sglext": {"spec_tokens_details": {"spec_verify_ct": 2}}}),
        ("llamacpp", {"timings": {"predicted_n": 2, "draft_n": 12, "draft_n_accepted": 3}}),
        ("llamacpp", {"timings": {"predicted_n": 9, "draft_n": 2, "draft_n_accepted": 3}}),
    ],
)
def test_counts_that_contradict_each_other_are_an_error_and_no_counts(engine: str, answer: dict[str, Any]):
    with pytest.raises(EngineError, match=f"counts of a request of {engine}"):
        read_counts(engine, answer)
    facts = read_answer(engine, [answer])
    assert facts.counts is None
    assert facts.problem is not None


def test_a_stream_says_it_in_its_last_chunks():
    chunks = [
        {"id": "c", "model": "m", "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]},
        {"id": "c", "model": "m", "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]},
        {"id": "c", "model": "m", "choices": [], "usage": USAGE, "metrics": {"speculative_decoding": VLLM_SUMMARY}},
    ]
    assert read_answer("vllm", chunks) == AnswerFacts("c", "m", None, 9, 8, "length", 1, COUNTED)
    of_sglang = [
        *chunks[:2],
        {"choices": [], "sglext": {"spec_tokens_details": SGLANG}},
        {"choices": [], "usage": USAGE},
    ]
    assert read_answer("sglang", of_sglang).counts == RequestCounts(4, 12, 3, (2, 1, 1))


def test_what_an_answer_says_beside_its_counts():
    choices = [{"index": n, "finish_reason": "stop"} for n in range(3)]
    answer = {"id": "x", "model": "m", "choices": choices, "usage": USAGE, "metadata": {"weight_version": "7"}}
    assert read_answer("sglang", [answer]) == AnswerFacts("x", "m", "7", 9, 8, "stop", 3)
    meta = {"id": "r", "finish_reason": {"type": "abort", "message": "m"}, "prompt_tokens": 4, "completion_tokens": 2}
    found = read_answer("sglang", [{"text": "", "meta_info": {**meta, "weight_version": "default"}}])
    assert found == AnswerFacts("r", None, "default", 4, 2, "abort")
    assert read_answer("vllm", [{"error": {"message": "no"}}]).finish == "error"
    assert read_answer("vllm", [{"choices": 7, "usage": [], "id": 3, "metadata": "x"}]) == AnswerFacts()


def test_an_engine_is_known_by_its_own_fields():
    answers = [of_vllm(None), {"sglext": {}}, {"meta_info": {}}, {"timings": {"predicted_n": 1}}, {"choices": []}]
    assert [*map(detect_engine, answers)] == ["vllm", "sglang", "sglang", "llamacpp", None]


@pytest.mark.parametrize(
    ("passes", "accepted", "completion_tokens", "within"),
    [
        (4, 3, 8, 3),  # the first token, and each pass with its own and the accepted ones
        (4, 3, 7, 3),  # ends with an accepted token: the own one of the last pass is beyond
        (4, 3, 5, 1),
        (4, 3, None, 3),
        (4, 3, 20, 3),  # passes without a proposal are not counted
        (0, 0, 1, 0),
    ],
)
def test_tokens_beyond_the_end_are_not_of_the_answer(
    passes: int, accepted: int, completion_tokens: int | None, within: int
):
    counted = replace(REQUEST, passes=passes, accepted=accepted, completion_tokens=completion_tokens)
    assert counted.accepted_in_answer == within


def test_without_counts_nothing_is_accepted():
    assert REQUEST.accepted_in_answer is None


def test_a_line_is_plain_json():
    assert json.loads(replace(REQUEST, histogram=(1, 2)).to_line())["histogram"] == [1, 2]
