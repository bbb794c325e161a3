"""The proxy as a program: it listens until it is told to end, lets requests come to their end, and writes what waits."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from draftworks.errors import ConfigError
from draftworks.recording.line_writer import LineWriter
from draftworks.recording.proxy import ProxyOptions, RecordingProxy
from draftworks.recording.request_lines import SeenRequest
from draftworks.servers.process import format_url

WRITE_S = 10.0
"""For what waits at the end; a disk that is slower loses lines."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LONGEST_HEADER = 64 << 10


@dataclass(frozen=True)
class Place:
    """Where the proxy listens; port 0 is a free one."""

    host: str
    port: int


def run_proxy(
    options: ProxyOptions,
    writer: LineWriter[SeenRequest],
    place: Place,
    grace_s: float,
    tell: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends it at once.

    Args:
        grace_s: seconds for requests that run then; what takes longer is aborted.

    Raises:
        ConfigError: the place cannot be listened at.
    """
    asyncio.run(_serve(options, writer, place, grace_s, tell))
    writer.close(WRITE_S)


async def _serve(
    options: ProxyOptions, writer: LineWriter[SeenRequest], place: Place, grace_s: float, tell: Callable[[str], None]
) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with listen(options, writer, place) as listening:
        for number in _SIGNALS:
            loop.add_signal_handler(number, ended.set)
        tell(f"listening at {listening.url}, in front of {options.upstream}")
        await ended.wait()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)  # a second one does what it does to any program
        late = await listening.end(grace_s)
        if late:
            tell(f"aborted requests, which ran for {grace_s:g} s more: {late:,}")


@dataclass(frozen=True)
class Listening:
    """A proxy that listens at `url`."""

    url: str
    proxy: RecordingProxy
    site: web.TCPSite

    async def end(self, grace_s: float) -> int:
        """Take no more connections, let what runs come to its end, and return how many requests had to be aborted."""
        await self.site.stop()
        return await self.proxy.end_requests(grace_s)


@asynccontextmanager
async def listen(options: ProxyOptions, writer: LineWriter[SeenRequest], place: Place) -> AsyncIterator[Listening]:
    """Serve in the loop that runs. Raises ConfigError if the place cannot be listened at."""
    async with RecordingProxy(options, writer) as proxy:
        server = web.Server(
            proxy.handle,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            max_line_size=_LONGEST_HEADER,
            max_field_size=_LONGEST_HEADER,
        )
        runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, place.host, place.port)
        try:
            await site.start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(f"{place.host}:{place.port} cannot be listened at: {error.strerror or error}") from None
        try:
            host, port = runner.addresses[0][:2]
            yield Listening(format_url(host, port), proxy, site)
        finally:
            await runner.cleanup()
