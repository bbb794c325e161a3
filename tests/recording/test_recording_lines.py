"""The line of a request: what was asked, what the engine counted, and never a key, a header or a text that nobody allowed."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from recording_site import CHAT, COUNTS, make_answer, make_question, make_stream, recording_site, whole

from draftworks.data.served.shapes import parse_served
from draftworks.production.requests import ServedRequest
from draftworks.production.serving_facts import ServingFacts
from draftworks.recording.answer_pieces import STREAM_BYTES, AnswerPieces
from draftworks.recording.request_lines import LineMaker, SeenRequest, mask_asked

KEY = "sk-proj-abcdefghijklmnopqrstuvwxyz0123456789"

VLLM = ServingFacts("vllm")


def make_line(
    values: dict[str, Any] | None,
    answer: bytes,
    streamed: bool = False,
    path: str = CHAT,
    facts: ServingFacts = VLLM,
    **maker: Any,
) -> ServedRequest:
    seen = SeenRequest(path, values, 1, facts, status=200, pieces=AnswerPieces(streamed), time=1.0)
    assert seen.pieces is not None
    seen.pieces.add(answer)
    return ServedRequest.from_line(LineMaker("front", print, **maker).make(seen))


def test_a_line_says_what_was_asked():
    messages = [
        {"role": "user", "content": "Was ist das und wie ist es nicht?"},
        {"role": "assistant", "content": "Das."},
        {"role": "user", "content": "Und wie?"},
    ]
    line = make_line(make_question(messages=messages, temperature=0.5, reasoning_effort="none"), make_answer())
    assert (line.language, line.turn, line.thinking, line.temperature) == ("de", 2, False, 0.5)
    assert line.prompt_characters == sum(len(each["content"]) for each in messages)
    assert (line.server, line.engine, line.prompt_tokens, line.completion_tokens) == ("front", "vllm", 5, 8)
    assert line.prompt == make_line(make_question(messages=messages), make_answer()).prompt
    assert line.text is None


def test_what_a_server_says_of_itself_is_in_the_line_where_its_answer_does_not_say_it():
    facts = ServingFacts("sglang", draft="drafts/a", weight_version="3", lossy=True)
    answer = {"id": "a", "model": "m", "choices": [], "metadata": {"weight_version": "4"}}
    line = make_line(make_question(), json.dumps(answer).encode(), facts=facts)
    assert (line.draft, line.weight_version, line.lossy) == ("drafts/a", "4", True)
    line = make_line(make_question(), b"{}", facts=facts)
    assert (line.weight_version, line.model) == ("3", "ours")


def test_sglangs_stream_says_its_counts_in_an_object_without_choices():
    details = {"spec_verify_ct": 4, "spec_num_correct_drafts": 3, "spec_num_proposed_drafts": 12}
    objects = [
        {"id": "a", "model": "m", "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]},
        {"id": "a", "model": "m", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"id": "a", "model": "m", "choices": [], "sglext": {"spec_tokens_details": details}},
        {"id": "a", "model": "m", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 8}},
    ]
    stream = "".join(f"data: {json.dumps(each)}\r\n\r\n" for each in objects) + "data: [DONE]\r\n\r\n"
    line = make_line(make_question(stream=True), stream.encode(), True, facts=ServingFacts("sglang"))
    assert (line.passes, line.accepted, line.drafted, line.finish, line.completion_tokens) == (4, 3, 12, "stop", 8)


def test_generate_of_sglang_is_read_whole_and_streamed():
    meta = {"id": "a", "finish_reason": {"type": "length"}, "prompt_tokens": 2, "completion_tokens": 8}
    meta |= {"spec_verify_ct": 4, "spec_num_correct_drafts": 3, "weight_version": "default"}
    values = {"text": "Wie ist das", "sampling_params": {"temperature": 0}}
    early = {
        "text": "x",
        "meta_info": {**meta, "finish_reason": None, "spec_verify_ct": 1, "spec_num_correct_drafts": 0},
    }
    last = {"text": "xy", "meta_info": meta}
    stream = f"data: {json.dumps(early)}\n\ndata: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode()
    for answer, streamed in ((json.dumps(last).encode(), False), (stream, True)):
        line = make_line(values, answer, streamed, "/generate", ServingFacts("sglang"))
        assert (line.passes, line.accepted, line.finish, line.weight_version) == (4, 3, "length", "default")
        assert (line.temperature, line.prompt_tokens, line.language) == (0.0, 2, "de")
    several = make_line(
        {"text": ["a", "b"]}, json.dumps([last, last]).encode(), False, "/generate", ServingFacts("sglang")
    )
    assert (several.answers, several.passes) == (2, None)


@pytest.mark.parametrize("values", [make_question(n=3), {"prompt": ["a", "b", "c"]}])
def test_several_answers_in_one_request_have_no_counts_of_one(values: dict[str, Any]):
    line = make_line(values, make_answer())
    assert (line.answers, line.passes, line.accepted) == (3, None, None)


def test_thoughts_in_an_answer_say_that_thinking_was_on():
    stream = b'data: {"choices":[{"delta":{"reasoning_content":"Hm"}}]}\n\n' + b"".join(make_stream())
    assert make_line(make_question(), stream, True).thinking is True
    silent = b'data: {"choices":[{"delta":{"reasoning_content":null}}]}\n\n' + b"".join(make_stream())
    assert make_line(make_question(), silent, True).thinking is None


def test_of_a_long_stream_only_the_end_is_kept_and_read():
    pieces = AnswerPieces(True)
    for _ in range(3 * STREAM_BYTES // 100_000):
        pieces.add(b'data: {"choices": [], "x": "' + b"y" * 100_000 + b'"}\n\n')
    for event in make_stream():
        pieces.add(event)
    assert pieces.nbytes < 2 * STREAM_BYTES
    assert any("metrics" in each for each in pieces.read_objects())


def test_an_end_whose_object_lost_its_beginning_has_no_counts():
    pieces = AnswerPieces(True)
    pieces.add(b'data: {"metrics": {"speculative_decoding": ')
    pieces.add(b" " * STREAM_BYTES)
    pieces.add(json.dumps(COUNTS).encode() + b"}}\n\n")
    assert pieces.read_objects() == []


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (gzip.compress(make_answer())[:30], "gzip"),
        (b"x", "br"),
        (b"{", ""),
        (b"[" * 10_000, ""),
        (b"", ""),
        (b"\xff", ""),
    ],
)
def test_an_answer_that_cannot_be_read_has_no_counts(body: bytes, encoding: str):
    pieces = AnswerPieces(False, encoding)
    pieces.add(body)
    assert pieces.read_objects() == []
    assert not pieces.has_thoughts


def test_a_compressed_bomb_is_not_unpacked_whole():
    pieces = AnswerPieces(False, "gzip")
    pieces.add(gzip.compress(b" " * (1 << 28)))
    assert pieces.read_objects() == []


def test_nothing_secret_is_ever_written(tmp_path: Path):
    """Keys in headers, in the address, in the source, in texts; told errors too."""
    headers = {
        "Authorization": f"Bearer {KEY}",
        "Cookie": "sid=c00kie",
        "X-Api-Key": "header-key",
        "X-App": f"app {KEY}",
    }
    question = make_question(
        messages=[{"role": "user", "content": f"My key is {KEY}, write to ann@example.com"}],
        user="user-name", metadata={"token": "in-body"},
    )  # fmt: skip

    async def test(text: tuple[str, ...] | None) -> None:
        folder = tmp_path / str(text)
        async with recording_site(folder, whole(make_answer()), text=text, source_header="X-App") as site:
            url = f"{site.proxy.url}{CHAT}?key=query-key"
            async with site.client.post(url, json=question, headers=headers) as answer:
                assert answer.status == 200
            [line] = await site.read_lines()
        written = b"".join(path.read_bytes() for path in folder.iterdir()).decode() + str(site.told)
        for secret in (KEY, "c00kie", "header-key", "query-key", "ann@example.com", "user-name", "in-body"):
            assert secret not in written
        assert line.source == "app [SECRET]"
        said = {"messages": [{"role": "user", "content": "My key is [SECRET], write to [EMAIL]"}]}
        assert line.text == (None if text is None else said)

    for text in (None, ("email", "secret")):
        asyncio.run(test(text))


def test_lines_with_texts_are_a_data_set_of_served_prompts():
    line = make_line(make_question(), make_answer(), text=("secret",))
    prompt = parse_served({**line.to_json(), "source": "tutor"}, "source")
    assert prompt is not None
    assert [(turn.role, turn.content) for turn in prompt.turns] == [("user", "Wie ist das?")]
    assert (prompt.source, prompt.created) == ("tutor", 1.0)


@pytest.mark.parametrize(
    "values",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        {"messages": [{"role": "user", "content": f"the key is {KEY}"}]},
        {"messages": []},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"prompt": [1, 2, 3]},
        {},
    ],
)
def test_a_text_that_cannot_be_masked_is_left_out(values: dict[str, Any]):
    assert mask_asked(values, ("email",)) is None


def test_a_server_without_counts_is_told_of_once_with_what_to_do():
    told: list[str] = []
    maker = LineMaker("front", told.append)
    for _ in range(20):
        seen = SeenRequest(CHAT, make_question(), 1, ServingFacts("vllm"), status=200, pieces=AnswerPieces(False))
        assert seen.pieces is not None
        seen.pieces.add(make_answer(counts=None))
        maker.make(seen)
    [said] = told
    assert "--per-request-spec-decode-metrics" in said
    assert maker.uncounted == 20


def test_an_engine_that_nobody_named_is_known_by_its_answer():
    assert make_line(make_question(), make_answer(), facts=ServingFacts()).engine == "vllm"
    line = make_line(make_question(), make_answer(counts=None), facts=ServingFacts())
    assert (line.engine, line.passes) == ("unknown", None)
