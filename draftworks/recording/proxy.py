"""A pass-through proxy in front of one server: every byte of an answer goes on as it came, and a line is made beside it.

A request is read whole before it is passed on, where it asks for answers, so that what the engine needs can be added; all
else streams both ways. Nobody waits for lines: `LineWriter`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp
from aiohttp import hdrs, web
from multidict import CIMultiDict
from yarl import URL

from draftworks.production.requests import ABORT
from draftworks.production.serving_facts import ServingFacts
from draftworks.recording.answer_pieces import AnswerPieces
from draftworks.recording.asked_body import AskedBody, is_recorded, read_body
from draftworks.recording.engine_look import EngineLook
from draftworks.recording.line_writer import LineWriter
from draftworks.recording.request_lines import BROKEN, SeenRequest

MAX_READ_BYTES = 8 << 20
"""Of a request's body; a longer one streams through as it is, and nothing of it is known."""
CONNECT_S = 10.0
KEEP_IDLE_S = 2.0
"""Less than the 5 s after which uvicorn, in vLLM and SGLang, closes an idle connection: none is used that is being closed."""
LOOK_EVERY_S, LOOK_AGAIN_S, FIRST_LOOK_S = 60.0, 2.0, 10.0
"""Requests that come before the first look has ended have nothing added; vLLM's first one in development mode takes seconds."""
_BY_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
_OWN_TO_THEM, _OF_A_BODY = frozenset(("host", "expect")), frozenset(("content-length",))
_BODILESS = frozenset((204, 304))


@dataclass(frozen=True)
class ProxyOptions:
    """How requests are passed on.

    Attributes:
        upstream: address of the server, without a slash at its end.
        look_headers: of our own looks at the server, such as one with its key.
        source_header: header of a request whose value is the line's source.
        asks: whether fields are added to requests, so that engines say what they counted.
        facts: of the server, as far as they are known before it is asked.
        looks: whether the server is asked what it is, now and again.
    """

    upstream: str
    look_headers: dict[str, str] = field(default_factory=dict)
    source_header: str | None = None
    asks: bool = True
    facts: ServingFacts = field(default_factory=ServingFacts)
    looks: bool = True


