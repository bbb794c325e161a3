"""The command observe: a table of the servers, JSON for programs, and an exit code that says whether all were read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from metrics_server import Pages, serve_pages, sglang_pages, vllm_pages
from observed_site import ObservedSite
from paused_time import PausedTime
from typer.testing import CliRunner, Result

from draftworks.programs import observe
from draftworks.programs.cli import app


@pytest.fixture
def pages() -> list[Pages]:
    return [Pages(sglang_pages(10, 20, 2)), Pages(vllm_pages(5, 5))]


@pytest.fixture
def site(tmp_path: Path, pages: list[Pages]) -> Iterator[ObservedSite]:
    with ExitStack() as stack:
        urls = [stack.enter_context(serve_pages(each)) for each in pages]
        servers = [
            {"name": n, "url": u, "kind": k, "timeout_s": 30.0} for n, u, k in zip("ab", urls, ("sglang", "vllm"))
        ]
        yield ObservedSite.make(tmp_path, servers)


def call(site: ObservedSite, *words: str) -> Result:
    return CliRunner().invoke(app, ["observe", "small", *words, "--registry", str(site.registry)])


def test_each_reading_adds_to_the_series_and_the_table_shows_what_was_accepted_since(site: ObservedSite, pages: list):
    first = call(site)
    assert first.exit_code == 0, first.output
    assert "what it accepts is known after the next reading" in first.output
    pages[0].pages = sglang_pages(20, 50, 4)
    found = json.loads(call(site, "--json").stdout)["servers"]
    assert [one["server"] for one in found] == ["a", "b"]
    assert (found[0]["now"]["value"], found[0]["now"]["passes"], found[0]["draft"]) == (3.0, 10, "drafts/a")
    assert found[1]["now"]["value"] is None
    table = call(site, "--no-read")
    assert "4.000 (no interval)" in table.output
    assert "rung 6" in table.output
    assert json.loads(call(site, "--json", "--no-read").stdout)["servers"] == [{**one, "remarks": []} for one in found]


def test_every_and_for_read_as_often(site: ObservedSite, pages: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(observe, "time", PausedTime())
    assert call(site, "--every", "0.25", "--for", "0.5").exit_code == 0
    assert len(site.open().recall()[0].readings) == 3


def test_one_dead_server_is_a_warning_and_an_exit_code_and_the_others_are_read(site: ObservedSite, pages: list):
    pages[0].pages = {}
    found = call(site)
    assert found.exit_code == 1
    assert "warning: server a (http://127.0.0.1:" in found.output
    assert [len(one.readings) for one in site.open().recall()] == [0, 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--for", "5"], "say how often too: --every"),
        (["--every", "0"], "--every: expected seconds"),
        (["--every", "1", "--no-read"], "--no-read asks no server"),
    ],
)
def test_times_that_make_no_sense_are_refused(site: ObservedSite, words: list[str], message: str):
    found = call(site, *words)
    assert found.exit_code == 1
    assert message in found.output


def test_a_target_without_servers_is_told_what_to_add(site: ObservedSite):
    site.change_entry(servers=[])
    found = call(site)
    assert found.exit_code == 1
    assert "has no servers: add a `servers` section" in found.output
