"""Chat completions: answers of SGLang, vLLM and plain servers are parsed; errors are reported without the key."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from json_server import Reply, Request, json_server
from waiting import HANG_S

from draftworks.capture.answers.endpoint import ChatClient, Completion
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
