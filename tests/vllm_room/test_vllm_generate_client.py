"""What an engine asks of vLLM behind HTTP: ids of ours, all of a call ended before an error, logits in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from json_server import Reply, Request, json_server

from draftworks.errors import AbortedRequestError, EngineError
from draftworks.servers.client import GenerateRequest
from draftworks.vllm.generate_client import VLLMGenerateClient, parse_generation


def answer(finish: str = "length", **choice: Any) -> dict[str, Any]:
    return {"choices": [{"token_ids": [7], "finish_reason": finish, "logprobs": None, **choice}], "usage": None}


@dataclass
class StandIn:
    """Answers the prompt [n] with n, after all others of a call have come; fails for [0]."""

    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    ended: int = 0
    together: threading.Barrier = field(default_factory=lambda: threading.Barrier(3))


@pytest.fixture
def vllm() -> Iterator[StandIn]:
    server = StandIn()

    def complete(request: Request) -> Reply:
        server.asked.append(request.body)
        server.together.wait()
        server.ended += 1
        [token] = request.body["prompt"]
        return Reply(200, answer(token_ids=[token])) if token else Reply(500, "out of blocks")

    with json_server(complete) as server.url:
        yield server


def ask(server: StandIn, *prompts: int) -> list[int]:
    requests = [GenerateRequest(f"id{n}", [n], {"max_tokens": 1, "detokenize": False}) for n in prompts]
    client = VLLMGenerateClient(server.url, 30, model="small")
    try:
        return [found.output_ids[0] for found in client.generate(requests)]
    finally:
        client.close()


def test_requests_of_a_call_are_sent_together_with_our_ids_and_answered_in_order(vllm: StandIn):
    assert ask(vllm, 5, 6, 7) == [5, 6, 7]
    assert {body["request_id"] for body in vllm.asked} == {"id5", "id6", "id7"}
    assert all("detokenize" not in body and body["max_tokens"] == 1 for body in vllm.asked)


def test_an_error_waits_for_the_other_requests_of_its_call(vllm: StandIn):
    with pytest.raises(EngineError, match=r"failed on /v1/completions \(500"):
        ask(vllm, 5, 0, 7)
    assert vllm.ended == 3


def test_logits_are_in_the_order_of_the_vocabulary():
    found = parse_generation(answer(logprobs={"top_logprobs": [{"token_id:1": 0.5, "token_id:0": -2.0}]}))
    assert found.logits == [-2.0, 0.5]


def test_a_request_that_was_given_up_and_an_answer_of_another_form_are_told():
    with pytest.raises(AbortedRequestError, match="ended with abort"):
        parse_generation(answer("abort"))
    with pytest.raises(EngineError, match="unexpected form"):
        parse_generation({"choices": []})
