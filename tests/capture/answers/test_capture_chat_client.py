"""Chat completions: answers of SGLang, vLLM and plain servers are parsed; errors are reported without the key.
A reasoning target: every supervised token follows exactly the tokens that the target read before it, as rendered.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from answer_toys import Scripted, answering_run, conversation, rows_of, spelt, supervised
from json_server import Reply, Request, json_server
from thinking import thinking_target
from waiting import HANG_S

from draftworks.capture.answers.answer_sets import CONVERSATIONS, find_answers_file
from draftworks.capture.answers.endpoint import ChatClient, Completion
from draftworks.capture.answers.regenerate import regenerate_with
from draftworks.config.run_files import TargetFiles
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import Turn, read_conversations
from draftworks.data.slices import ask_both_ways
from draftworks.errors import CaptureError, ConfigError, DraftworksError, EngineError

KEY = "sk-very-secret-1234"
MESSAGE = {"role": "assistant", "content": "A pipe."}


def complete(reply: Reply, timeout_s: float = 30) -> Completion:
    with json_server(lambda request: reply) as url, ChatClient(f"{url}/v1", timeout_s, KEY) as client:
        return client.complete({"messages": []})


def make_answer(body: dict[str, Any] | None = None, **choice: Any) -> Reply:
    choices = [{"index": 0, "message": MESSAGE, "finish_reason": "stop", **choice}]
    return Reply(200, {"choices": choices, "usage": {"prompt_tokens": 3, "completion_tokens": 2}, **(body or {})})


def test_token_ids_are_found_where_sglang_and_where_vllm_put_them():
    by_sglang = complete(make_answer(response_token_ids=[7, 8], prompt_token_ids=[1, 2, 3]))
    by_vllm = complete(make_answer({"prompt_token_ids": [1, 2, 3]}, token_ids=[7, 8]))
    assert by_sglang == by_vllm == Completion("A pipe.", "", "stop", (7, 8), (1, 2, 3), 3, 2)


def test_text_alone_is_an_answer_too():
    found = complete(Reply(200, {"choices": [{"message": MESSAGE, "finish_reason": "length"}]}))
    assert found == Completion("A pipe.", "", "length", None, None, None, None)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thoughts_that_the_server_took_out_are_noticed(field):
    assert complete(make_answer(message={"content": None, field: "Let me see."})).reasoning == "Let me see."


def test_the_key_is_sent_as_a_bearer_token_to_the_right_place():
    asked: list[Request] = []

    def remember(request: Request) -> Reply:
        asked.append(request)
        return make_answer()

    with json_server(remember) as url:
        for key in (KEY, None):
            with ChatClient(f"{url}/v1", 30, key) as client:
                client.complete({"messages": [], "model": "m"})
    assert [each.path for each in asked] == ["/v1/chat/completions"] * 2
    assert [each.headers.get("Authorization") for each in asked] == [f"Bearer {KEY}", None]
    assert asked[0].body == {"messages": [], "model": "m"}


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, CaptureError), (422, CaptureError), (401, ConfigError), (403, ConfigError), (404, ConfigError),
        (408, EngineError), (429, EngineError), (500, EngineError), (503, EngineError), (302, EngineError),
    ],
)  # fmt: skip
def test_an_error_tells_what_the_server_said_and_not_the_key(status, error):
    with pytest.raises(error, match="key \\*\\*\\* is not good here") as raised:
        complete(Reply(status, {"error": f"key {KEY} is not good here"}))
    assert KEY not in str(raised.value)


@pytest.mark.parametrize("value", ["not json", {"choices": []}, {"choices": [{"message": None}]}, []], ids=str)
def test_an_answer_of_another_shape_is_told(value):
    with pytest.raises(EngineError, match="expected a chat completion, found"):
        complete(Reply(200, value))


def test_a_connection_that_is_lost_or_never_made_is_told():
    with pytest.raises(EngineError, match="cannot be reached: RemoteProtocolError"):
        complete(Reply(0, None))
    with (
        ChatClient("http://127.0.0.1:9/v1", 5, KEY) as client,
        pytest.raises(EngineError, match="127.0.0.1:9/v1.*cannot be reached"),
    ):
        client.complete({})


def test_an_answer_that_takes_too_long_is_told():
    late = threading.Event()

    def slow(request: Request) -> Reply:
        late.wait(HANG_S)
        return make_answer()

    with json_server(slow) as url, ChatClient(f"{url}/v1", 0.05) as client:
        with pytest.raises(EngineError, match=r"no answer within 0.05 s \(endpoint.timeout_s\)"):
            client.complete({})
        late.set()


def test_a_closed_client_says_so():
    client = ChatClient("http://127.0.0.1:9/v1", 5)
    client.close()
    with pytest.raises(DraftworksError, match="its client was closed"):
        client.complete({})


THOUGHTS = tuple(f"<think>\nI see part {number}.\n</think>\n\nIt is number {number}." for number in range(3))
PLAIN = tuple(f"It is number {number}." for number in range(3))


@pytest.fixture
def target(tiny_target: TargetFiles, tmp_path: Path) -> TargetFiles:
    return thinking_target(tiny_target, tmp_path)


def format_question(number: int) -> str:
    return f"<|im_start|>user\nWhat does function 1 do, part {number}?<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_drops_earlier_thoughts_gives_a_sample_for_each_answer(target, tmp_path: Path):
    chat = ChatTokenizer.load(target, thinking=True)
    source = conversation(1, exchanges=3)
    run = answering_run(target, tmp_path, [source], responses={"thinking": True})
    answers = Scripted(chat, *THOUGHTS)
    regenerate_with(run, answers, chat)
    rows = rows_of(run)
    assert [row.sample_id for row in rows] == [f"{source.id}.1", f"{source.id}.2", source.id]
    history = ""
    for number, row in enumerate(rows):
        prompt = history + format_question(number)
        assert answers.prompts[number] == prompt
        assert spelt(chat, row) == prompt + THOUGHTS[number] + "<|im_end|>"
        assert supervised(chat, row) == THOUGHTS[number] + "<|im_end|>"
        assert row.columns == source.columns
        history = prompt + f"{PLAIN[number]}<|im_end|>\n"


def test_without_thinking_the_mark_of_it_is_only_in_the_prompt_of_the_newest_answer(target, tmp_path: Path):
    chat = ChatTokenizer.load(target, thinking=False)
    run = answering_run(target, tmp_path, [conversation(1, exchanges=2)], responses={"thinking": False})
    regenerate_with(run, Scripted(chat, *PLAIN), chat)
    first, second = rows_of(run)
    mark = "<think>\n\n</think>\n\n"
    assert spelt(chat, first) == format_question(0) + mark + PLAIN[0] + "<|im_end|>"
    assert (
        spelt(chat, second)
        == f"{format_question(0)}{PLAIN[0]}<|im_end|>\n{format_question(1)}{mark}{PLAIN[1]}<|im_end|>"
    )
    assert [supervised(chat, row) for row in (first, second)] == [f"{text}<|im_end|>" for text in PLAIN[:2]]


def test_thoughts_that_the_template_keeps_stay_in_one_sample(target, tmp_path: Path):
    """A tool result after an answer is no new question, so the template keeps the thought of that answer."""
    chat = ChatTokenizer.load(target, thinking=True)
    source = conversation(1)
    source = type(source).of([*source.turns, Turn("tool", "exit code 0"), Turn("assistant", "Done.")])
    run = answering_run(target, tmp_path, [source], responses={"thinking": True})
    regenerate_with(run, Scripted(chat, *THOUGHTS), chat)
    (row,) = rows_of(run)
    assert supervised(chat, row) == "".join(f"{text}<|im_end|>" for text in THOUGHTS[:2])


def test_an_answer_without_a_thought_is_kept_and_both_answers_are_supervised(target, tmp_path: Path):
    chat = ChatTokenizer.load(target, thinking=True)
    run = answering_run(target, tmp_path, [conversation(1, exchanges=3)], responses={"thinking": True})
    regenerate_with(run, Scripted(chat, PLAIN[0], THOUGHTS[1], THOUGHTS[2]), chat)
    first, second = rows_of(run)
    assert supervised(chat, first) == f"{PLAIN[0]}<|im_end|>{THOUGHTS[1]}<|im_end|>"
    assert supervised(chat, second) == f"{THOUGHTS[2]}<|im_end|>"


def test_only_last_turn_is_the_last_sample(target, tmp_path: Path):
    chat = ChatTokenizer.load(target, thinking=True)
    source = conversation(1, exchanges=3)
    run = answering_run(target, tmp_path, [source], responses={"thinking": True}, only_last_turn=True)
    regenerate_with(run, Scripted(chat, *THOUGHTS), chat)
    (row,) = rows_of(run)
    assert (row.sample_id, supervised(chat, row)) == (source.id, f"{THOUGHTS[2]}<|im_end|>")


def test_conversations_keep_what_was_thought_and_a_resume_changes_nothing(target, tmp_path: Path):
    chat = ChatTokenizer.load(target, thinking=True)
    sources = [conversation(1, exchanges=2), conversation(2, exchanges=3)]
    run = answering_run(target, tmp_path, sources, responses={"thinking": True})
    first = regenerate_with(run, Scripted(chat, *THOUGHTS), chat)
    again = regenerate_with(run, lambda: pytest.fail("all is answered"), chat)
    assert first.tokens["digest"] == again.tokens["digest"]
    assert (first.conversations, first.tokens["samples"], first.tokens["dropped_turns"]) == (2, 5, 0)
    answers = [
        turn.content for turn in next(read_conversations(run.out / CONVERSATIONS)).turns if turn.role == "assistant"
    ]
    assert answers == list(THOUGHTS[:2])
    assert first.generated_tokens == first.tokens["supervised_tokens"]


def test_answers_of_another_mode_are_not_used(target, tmp_path: Path):
    runs = [
        answering_run(target, tmp_path, [conversation(1)], responses={"thinking": thinking})
        for thinking in (None, True, False)
    ]
    assert len({find_answers_file(run) for run in runs}) == 3


def test_conversations_of_a_mix_are_asked_as_it_says_in_one_run(target, tmp_path: Path):
    chat = ChatTokenizer.load(target)
    run = answering_run(target, tmp_path, ask_both_ways([conversation(1), conversation(2)]))
    regenerate_with(run, Scripted(chat, PLAIN[0]), chat)
    rows = rows_of(run)
    assert [row.columns["thinking"] for row in rows] == ["off", "on"] * 2
    for row in rows:
        assert ("<think>" in spelt(chat, row)) == (
            row.columns["thinking"] == "off"
        )  # the empty thought of this template
    for thinking in (False, True):
        alone = answering_run(target, tmp_path / str(thinking), [conversation(1)], responses={"thinking": thinking})
        regenerate_with(alone, Scripted(chat, PLAIN[0]), ChatTokenizer.load(target, thinking))
        assert rows_of(alone)[0].input_ids.tolist() == rows[thinking].input_ids.tolist()
