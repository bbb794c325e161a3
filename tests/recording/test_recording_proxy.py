"""The proxy passes on what it gets, byte for byte, and nothing that goes wrong beside it is seen by a client."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from recording_site import (
    CHAT,
    Arrived,
    RecordingSite,
    in_chunks,
    make_answer,
    make_question,
    make_stream,
    recording_site,
    whole,
)
from waiting import HANG_S
from yarl import URL

from draftworks.recording.proxy import MAX_READ_BYTES


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, HANG_S))


def cut(body: bytes, size: int) -> list[bytes]:
    return [body[start : start + size] for start in range(0, len(body), size)]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_stream_goes_on_byte_for_byte_however_it_is_cut(tmp_path: Path, size: int):
    sent = b"".join(make_stream())

    async def test() -> None:
        async with recording_site(tmp_path, in_chunks(cut(sent, size), X_Odd="a")) as site:
            async with site.client.post(site.proxy.url + CHAT, json=make_question(stream=True)) as answer:
                assert (answer.status, answer.content_type, answer.headers["X-Odd"]) == (200, "text/event-stream", "a")
                assert await answer.read() == sent
            [line] = await site.read_lines()
            assert (line.passes, line.accepted, line.histogram) == (4, 3, (2, 1, 1, 0))
            assert (line.id, line.model, line.finish, line.completion_tokens) == ("chatcmpl-1", "ours", "length", 8)

    run(test())


def test_an_event_goes_on_before_the_next_one_comes(tmp_path: Path):
    """A proxy that waited for more would take what speculation gains."""
    first, *rest = make_stream()

    async def test() -> None:
        seen = asyncio.Event()

        async def answer(_: Arrived, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            writer.write(b"%x\r\n%s\r\n" % (len(first), first))
            await seen.wait()
            for piece in rest:
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            writer.write(b"0\r\n\r\n")

        async with (
            recording_site(tmp_path, answer) as site,
            site.client.post(site.proxy.url + CHAT, json=make_question(stream=True)) as got,
        ):
            assert await got.content.readany() == first
            seen.set()
            assert await got.read() == b"".join(rest)

    run(test())


def test_what_is_compressed_stays_so_and_is_read(tmp_path: Path):
    sent = gzip.compress(b"".join(make_stream()))

    async def test() -> None:
        async with recording_site(tmp_path, in_chunks(cut(sent, 9), Content_Encoding="gzip")) as site:
            site.client._auto_decompress = False
            async with site.client.post(site.proxy.url + CHAT, json=make_question(stream=True)) as answer:
                assert answer.headers["Content-Encoding"] == "gzip"
                assert await answer.read() == sent
            assert [line.accepted for line in await site.read_lines()] == [3]

    run(test())


def test_a_request_arrives_as_it_was_but_for_the_fields_that_ask_for_counts(tmp_path: Path):
    body = '{"messages": [{"role": "user", "content": "ü}"}], "stream": true, "seed": 1e0} '.encode()
    added = b',"return_spec_tokens_details":true,"stream_options":{"include_usage":true}'
    headers = {"Authorization": "Bearer abc", "X-Mine": "1", "Connection": "X-Hop", "X-Hop": "1", "Accept": "*/*"}

    async def test() -> None:
        for asks, expected in ((True, body[:-2] + added + b"} "), (False, body)):
            async with recording_site(tmp_path, whole(b"{}"), "sglang", asks=asks) as site:
                async with site.client.post(
                    URL(f"{site.proxy.url}{CHAT}?a=%2F", encoded=True), data=body, headers=headers
                ) as answer:
                    await answer.read()
                [arrived] = site.server.arrived
                assert (arrived.body, arrived.target) == (expected, f"{CHAT}?a=%2F")
                assert arrived.headers["authorization"] == "Bearer abc"
                assert arrived.headers["x-mine"] == "1"
                assert "x-hop" not in arrived.headers

    run(test())


@pytest.mark.parametrize("options", [{"include_usage": False}, None, {}])
def test_what_a_client_says_itself_is_never_changed(tmp_path: Path, options: Any):
    async def test() -> None:
        async with recording_site(tmp_path, whole(b"{}")) as site:
            await site.ask(stream=True, stream_options=options)
            assert json.loads(site.server.arrived[0].body)["stream_options"] == options

    run(test())


def test_all_other_paths_pass(tmp_path: Path):
    async def test() -> None:
        async with recording_site(tmp_path, whole(b"models", "text/plain", Set_Cookie="a=1")) as site:
            async with site.client.get(site.proxy.url + "/v1/models") as answer:
                assert (await answer.read(), answer.headers["Set-Cookie"]) == (b"models", "a=1")
            async with site.client.head(site.proxy.url + "/health") as answer:
                assert (answer.status, answer.headers["Content-Length"]) == (200, "6")
            async with site.client.put(site.proxy.url + "/files", data=b"x" * 100_000) as answer:
                assert answer.status == 200
            assert [len(each.body) for each in site.server.arrived] == [0, 0, 100_000]
            assert await site.read_lines() == []

    run(test())


@pytest.mark.parametrize("status", ["400 Bad Request", "429 Too Many Requests", "500 Internal Server Error"])
def test_an_error_of_the_server_goes_on_and_is_no_line(tmp_path: Path, status: str):
    async def test() -> None:
        async with recording_site(tmp_path, whole(b'{"error": 1}', status=status, Retry_After="3")) as site:
            async with site.client.post(site.proxy.url + CHAT, json=make_question()) as answer:
                assert (answer.status, answer.reason) == (int(status[:3]), status[4:])
                assert (await answer.read(), answer.headers["Retry-After"]) == (b'{"error": 1}', "3")
            assert await site.read_lines() == []

    run(test())


def test_a_server_that_refuses_a_large_body_before_it_has_come_is_heard(tmp_path: Path):
    async def test() -> None:
        refuses = whole(b"too large", "text/plain", "413 Request Entity Too Large", Connection="close")
        async with recording_site(tmp_path, refuses) as site:
            site.server.reads_body = False
            for size in (1 << 20, MAX_READ_BYTES + (1 << 20)):
                async with site.client.post(site.proxy.url + CHAT, data=b"x" * size) as answer:
                    assert (answer.status, await answer.read()) == (413, b"too large")

    run(test())


def test_a_body_that_is_too_long_to_be_read_streams_through(tmp_path: Path):
    body = json.dumps(make_question(padding="x" * MAX_READ_BYTES)).encode()

    async def test() -> None:
        async with recording_site(tmp_path, whole(make_answer())) as site:
            async with site.client.post(site.proxy.url + CHAT, data=body) as answer:
                assert await answer.read() == make_answer()
            assert site.server.arrived[0].body == body
            [line] = await site.read_lines()
            assert (line.accepted, line.prompt) == (3, None)

    run(test())


def test_a_server_that_is_down_is_502_in_one_line_until_it_is_there(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    async def test() -> None:
        async with recording_site(tmp_path, whole(make_answer()), upstream=f"http://127.0.0.1:{port}") as site:
            async with site.client.post(site.proxy.url + CHAT, json=make_question()) as answer:
                said = await answer.text()
                assert (answer.status, said.count("\n")) == (502, 1)
                assert f"http://127.0.0.1:{port} does not answer" in json.loads(said)["error"]["message"]
            async with await asyncio.start_server(site.server, "127.0.0.1", port) as late:
                assert await site.ask() == make_answer()
                late.close()
            assert len(await site.read_lines()) == 1

    run(test())


def test_an_answer_that_the_server_breaks_off_is_broken_off(tmp_path: Path):
    first = make_stream()[0]

    async def answer(_: Arrived, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%s\r\n" % (len(first), first))
        await writer.drain()
        writer.close()

    async def test() -> None:
        async with recording_site(tmp_path, answer) as site:
            with pytest.raises(aiohttp.ClientError):
                await site.ask(stream=True)
            [line] = await site.read_lines()
            assert (line.finish, line.passes) == ("error", None)

    run(test())


@pytest.mark.parametrize("begun", [True, False])
def test_a_client_that_goes_is_an_abort_and_ends_the_servers_work(tmp_path: Path, begun: bool):
    async def test() -> None:
        came, over = asyncio.Event(), asyncio.Event()

        async def answer(_: Arrived, writer: asyncio.StreamWriter) -> None:
            came.set()
            if begun:
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
            try:
                while begun:
                    writer.write(b'10\r\ndata: {"a": 1}\n\n\r\n')
                    await writer.drain()
                    await asyncio.sleep(0.001)
                await writer.wait_closed()
            finally:
                over.set()

        async with recording_site(tmp_path, answer) as site:
            asked = asyncio.create_task(site.ask(stream=True))
            await came.wait()
            asked.cancel()
            if begun:  # without a write the stand-in would not notice
                await over.wait()
            [line] = await site.read_lines()
            assert (line.finish, line.passes, line.model) == ("abort", None, "ours")

    run(test())


def test_a_slow_client_slows_its_server_and_no_other_client(tmp_path: Path):
    async def test() -> None:
        sent = 0

        async def answer(arrived: Arrived, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            if b"slow" not in arrived.body:
                await whole(make_answer())(arrived, writer)
                return
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            piece = b"data: " + b"x" * 65_000 + b"\n\n"
            while True:
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
                sent += len(piece)

        async with (
            recording_site(tmp_path, answer) as site,
            site.client.post(site.proxy.url + CHAT, json=make_question(user="slow")),
        ):
            before = -1
            while sent != before:  # the buffers of the system fill
                before = sent
                await asyncio.sleep(0.2)
            assert sent < 64 << 20
            assert await site.ask() == make_answer()

    run(test())


def test_a_hundred_at_once_keep_their_answers_apart(tmp_path: Path):
    async def answer(arrived: Arrived, writer: asyncio.StreamWriter) -> None:
        number = json.loads(arrived.body)["seed"]
        await (in_chunks(make_stream(number)) if number % 2 else whole(make_answer(number)))(arrived, writer)

    async def test() -> None:
        async with recording_site(tmp_path, answer) as site:
            site.client.connector._limit = 0  # type: ignore[union-attr]
            got = await asyncio.gather(*(site.ask(seed=n, stream=bool(n % 2)) for n in range(100)))
            assert got == [b"".join(make_stream(n)) if n % 2 else make_answer(n) for n in range(100)]
            lines = await site.read_lines()
            assert sorted(line.id for line in lines) == sorted(f"chatcmpl-{n}" for n in range(100))
            assert {line.accepted for line in lines} == {3}

    run(test())


def test_what_comes_on_an_open_connection_while_all_ends_is_answered(tmp_path: Path):
    async def test() -> None:
        goes_on = asyncio.Event()

        async def answer(arrived: Arrived, writer: asyncio.StreamWriter) -> None:
            if b"long" in arrived.body:
                await goes_on.wait()
            await whole(make_answer())(arrived, writer)

        async with recording_site(tmp_path, answer) as site:
            kept = aiohttp.ClientSession()
            asked = partial(kept.post, site.proxy.url + CHAT, json=make_question())
            async with asked() as got:
                assert got.headers.get("Connection") != "close"
                await got.read()  # its connection stays open
            running = asyncio.create_task(site.ask(user="long"))
            while not any(b"long" in each.body for each in site.server.arrived):
                await asyncio.sleep(0.01)
            other = aiohttp.ClientSession()
            ending = asyncio.create_task(site.proxy.end(HANG_S))
            await asyncio.sleep(0.05)
            with pytest.raises(aiohttp.ClientError):
                await other.get(site.proxy.url)
            await other.close()
            async with asked() as got:
                assert (got.headers["Connection"], await got.read()) == ("close", make_answer())
            await kept.close()
            goes_on.set()
            assert (await running, await ending) == (make_answer(), 0)
            assert [line.accepted for line in await site.read_lines()] == [3, 3, 3]

    run(test())


def test_curl_need_not_wait_before_it_sends_a_long_body(tmp_path: Path):
    async def test() -> None:
        async with (
            recording_site(tmp_path, whole(make_answer())) as site,
            site.client.post(site.proxy.url + CHAT, json=make_question(), expect100=True) as answer,
        ):
            assert await answer.read() == make_answer()

    run(test())


def test_a_path_cannot_lead_to_another_host(tmp_path: Path):
    async def ask_raw(site: RecordingSite, target: str) -> bytes:
        host, port = site.proxy.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        return answer

    async def test() -> None:
        async with recording_site(tmp_path, whole(b"ours")) as site:
            for target in ("@127.0.0.1:1/x", "http://127.0.0.1:1/x", ".evil.example/"):
                assert b" 400 " in (await ask_raw(site, target)).split(b"\r\n")[0]
            assert site.server.arrived == []
            assert b"ours" in await ask_raw(site, "//127.0.0.1:1/x")

    run(test())
