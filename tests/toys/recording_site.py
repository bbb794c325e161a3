"""A recording proxy in front of a server that sends the very bytes a test gives, all in one loop."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from draftworks.production.requests import Engine, ServedRequest
from draftworks.production.serving_facts import ServingFacts
from draftworks.recording.line_files import LineFiles
from draftworks.recording.line_writer import LineWriter
from draftworks.recording.proxy import ProxyOptions
from draftworks.recording.request_lines import LineMaker, SeenRequest
from draftworks.recording.serving import Listening, Place, listen

CHAT = "/v1/chat/completions"
COUNTS = {
    "mean_acceptance_length": 1.75,
    "num_spec_steps": 4,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 12,
    "acceptance_histogram": [2, 1, 1, 0],
    "num_spec_tokens": 3,
}


@dataclass(frozen=True)
class Arrived:
    """A request as the server got it."""

    head: bytes
    body: bytes

    @property
    def target(self) -> str:
        return self.head.split(b" ", 2)[1].decode()

    @property
    def headers(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name}


Answer = Callable[[Arrived, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class RawServer:
    """A server whose connections are answered by `answer`, which writes bytes.

    Attributes:
        reads_body: False answers as soon as the head has come.
        lost: connections that the other side closed while an answer was written.
    """

    answer: Answer
    reads_body: bool = True
    arrived: list[Arrived] = field(default_factory=list)
    lost: int = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await _read_body(head, reader) if self.reads_body else b""
                self.arrived.append(Arrived(head, body))
                try:
                    await self.answer(self.arrived[-1], writer)
                    await writer.drain()
                except ConnectionError:
                    self.lost += 1
                if writer.is_closing() or not self.reads_body:
                    break
        writer.close()


async def _read_body(head: bytes, reader: asyncio.StreamReader) -> bytes:
    if re.search(rb"transfer-encoding:\s*chunked", head, re.IGNORECASE):
        body = b""
        while size := int((await reader.readline()).split(b";")[0], 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
        return body
    length = re.search(rb"content-length:\s*(\d+)", head, re.IGNORECASE)
    return await reader.readexactly(int(length[1])) if length else b""


def whole(body: bytes, kind: str = "application/json", status: str = "200 OK", **headers: str) -> Answer:
    """An answer with a length."""
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode()

    async def answer(arrived: Arrived, writer: asyncio.StreamWriter) -> None:
        writer.write(head + (b"" if arrived.head.startswith(b"HEAD") else body))

    return answer


def in_chunks(pieces: list[bytes], kind: str = "text/event-stream", **headers: str) -> Answer:
    """An answer in these chunks, each sent by itself."""
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())

    async def answer(_: Arrived, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{more}Transfer-Encoding: chunked\r\n\r\n".encode())
        for piece in pieces:
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")

    return answer


def make_answer(number: int = 1, counts: Mapping[str, Any] | None = COUNTS) -> bytes:
    """A whole answer of vLLM's chat completions."""
    values: dict[str, Any] = {
        "id": f"chatcmpl-{number}",
        "model": "ours",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Schön"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 8},
    }
    return json.dumps(values | ({} if counts is None else {"metrics": {"speculative_decoding": counts}})).encode()


def make_stream(number: int = 1, texts: int = 5) -> list[bytes]:
    """The events of a stream of vLLM's chat completions."""

    def event(values: Mapping[str, Any]) -> bytes:
        known = {"id": f"chatcmpl-{number}", "model": "ours"}
        return f"data: {json.dumps(known | dict(values), ensure_ascii=False)}\n\n".encode()

    said = [{"index": 0, "delta": {"content": f"schön {n} "}, "finish_reason": None} for n in range(texts)]
    end = {"index": 0, "delta": {}, "finish_reason": "length"}
    last = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 8}}
    last |= {"metrics": {"speculative_decoding": COUNTS}}
    return [*(event({"choices": [each]}) for each in (*said, end)), event(last), b"data: [DONE]\n\n"]


@dataclass
class RecordingSite:
    """A proxy, the server behind it, and a client's session."""

    server: RawServer
    proxy: Listening
    writer: LineWriter[SeenRequest]
    folder: Path
    told: list[str]
    client: aiohttp.ClientSession

    async def ask(self, path: str = CHAT, **values: Any) -> bytes:
        """Return the body of an answer to a chat request."""
        async with self.client.post(self.proxy.url + path, json=make_question(**values)) as answer:
            return await answer.read()

    async def know_engine(self) -> None:
        """Wait until the proxy knows what the server is, for which a busy one takes its time."""
        while self.proxy.proxy.facts.engine is None:
            await asyncio.sleep(0.05)

    async def read_lines(self) -> list[ServedRequest]:
        """Return all lines, once no request is under way and what waits is written."""
        while not self.proxy.proxy.is_idle:
            await asyncio.sleep(0.01)
        self.writer.close(60)
        return read_lines(self.folder)


def make_question(**values: Any) -> dict[str, Any]:
    return {"model": "ours", "messages": [{"role": "user", "content": "Wie ist das?"}], **values}


def read_lines(folder: Path) -> list[ServedRequest]:
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_bytes().splitlines()]
    return [ServedRequest.from_line(line) for line in lines]


@asynccontextmanager
async def recording_site(
    folder: Path,
    answer: Answer,
    engine: Engine | None = "vllm",
    files: LineFiles | None = None,
    max_items: int = 10_000,
    upstream: str | None = None,
    text: tuple[str, ...] | None = None,
    **options: Any,
) -> AsyncIterator[RecordingSite]:
    told: list[str] = []
    server = RawServer(answer)
    maker = LineMaker("front", told.append, text)
    writer = LineWriter(files or LineFiles(folder, 1 << 26), maker.make, told.append, max_items)
    listening = await asyncio.start_server(server, "127.0.0.1", 0, limit=1 << 20)
    url = upstream or f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    passed = ProxyOptions(url, facts=ServingFacts(engine), **{"looks": False, **options})
    try:
        async with listen(passed, writer, Place("127.0.0.1", 0)) as proxy, aiohttp.ClientSession() as client:
            yield RecordingSite(server, proxy, writer, folder, told, client)
    finally:
        listening.close()
        writer.close(60)
