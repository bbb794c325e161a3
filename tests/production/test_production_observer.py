"""Reading servers: their counters as they are, one clear problem for everything else, and no harm to the other servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from metrics_server import Pages, serve_pages, sglang_pages, vllm_pages
from observed_site import ObservedSite

from draftworks.production.observer import UNKNOWN_DRAFT, Observation, ServerSeries
from draftworks.production.readings import split_windows
from draftworks.production.scrape import list_positions

RECORDED = Path(__file__).parent / "recorded"
SGLANG_RECORDED = Path(__file__).parents[1] / "sglang_room" / "recorded"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def start(stack: ExitStack, root: Path, kind: str, pages: dict[str, Any], **server: Any) -> tuple[ObservedSite, Pages]:
    """A site with one server `front`."""
    served = Pages(pages)
    entry = {
        "name": "front",
        "url": stack.enter_context(serve_pages(served)),
        "kind": kind,
        "timeout_s": 30.0,
        **server,
    }
    return ObservedSite.make(root, [entry]), served


def observe_once(site: ObservedSite, after_s: float = 60.0) -> Observation:
    [found] = site.observe(after_s)
    return found


def test_sglangs_counters_become_accepted_tokens_per_pass(stack: ExitStack, tmp_path: Path):
    site, served = start(stack, tmp_path, "sglang", sglang_pages(100, 150, 7))
    first = observe_once(site)
    assert (first.problem, first.remarks) == (None, ())
    served.pages = sglang_pages(150, 250, 9)
    [window] = split_windows(observe_once(site).readings)
    assert (window.passes, window.accepted, window.restarted) == (50, 100, False)
    assert window.draft == "drafts/a"


def test_what_a_real_sglang_sent_is_read(stack: ExitStack, tmp_path: Path):
    pages = {"/server_info": sglang_pages()["/server_info"] | {"model_path": "models/tiny"}}
    before, after = ((SGLANG_RECORDED / f"metrics_{when}.txt").read_text() for when in ("before", "after"))
    site, served = start(stack, tmp_path, "sglang", {**pages, "/metrics": before}, model="models/tiny")
    assert observe_once(site).problem is None
    served.pages["/metrics"] = after
    [window] = split_windows(observe_once(site).readings)
    assert window.passes > 0
    assert window.accepted >= 0


def test_saved_scrapes_of_vllm_are_read(stack: ExitStack, tmp_path: Path):
    """They were written from its documentation; no vLLM was run."""
    pages = {**vllm_pages(), "/metrics": (RECORDED / "vllm_before.txt").read_text()}
    site, served = start(stack, tmp_path, "vllm", pages)
    assert observe_once(site).problem is None
    served.pages["/metrics"] = (RECORDED / "vllm_after.txt").read_text()
    [window] = split_windows(observe_once(site).readings)
    assert (window.passes, window.accepted, window.counts["proposed"]) == (4000, 5640, 12000)
    assert list_positions(window.counts) == [(0, 2800), (1, 1800), (2, 1040)]
    served.pages["/metrics"] = (RECORDED / "vllm_without_speculation.txt").read_text()
    assert "runs without speculative decoding" in str(observe_once(site).problem)


@pytest.mark.parametrize(
    ("version", "known"), [("0.11.2", True), ("0.32.0", True), ("0.33.0", True), ("0.3.3", False), ("0.34.0", False)]
)
def test_only_a_vllm_whose_names_were_not_read_is_said(stack: ExitStack, tmp_path: Path, version: str, known: bool):
    site, _ = start(stack, tmp_path, "vllm", {**vllm_pages(), "/version": {"version": version}})
    said = any(f"vLLM {version}: the names of the counters" in each for each in observe_once(site).remarks)
    assert said is not known


def test_a_restart_is_known_by_the_process_even_if_no_counter_fell(stack: ExitStack, tmp_path: Path):
    site, served = start(stack, tmp_path, "sglang", sglang_pages(10, 10, 1, seed=1))
    observe_once(site)
    served.pages = sglang_pages(30, 60, 2, seed=2)
    [window] = split_windows(observe_once(site).readings)
    assert (window.passes, window.accepted, window.restarted) == (30, 60, True)


def test_several_servers_behind_one_address_are_refused(stack: ExitStack, tmp_path: Path):
    """Their counters would look like a restart each time, and be counted again and again."""
    site, served = start(stack, tmp_path, "vllm", vllm_pages(10, 10, started=1.0))
    observe_once(site)
    served.pages = vllm_pages(500, 700, started=2.0)
    assert observe_once(site).problem is None  # this may have been a restart
    served.pages = vllm_pages(11, 11, started=1.0)
    found = observe_once(site)
    assert "several servers answer at this address" in str(found.problem)
    assert len(found.readings) == 2


PROBLEMS = {
    "another model": (sglang_pages(model_path="models/other"), "several models|another model"),
    "no metrics": ({"/server_info": sglang_pages()["/server_info"]}, "no /metrics: start SGLang with --enable-metrics"),
    "another server": ({"/metrics": "go_gc_seconds 1\n"}, "is it SGLang"),
    "no speculation": (sglang_pages(speculative_algorithm=None), "runs without speculative decoding"),
    "an error page": ({**sglang_pages(), "/metrics": 500}, "/metrics: status 500"),
    "a page of HTML": ({**sglang_pages(), "/metrics": "<html>"}, "not Prometheus' text format: line 1"),
    "no text": ({**sglang_pages(), "/metrics": b"\xff\xfe"}, "expected text"),
    "no JSON": ({**sglang_pages(), "/server_info": "{"}, "/server_info: expected JSON"),
    "no object": ({**sglang_pages(), "/server_info": []}, "expected a JSON object, found list"),
    "a huge page": ({**sglang_pages(), "/metrics": b"a 1\n" * (3 << 20)}, "an answer of more than 8,388,608 bytes"),
    "a huge object": ({**sglang_pages(), "/server_info": b" " * (3 << 20)}, "an answer of more than 2,097,152 bytes"),
    "not a number": (
        {**sglang_pages(), "/metrics": sglang_pages()["/metrics"].replace("} 0.0", "} NaN")},
        "the counter sglang:spec_verify_calls_total is nan",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_no_reading_is_one_problem_and_records_nothing(stack: ExitStack, tmp_path: Path, name: str):
    import re

    pages, message = PROBLEMS[name]
    if name == "another model":
        pages = {**pages, "/metrics": pages["/metrics"].replace("models/small", "models/other")}
    site, served = start(stack, tmp_path, "sglang", sglang_pages(1, 1))
    observe_once(site)
    served.pages = pages
    found = observe_once(site)
    assert re.search(message, str(found.problem)), found.problem
    assert str(found.problem).startswith("server front (http://127.0.0.1:")
    assert len(found.readings) == len(ServerSeries(site.open().var, "small", "front").read()) == 1


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        (vllm_pages(model="other"), "serves another model: expected .*models/small.*, found other"),
        (vllm_pages(passes=1, accepted=9), "counts 9 accepted tokens of 5 proposed ones"),
        ({**vllm_pages(), "/metrics": "a 1\n"}, "is it vLLM"),
    ],
)
def test_a_vllm_that_says_something_else_is_refused(stack: ExitStack, tmp_path: Path, pages: dict, message: str):
    site, _ = start(stack, tmp_path, "vllm", pages)
    found = observe_once(site)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(found.problem)
    assert not found.readings


def test_a_model_under_another_name_is_read_if_the_entry_gives_that_name(stack: ExitStack, tmp_path: Path):
    site, _ = start(stack, tmp_path, "vllm", vllm_pages(model="my-alias"), model="my-alias")
    assert observe_once(site).problem is None


def test_a_dead_and_a_slow_server_do_not_stop_the_others(stack: ExitStack, tmp_path: Path):
    slow, good = Pages(sglang_pages()), Pages(vllm_pages(5, 5))
    slow.gate.clear()
    urls = [stack.enter_context(serve_pages(each)) for each in (slow, good)]
    servers = [
        {"name": "dead", "url": "http://127.0.0.1:9", "kind": "sglang", "timeout_s": 1.0},
        {"name": "slow", "url": urls[0], "kind": "sglang", "timeout_s": 0.3},
        {"name": "good", "url": urls[1], "kind": "vllm", "timeout_s": 60.0},
    ]
    dead, late, found = ObservedSite.make(tmp_path, servers).observe()
    slow.gate.set()
    assert "cannot be reached" in str(dead.problem)
    assert "no answer within 0.3 s" in str(late.problem)
    assert (found.problem, len(found.readings)) == (None, 1)


def test_a_key_is_sent_and_never_shown(stack: ExitStack, tmp_path: Path):
    site, served = start(stack, tmp_path, "vllm", vllm_pages(1, 1), api_key_env="FRONT_KEY")
    assert "no key in FRONT_KEY" in str(observe_once(site).problem)
    assert served.keys == []
    site.environment["FRONT_KEY"] = "very-secret"
    served.pages = {"/metrics": 401}
    problem = str(observe_once(site).problem)
    assert "status 401" in problem
    assert "very-secret" not in problem
    assert served.keys == ["Bearer very-secret"]


def test_the_draft_is_the_one_that_the_server_says_by_its_folder_wherever_that_is_mounted(
    stack: ExitStack, tmp_path: Path
):
    site, served = start(stack, tmp_path, "sglang", sglang_pages())
    site.site.publish("a", 1.0)
    record = site.site.promote()
    served.pages = sglang_pages(draft=f"/elsewhere/var/{record.draft.path}/sglang")
    [reading] = observe_once(site).readings
    assert (reading.draft, reading.by_server) == (record.draft.digest, True)


def test_a_server_that_does_not_say_its_draft_loaded_the_one_in_service_when_it_started(
    stack: ExitStack, tmp_path: Path
):
    import time

    site, served = start(stack, tmp_path, "vllm", vllm_pages(started=time.time() - 3600))
    assert observe_once(site).readings[-1].draft == UNKNOWN_DRAFT  # nothing was in service yet
    site.site.publish("a", 1.0)
    first = site.site.promote().draft.digest
    served.pages = vllm_pages(3, 3, started=time.time() + 10)
    assert observe_once(site).readings[-1].draft == first
    site.site.publish("b", 1.5)
    second = site.site.promote().draft.digest
    served.pages = {**served.pages, "/metrics": served.pages["/metrics"].replace("} 3.0", "} 9.0")}
    assert observe_once(site).readings[-1].draft == first  # the process is the same
    served.pages = vllm_pages(1, 1, started=time.time() + 20)
    found = observe_once(site).readings
    assert found[-1].draft == second
    assert [window.draft for window in split_windows(found)] == [first, first, second]


def test_a_version_that_is_not_known_is_said_and_a_gauge_alone_gives_a_value_without_an_interval(
    stack: ExitStack, tmp_path: Path
):
    pages = sglang_pages(version="0.4.1")
    pages["/metrics"] = 'sglang:spec_accept_length{model_name="models/small"} 2.5\n'
    site, _ = start(stack, tmp_path, "sglang", pages)
    found = observe_once(site)
    assert found.problem is None
    assert any("0.4.1: the names of the counters are known of 0.5.23 alone" in each for each in found.remarks)
    [standing] = site.assess()
    assert (standing.gauge, standing.now) == (1.5, None)
    pages["/metrics"] = pages["/metrics"].replace("2.5", "0.0")
    assert "no pass lately" in str(observe_once(site).problem)


def test_observers_at_once_lose_nothing(stack: ExitStack, tmp_path: Path):
    site, _ = start(stack, tmp_path, "sglang", sglang_pages(1, 1))
    observers = [threading.Thread(target=site.observe) for _ in range(4)]
    for each in observers:
        each.start()
    for each in observers:
        each.join()
    windows = split_windows(site.open().recall()[0].readings)
    assert len(windows) == 3
    assert not any(window.restarted for window in windows)
