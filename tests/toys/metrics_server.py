"""HTTP servers with /metrics: stand-ins of SGLang and vLLM whose counters a test sets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from json_server import QuietHandler, serve
from waiting import HANG_S

MODEL = "models/small"
SGLANG_LABELS = f'{{engine_type="unified",model_name="{MODEL}"}}'
VLLM_LABELS = f'engine="0",model_name="{MODEL}"'


@dataclass
class Pages:
    """What a server answers, by path: a text, bytes, JSON, or a status. A test changes it while the server runs.

    Attributes:
        gate: nothing is answered before it is open.
        keys: the bearer tokens of the requests so far.
    """

    pages: dict[str, Any]
    gate: threading.Event = field(default_factory=threading.Event)
    keys: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    def find(self, path: str) -> Any:
        found = self.pages.get(path, 404)
        return found() if callable(found) else found


@contextmanager
def serve_pages(pages: Pages) -> Iterator[str]:
    """Serve GET requests on a free port of this machine; yields the address."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            pages.keys.append(self.headers.get("Authorization"))
            pages.gate.wait(HANG_S)
            found = pages.find(self.path)
            status, value = (found, "no") if isinstance(found, int) else (200, found)
            if isinstance(value, (dict, list)):
                value = json.dumps(value)
            content = value if isinstance(value, bytes) else value.encode()
            self.reply(status, content)

    with serve(Handler) as url:
        yield url


def sglang_pages(
    passes: int = 0, accepted: int = 0, requests: int = 1, seed: int = 1, draft: str = "drafts/a", **info: Any
) -> dict[str, Any]:
    """The pages of an SGLang server that answered `requests` requests with so many passes and accepted tokens."""
    counters = {
        "spec_verify_calls_total": passes,
        "generation_tokens_total": passes + accepted + requests,
        "num_requests_total": requests,
    }
    lines = [f"# TYPE sglang:{name} counter\nsglang:{name}{SGLANG_LABELS} {n}.0" for name, n in counters.items()]
    said = {
        "version": "0.5.23", "model_path": MODEL, "random_seed": seed, "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": draft, **info,
    }  # fmt: skip
    return {"/metrics": "\n".join(lines) + "\n", "/server_info": said}


def vllm_pages(
    passes: int = 0, accepted: int = 0, proposed: int | None = None, started: float | None = 1000.0, model: str = MODEL
) -> dict[str, Any]:
    """The pages of a vLLM server with so many drafts, accepted and proposed tokens; all were accepted at position 0."""
    values = {
        "drafts": passes,
        "draft_tokens": passes * 5 if proposed is None else proposed,
        "accepted_tokens": accepted,
    }
    labels = VLLM_LABELS.replace(MODEL, model)
    lines = [f"vllm:spec_decode_num_{name}_total{{{labels}}} {n}.0" for name, n in values.items()]
    lines += [f"vllm:spec_decode_num_drafts_created{{{labels}}} {started}"] if started is not None else []
    models = {"data": [{"id": model, "root": model}]}
    return {"/metrics": "\n".join(lines) + "\n", "/version": {"version": "0.11.2"}, "/v1/models": models}
