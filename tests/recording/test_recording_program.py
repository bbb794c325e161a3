"""`draftworks record` as a user starts it: its end, a kill, what it says of mistakes, and what it learns of the server."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from processes import ending
from recording_site import CHAT, Answer, Arrived, RawServer, make_answer, make_question, make_stream, read_lines, whole
from typer.testing import CliRunner
from waiting import HANG_S, wait_for, wait_until

from draftworks.errors import StoreError
from draftworks.production.requests import ServedRequest
from draftworks.production.serving_facts import ServingFacts
from draftworks.programs.cli import app
from draftworks.recording.engine_look import EngineLook


@dataclass(frozen=True)
class Recording:
    """A proxy that runs as a program."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    async def end(self, number: int) -> int:
        self.process.send_signal(number)
        return await asyncio.to_thread(self.process.wait)


@asynccontextmanager
async def recording(folder: Path, answer: Answer, *options: str) -> AsyncIterator[Recording]:
    log = folder / "log"
    server = await asyncio.start_server(RawServer(answer), "127.0.0.1", 0)
    to = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    words = ["record", "--to", to, "--out", str(folder / "out"), "--port", "0", *options]
    with log.open("w") as stream:
        process = subprocess.Popen([sys.executable, "-m", "draftworks.programs.cli", *words], stderr=stream, text=True)
    with ending(process):
        found = await asyncio.to_thread(
            wait_for, lambda: re.search(r"listening at (\S+),", log.read_text()), log.read_text
        )
        yield Recording(process, found[1], log)
    server.close()


async def takes_connections(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as client, client.get(f"{url}/version"):
            return True
    except aiohttp.ClientError:
        return False


def test_on_sigterm_what_runs_comes_to_its_end_and_is_written(tmp_path: Path):
    first, *rest = make_stream()

    async def test() -> None:
        goes_on = asyncio.Event()

        async def answer(arrived: Arrived, writer: asyncio.StreamWriter) -> None:
            if not arrived.head.startswith(b"POST"):
                await whole(b'{"version": "0.32.0"}')(arrived, writer)
                return
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            writer.write(b"%x\r\n%s\r\n" % (len(first), first))
            await goes_on.wait()
            for piece in rest:
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            writer.write(b"0\r\n\r\n")

        async with recording(tmp_path, answer) as proxy, aiohttp.ClientSession() as client:
            async with client.post(proxy.url + CHAT, json=make_question(stream=True)) as got:
                assert await got.content.readany() == first
                proxy.process.terminate()
                while await takes_connections(proxy.url):
                    await asyncio.sleep(0.02)
                goes_on.set()
                assert await got.read() == b"".join(rest)
            assert await asyncio.to_thread(proxy.process.wait) == 0
            assert "ended: 1 line written" in proxy.log.read_text()
        [line] = read_lines(tmp_path / "out")
        assert (line.engine, line.accepted) == ("vllm", 3)

    asyncio.run(asyncio.wait_for(test(), HANG_S))


def test_what_runs_longer_than_the_grace_is_aborted(tmp_path: Path):
    async def test() -> None:
        came = asyncio.Event()

        async def answer(arrived: Arrived, writer: asyncio.StreamWriter) -> None:
            if arrived.head.startswith(b"POST"):
                came.set()
                await writer.wait_closed()
            await whole(b"{}")(arrived, writer)

        starting = recording(tmp_path, answer, "--grace", "0.1", "--engine", "vllm")
        async with starting as proxy, aiohttp.ClientSession() as client:
            asked = asyncio.create_task(client.post(proxy.url + CHAT, json=make_question()))
            await came.wait()
            assert await proxy.end(signal.SIGINT) == 0
            with pytest.raises(aiohttp.ClientError):
                await asked
        assert [line.finish for line in read_lines(tmp_path / "out")] == ["abort"]

    asyncio.run(asyncio.wait_for(test(), HANG_S))


def test_a_kill_costs_at_most_half_a_line(tmp_path: Path):
    async def test() -> None:
        starting = recording(tmp_path, whole(make_answer()), "--engine", "vllm")
        async with starting as proxy, aiohttp.ClientSession() as client:

            async def ask_for_ever() -> None:
                while True:
                    async with client.post(proxy.url + CHAT, json=make_question()) as answer:
                        await answer.read()

            asked = [asyncio.create_task(ask_for_ever()) for _ in range(4)]
            await asyncio.to_thread(
                wait_until, lambda: any(path.stat().st_size > 5_000 for path in (tmp_path / "out").glob("*"))
            )
            assert await proxy.end(signal.SIGKILL) == -signal.SIGKILL
            await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(asyncio.wait_for(test(), HANG_S))
    *lines, last = b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir()).split(b"\n")
    assert {ServedRequest.from_line(line).accepted for line in lines} == {3}
    if last:
        with pytest.raises(StoreError, match="not a line of JSON"):
            ServedRequest.from_line(last)


