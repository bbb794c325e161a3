"""`draftworks record`: a pass-through proxy in front of a server, which writes one line a request."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from draftworks.config.urls import parse_url, require_root
from draftworks.errors import ConfigError, DraftworksError
from draftworks.production.requests import ENGINES
from draftworks.programs.start import LOOPBACK, report_error
from draftworks.storage.words import suggest_or_list

MASKED = ("email", "phone", "ip", "secret")
AUTO = "auto"
_SECRET_HEADERS = ("auth", "cookie", "key", "token", "secret", "password")


def record(
    to: Annotated[str, typer.Option("--to", help="Address of the server, such as http://127.0.0.1:8000.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the lines; made where it is not there.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="To listen at; 0 is a free one.")] = 8900,
    host: Annotated[str, typer.Option("--host", help="Address to listen at; 0.0.0.0 is for all.")] = LOOPBACK,
    name: Annotated[
        str | None, typer.Option("--name", help="The server's name, as in the target's `servers`; else host:port.")
    ] = None,
    engine: Annotated[str, typer.Option("--engine", help="vllm, sglang or llamacpp; auto asks the server.")] = AUTO,
    draft: Annotated[
        str | None, typer.Option("--draft", help="Digest or path of the draft, where the server does not say it.")
    ] = None,
    source_header: Annotated[
        str | None, typer.Option("--source-header", help="Header of requests whose value is the line's source.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Write what was asked too, masked.")] = False,
    mask: Annotated[str, typer.Option("--mask", help="Of texts: email, phone, ip, secret.")] = "email,secret",
    no_ask: Annotated[
        bool, typer.Option("--no-ask", help="Add nothing to requests, so that engines say only what clients ask for.")
    ] = False,
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", help="Variable with the key by which the server is asked what it is.")
    ] = None,
    max_mb: Annotated[float, typer.Option("--max-mb", help="Size from which on a new file is begun.")] = 64.0,
    grace: Annotated[float, typer.Option("--grace", help="Seconds for requests that run when it is to end.")] = 60.0,
) -> None:
    """Stand in front of a server, pass everything through, and write one line a request: what its draft accepted.

    Counts are the engine's own: of vLLM started with --per-request-spec-decode-metrics, of SGLang, of llama.cpp. Lines go
    to files in a folder; a disk that is full or slow loses lines, and never delays an answer. Headers and keys are never
    written, and texts only with --text. Ctrl-C or SIGTERM ends it when the requests that run have ended.
    """
    try:
        _require_library()
        address = _parse_server(to)
        kinds = _parse_mask(mask) if text else None
        _require_choices(engine, source_header, max_mb, grace)
        key = _read_key(api_key_env)
    except DraftworksError as error:
        raise report_error(error) from None

    from draftworks.production.serving_facts import ServingFacts
    from draftworks.recording.line_files import LineFiles
    from draftworks.recording.line_writer import LineWriter
    from draftworks.recording.proxy import ProxyOptions
    from draftworks.recording.request_lines import LineMaker
    from draftworks.recording.serving import Place, run_proxy
    from draftworks.servers.start import build_headers

    files = LineFiles(out, int(max_mb * 2**20))
    problem = files.find_problem()
    if problem is not None:
        _tell(f"warning: {problem}. Requests pass; nothing is recorded until this is mended")
    maker = LineMaker(name or urlsplit(address).netloc, _tell, kinds, draft)
    writer = LineWriter(files, maker.make, _tell)
    known = ServingFacts() if engine == AUTO else ServingFacts(engine)  # type: ignore[arg-type]
    options = ProxyOptions(address, build_headers(key), source_header, not no_ask, known)
    try:
        run_proxy(options, writer, Place(host, port), grace, _tell)
    except DraftworksError as error:
        raise report_error(error) from None
    without = f", {maker.uncounted:,} without counts" if maker.uncounted else ""
    _tell(f"ended: {writer.counts.describe()}{without}")


def _tell(said: str) -> None:
    typer.echo(f"record: {said}", err=True)


def _require_library() -> None:
    if find_spec("aiohttp") is None:
        raise ConfigError("draftworks record needs aiohttp: pip install 'draftworks[record]'")


def _parse_server(to: str) -> str:
    try:
        return require_root(parse_url(to))
    except ValueError as error:
        raise ConfigError(f"--to: {error}") from None


def _parse_mask(mask: str) -> tuple[str, ...]:
    kinds = tuple(each.strip() for each in mask.split(",") if each.strip())
    unknown = [each for each in kinds if each not in MASKED]
    if unknown:
        raise ConfigError(f"--mask: no kind {unknown[0]!r}; {suggest_or_list(unknown[0], MASKED)}")
    return kinds


def _require_choices(engine: str, source_header: str | None, max_mb: float, grace: float) -> None:
    if engine not in (AUTO, *ENGINES):
        raise ConfigError(f"--engine: no engine {engine!r}; {suggest_or_list(engine, (AUTO, *ENGINES))}")
    if source_header is not None and any(each in source_header.lower() for each in _SECRET_HEADERS):
        raise ConfigError(
            f"--source-header {source_header}: its value may be a key or a token, which are never written"
        )
    for option, value, least in (("--max-mb", max_mb, 0.001), ("--grace", grace, 0.0)):
        if not least <= value < 1e9:
            raise ConfigError(f"{option}: expected a number from {least:g} on, found {value:g}")


def _read_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"--api-key-env: the environment has no variable {variable}")
    return key
