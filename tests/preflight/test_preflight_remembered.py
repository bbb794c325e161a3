"""A verdict on drafts is kept as long as entry, files and versions are what they were, and only where nothing was wrong."""

from __future__ import annotations

import pytest

from draftworks.preflight import drafts, remembered
from draftworks.preflight.remembered import examine_drafts


@pytest.fixture
def looks(monkeypatch):
    """How often drafts were built."""
    seen = []

    def watched(target, files, findings):
        seen.append(target.name)
        plain(target, files, findings)

    plain = drafts.check_drafts
    monkeypatch.setattr(drafts, "check_drafts", watched)
    return seen


def test_what_has_not_changed_is_not_looked_at_again(fleet, tiny_target, tmp_path, looks, monkeypatch):
    fleet.write(strategies={"eagle3": {"options": {"draft_vocab_size": 64}, "training": {"lr": 0.5}}})
    target = fleet.registry.target("small")
    first = examine_drafts(target, tiny_target, tmp_path / "kept")
    assert [one.severity for one in first] == ["warning"]
    assert examine_drafts(target, tiny_target, tmp_path / "kept") == first
    assert len(looks) == 1
    examine_drafts(target.model_copy(update={"max_length": 80}), tiny_target, tmp_path / "kept")
    examine_drafts(target, tiny_target.model_copy(update={"digest": "other"}), tmp_path / "kept")
    monkeypatch.setattr(remembered, "REVISION", 2)
    examine_drafts(target, tiny_target, tmp_path / "kept")
    assert len(looks) == 4


def test_a_mistake_and_a_damaged_verdict_are_looked_at_again(fleet, tiny_target, tmp_path, looks):
    good = fleet.registry.target("small")
    fleet.write(strategies={"eagle3": {"options": {"draft_vocab_size": 64}, "training": {"lr": 9}}})
    bad = fleet.registry.target("small")
    for _ in range(2):
        assert any(one.severity == "error" for one in examine_drafts(bad, tiny_target, tmp_path / "kept"))
    assert len(looks) == 2
    examine_drafts(good, tiny_target, tmp_path / "kept")
    [path] = (tmp_path / "kept").iterdir()
    path.write_text("{")
    assert examine_drafts(good, tiny_target, tmp_path / "kept") == ()
    assert len(looks) == 4
