"""The example of docs/how-to/own-stream.md, as it stands there."""

from __future__ import annotations

import runpy

import pytest
from documents import ROOT


def test_the_example_of_an_online_training_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(ROOT)
    runpy.run_path("tests/stream/example_online_training.py")
    assert "3 steps, loss" in capsys.readouterr().out
