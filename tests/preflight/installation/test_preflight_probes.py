"""Probes run at once and bounded in time; one that hangs or fails is a warning, and the others are heard."""

from __future__ import annotations

import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from draftworks.preflight.installation.masking import MASK, mask_secrets
from draftworks.preflight.installation.probes import Line, Probe, run_probes

NAMES = ("AWS_SECRET_ACCESS_KEY", "DAGSTER_PG_PASSWORD", "HF_TOKEN", "named_in_the_registry")


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


def test_probes_run_at_once():
    """Each waits for all others: one after the other they would never end."""
    barrier = threading.Barrier(4, timeout=5)

    def look():
        barrier.wait()
        yield Line("area", "ok", "met")

    assert [line.state for line in run_probes([Probe("area", look)] * 4, limit_s=10)] == ["ok"] * 4


@given(
    name=st.sampled_from(NAMES),
    secret=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=4).filter(lambda one: one not in MASK),
    before=st.text(),
    after=st.text(),
)
def test_no_value_of_a_secret_variable_is_ever_shown(name: str, secret: str, before: str, after: str):
    shown = mask_secrets(f"{before} {secret} {after}", {name: secret}, NAMES[-1:])
    assert secret not in shown.replace(MASK, "")


def test_credentials_in_a_url_are_masked():
    shown = mask_secrets("cannot reach postgresql://me:hunter2@db:5432/x", {})
    assert "hunter2" not in shown
    assert "db:5432" in shown
