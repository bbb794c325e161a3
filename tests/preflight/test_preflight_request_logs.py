"""`check` looks at the last lines of the logs of requests: whose they are, and whether they can be used at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from promised_site import PromisedSite
from request_logs import make_request

from draftworks.preflight.findings import Findings
from draftworks.preflight.services import check_request_logs
from draftworks.targets.registry import Registry


def check(site: PromisedSite, **entry: Any) -> list[tuple[str, str]]:
    path = site.registry / "targets" / "small.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **entry}))
    registry, findings = Registry(site.registry), Findings()
    check_request_logs(registry.load_target("small"), registry, findings)
    return [(each.severity, each.text) for each in findings.found]


@pytest.fixture
def site(tmp_path: Path) -> PromisedSite:
    return PromisedSite(tmp_path)


def test_logs_that_are_not_there_yet_are_a_note_and_sound_ones_nothing(site: PromisedSite):
    [(severity, text)] = check(site)
    assert (severity, "no file matches 'logs/*.jsonl'" in text) == ("note", True)
    site.write(make_request(1))
    assert check(site) == []
    assert check(site, observation={}) == []


def test_lines_of_which_none_can_be_used_are_told_with_what_helps(site: PromisedSite):
    site.write(*(make_request(n, passes=None) for n in range(300)), make_request(301, model="other"))
    [(severity, text)] = check(site)
    assert severity == "warning"
    assert "199 lines without counts of speculative decoding: start vLLM with --per-request-spec-decode-metrics" in text
    assert "1 line of another model: if it is the target under another name" in text


def test_it_has_to_be_clear_whose_draft_answered(site: PromisedSite):
    site.write(make_request(1))
    found = check(site, strategies={"eagle3": {}, "dflash": {}})
    assert [severity for severity, _ in found] == ["error", "warning"]
    assert "several strategies: set `strategy`" in found[0][1]