def test_a_folder_that_cannot_be_written_is_told_at_once_and_stops_nothing(tmp_path: Path):
    (tmp_path / "out").write_text("a file where the folder should be")

    async def test() -> None:
        async with recording(tmp_path, whole(make_answer()), "--engine", "vllm") as proxy:
            async with aiohttp.ClientSession() as client, client.post(proxy.url + CHAT, json=make_question()) as answer:
                assert await answer.read() == make_answer()
            assert await proxy.end(signal.SIGTERM) == 0
            said = proxy.log.read_text()
            assert "warning:" in said
            assert "nothing is recorded until this is mended" in said
            assert "0 lines written, 1 lost (1: they could not be written)" in said

    asyncio.run(asyncio.wait_for(test(), HANG_S))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--to", "localhost:8000"], "--to: expected an address such as"),
        (["--to", "http://me:word@a:1"], "--to: an address must not contain a user or password"),
        (["--to", "http://a:1/v1"], "--to: expected the address of the server, without /v1; did you mean http://a:1?"),
        (["--engine", "vlm"], "--engine: no engine 'vlm'; did you mean vllm?"),
        (["--text", "--mask", "mail"], "--mask: no kind 'mail'; "),
        (["--source-header", "Authorization"], "its value may be a key or a token, which are never written"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "--api-key-env: the environment has no variable NO_SUCH_VARIABLE"),
        (["--max-mb", "0"], "--max-mb: expected a number from 0.001 on, found 0"),
        (["--grace", "-1"], "--grace: expected a number from 0 on, found -1"),
        (["--host", "192.0.2.1"], "192.0.2.1:8900 cannot be listened at"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, options: list[str], expected: str):
    given = ["record", "--to", "http://127.0.0.1:1", "--out", str(tmp_path), "--engine", "vllm", *options]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 1, done.output
    [said] = [line for line in " ".join(done.stderr.split("\n")).split("error: ") if line.strip()]
    assert expected in said
    assert "word" not in said.replace("password", "")


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ({"/version": {"version": "0.32.0"}}, ServingFacts("vllm", "0.32.0")),
        (
            {
                "/version": {"version": "0.32.0"},
                "/server_info": {
                    "vllm_config": {"speculative_config": {"model": "d", "rejection_sample_method": "synthetic"}}
                },
            },
            ServingFacts("vllm", "0.32.0", draft="d", lossy=True),
        ),
        (
            {
                "/server_info": {
                    "version": "0.5.23", "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "d",
                    "speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 0.9,
                },
                "/model_info": {"weight_version": "default"},
            },
            ServingFacts("sglang", "0.5.23", "EAGLE3", "d", weight_version="default", lossy=True),
        ),
        ({"/props": {"default_generation_settings": {}, "build_info": "b11434"}}, ServingFacts("llamacpp", "b11434")),
        ({"/version": ["no object"]}, ServingFacts()),
        ({}, ServingFacts()),
    ],
)  # fmt: skip
def test_a_look_knows_the_engine_and_its_draft(pages: dict[str, object], expected: ServingFacts):
    async def answer(arrived: Arrived, writer: asyncio.StreamWriter) -> None:
        page = pages.get(arrived.target.split("?")[0])
        sends = whole(b"", status="404 Not Found") if page is None else whole(json.dumps(page).encode())
        await sends(arrived, writer)

    async def test() -> None:
        server = RawServer(answer)
        listening = await asyncio.start_server(server, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        async with aiohttp.ClientSession() as session:
            assert await EngineLook(session, url, {"Authorization": "Bearer k"}).look() == expected
        assert {each.headers["authorization"] for each in server.arrived} == {"Bearer k"}
        listening.close()

    asyncio.run(test())
