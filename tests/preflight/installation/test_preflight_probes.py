"""Probes run at once and bounded in time; one that hangs or fails is a warning, and the others are heard."""

from __future__ import annotations

import threading

from waiting import HANG_S, growing_limits

from draftworks.errors import ConfigError
from draftworks.preflight.findings import Finding
from draftworks.preflight.installation.machine_probes import Probe, run_probes


def test_a_probe_that_hangs_is_a_warning_and_keeps_nobody_waiting():
    never = threading.Event()

    def hang():
        yield Finding("ok", "the first half", "slow")
        never.wait()

    for limit_s in growing_limits(0.3):
        found = run_probes(
            [Probe("slow", hang), Probe("quick", lambda: [Finding("ok", "here", "quick")])], limit_s=limit_s
        )
        if len(found) == 3 and found[2].severity == "ok":
            break
    assert [(line.where, line.severity) for line in found] == [("slow", "ok"), ("slow", "warning"), ("quick", "ok")]
    assert "no answer within" in found[1].text
    never.set()


def test_a_probe_that_raises_is_a_warning_with_what_it_found_before():
    def fail():
        yield Finding("ok", "before", "broken")
        raise PermissionError("no right")

    found = run_probes([Probe("broken", fail)], limit_s=HANG_S)
    assert [(line.severity, line.text) for line in found] == [
        ("ok", "before"),
        ("warning", "could not be looked at: PermissionError('no right')"),
    ]
    assert found[1].remedy


def test_a_probe_that_a_broken_registry_file_stops_says_what_to_do_after_it():
    def fail():
        raise ConfigError("deployment.yaml: unknown key vra; did you mean var?\nand more")

    [line] = run_probes([Probe("stores", fail)], limit_s=HANG_S)
    assert line.text == "could not be looked at: deployment.yaml: unknown key vra; did you mean var?"
    assert "run draftworks doctor again" in line.remedy


def test_probes_run_at_once():
    """Each waits for all others: one after the other they would never end."""
    barrier = threading.Barrier(4, timeout=HANG_S)

    def look():
        barrier.wait()
        yield Finding("ok", "met", "area")

    assert [line.severity for line in run_probes([Probe("area", look)] * 4, limit_s=HANG_S)] == ["ok"] * 4
