"""Redaction of served prompts: secrets that are always taken out, and the hook of the deployment.

A row is `{"messages": [{"role": …, "content": …}, …], "source": …}`. The hook may change contents and source, and drops a
row by answering `null`. Nothing that it prints to stderr is kept, and no error quotes a row.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from draftworks.config.data import RedactionSpec
from draftworks.data.conversations import Turn
from draftworks.data.served.shapes import MAX_SOURCE_LENGTH, is_unicode
from draftworks.errors import ConfigError, DataError
from draftworks.storage.files import parse_json
from draftworks.storage.identity import FileDigests, digest

MAX_GROWTH = 4
"""An answer may be this many times as long as the rows, and SLACK_BYTES; more ends the hook."""
SLACK_BYTES = 1 << 20
POLL_S = 0.05


@dataclass(frozen=True)
class HookRow:
    """What the hook sees and may change of a row."""

    turns: tuple[Turn, ...]
    source: str

    def to_json(self) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in self.turns]
        return json.dumps({"messages": messages, "source": self.source})


def redact_rows(rows: Sequence[HookRow], hook: RedactionSpec, folder: Path, where: str) -> list[HookRow | None]:
    """Return what the hook makes of the rows, in their order; None for a row that it drops.

    Args:
        folder: working directory of the command.
        where: names the data set in messages.

    Raises:
        DataError: the hook cannot be started, fails, takes too long, writes too much, or answers other than a row per row.
    """
    if not rows:
        return []
    given = "".join(row.to_json() + "\n" for row in rows).encode()
    lines = _call(hook, given, folder, where).splitlines()
    if len(lines) != len(rows):
        raise DataError(f"{where}: redaction: expected {len(rows)} lines for as many rows, found {len(lines)}")
    return [_parse_answer(line, row, number, where) for number, (line, row) in enumerate(zip(lines, rows), start=1)]


def _call(hook: RedactionSpec, given: bytes, folder: Path, where: str) -> bytes:
    """Return the stdout of the hook; it is ended with all its children at a limit."""
    command = hook.command or [sys.executable, "-m", "draftworks.data.served.call_function", str(hook.function)]
    limit = MAX_GROWTH * len(given) + SLACK_BYTES
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
        stdin.write(given)
        stdin.seek(0)
        try:
            process = subprocess.Popen(
                command, stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, cwd=folder, start_new_session=True
            )
        except (OSError, ValueError) as error:
            raise DataError(f"{where}: redaction: {command[0]} cannot be started: {type(error).__name__}") from error
        try:
            code = _wait(process, stdout, hook.timeout_s, limit, where)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code:
            raise DataError(
                f"{where}: redaction: exit code {code}. Its messages are not shown, as they may quote rows: run it by hand"
            )
        if _size(stdout) > limit:
            raise DataError(_describe_excess(where, limit))
        stdout.seek(0)
        return stdout.read()


def _wait(process: subprocess.Popen[bytes], stdout: IO[bytes], timeout_s: float, limit: int, where: str) -> int:
    deadline = time.monotonic() + timeout_s
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(POLL_S)
        if time.monotonic() > deadline:
            raise DataError(f"{where}: redaction: not done within {timeout_s:g} s (timeout_s): ended")
        if _size(stdout) > limit:
            raise DataError(_describe_excess(where, limit))


def _size(stream: IO[bytes]) -> int:
    return os.fstat(stream.fileno()).st_size


def _describe_excess(where: str, limit: int) -> str:
    return f"{where}: redaction: more than {limit:,} bytes of output for one call: ended"


def _parse_answer(line: bytes, row: HookRow, number: int, where: str) -> HookRow | None:
    try:
        found = parse_json(line.decode("utf-8"))
    except ValueError:
        raise DataError(f"{where}: redaction: line {number} of a call's output is not JSON") from None
    if found is None:
        return None
    messages = found.get("messages") if isinstance(found, dict) else None
    source = found.get("source") if isinstance(found, dict) else None
    roles = (
        [one.get("role") if isinstance(one, dict) else None for one in messages] if isinstance(messages, list) else []
    )
    contents = [
        one["content"] for one in messages or () if isinstance(one, dict) and isinstance(one.get("content"), str)
    ]
    if roles != [turn.role for turn in row.turns] or len(contents) != len(roles):
        raise DataError(
            f"{where}: redaction: line {number} of a call's output: expected the messages of row {number} with the same roles "
            "and contents of text, or null"
        )
    if not isinstance(source, str) or len(source) > MAX_SOURCE_LENGTH:
        raise DataError(f"{where}: redaction: line {number} of a call's output: expected the key source, a short text")
    if not all(content.strip() and is_unicode(content) for content in contents) or not is_unicode(source):
        return None  # nothing is left of a message
    return HookRow(tuple(Turn(role, text) for role, text in zip((turn.role for turn in row.turns), contents)), source)


REVISION = 1
"""Part of a data set's identity: raised when a pattern changes, so that prompts are read again."""


@dataclass(frozen=True)
class Kind:
    """A kind of secret.

    Attributes:
        marks: lower-case texts, one of which every secret of the kind has: looked for first, as that costs little.
    """

    pattern: re.Pattern[str]
    marks: tuple[str, ...]

    def may_be_in(self, lowered: str) -> bool:
        return any(mark in lowered for mark in self.marks)


