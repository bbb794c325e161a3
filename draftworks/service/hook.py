"""The hook that tells servers which draft is in service: a command or a request, with a time limit and retries.

It is called after the record is replaced and outside its lease, so a server that is slow or down stops no rollback. Its
outcome is recorded. The draft is confirmed when the hook answers with JSON that has its digest: `{"confirmed": "DIGEST"}`,
as a line of the command's output or as the body of the response.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import IO, NamedTuple

from draftworks.config.service import HookSpec
from draftworks.errors import ConfigError
from draftworks.service.candidate import Attempt, Delivery, find_delivery, save_delivery
from draftworks.service.register import InService, ServiceRegister
from draftworks.storage.files import parse_json
from draftworks.storage.http_call import MAX_POST_ANSWER_BYTES, post_json
from draftworks.storage.words import format_count

MAX_DETAIL = 500
CONFIRMED, TOLD, FAILED = "confirmed", "told", "failed"


class _Answer(NamedTuple):
    """The answer of a hook. `problem` is why the attempt failed; empty if it did not."""

    text: str
    problem: str = ""


def tell_servers(
    register: ServiceRegister,
    record: InService,
    hook: HookSpec,
    environment: Mapping[str, str] = os.environ,
    sleep: Callable[[float], None] = time.sleep,
) -> Delivery:
    """Call the hook until an attempt succeeds, and record the outcome.

    Nothing is called again for a record whose hook has succeeded, or once another record is in service.

    Raises:
        ConfigError: the environment lacks the hook's key.
    """
    known = find_delivery(register, record)
    if known is not None and known.told:
        return known
    key = _read_key(hook, environment)
    done = known or Delivery(record.number, record.draft.digest, told=False, confirmed=False, attempts=())
    pause = hook.pause_s
    for attempt in range(hook.attempts):
        if attempt:
            sleep(pause)
            pause *= 2
        now = register.find()
        if now is None or now.number != record.number:
            return done
        made = _attempt(register, record, hook, environment, key)
        told = made.outcome != FAILED
        done = replace(done, told=told, confirmed=made.outcome == CONFIRMED, attempts=(*done.attempts, made)[-20:])
        save_delivery(register, done)
        if told:
            break
    return done


def describe_delivery(delivery: Delivery) -> str:
    """Return the outcome of the hook in one line."""
    if not delivery.attempts:
        return "another draft was put into service before the servers were told"
    last = delivery.attempts[-1]
    if delivery.confirmed:
        return f"the server has confirmed draft {delivery.digest}"
    if delivery.told:
        return f"the hook succeeded and confirmed no draft: {last.detail or 'it said nothing'}"
    return f"the hook failed {format_count(len(delivery.attempts), 'time')}, last: {last.detail}"


def _attempt(
    register: ServiceRegister, record: InService, hook: HookSpec, environment: Mapping[str, str], key: str | None
) -> Attempt:
    started = time.monotonic()
    when = datetime.now(UTC).isoformat(timespec="seconds")
    folder = (register.var / record.draft.path).resolve()
    payload = json.dumps({**record.to_json(), "folder": str(folder)}).encode()
    if hook.command is not None:
        about = {
            "DRAFTWORKS_TARGET": record.target,
            "DRAFTWORKS_STRATEGY": record.strategy,
            "DRAFTWORKS_DRAFT": record.draft.digest,
            "DRAFTWORKS_FOLDER": str(folder),
        }
        answer = _run(hook.command, payload, {**environment, **about}, hook.timeout_s)
    else:
        assert hook.url is not None
        answer = _post(hook.url, payload, key, hook.timeout_s)
    outcome, detail = FAILED, answer.problem
    if not answer.problem:
        said = _find_confirmed(answer.text)
        outcome = TOLD if said is None else CONFIRMED if said == record.draft.digest else FAILED
        detail = answer.text if outcome != FAILED else f"confirms draft {said}, expected {record.draft.digest}"
    detail = detail.strip() if key is None else detail.strip().replace(key, "***")
    return Attempt(when, round(time.monotonic() - started, 3), outcome, detail[-MAX_DETAIL:])


def _find_confirmed(text: str) -> str | None:
    """Return the digest that an answer confirms: the whole answer is JSON, or one of its lines, the last one counts."""
    for part in (text, *reversed(text.splitlines())):
        try:
            found = parse_json(part)
        except ValueError:
            continue
        if isinstance(found, dict) and isinstance(found.get("confirmed"), str):
            return found["confirmed"]
    return None


def _run(command: list[str], payload: bytes, environment: Mapping[str, str], timeout_s: float) -> _Answer:
    """Run a command with the record on its stdin; end it with all its children at the time limit."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
        given.write(payload)
        given.seek(0)
        try:
            process = subprocess.Popen(
                command,
                stdin=given,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            return _Answer("", f"cannot be started: {error}")
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return _Answer("", f"not done within {timeout_s:g} s: ended. {_read_end(said)}")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        text = _read_end(said)
        return _Answer(text) if code == 0 else _Answer(text, f"exit code {code}: {text}")


def _read_end(stream: IO[bytes]) -> str:
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - MAX_POST_ANSWER_BYTES))
    return stream.read().decode(errors="replace")


def _post(url: str, payload: bytes, key: str | None, timeout_s: float) -> _Answer:
    posted = post_json(url, payload, {} if key is None else {"Authorization": f"Bearer {key}"}, timeout_s)
    return _Answer(posted.text, posted.problem)


def _read_key(hook: HookSpec, environment: Mapping[str, str]) -> str | None:
    if hook.api_key_env is None:
        return None
    key = environment.get(hook.api_key_env, "").strip()
    if not key or not key.isprintable() or not key.isascii():
        raise ConfigError(
            f"service.hook.api_key_env: the environment has no key in {hook.api_key_env}: set it where this runs. The "
            "draft is in service, and the servers are not told"
        )
    return key
