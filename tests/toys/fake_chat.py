"""A stand-in for a chat server: renders and tokenizes as a real one does, and says what a test has it say."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from json_server import Reply, Request

from draftworks.config.run_files import TargetFiles
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import Turn

END = "<|im_end|>"

Says = Callable[[list[Turn]], str]


def echo(turns: list[Turn]) -> str:
    """An answer that tells which question it belongs to."""
    return f"As to {turns[-1].content!r}: it returns."


class FakeChat:
    """Answers requests to /v1/chat/completions.

    Attributes:
        dialect: as `EndpointSpec.server`; decides under which names token ids are told, if they are asked for.
        asked: bodies of all requests.
        replies: for the next requests, instead of an answer.
        refuses: an answer to a question with this text is refused.
        changes: of the `choice` that is sent.
    """

    def __init__(self, target: TargetFiles, says: Says = echo, dialect: str = "sglang") -> None:
        self.dialect = dialect
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.replies: list[Reply] = []
        self.refuses = "\0"
        self.changes: dict[str, Any] = {}
        self.counts_prompt = True
        self._target = target
        self._says = says
        self._chats: dict[bool | None, ChatTokenizer] = {}
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> Reply:
        with self._lock:
            body = request.body
            self.asked.append(body)
            self.keys.add(request.headers.get("Authorization"))
            if self.replies:
                return self.replies.pop(0)
            turns = [Turn(**message) for message in body["messages"]]
            if self.refuses in turns[-1].content:
                return Reply(400, {"error": "the question is refused"})
            return Reply(200, self._completion(body, turns))

    def _completion(self, body: dict[str, Any], turns: list[Turn]) -> dict[str, Any]:
        chat = self._chat(body.get("chat_template_kwargs", {}).get("enable_thinking"))
        prompt = chat.encode_prompt(turns)
        said = chat._tokenizer(self._says(turns) + END, add_special_tokens=False)["input_ids"]
        ids = said[: body["max_tokens"]]
        message = {"role": "assistant", "content": chat.decode(ids)}
        choice = {"index": 0, "message": message, "finish_reason": "stop" if len(ids) == len(said) else "length"}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)} if self.counts_prompt else {}
        completion = {"choices": [choice], "usage": usage}
        if body.get("return_token_ids") and self.dialect == "sglang":
            choice |= {"response_token_ids": ids, "prompt_token_ids": prompt}
        elif body.get("return_token_ids") and self.dialect == "vllm":
            choice["token_ids"], completion["prompt_token_ids"] = ids, prompt
        choice |= self.changes
        return completion

    def _chat(self, thinking: bool | None) -> ChatTokenizer:
        if thinking not in self._chats:
            self._chats[thinking] = ChatTokenizer.load(self._target, thinking)
        return self._chats[thinking]
