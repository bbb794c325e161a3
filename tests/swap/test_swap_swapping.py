"""A promotion in a server that runs: counts before and after, back if they fell, told whatever came of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from exchanging_vllm import ExchangingVLLM, SwapSite
from pydantic import ValidationError

from draftworks.config.service import LEAST_READINGS, SwapSpec
from draftworks.errors import ConfigError, StoreError
from draftworks.production.readings import LEAST_WINDOWS, Window
from draftworks.servers.counters import ACCEPTED, PASSES, REQUESTS
from draftworks.service.candidate import State, read_states
from draftworks.service.register import InService
from draftworks.service.swap_record import SWAPS, Outcome, SwapResult, find_swap, find_taken_back
from draftworks.swap.swapping import Clock, Swapped, judge, swap


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ExchangingVLLM]:
    with ExchangingVLLM.make(tmp_path / "served").run() as server:
        yield server


@pytest.fixture
def site(tmp_path: Path, server: ExchangingVLLM) -> SwapSite:
    return SwapSite(tmp_path, entry={"service": {"swap": server.describe()}})


def change(site: SwapSite, **options: Any) -> None:
    path = site.registry / "targets" / "small.yaml"
    entry = yaml.safe_load(path.read_text())
    entry["service"]["swap"] |= options
    path.write_text(yaml.safe_dump(entry))


def promote_two(site: SwapSite, server: ExchangingVLLM, accepts: float) -> InService:
    """Two drafts, the second of which the server accepts so many tokens of, 1.5 of the first; the second is promoted."""
    first = site.publish("a", 1.5, prompts=4)
    site.promote()
    second = site.publish("b", 2.0, prompts=4)
    server.accepts = {"default": 1.5, first: 1.5, second: accepts}
    return promote(site, second)


def promote(site: SwapSite, draft: str, **asked: Any) -> InService:
    """Whatever the rule says of four prompts, which cost less than 120."""
    return site.promote(draft, force=True, why="a test", **asked)


def run(site: SwapSite, server: ExchangingVLLM, record: InService | None = None) -> Swapped:
    service = site.open()
    return swap(service, record or service.register.require(), "me", clock=Clock(lambda: server.now, server.sleep))


def require(done: Swapped) -> SwapResult:
    assert done.result is not None
    return done.result


def test_a_draft_that_is_accepted_no_less_stays_and_its_counts_are_told(site: SwapSite, server: ExchangingVLLM):
    record = promote_two(site, server, 1.8)
    done = run(site, server)
    result = require(done)
    assert (done.record, result.outcome, server.exchanges) == (record, Outcome.STAYS, [record.draft.digest])
    assert (server.folder / "model.safetensors").read_text() == f"model.safetensors of {record.draft.weights}"
    assert result.before is not None
    assert result.after is not None
    assert result.before.accepted_per_pass == pytest.approx(1.5, abs=0.05)
    assert result.after.accepted_per_pass == pytest.approx(1.8, abs=0.05)
    assert result.before.requests >= 100
    assert result.difference == pytest.approx(0.3, abs=0.05)
    assert result.low is not None
    assert result.low > 0
    assert find_swap(site.open().register, record) == result
    assert read_states(site.open().register)[record.draft.digest] is State.CONFIRMED  # the server says so itself
    sleeps = server.sleeps
    assert run(site, server) == done  # again: nothing is done
    assert server.sleeps == sleeps


def test_a_draft_that_is_accepted_clearly_less_is_taken_back_in_server_and_record(
    site: SwapSite, server: ExchangingVLLM
):
    record = promote_two(site, server, 1.0)
    first = record.previous
    done = run(site, server)
    result = require(done)
    assert (result.outcome, server.version) == (Outcome.BACK, first)
    assert server.exchanges == [record.draft.digest, first]
    assert (done.record.number, done.record.action, done.record.draft.digest) == (3, "rollback", first)
    assert site.open().register.require() == done.record
    assert "it accepted clearly less" in done.record.why
    assert result.describe() in done.record.why
    assert find_taken_back(site.open().register, record.draft.digest) == result
    assert find_taken_back(site.open().register, str(first)) is None
    assert require(run(site, server)).outcome is Outcome.STAYS  # of the record of the way back; nothing more is done
    assert len(server.exchanges) == 2


@pytest.mark.parametrize(("loss", "outcome"), [(0.0, Outcome.UNDECIDED), (0.06, Outcome.UNDECIDED)])
def test_what_the_interval_does_not_decide_stays(site: SwapSite, server: ExchangingVLLM, loss: float, outcome: Outcome):
    record = promote_two(site, server, 1.5 - loss)
    result = require(run(site, server))
    assert result.outcome is outcome
    assert "decides nothing" in result.describe()
    assert site.open().register.require() == record


def test_a_wider_margin_decides_for_the_draft(tmp_path: Path, server: ExchangingVLLM, site: SwapSite):
    path = site.registry / "targets" / "small.yaml"
    entry = yaml.safe_load(path.read_text())
    entry["service"]["margin"] = 0.3
    path.write_text(yaml.safe_dump(entry))
    promote_two(site, server, 1.45)
    assert require(run(site, server)).outcome is Outcome.STAYS


def test_too_little_traffic_is_undecided_after_the_time_and_stays(site: SwapSite, server: ExchangingVLLM):
    record = promote_two(site, server, 0.1)
    server.passes_per_s = 0.0
    result = require(run(site, server))
    assert (result.outcome, result.difference) == (Outcome.UNDECIDED, None)
    assert "no pass was counted before" in result.detail
    assert site.open().register.require() == record


def test_few_readings_with_traffic_are_no_verdict(site: SwapSite, server: ExchangingVLLM):
    record = promote_two(site, server, 0.1)
    server.on_sleep = lambda: setattr(server, "passes_per_s", 20.0 if server.sleeps % 10 == 0 else 0.0)
    result = require(run(site, server))
    assert (result.outcome, result.low) == (Outcome.UNDECIDED, None)
    assert "12 are needed" in result.detail
    assert site.open().register.require() == record


def test_windows_that_are_all_alike_are_no_verdict():
    before, after = (
        [Window(5.0 * n, 5.0 * n + 5, "a", {PASSES: 10, ACCEPTED: accepted, REQUESTS: 1}, False) for n in range(20)]
        for accepted in (20, 5)
    )
    assert judge(before, after, 0.03).outcome is Outcome.UNDECIDED


def test_a_server_that_refuses_is_told_and_asked_again_by_the_same_command(site: SwapSite, server: ExchangingVLLM):
    record = promote_two(site, server, 1.8)
    server.refuses = "/update_weights"
    result = require(run(site, server))
    assert (result.outcome, server.version) == (Outcome.FAILED, "default")
    assert "other fc.weight than at the start" in result.describe()
    assert site.open().register.require() == record
    server.refuses = ""
    assert require(run(site, server)).outcome is Outcome.STAYS


def test_a_server_of_another_strategys_draft_is_left_alone(site: SwapSite, server: ExchangingVLLM):
    record = promote_two(site, server, 1.8)
    change(site, strategy="dflash")
    path = site.registry / "targets" / "small.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "strategies": {"eagle3": {}, "dflash": {}}}))
    assert run(site, server) == Swapped(record, None)
    change(site, strategy="eagle3", format="zlab_dflash")
    with pytest.raises(ConfigError, match=r"service\.swap\.format: strategy eagle3 has no export format"):
        site.open()


def test_a_server_that_is_not_there_is_told(site: SwapSite, server: ExchangingVLLM):
    promote_two(site, server, 1.8)
    change(site, url="http://127.0.0.1:1")
    assert require(run(site, server)).outcome is Outcome.FAILED


def test_counters_that_are_gone_after_the_exchange_decide_nothing(site: SwapSite, server: ExchangingVLLM):
    record = promote_two(site, server, 0.1)
    server.silent_after = 1
    result = require(run(site, server))
    assert result.outcome is Outcome.UNDECIDED
    assert "cannot be read any more" in result.detail
    assert (server.version, site.open().register.require()) == (record.draft.digest, record)


def test_the_first_draft_is_loaded_and_compared_with_nothing(site: SwapSite, server: ExchangingVLLM):
    first = site.publish("a", 1.5, prompts=4)
    server.accepts = {"default": 1.0, first: 1.0}
    site.promote()
    result = require(run(site, server))
    assert (result.outcome, result.before, server.version) == (Outcome.UNDECIDED, None, first)


def test_a_rollback_by_hand_is_loaded_without_a_comparison_and_a_canary_not_at_all(
    site: SwapSite, server: ExchangingVLLM
):
    record = promote_two(site, server, 1.8)
    run(site, server)
    back = site.rollback()
    result = require(run(site, server))
    assert (result.outcome, result.difference, server.version) == (Outcome.STAYS, None, back.draft.digest)
    promote(site, record.draft.digest, share=0.1)
    assert run(site, server).result is None
    assert server.version == back.draft.digest


def test_after_a_kill_between_exchange_and_verdict_nothing_is_invented(site: SwapSite, server: ExchangingVLLM):
    record = promote_two(site, server, 0.1)
    server.version = record.draft.digest
    result = require(run(site, server))
    assert (result.outcome, result.before, result.after) == (Outcome.UNDECIDED, None, None)
    assert not server.exchanges


def test_a_draft_that_was_replaced_meanwhile_is_not_taken_back(site: SwapSite, server: ExchangingVLLM):
    record = promote_two(site, server, 0.1)
    third = site.publish("c", 2.5, prompts=4)

    def replaced() -> None:
        if server.exchanges and site.open().register.require() == record:
            promote(site, third)

    server.on_sleep = replaced
    result = require(run(site, server))
    assert result.outcome is Outcome.UNDECIDED
    assert "another draft is in service by now" in result.detail
    assert site.open().register.require().draft.digest == third
    assert run(site, server, record).record.draft.digest == third  # whoever comes late does nothing
    assert server.exchanges == [record.draft.digest]


def test_a_former_draft_that_is_gone_stops_the_swap_before_it_begins(site: SwapSite, server: ExchangingVLLM):
    promote_two(site, server, 1.8)
    [first, _] = site.open().register.read_history()
    (site.root / "var" / first.draft.path).rename(site.root / "gone")
    result = require(run(site, server))
    assert result.outcome is Outcome.FAILED
    assert "was it pruned" in result.detail
    assert not server.exchanges


def test_a_damaged_outcome_is_told_with_its_file(site: SwapSite, server: ExchangingVLLM):
    record = promote_two(site, server, 1.8)
    run(site, server)
    [path] = (site.open().register.folder / SWAPS).iterdir()
    path.write_text('{"number": 2}')
    with pytest.raises(StoreError, match=r"00000002\.json"):
        find_swap(site.open().register, record)
    path.unlink()
    assert find_swap(site.open().register, replace(record, number=7)) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "http://10.0.0.1:8000"}, "of this machine"),
        ({"url": "http://127.0.0.1:8000/metrics"}, "without /metrics"),
        ({"folder": "served"}, "an absolute path"),
        ({"seconds": 30}, "leaves no room for 12 readings"),
        ({"requests": 0}, "greater than or equal to 1"),
    ],
    ids=range(5),
)
def test_options_that_could_not_work_are_refused(options: dict[str, Any], said: str):
    with pytest.raises(ValidationError, match=said):
        SwapSpec(**{"url": "http://127.0.0.1:8000", "folder": "/served", **options})


def test_the_options_know_how_many_windows_have_an_interval():
    assert LEAST_READINGS == LEAST_WINDOWS
