"""What `draftworks record` adds to a request: processor time of the proxy, and latency beside the server asked directly.

    python benchmarks/record_proxy.py
    python benchmarks/record_proxy.py --requests 100 --turns 3      # a look

The server is a stand-in that answers at once, one process; so are the client and the proxy, as a user starts it, with
every line written. A stream has an event for each of 200 passes, one every 2 ms, each 250 bytes, so that the proxy wakes
for each as it does in front of an engine. Processor time is that of all threads of the proxy (Linux, /proc/PID/schedstat),
its lines included, divided by the requests of a turn. Latency is of one request after another, to the last byte.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import aiohttp
import typer
from figures import format_table, summarize

EVENTS, PAUSE_S, EVENT_BYTES = 200, 0.002, 250
PROMPT = "Explain how a queue that is bounded loses what it has no room for. " * 30
MESSAGES = [{"role": "user", "content": PROMPT}]
COUNTS = {
    "num_spec_steps": EVENTS,
    "num_accepted_draft_tokens": 300,
    "num_draft_tokens": 3 * EVENTS,
    "acceptance_histogram": [40, 60, 60, 40],
}
USAGE = {"prompt_tokens": 420, "completion_tokens": 501, "total_tokens": 921}
END = {"id": "chatcmpl-1", "model": "m", "usage": USAGE, "metrics": {"speculative_decoding": COUNTS}}
WAYS = ("direct", "through the proxy")


def make_event(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    values = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return f"data: {json.dumps(values)}\n\n".encode()


async def answer_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of a connection: a bare stand-in, so that it takes little of the processor."""
    event = make_event("x" * (EVENT_BYTES - len(make_event(""))))
    body = json.dumps({**END, "choices": [{"index": 0, "message": {"content": "x" * 2000}, "finish_reason": "stop"}]})
    last = f"data: {json.dumps({**END, 'choices': []})}\n\ndata: [DONE]\n\n".encode()
    while head := await reader.readuntil(b"\r\n\r\n"):
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        asked = await reader.readexactly(int(length[1])) if length else b""
        if head.startswith(b"GET"):
            found, kind = json.dumps({"version": "0.32.0"}).encode(), b"application/json"
            missing = not head.startswith(b"GET /version")
            writer.write(frame(b"404 Not Found" if missing else b"200 OK", kind, found))
        elif b'"stream": true' in asked or b'"stream":true' in asked:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for piece in [*[event] * EVENTS, last]:
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
                await asyncio.sleep(PAUSE_S)
            writer.write(b"0\r\n\r\n")
        else:
            writer.write(frame(b"200 OK", b"application/json", body.encode()))
        await writer.drain()


def frame(status: bytes, kind: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (status, kind, len(body), body)


async def serve_stand_in() -> None:
    server = await asyncio.start_server(answer_one, "127.0.0.1", 0)
    print(f"listening at http://127.0.0.1:{server.sockets[0].getsockname()[1]}", file=sys.stderr, flush=True)
    await server.serve_forever()


@contextmanager
def running(words: list[str]) -> Iterator[tuple[int, str]]:
    """Start a program that tells where it listens on stderr; yields its id and its address."""
    with subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if found := re.search(r"listening at (http:[^\s,]+)", line):
                    yield process.pid, found[1]
                    break
        finally:
            process.terminate()
            process.stderr.read()


def read_cpu_s(pid: int) -> float:
    """Return the processor time of all threads of a process, in seconds."""
    parts = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(part.read_text().split()[0]) for part in parts) / 1e9


@dataclass(frozen=True)
class Turn:
    """Latencies of the requests of a turn in ms, and the proxy's processor time for one of them in ms."""

    latencies: list[float]
    cpu_ms: float


async def take_turn(url: str, streamed: bool, requests: int, pid: int | None) -> Turn:
    body = {"model": "m", "messages": MESSAGES, "stream": streamed}
    body |= {"stream_options": {"include_usage": True}} if streamed else {}
    latencies = []
    async with aiohttp.ClientSession() as session:
        before = 0.0
        for number in range(requests + 2):
            if number == 2:  # the first ones open connections
                before = 0.0 if pid is None else read_cpu_s(pid)
            began = time.perf_counter()
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                await answer.read()
            latencies.append(1e3 * (time.perf_counter() - began))
        await asyncio.sleep(0.2)  # lines are written behind
        spent = 0.0 if pid is None else read_cpu_s(pid) - before
    return Turn(latencies[2:], 1e3 * spent / requests)


def measure(proxy: list[str], streamed: bool, requests: int, turns: int) -> dict[str, list[Turn]]:
    """Return the turns of both ways, which took turns."""
    found: dict[str, list[Turn]] = {way: [] for way in WAYS}
    with (
        running([__file__, "--stand-in"]) as (_, direct),
        tempfile.TemporaryDirectory(prefix="record_proxy.") as folder,
    ):
        options = ["--to", direct, "--out", folder, "--port", "0", "--engine", "vllm"]
        with running([*proxy, *options]) as (pid, through):
            for _ in range(turns):
                found[WAYS[0]].append(asyncio.run(take_turn(direct, streamed, requests, None)))
                found[WAYS[1]].append(asyncio.run(take_turn(through, streamed, requests, pid)))
        lines = sum(path.read_bytes().count(b"\n") for path in Path(folder).iterdir())
    assert lines == turns * (requests + 2), f"{lines} lines of {turns * (requests + 2)} requests"
    return found


def main(
    requests: Annotated[
        int, typer.Option(min=1, help="Of a turn that does not stream; a fifth of them streams.")
    ] = 300,
    turns: Annotated[int, typer.Option(min=1)] = 5,
    stand_in: Annotated[bool, typer.Option("--stand-in", help="Be the server.")] = False,
    program: Annotated[
        str, typer.Option(help="Another proxy with the same options.")
    ] = "-m draftworks.programs.cli record",
) -> None:
    """Print a table and a line of JSON."""
    if stand_in:
        asyncio.run(serve_stand_in())
        return
    rows, figures = [], {}
    for kind, streamed, count in (("one object", False, requests), (f"{EVENTS} events", True, max(requests // 5, 1))):
        for way, taken in measure(program.split(), streamed, count, turns).items():
            latencies = sorted(each for turn in taken for each in turn.latencies)
            p50, p99 = latencies[len(latencies) // 2], latencies[int(0.99 * len(latencies))]
            cpu = [turn.cpu_ms for turn in taken]
            rows.append([kind, way, summarize(cpu, 2) if any(cpu) else "", f"{p50:,.2f}", f"{p99:,.2f}"])
            figures[f"{kind}, {way}"] = {
                "cpu_ms": round(statistics.median(cpu), 3), "p50_ms": round(p50, 2), "p99_ms": round(p99, 2),
            }  # fmt: skip
    columns = ("answer", "asked", "processor time of the proxy a request, ms", "p50, ms", "p99, ms")
    print(format_table(columns, rows))
    print(json.dumps(figures))


if __name__ == "__main__":
    typer.run(main)
