"""A stand-in for SGLang that speculates: the HTTP interface and the counters of a real one, with answers a test chooses.

As a script it is the server: `fake_speculating_sglang.py FILE --port N …`, where FILE is the JSON of a `Script`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Script:
    """What the server does.

    Attributes:
        answers: by prompt (its ids, joined by a blank), the answer's ids and the histogram of its passes.
        verified: tokens that a pass verifies.
        device: what it says that it runs on.
        hangs: no prompt is answered, and the id of a child process is written beside the script.
    """

    answers: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    verified: int = 3
    hangs: bool = False
    device: str = "cuda"


def key(prompt: list[int]) -> str:
    return " ".join(map(str, prompt))


def fake_python(folder: Path, script: Script) -> Path:
    """The Python of an environment with this SGLang in it; what the server was started with is in `arguments.json`."""
    (folder / "script.json").write_text(json.dumps(asdict(script)))
    python = folder / "python"
    python.write_text(
        '#!/bin/sh\n[ "$1" = -c ] && case "$2" in *find_spec*) exec echo True;; *) exec echo 0.5.23;; esac\n'
        f'exec {sys.executable} {__file__} {folder / "script.json"} "$@"\n'
    )
    python.chmod(0o755)
    return python


class _Handler(BaseHTTPRequestHandler):
    script: Script
    folder: Path
    model: str
    passes = tokens = 0
    counting = threading.Lock()

    def do_GET(self) -> None:
        if self.path == "/metrics":
            text = (
                f'sglang:spec_verify_calls_total{{engine_type="unified"}} {_Handler.passes}.0\n'
                f'sglang:generation_tokens_total{{engine_type="unified"}} {_Handler.tokens}.0\n'
            )
            self._send(text.encode())
            return
        speaks = {"version": "0.5.23", "model_path": self.model, "device": self.script.device}
        self._send({**speaks, "speculative_num_draft_tokens": self.script.verified, "internal_states": [{}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.script.hangs:
            (self.folder / "asked").touch()
            threading.Event().wait()
        ids, histogram = self.script.answers[key(body["input_ids"])]
        with self.counting:
            _Handler.passes += sum(histogram)
            _Handler.tokens += len(ids)
        meta = {"finish_reason": {"type": "stop"}, "completion_tokens": len(ids), "cached_tokens": 0}
        counters = {"spec_verify_ct": sum(histogram), "spec_correct_drafts_histogram": histogram}
        self._send({"output_ids": ids, "meta_info": meta | (counters if sum(histogram) else {})})

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
    _Handler.script, _Handler.folder = Script(**json.loads(path.read_text())), path.parent
    _Handler.model = arguments[arguments.index("--model-path") + 1]
    (path.parent / "arguments.json").write_text(json.dumps(arguments))
    if _Handler.script.hangs:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (path.parent / "child").write_text(str(child.pid))
    print("the fake server serves", flush=True)
    ThreadingHTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), _Handler).serve_forever()


if __name__ == "__main__":
    main()