class RecordingProxy:
    """The proxy's handler, for an event loop; `serve` runs it."""

    def __init__(self, options: ProxyOptions, writer: LineWriter[SeenRequest]) -> None:
        self.facts = options.facts
        self._options = options
        self._writer = writer
        self._running: set[asyncio.Task[object]] = set()
        self._looked = asyncio.Event()
        self._ending = False

    async def __aenter__(self) -> RecordingProxy:
        self._session = aiohttp.ClientSession(
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            skip_auto_headers=(hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE, hdrs.USER_AGENT),
            read_bufsize=1 << 16,
            max_line_size=1 << 16,
            max_field_size=1 << 16,
        )
        self._looking = asyncio.create_task(self._look_again())
        with suppress(TimeoutError):
            await asyncio.wait_for(self._looked.wait(), FIRST_LOOK_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._looking.cancel()
        with suppress(asyncio.CancelledError):
            await self._looking
        await self._session.close()

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return not self._running

    async def end_requests(self, grace_s: float) -> int:
        """Wait until all requests have ended; abort those that have not after so long, and return how many.

        Connections are closed after the next answer; what still comes on one of them is answered too.
        """
        self._ending = True
        until = time.monotonic() + grace_s
        while self._running and (left := until - time.monotonic()) > 0:
            await asyncio.wait(self._running, timeout=left)
        late = list(self._running)
        for each in late:
            each.cancel()
        if late:
            await asyncio.wait(late)
        return len(late)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request with what the server answers."""
        if not request.raw_path.startswith("/"):  # behind the server's address it could name another host
            return web.Response(status=400, text="expected a path that begins with /\n")
        if request.headers.get(hdrs.EXPECT, "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            if is_recorded(request.method, request.path):
                return await self._record(request)
            return await self._pass_on(request, _read_all(request), None)
        finally:
            self._running.discard(task)

    async def _record(self, request: web.BaseRequest) -> web.StreamResponse:
        head, whole = await _read_some(request)
        if whole:
            encoding = request.headers.get(hdrs.CONTENT_ENCODING, "")
            body = read_body(request.path, head, encoding, self.facts.engine, self._options.asks)
        else:
            body = AskedBody(head, None)
        seen = SeenRequest(request.path, body.values, len(head), self.facts, self._find_source(request))
        try:
            return await self._pass_on(request, body.sent if whole else _go_on(head, request), seen)
        except (asyncio.CancelledError, ConnectionError):  # the client went, or all has to end
            seen.ended_by = seen.ended_by or ABORT
            raise
        finally:
            seen.time = time.time()
            if seen.was_served:
                self._writer.offer(seen, seen.nbytes)

    async def _pass_on(
        self, request: web.BaseRequest, body: bytes | AsyncIterator[bytes] | None, seen: SeenRequest | None
    ) -> web.StreamResponse:
        url = URL(self._options.upstream + request.raw_path, encoded=True)
        headers = _keep(request.headers, _OF_A_BODY | _OWN_TO_THEM if isinstance(body, bytes) else _OWN_TO_THEM)
        try:
            answer = await self._session.request(request.method, url, headers=headers, data=body, allow_redirects=False)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return _explain(self._options.upstream, error)
        async with answer:
            return await self._return(request, answer, seen)

    async def _return(
        self, request: web.BaseRequest, answer: aiohttp.ClientResponse, seen: SeenRequest | None
    ) -> web.StreamResponse:
        back = web.StreamResponse(status=answer.status, reason=answer.reason, headers=_keep(answer.headers))
        bodiless = request.method == hdrs.METH_HEAD or answer.status in _BODILESS
        if answer.content_length is None and not bodiless and request.version >= (1, 1):
            back.enable_chunked_encoding()
        if self._ending:
            back.force_close()
        if seen is not None:
            streamed = answer.content_type == "text/event-stream"
            seen.status = answer.status
            seen.pieces = AnswerPieces(streamed, answer.headers.get(hdrs.CONTENT_ENCODING, ""))
        await back.prepare(request)
        while (piece := await _read_piece(answer)) is not None:
            if not piece:
                await back.write_eof()
                return back
            if seen is not None and seen.pieces is not None:
                seen.pieces.add(piece)
            await back.write(piece)
        if seen is not None:
            seen.ended_by = BROKEN
        if request.transport is not None:  # a proper end would say that the answer is whole
            request.transport.abort()
        return back

    def _find_source(self, request: web.BaseRequest) -> str | None:
        name = self._options.source_header
        return None if name is None else request.headers.get(name)

    async def _look_again(self) -> None:
        """Look at the server again and again: a draft or its weights may be exchanged while it runs."""
        look = EngineLook(self._session, self._options.upstream, self._options.look_headers)
        if not self._options.looks:
            self._looked.set()
        while self._options.looks:
            found = await look.look()
            if found.engine is not None:
                self.facts = found if self._options.facts.engine in (None, found.engine) else self._options.facts
            self._looked.set()
            await asyncio.sleep(LOOK_AGAIN_S if self.facts.engine is None else LOOK_EVERY_S)


def _keep(headers: CIMultiDict[str] | object, without: frozenset[str] = frozenset()) -> CIMultiDict[str]:
    """Return the headers that go on: all but those of the connection."""
    kept: CIMultiDict[str] = CIMultiDict(headers)  # type: ignore[arg-type]
    of_connection = {name.strip().lower() for value in kept.getall(hdrs.CONNECTION, ()) for name in value.split(",")}
    for name in {each.lower() for each in kept} & (_BY_HOP | without | of_connection):
        kept.popall(name, None)
    return kept


async def _read_piece(answer: aiohttp.ClientResponse) -> bytes | None:
    """Return what has come of an answer, empty at its end; None if the server broke it off."""
    try:
        return await answer.content.readany()
    except (TimeoutError, aiohttp.ClientError, OSError):
        return None


async def _read_some(request: web.BaseRequest) -> tuple[bytes, bool]:
    """Return a body, or its first bytes if it is longer than `MAX_READ_BYTES`, and whether it is whole."""
    pieces: list[bytes] = []
    nbytes = 0
    async for piece in request.content.iter_any():
        pieces.append(piece)
        nbytes += len(piece)
        if nbytes > MAX_READ_BYTES:
            return b"".join(pieces), False
    return b"".join(pieces), True


async def _go_on(head: bytes, request: web.BaseRequest) -> AsyncIterator[bytes]:
    yield head
    async for piece in request.content.iter_any():
        yield piece


def _read_all(request: web.BaseRequest) -> AsyncIterator[bytes] | None:
    return request.content.iter_any() if request.can_read_body else None


def _explain(upstream: str, error: BaseException) -> web.Response:
    """Return 502 in a line that OpenAI's clients show."""
    said = " ".join(str(error).split()) or type(error).__name__
    message = f"draftworks record: {upstream} does not answer: {said}"
    body = json.dumps({"error": {"message": message, "type": "bad_gateway", "code": 502}})
    return web.Response(status=502, text=body + "\n", content_type="application/json")