def _kind(pattern: str, *marks: str) -> Kind:
    return Kind(re.compile(pattern), marks)


SECRETS: dict[str, Kind] = {
    "private_key": _kind(
        r"-----BEGIN (?:[A-Z0-9]+ ){0,4}PRIVATE KEY(?: BLOCK)?-----"
        r"(?:(?:[^-]|-(?!----)){0,20000}-----END (?:[A-Z0-9]+ ){0,4}PRIVATE KEY(?: BLOCK)?-----|[\sA-Za-z0-9+/=:,\\]{0,20000})",
        "private key",
    ),
    "api_key": _kind(r"(?<![A-Za-z0-9])sk-(?:[A-Za-z0-9]+-)*[A-Za-z0-9_-]{20,}", "sk-"),
    "stripe_key": _kind(r"(?<![A-Za-z0-9])[rs]k_(?:live|test)_[A-Za-z0-9]{16,}", "k_live_", "k_test_"),
    "aws_access_key": _kind(
        r"(?<![A-Za-z0-9])(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9])", "akia", "asia", "abia", "acca"
    ),
    "aws_secret_key": _kind(
        r"(?i:aws_?secret_?(?:access_?)?key)[\"']?\s{0,5}[:=]\s{0,5}[\"']?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])", "secret"
    ),
    "github_token": _kind(
        r"(?<![A-Za-z0-9])(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{40,})",
        *("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
    ),
    "gitlab_token": _kind(r"(?<![A-Za-z0-9])glpat-[A-Za-z0-9_-]{20,}", "glpat-"),
    "hugging_face_token": _kind(r"(?<![A-Za-z0-9])hf_[A-Za-z0-9]{30,}", "hf_"),
    "google_api_key": _kind(r"(?<![A-Za-z0-9])AIza[A-Za-z0-9_-]{35}", "aiza"),
    "slack_token": _kind(r"(?<![A-Za-z0-9])xox[abeoprs]-[A-Za-z0-9-]{20,}", "xox"),
    "json_web_token": _kind(
        r"(?<![A-Za-z0-9])eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}", ".eyj"
    ),
    "bearer_token": _kind(
        r"(?i:authorization)[\"']?\s{0,5}[:=]\s{0,5}[\"']?(?i:bearer|basic)\s{1,5}[A-Za-z0-9._~+/=-]{16,}",
        "authorization",
    ),
    "password_in_url": _kind(r"(?<![A-Za-z0-9])[a-z][a-z0-9+.-]{1,20}://[^\s/:@]{1,100}:[^\s/@]{3,200}@", "://"),
}
PERSONAL: dict[str, re.Pattern[str]] = {
    "email": re.compile(r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}"),
    "phone": re.compile(r"(?<![\w.+])\+\d(?:[ ()./-]{0,2}\d){6,14}(?!\w)"),
    "ip": re.compile(r"(?<![\w.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.]|\.\d)"),
}


def find_secret(texts: Iterable[str]) -> str | None:
    """Return the name of the first kind of secret found in any of the texts; None if there is none."""
    for text in texts:
        lowered = text.lower()
        for name, kind in SECRETS.items():
            if kind.may_be_in(lowered) and kind.pattern.search(text):
                return name
    return None


@dataclass(frozen=True)
class MaskedText:
    """A text with placeholders, and the kinds of what they stand for: keys of SECRETS and PERSONAL."""

    text: str
    kinds: frozenset[str]


def mask_text(text: str, kinds: Iterable[str]) -> MaskedText:
    """Replace what these kinds match by placeholders: [SECRET], [EMAIL], [PHONE], [IP].

    Args:
        kinds: of email, phone, ip, and secret, which is all of SECRETS.
    """
    wanted = set(kinds)
    patterns: dict[str, tuple[re.Pattern[str], str]] = {}
    if "secret" in wanted:
        lowered = text.lower()
        patterns |= {name: (kind.pattern, "[SECRET]") for name, kind in SECRETS.items() if kind.may_be_in(lowered)}
    for name, mark in (("email", "@"), ("phone", "+"), ("ip", ".")):
        if name in wanted and mark in text:
            patterns[name] = (PERSONAL[name], f"[{name.upper()}]")
    found: set[str] = set()
    for name, (pattern, placeholder) in patterns.items():
        text, count = pattern.subn(placeholder, text)
        found |= {name} if count else set()
    return MaskedText(text, frozenset(found))


def digest_hook(hook: RedactionSpec | None, folder: Path, digests: FileDigests) -> str | None:
    """Return a digest that changes with the hook: with its words, and with every word's file, seen from `folder`.

    A program that is found by PATH counts by its name, and what a script imports does not count.

    Raises:
        ConfigError: the module of a function is not installed.
    """
    if hook is None:
        return None
    if hook.command is not None:
        files = [folder / word for word in hook.command]
        known = [digests.of_file(path) if _is_file(path) else None for path in files]
        return digest([hook.command, known])
    module = str(hook.function).partition(":")[0]
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ConfigError(
            f"redaction.function: the module {module} is not installed: pip install the package that has it"
        )
    return digest([hook.function, digests.of_file(Path(found.origin)) if found.has_location and found.origin else None])


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
