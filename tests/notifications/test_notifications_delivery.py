"""Delivery: what is told, how often, when again, and in how many messages."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from json_server import Reply, Request, json_server
from notification_toys import Desk, make_event, webhook

from draftworks.config.operations import NotificationSpec
from draftworks.errors import ConfigError, StoreError
from draftworks.notifications.channels import GIVE_UP_S, Channels, resolve_address, send_test
from draftworks.notifications.outbox import Outbox
from draftworks.storage.http_call import Posted

TOKEN = "T000/B000/s3cr3t"
DOWN = Posted("", "cannot be reached")


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, [webhook()])


def test_each_event_is_told_once_however_often_it_is_found(desk: Desk) -> None:
    event = make_event(1)
    for _ in range(3):
        desk.send(event, event)
    assert desk.told.ids == [event.id]


def test_a_channel_is_told_only_what_it_wants(tmp_path: Path) -> None:
    desk = Desk(
        tmp_path,
        [
            webhook(name="failures", events=["failure"], url="http://127.0.0.1:1"),
            webhook(name="ones", targets=["one"], url="http://127.0.0.1:2"),
        ],
    )
    desk.send(make_event(1, "failure", "one"), make_event(2, "promotion", "one"), make_event(3, "failure", "two"))
    desk.send(make_event(4, "failure", ""))
    told = {url: [] for url in ("http://127.0.0.1:1", "http://127.0.0.1:2")}
    for message in desk.told.messages:
        told[message["url"]] += [event["title"] for event in message["body"]["events"]]
    assert sorted(told["http://127.0.0.1:1"]) == ["about 1", "about 3", "about 4"]
    assert sorted(told["http://127.0.0.1:2"]) == ["about 1", "about 2", "about 4"]


def test_a_server_that_is_down_is_tried_again_later_and_later_with_the_same_message(desk: Desk) -> None:
    desk.told.answers = [DOWN, Posted("", "busy", 429, 100.0), DOWN]
    (words,) = desk.send(make_event(1))
    assert "attempt 1 failed" in words
    pauses = []
    while not desk.told.ids:
        began = desk.now
        assert desk.send(make_event(2)) == []  # nothing is due yet
        while not desk.send():
            desk.now += 5
        pauses.append(desk.now - began)
    assert pauses == [15, 100, 60]
    assert desk.told.ids == [make_event(1).id, make_event(2).id]


def test_what_a_server_refuses_is_put_away_and_the_next_is_told(desk: Desk) -> None:
    desk.told.answers = [Posted("", "invalid_payload", 400)] * 3
    desk.send(make_event(1))
    for _ in range(3):
        desk.now += 4000
        desk.send(make_event(2))
    assert desk.told.ids == [make_event(2).id]
    assert desk.send(make_event(1)) == []


def test_a_message_is_given_up_after_a_week(desk: Desk) -> None:
    desk.told.answers = [DOWN, DOWN]
    desk.send(make_event(1))
    desk.now += GIVE_UP_S + 1
    assert "given up" in desk.send()[0]
    assert desk.told.ids == []


def test_a_whole_fleet_is_one_message_and_no_window_has_more_than_allowed(desk: Desk) -> None:
    fleet = [make_event(index, target=f"t{index}") for index in range(200)]
    desk.send(*fleet)
    assert len(desk.told.messages) == 1
    assert sorted(desk.told.ids) == sorted(each.id for each in fleet)
    assert desk.told.messages[0]["body"]["text"].startswith("200 events: 200 promotion")
    assert "and 180 more" in desk.told.messages[0]["body"]["text"]
    for index in range(20):  # one at a time: five more messages, then they wait for the window
        desk.send(make_event(["late", index]))
    assert len(desk.told.messages) == 6
    desk.now += 601
    desk.send()
    assert len(desk.told.messages) == 7
    assert len(set(desk.told.ids)) == len(desk.told.ids) == 220


def test_slack_and_a_webhook_get_their_own_bodies_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Request] = []

    def answer(request: Request) -> Reply:
        seen.append(request)
        return Reply(200, "ok")

    with json_server(answer) as url:
        monkeypatch.setenv("SLACK_URL", f"{url}/services/{TOKEN}")
        monkeypatch.setenv("HOOK_KEY", "k-123")
        specs = [
            NotificationSpec(kind="slack", url_env="SLACK_URL"),
            NotificationSpec(kind="webhook", url=f"{url}/hook", api_key_env="HOOK_KEY"),
        ]
        with Channels(tmp_path, specs) as channels:
            channels.add([make_event("<!channel> & co", "failure")])
            words = channels.send(print, 60)
    slack, hook = seen
    assert slack.path == f"/services/{TOKEN}"
    assert slack.body == {"text": "failure: small: about &lt;!channel&gt; &amp; co\nmore"}
    assert hook.headers["Authorization"] == "Bearer k-123"
    assert hook.headers["Idempotency-Key"] == hook.body["id"]
    assert [event["kind"] for event in hook.body["events"]] == ["failure"]
    assert len(words) == 2


@pytest.mark.parametrize("status", [0, 302, 404, 500])
def test_no_token_is_in_a_log_a_file_or_what_is_said(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with json_server(lambda request: Reply(status, f"no such page: {request.path}")) as url:
        monkeypatch.setenv("SLACK_URL", f"{url}/services/{TOKEN}")
        spec = NotificationSpec(kind="slack", url_env="SLACK_URL")
        with Channels(tmp_path, [spec]) as channels:
            channels.add([make_event(1)])
            words = channels.send(print, 60)
        said = send_test(spec).problem
    files = "".join(path.read_text() for path in tmp_path.rglob("*.json*") if path.is_file())
    assert "the address in SLACK_URL" in words[0]
    assert "the address in SLACK_URL" in said
    for text in (files, said, *words):
        assert url not in text
    assert not [line for line in caplog.messages if TOKEN in line]


@pytest.mark.parametrize(
    "value", [None, "", "hooks.slack.com/x", "http://hooks.slack.com/x", "https://a b", "ftp://h/x"]
)
def test_an_address_that_cannot_work_is_refused_by_the_name_of_its_variable(value: str | None) -> None:
    spec = NotificationSpec(kind="slack", url_env="SLACK_URL")
    with pytest.raises(ConfigError, match="SLACK_URL") as refused:
        resolve_address(spec, {} if value is None else {"SLACK_URL": value})
    assert not value or value not in str(refused.value)


def test_a_missing_address_keeps_events_and_stops_no_other_channel(tmp_path: Path) -> None:
    desk = Desk(tmp_path, [NotificationSpec(kind="slack", url_env="NO_SUCH_VARIABLE", name="slack"), webhook()])
    desk.send(make_event(1))
    assert desk.told.ids == [make_event(1).id]
    assert "NO_SUCH_VARIABLE" in desk.warnings[0]
    assert len(Outbox(tmp_path, "slack").list_pending()) == 1


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"add": {}}', '{"add": 3}', "null", '{"told": 3, "at": 0}', '{"begin": ["x"], "at": 0}', "{}"],
)
def test_a_damaged_file_is_named(content: str, tmp_path: Path) -> None:
    box = Outbox(tmp_path, "hook")
    path = box.folder / "outbox.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text(f"{content}\n")
    with pytest.raises(StoreError, match=path.name):
        box.find_message()


def test_two_processes_do_not_send_at_once(tmp_path: Path) -> None:
    with Channels(tmp_path, [webhook()]) as first, Channels(tmp_path, [webhook()]) as second:
        assert (first.is_held, second.is_held) == (True, False)
    with Channels(tmp_path, [webhook()]) as third:
        assert third.is_held


def test_what_an_earlier_version_kept_as_a_file_for_each_event_is_told_once_and_taken_over(tmp_path: Path) -> None:
    folder = tmp_path / "notifications" / "hook"
    for kind, subjects in (("pending", [1, 2]), ("sent", [3]), ("refused", [4])):
        (folder / kind).mkdir(parents=True)
        for event in map(make_event, subjects):
            (folder / kind / f"{event.id}.json").write_text(json.dumps(event.to_json()))
    desk = Desk(tmp_path, [webhook()])
    assert len(Outbox(tmp_path, "hook").list_pending()) == 2
    desk.send(*map(make_event, range(1, 6)))
    assert sorted(desk.told.ids) == sorted(make_event(subject).id for subject in (1, 2, 5))
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "outbox.jsonl"]


def test_what_was_told_long_ago_is_forgotten_and_what_waits_is_not(tmp_path: Path) -> None:
    desk = Desk(tmp_path, [webhook()])
    desk.send(make_event(1))
    desk.told.answers = [DOWN]
    desk.now += 29 * 86400
    desk.send(make_event(2))
    desk.send(make_event(1))
    desk.now += 2 * 86400
    desk.send()
    assert desk.told.ids == [make_event(1).id, make_event(2).id]
    desk.send()
    assert make_event(1).id not in Outbox(tmp_path, "hook").path.read_text()
    desk.send(make_event(2))
    assert desk.told.ids == [make_event(1).id, make_event(2).id]
