"""Probes run at once and bounded in time; one that hangs or fails is a warning, and the others are heard."""

from __future__ import annotations

import threading
import time

from draftworks.errors import ConfigError
from draftworks.preflight.installation.probes import Line, Probe, run_probes


def test_a_probe_that_hangs_is_a_warning_and_keeps_nobody_waiting():
    never = threading.Event()

    def hang():
        yield Line("slow", "ok", "the first half")
        never.wait()

    started = time.monotonic()
    found = run_probes([Probe("slow", hang), Probe("quick", lambda: [Line("quick", "ok", "here")])], limit_s=0.3)
    assert time.monotonic() - started < 5
    assert [(line.area, line.state) for line in found] == [("slow", "ok"), ("slow", "warning"), ("quick", "ok")]
    assert "no answer within" in found[1].found
    never.set()


def test_a_probe_that_raises_is_a_warning_with_what_it_found_before():
    def fail():
        yield Line("broken", "ok", "before")
        raise PermissionError("no right")

    found = run_probes([Probe("broken", fail)], limit_s=5)
    assert [(line.state, line.found) for line in found] == [
        ("ok", "before"),
        ("warning", "could not be looked at: PermissionError('no right')"),
    ]
    assert found[1].todo


def test_a_probe_that_a_broken_registry_file_stops_says_what_to_do_after_it():
    def fail():
        raise ConfigError("deployment.yaml: unknown key vra; did you mean var?\nand more")

    [line] = run_probes([Probe("stores", fail)], limit_s=5)
    assert line.found == "could not be looked at: deployment.yaml: unknown key vra; did you mean var?"
    assert "run draftworks doctor again" in line.todo


def test_probes_run_at_once():
    """Each waits for all others: one after the other they would never end."""
    barrier = threading.Barrier(4, timeout=5)

    def look():
        barrier.wait()
        yield Line("area", "ok", "met")

    assert [line.state for line in run_probes([Probe("area", look)] * 4, limit_s=10)] == ["ok"] * 4
