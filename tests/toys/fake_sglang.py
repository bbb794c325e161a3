"""An HTTP server with the answers of a real SGLang 0.5.23, and a host around it whose faults a test chooses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from waiting import HANG_S

from draftworks.capture.engines.server_hosts import ExternalHost
from draftworks.handover.spool import Part, write_part
from draftworks.sglang.client import SGLangClient
from draftworks.sglang.hook import format_hook_option

HIDDEN = 8
VOCAB = 50


def server_info(model: str, spool: Path, **changes: Any) -> dict[str, Any]:
    """What we read of the answer to /server_info, recorded from a server that was set up for capture."""
    recorded = {
        "version": "0.5.23",
        "model_path": model,
        "revision": None,
        "dtype": "float32",
        "context_length": 528,
        "disable_radix_cache": True,
        "chunked_prefill_size": -1,
        "enable_return_aux_hidden_states": True,
        "return_aux_hidden_state_layer_ids": [1, 3],
        "forward_hooks": json.loads(format_hook_option(spool)),
    }
    return {**recorded, **changes}


def generated(request_id: str, prompt: list[int]) -> dict[str, Any]:
    """Recorded shape of one answer of /generate."""
    meta = {"id": request_id, "finish_reason": {"type": "length", "length": 1}, "prompt_tokens": len(prompt)}
    return {"text": " in", "output_ids": [297], "meta_info": {**meta, "completion_tokens": 1, "cached_tokens": 0}}


class FakeSGLang:
    """Writes a part for every prompt: row t of tap k is filled with `100 * k + id of token t`.

    Attributes:
        info: the answer to /server_info.
        served: what the answer to /model_info says otherwise than /server_info.
        answers: instead of the next answer to /generate.
        unwritten: how many calls of /generate yet leave nothing in the spool.
        failures: status codes of the next answers to /generate; 0 closes the connection.
        meeting: nothing is answered on /generate before so many requests are here.
        gate: nothing is answered on /generate before it is open.
        damage: what becomes of every part before it is written.
        refused: prompts that hold this id are refused.
        fatal: requests for prompts that hold this id are given up.
        aborted: how many answers yet give their requests up.
        asked: bodies of /generate.
        key: what requests have to carry, but for /health; None for a server without a key.
    """

    def __init__(self, info: dict[str, Any], spool: Path) -> None:
        self.info = info
        self.spool = spool
        self.served: dict[str, Any] = {}
        self.answers: Any = None
        self.unwritten = 0
        self.failures: list[int] = []
        self.meeting = threading.Barrier(1)
        self.gate = threading.Event()
        self.gate.set()
        self.damage: Callable[[Part], Part] = lambda part: part
        self.refused = -1
        self.fatal = -1
        self.aborted = 0
        self.asked: list[dict[str, Any]] = []
        self.url = ""
        self.key: str | None = None

    def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append(body)
        self.meeting.wait(HANG_S)
        self.gate.wait(HANG_S)
        if self.failures:
            return self.failures.pop(0), {"error": {"message": "out of memory"}}
        if any(self.refused in prompt for prompt in body["input_ids"]):
            return 400, {"error": {"message": "The input is longer than the model's context length."}}
        if self.answers is not None:
            answers, self.answers = self.answers, None
            return 200, answers
        self.unwritten -= 1
        for request_id, prompt in zip(body["rid"], body["input_ids"], strict=True):
            if self.unwritten >= 0:
                break
            write_part(self.spool, request_id, self.damage(part_of(prompt)))
        answers = [generated(*each) for each in zip(body["rid"], body["input_ids"], strict=True)]
        for answer, prompt in zip(answers, body["input_ids"], strict=True):
            if self.fatal in prompt:
                answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "out of memory"}
        if self.aborted:
            self.aborted -= 1
            answers[0]["meta_info"]["finish_reason"] = {"type": "abort", "message": "out of memory"}
        return 200, answers


def part_of(prompt: list[int], start: int = 0) -> Part:
    ids = torch.tensor(prompt)
    rows = ids[:, None].float().expand(-1, HIDDEN)
    return Part(start, ids, torch.stack([rows + 200, rows + 400]), rows, torch.zeros(VOCAB))


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that stopped waiting is part of the test."""


@contextmanager
def fake_sglang(spool: Path, **changes: Any) -> Iterator[FakeSGLang]:
    spool.mkdir(parents=True, exist_ok=True)
    fake = FakeSGLang(server_info("models/toy", spool, **changes), spool)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.is_allowed():
                return self.answer(401, {"error": "Unauthorized"})
            now = {"model_path": fake.info["model_path"], **fake.served}
            self.answer(200, now if self.path == "/model_info" else fake.info)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.is_allowed():
                return self.answer(401, {"error": "Unauthorized"})
            self.answer(*fake.generate(body))

        def is_allowed(self) -> bool:
            return fake.key is None or self.headers["Authorization"] == f"Bearer {fake.key}"

        def answer(self, status: int, value: Any) -> None:
            if status == 0:
                return
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            """A test's output is its own."""

    server = _Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()


class RevivedHost(ExternalHost):
    """Counts how often it was asked to revive."""

    def __init__(self, fake: FakeSGLang, timeout_s: float = 5.0) -> None:
        super().__init__(SGLangClient(fake.url, timeout_s), fake.spool, (1, 3))
        self.revivals = 0

    def revive(self, error: Exception) -> None:
        self.revivals += 1
