"""A format of another package is written, checked, read and imported like the built-in ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from draftworks.config.strategies import register_strategy, resolve_export, resolve_strategy
from draftworks.errors import ConfigError
from draftworks.export.names import GATE_MEANINGS
from draftworks.strategies.eagle3.options import EAGLE3

HERE = Path(__file__).parent


def test_a_plugged_in_format_passes_every_gate_and_comes_back(tmp_path: Path):
    command = [sys.executable, str(HERE / "plugin_worker.py"), str(tmp_path)]
    paths = [HERE / "plugin", HERE.parent / "toys"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert list(report["gates"]) == list(GATE_MEANINGS)
    assert report["failed"] == {}
    assert report["layer_ids"] == [layer - 1 for layer in report["taps"]]
    assert report["imported"] == ["fused", "fused_eagle3"]
    assert report["same"]


def test_a_format_whose_name_is_taken_is_refused():
    """Otherwise its drafts would be counted and read as drafts of the other strategy."""
    with pytest.raises(ConfigError, match="export format 'sglang_eagle3' belongs to strategy 'eagle3'"):
        register_strategy(replace(EAGLE3, name="late"))
    with pytest.raises(ConfigError, match="unknown strategy 'late'"):
        resolve_strategy("late")


def test_layers_are_counted_in_a_known_way_or_not_at_all():
    with pytest.raises(ConfigError, match="counting: expected one of layers_passed, layer_output, found 'from_1'"):
        replace(resolve_export("sglang_eagle3"), counting="from_1")
