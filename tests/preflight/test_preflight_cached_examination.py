"""Findings are cached while entry, files, data and versions are unchanged, and only if there was no error."""

from __future__ import annotations

from functools import partial

import pytest

from draftworks.preflight import drafts, sample
from draftworks.preflight import examine as examination
from draftworks.preflight.examine import examine_before_run


@pytest.fixture
def looks(monkeypatch):
    """The names of the expensive checks that ran, in order."""
    seen = []

    def watched(plain, name, *args):
        seen.append(name)
        plain(*args)

    for module, name in ((drafts, "check_drafts"), (sample, "check_sample")):
        monkeypatch.setattr(module, name, partial(watched, getattr(module, name), name))
    return seen


@pytest.fixture
def examine(fleet, tiny_target, tmp_path):
    """Examine the fleet's target, with the arguments that a test changes."""

    def examined(**changed):
        given = {"target": fleet.registry.load_target("small"), "files": tiny_target, "data": {"chats": "a"}, **changed}
        return examine_before_run(registry=fleet.registry, cache_folder=tmp_path / "kept", **given)

    return examined


def test_what_has_not_changed_is_not_looked_at_again(fleet, tiny_target, examine, looks, monkeypatch):
    fleet.write(strategies={"eagle3": {"options": {"draft_vocab_size": 64}, "training": {"lr": 0.5}}})
    first = examine()
    assert [one.severity for one in first] == ["warning"]
    assert examine() == first
    assert looks == ["check_drafts", "check_sample"]
    examine(target=fleet.registry.load_target("small").model_copy(update={"max_length": 80}))
    examine(files=tiny_target.model_copy(update={"digest": "other"}))
    examine(data={"chats": "b"})
    monkeypatch.setattr(examination, "REVISION", 9)
    examine()
    assert len(looks) == 10


def test_a_mistake_and_a_damaged_verdict_are_looked_at_again(fleet, examine, looks, tmp_path):
    good = fleet.registry.load_target("small")
    fleet.write(strategies={"eagle3": {"options": {"draft_vocab_size": 64}, "training": {"lr": 9}}})
    for _ in range(2):
        assert any(one.severity == "error" for one in examine())
    assert len(looks) == 4
    assert examine(target=good) == ()
    [path] = (tmp_path / "kept").iterdir()
    path.write_text("{")
    assert examine(target=good) == ()
    assert len(looks) == 8
