"""A stand-in for a vLLM that exchanges its draft: its counters grow with a clock that the test moves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from json_server import QuietHandler, serve
from service_site import ServiceSite

from draftworks.storage.artifacts import Artifact, BuildResult

LABELS = 'engine="0",model_name="models/small"'


@dataclass
class ExchangingVLLM:
    """A server that serves the draft in `folder`.

    Attributes:
        accepts: accepted tokens per pass by draft.
        version: of the draft that it serves, as it says.
        load: what it loads at an exchange, by the announced version; by default whatever is asked.
        passes_per_s: of its traffic.
        refuses: the path that it answers with 500.
        silent_after: exchanges after which its metrics are gone.
        by_reading: five seconds pass with each reading, for programs that wait by a clock of their own.
    """

    folder: Path
    accepts: Mapping[str, float]
    version: str
    passes_per_s: float = 20.0
    refuses: str = ""
    silent_after: int = 1000
    by_reading: bool = False
    url: str = ""
    now: float = 1_000_000.0
    exchanges: list[str] = field(default_factory=list)
    sleeps: int = 0
    on_sleep: Callable[[], None] = lambda: None
    _counts: dict[str, float] = field(default_factory=lambda: {"passes": 0.0, "accepted": 0.0, "requests": 0.0})

    @classmethod
    def make(cls, folder: Path) -> ExchangingVLLM:
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text("first")
        return cls(folder, {}, "default")

    def describe(self, **options: Any) -> dict[str, Any]:
        """The section `swap` for it."""
        return {"url": self.url, "folder": str(self.folder), "requests": 100, "seconds": 120, "every_s": 5, **options}

    def sleep(self, seconds: float) -> None:
        """Let time pass: of six seconds some accept more and some less, so that intervals have a width."""
        self.sleeps += 1
        self.now += seconds
        passes = round(self.passes_per_s * seconds)
        wave = (-0.1, 0.05, 0.1, -0.05, 0.0, 0.0)[self.sleeps % 6]
        self._counts["passes"] += passes
        self._counts["accepted"] += max(0, round(passes * (self.accepts[self.version] + wave)))
        self._counts["requests"] += passes / 10
        self.on_sleep()

    def list_metrics(self) -> str:
        values = {
            "spec_decode_num_drafts": self._counts["passes"],
            "spec_decode_num_draft_tokens": self._counts["passes"] * 5,
            "spec_decode_num_accepted_tokens": self._counts["accepted"],
            "request_success": self._counts["requests"],
        }
        return "".join(f"vllm:{name}_total{{{LABELS}}} {int(value)}.0\n" for name, value in values.items())

    @contextmanager
    def run(self) -> Iterator[ExchangingVLLM]:
        server = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                if self.path == "/weight_info":
                    self.reply(200, json.dumps({"weight_version": server.version}).encode())
                elif len(server.exchanges) >= server.silent_after:
                    self.reply(503, b"no")
                else:
                    if server.by_reading:
                        server.sleep(5.0)
                    self.reply(200, server.list_metrics().encode())

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.path == server.refuses:
                    self.reply(500, b"other fc.weight than at the start: restart the server")
                    return
                if self.path == "/finish_weight_update":
                    server.version = json.loads(content)["weight_version"]
                    server.exchanges.append(server.version)
                self.reply(200, b"{}")

        with serve(Handler) as self.url:
            yield self


class SwapSite(ServiceSite):
    """Exports have what vLLM loads."""

    def publish_export(self, draft: Artifact, passed: bool = True) -> Artifact:
        made = super().publish_export(draft, passed)

        def build(out: Path) -> BuildResult:
            (out / "sglang").mkdir()
            for name in ("config.json", "model.safetensors"):
                (out / "sglang" / name).write_text(f"{name} of {draft.data_version}")
            return BuildResult(made.data_version, made.summary)

        return self.artifacts.obtain(made.asset, made.target, {**made.identity, "whole": True}, build)
