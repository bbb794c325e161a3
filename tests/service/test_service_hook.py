"""The hook: told, confirmed, failed, out of time, superseded; no key in any record."""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from json_server import Reply, Request, json_server
from processes import wait_until_ended
from service_toys import STRATEGY, TARGET, record
from waiting import HANG_S, growing_limits

from draftworks.config.service import HookSpec
from draftworks.errors import ConfigError
from draftworks.service.candidate import Delivery, State, find_delivery, read_states
from draftworks.service.hook import describe_delivery, tell_servers
from draftworks.service.register import ServiceRegister

CONFIRM = "import json, os, sys; json.load(sys.stdin); print(json.dumps({'confirmed': os.environ['DRAFTWORKS_DRAFT']}))"


@pytest.fixture
def register(tmp_path: Path) -> ServiceRegister:
    made = ServiceRegister(tmp_path, TARGET, STRATEGY)
    made.replace(None, lambda _: record(1, "a"))
    return made


def python(text: str, **options) -> HookSpec:
    return HookSpec(command=[sys.executable, "-c", text], **{"attempts": 2, "pause_s": 0, **options})


def tell(register: ServiceRegister, hook: HookSpec, **environment: str) -> Delivery:
    done = tell_servers(register, register.require(), hook, {**os.environ, **environment})
    assert find_delivery(register, register.require()) == (done if done.attempts else None)
    return done


def test_a_command_that_answers_with_the_digest_confirms_and_is_not_called_again(register: ServiceRegister):
    assert read_states(register) == {"a": State.PROMOTED}
    done = tell(register, python("print('starting');" + CONFIRM))
    assert (done.told, done.confirmed, len(done.attempts)) == (True, True, 1)
    assert read_states(register) == {"a": State.CONFIRMED}
    assert tell(register, python("raise SystemExit(1)")) == done
    assert "confirmed draft a" in describe_delivery(done)


def test_a_command_gets_the_record_and_the_folder(register: ServiceRegister, tmp_path: Path):
    seen = tmp_path / "seen"
    tell(register, python(f"import sys; open({str(seen)!r}, 'w').write(sys.stdin.read())"))
    values = json.loads(seen.read_text())
    assert (values["digest"], values["number"]) == ("a", 1)
    assert values["folder"] == str(tmp_path / "eagle3_export/small/a")


def test_a_command_is_run_without_a_shell(register: ServiceRegister):
    done = tell(register, HookSpec(command=["echo", "$HOME; exit 1"], attempts=1))
    assert done.attempts[0].detail == "$HOME; exit 1"


def test_success_without_the_digest_confirms_nothing(register: ServiceRegister):
    done = tell(register, python("print('[1'); print('fine')"))
    assert (done.told, done.confirmed, len(done.attempts)) == (True, False, 1)
    assert read_states(register) == {"a": State.PROMOTED}


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (python("print('no room'); raise SystemExit(3)"), "exit code 3: no room"),
        (python('print(\'{"confirmed": "b"}\')'), "confirms draft b, expected a"),
        (HookSpec(command=["/no/such/program"], attempts=2, pause_s=0), "cannot be started"),
        (HookSpec(url="http://127.0.0.1:1/x", attempts=2, pause_s=0), "cannot be reached"),
    ],
    ids=["exit", "other", "absent", "unreachable"],
)
def test_a_failure_is_tried_again_and_recorded(register: ServiceRegister, hook: HookSpec, said: str):
    done = tell(register, hook)
    assert (done.told, done.confirmed, len(done.attempts)) == (False, False, 2)
    assert said in done.attempts[-1].detail
    assert "failed 2 times" in describe_delivery(done)
    assert tell(register, python(CONFIRM)).confirmed  # asked again later


def test_pauses_grow(register: ServiceRegister):
    pauses: list[float] = []
    tell_servers(
        register, register.require(), python("raise SystemExit(1)", attempts=4, pause_s=2), os.environ, pauses.append
    )
    assert pauses == [2, 4, 8]


def test_a_command_that_hangs_is_ended_with_its_children(register: ServiceRegister, tmp_path: Path):
    child = tmp_path / "child"
    command = ["sh", "-c", f"sleep 2000 & echo $! > {child}; wait"]
    for limit_s in growing_limits(0.5):
        done = tell(register, HookSpec(command=command, timeout_s=limit_s, attempts=1))
        assert f"not done within {limit_s:g} s" in done.attempts[-1].detail
        if child.exists() and child.read_text():
            break
    with suppress(psutil.NoSuchProcess):
        wait_until_ended(psutil.Process(int(child.read_text())))


def test_a_webhook_gets_the_key_and_no_record_of_it_is_kept(register: ServiceRegister):
    seen: list[Request] = []

    def answer(request: Request) -> Reply:
        seen.append(request)
        if len(seen) == 1:
            return Reply(503, f"busy, {request.headers['Authorization']}")
        return Reply(200, {"confirmed": request.body["digest"]})

    with json_server(answer) as url:
        hook = HookSpec(url=f"{url}/draft", api_key_env="HOOK_KEY", pause_s=0)
        with pytest.raises(ConfigError, match="HOOK_KEY"):
            tell_servers(register, register.require(), hook, {})
        done = tell(register, hook, HOOK_KEY="s3cret")
    assert [each.headers["Authorization"] for each in seen] == ["Bearer s3cret"] * 2
    assert done.confirmed
    assert done.attempts[0].detail.endswith("503: busy, Bearer ***")
    assert all("s3cret" not in path.read_text() for path in register.folder.rglob("*.json"))


@pytest.mark.parametrize(
    "reply", [Reply(302, ""), Reply(200, "x" * 100_000), Reply(0, "")], ids=["moved", "long", "closed"]
)
def test_an_odd_answer_is_a_failure(register: ServiceRegister, reply: Reply):
    with json_server(lambda _: reply) as url:
        assert not tell(register, HookSpec(url=url, attempts=1)).told


def test_a_server_that_does_not_answer_is_given_up(register: ServiceRegister):
    given_up = threading.Event()

    def answer(_: Request) -> Reply:
        given_up.wait(HANG_S)
        return Reply(200, {})

    with json_server(answer) as url:
        done = tell(register, HookSpec(url=url, attempts=1, timeout_s=0.3))
        given_up.set()
    assert "no answer within 0.3 s" in done.attempts[0].detail


def test_once_another_draft_is_in_service_nobody_is_told_of_the_former(register: ServiceRegister):
    first = register.require()

    def replaced(_: float) -> None:
        register.replace("a", lambda _: replace(record(2, "b"), previous="a"))

    done = tell_servers(register, first, python("raise SystemExit(1)", attempts=5), os.environ, replaced)
    assert len(done.attempts) == 1
    assert tell_servers(register, first, python(CONFIRM)).told is False
    assert read_states(register) == {"b": State.PROMOTED}
    assert partial(tell, register, python(CONFIRM))().confirmed
