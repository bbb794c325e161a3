"""The benchmark of the code location makes a registry whose targets are sound, and counts the time of its processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import code_location
import pytest

from draftworks.targets.registry import Registry


@pytest.mark.long
def test_every_target_of_its_registry_passes_the_check(tmp_path: Path) -> None:
    code_location.make_registry(tmp_path / "registry", 2)
    assert len(Registry(tmp_path / "registry").list_targets()) == 2
    command = [sys.executable, "-c", code_location.COMMAND, "check", "--json", "--registry", str(tmp_path / "registry")]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["problems"] == []
    assert [each["errors"] for each in found["targets"].values()] == [[], []]


def test_the_time_of_a_process_is_counted_and_not_that_of_this_one() -> None:
    spin = "import time\nwhile time.process_time() < 0.5: pass"
    assert code_location.run_python([spin]) >= 0.5
    assert code_location.run_python(["pass"]) < 0.5
