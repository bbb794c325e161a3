"""A draft in service whose report has prompts of its own, and requests of these prompts as servers log them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from request_logs import BEGIN, HOUR_S, PLAIN, write_log
from service_site import ServiceSite, make_walk

from draftworks.data.conversations import Conversation, Scalar, Turn, write_conversations
from draftworks.data.tokenized import TokenRow, write_tokens
from draftworks.production.asked import digest_messages
from draftworks.production.requests import ServedRequest
from draftworks.production.served_logs import ServedLogs, read_served_logs
from draftworks.storage.artifacts import BuildResult
from draftworks.storage.identity import token_digest
from draftworks.storage.names import of_eval_set
from draftworks.targets.registry import Registry

LOG = "logs/*.jsonl"


@dataclass(frozen=True)
class PromisedSite(ServiceSite):
    """A target with logs of its requests: `registry/logs/`."""

    entry: Mapping[str, Any] = field(default_factory=lambda: {"observation": {"requests": {"files": [LOG]}}})

    def name_columns(self, index: int) -> dict[str, Scalar]:
        return {"language": "de" if index % 2 else "en", "source": "chat"}

    def _publish_answers(self, eval_set: str, target: str, answers: str, prompts: int) -> str:
        rows, conversations = [], []
        for index in range(prompts):
            ids, mask = np.arange(6, dtype=np.int32) + index, np.array([0, 0, 0, 1, 1, 1], dtype=bool)
            columns = self.name_columns(index)
            rows.append(TokenRow(f"s{index}", ids, mask, columns))
            turns = (Turn("user", f"question {index}"), Turn("assistant", "answer"))
            conversations.append(Conversation(f"s{index}", turns, columns))

        def build(out: Path) -> BuildResult:
            write_conversations(out / "conversations", conversations)
            return BuildResult(write_tokens(out / "tokens", rows)["digest"])

        identity = {"answers": answers, "prompts": prompts}
        return self.artifacts.obtain(of_eval_set(eval_set).responses, target, identity, build).data_version

    def serve(self, index: int, mean: float, weights: str, chat: bool = True, **changes: Any) -> ServedRequest:
        """A request of a prompt, whose counts are those of the walk."""
        walked = make_walk(index, mean, weights)
        tokens = token_digest([index, index + 1, index + 2])
        return replace(
            PLAIN,
            **{
                "id": f"p{index}",
                "time": BEGIN + index,
                "model": None,
                "passes": walked.passes,
                "accepted": walked.accepted,
                "drafted": 500,
                "completion_tokens": walked.emitted + 1,
                "prompt": digest_messages([("user", f"question {index}")]) if chat else tokens,
                "language": self.name_columns(index)["language"],
                "source": "chat",
                **changes,
            },
        )

    def write(self, *requests: ServedRequest, name: str = "a.jsonl") -> Path:
        return write_log(self.registry / "logs" / name, requests)

    def read_logs(self) -> ServedLogs:
        registry = Registry(self.registry)
        target = registry.load_target("small")
        return read_served_logs(target, registry.root, self.artifacts, clock=lambda: BEGIN + 1000 * HOUR_S)
