"""A stand-in for vLLM that speculates: the HTTP interface and the counters of 0.32.0, with answers a test chooses.

As a script it is the server: `fake_speculating_vllm.py FILE --port N …`, where FILE is the JSON of a `Script`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

METRICS = """
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0"}} {tokens}.0
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0"}} {passes}.0
"""


@dataclass(frozen=True)
class Script:
    """What the server does.

    Attributes:
        answers: by prompt (its ids, joined by a blank), the answer's ids and what each pass accepted.
        proposed: tokens that a pass proposes.
        counts: whether it has metrics (no `--disable-log-stats`).
        counts_requests: whether answers have counters of their own.
        ends_after: it ends instead of giving one answer more; None: never.
        draft: the draft that it has loaded, which it tells in development mode; None: it is not in that mode.
    """

    answers: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    proposed: int = 2
    counts: bool = True
    counts_requests: bool = True
    ends_after: int | None = None
    draft: str | None = None


def fake_vllm_python(folder: Path, script: Script) -> Path:
    """The Python of an environment with this vLLM in it; what the server was started with is in `vllm_arguments.json`."""
    (folder / "vllm_script.json").write_text(json.dumps(asdict(script)))
    python = folder / "vllm_python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec echo 0.32.0\nexec {sys.executable} {__file__} {folder / "vllm_script.json"} "$@"\n'
    )
    python.chmod(0o755)
    return python


class Handler(BaseHTTPRequestHandler):
    script: Script
    name = root = "models/toy"
    passes = tokens = answered = 0
    counting = threading.Lock()

    def do_GET(self) -> None:
        path, script = self.path.partition("?")[0], self.script
        if path == "/metrics":
            text = METRICS.format(tokens=type(self).tokens, passes=type(self).passes) if script.counts else ""
            self._send(text.encode())
        elif path == "/server_info" and script.draft is None:
            self.send_error(404)
        elif path == "/server_info":
            told = {"model": script.draft, "num_speculative_tokens": script.proposed}
            self._send({"vllm_config": {"speculative_config": told}})
        else:
            models = [{"id": self.name, "root": self.root, "max_model_len": 512}]
            self._send({"/v1/models": {"data": models}, "/version": {"version": "0.32.0"}}.get(path, {}))

    def do_POST(self) -> None:
        body, kind = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), type(self)
        with self.counting:
            if kind.answered == self.script.ends_after:
                print("out of memory", flush=True)
                os._exit(7)
            ids, steps = self.script.answers[" ".join(map(str, body["prompt"]))]
            kind.answered += 1
            kind.passes += len(steps)
            kind.tokens += len(ids)
        histogram = [steps.count(accepted) for accepted in range(self.script.proposed + 1)]
        counted = {"acceptance_histogram": histogram, "num_spec_steps": len(steps), "per_step_accepted": steps}
        choice = {"token_ids": ids, "prompt_token_ids": body["prompt"], "finish_reason": "stop"}
        self._send(
            {
                "choices": [choice],
                "metrics": {"speculative_decoding": counted} if self.script.counts_requests and steps else None,
            }
        )

    def _send(self, value: Any) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """The log is what the test wrote."""


def main() -> None:
    path, arguments = Path(sys.argv[1]), sys.argv[2:]
    Handler.script = Script(**json.loads(path.read_text()))
    Handler.root = arguments[arguments.index("--model") + 1]
    Handler.name = arguments[arguments.index("--served-model-name") + 1]
    (path.parent / "vllm_arguments.json").write_text(json.dumps(arguments))
    ThreadingHTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
