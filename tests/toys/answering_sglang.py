"""A program that answers like SGLang's server, from its own options and key, without a model; without torch.

Every server writes a file into the folder `ANSWERING_SGLANG`, one line per request. It answers nothing before as many
servers as `ANSWERING_SGLANG_SERVERS` were asked, and the first server with three requests ends as if it was killed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER, SERVERS = "ANSWERING_SGLANG", "ANSWERING_SGLANG_SERVERS"
KEY_FILE = "DRAFTWORKS_SGLANG_KEY_FILE"
HANG_S = 600.0  # this program runs without the packages of the tests
TOKENS = 3


def make_python(folder: Path) -> Path:
    """A stand-in for SGLang's Python, which runs this program as the server."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec echo 0.5.23\nexec {sys.executable} -I -S {__file__} "$@"\n')
    python.chmod(0o755)
    return python


def read_option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def answer(prompt: list[int]) -> dict[str, object]:
    """A greedy answer: the same for the same prompt, whoever gives it."""
    ids = [5 + (sum(prompt) + 7 * number) % 1000 for number in range(TOKENS)]
    return {"output_ids": ids, "meta_info": {"finish_reason": {"type": "length"}, "cached_tokens": 0}}


class Server:
    def __init__(self, folder: Path, servers: int, key: str | None) -> None:
        self._folder = folder
        self._servers = servers
        self._lock = threading.Lock()
        self._asked = 0
        self.key = key

    def generate(self, body: dict) -> list[dict[str, object]]:
        with self._lock:
            self._asked += 1
            with (self._folder / f"{os.getpid()}.asked").open("a") as stream:
                stream.write(f"{self._asked}\n")
            if self._servers > 1 and self._asked == 3:
                self._end_once()
        deadline = time.monotonic() + HANG_S
        while len(list(self._folder.glob("*.asked"))) < self._servers and time.monotonic() < deadline:
            time.sleep(0.02)
        return [answer(prompt) for prompt in body["input_ids"]]

    def _end_once(self) -> None:
        try:
            (self._folder / "killed").touch(exist_ok=False)
        except FileExistsError:
            return
        os._exit(9)


def serve() -> None:
    key_file = os.environ.get(KEY_FILE)
    key = None if key_file is None else Path(key_file).read_text()
    own = Server(Path(os.environ[FOLDER]), int(os.environ[SERVERS]), key)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/health":
                self.reply(200, {})
            elif self.is_allowed():
                self.reply(200, {"model_path": read_option("--model-path")})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.is_allowed():
                self.reply(200, own.generate(body))

        def is_allowed(self) -> bool:
            if key is None or self.headers["Authorization"] == f"Bearer {key}":
                return True
            self.reply(401, {"error": "Unauthorized"})
            return False

        def reply(self, status: int, value: object) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            """Its log has nothing."""

    ThreadingHTTPServer((read_option("--host"), int(read_option("--port"))), Handler).serve_forever()


if __name__ == "__main__":
    serve()
