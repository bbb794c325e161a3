"""Steps in turns: a process works only when it is asked, and shares are of the same turn."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rivals import RIVALS, Race, choose_rival, print_races
from train_step import Case
from turns import WARM_UP, Stepper

WORKER = """
from turns import serve_steps
kept = []
def step():
    kept.append(bytearray(b"1" * 3_000_000))
    open("steps", "w").write(str(len(kept)))
serve_steps(lambda: step, after_torch=1.0)
"""


def test_a_side_steps_only_when_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    place = Path(__file__).resolve().parents[2] / "benchmarks"
    side = Stepper([sys.executable, "-c", WORKER], {"PYTHONPATH": str(place)})
    assert Path("steps").read_text() == str(WARM_UP)
    side.run(2)
    side.run(1)
    side.close()
    assert Path("steps").read_text() == str(WARM_UP + 3)
    assert len(side.seconds) == 3
    assert 3 * (WARM_UP + 3) <= side.step_mb < side.mb


def test_a_side_that_ends_is_an_error():
    with pytest.raises(RuntimeError, match="exit code 3"):
        Stepper([sys.executable, "-c", "raise SystemExit(3)"], {})


def test_ratios_are_of_turns_and_a_missed_aim_is_said(capsys: pytest.CaptureFixture[str]):
    found = Race(Case(512, 4), "SpecForge", [1.0] * 3 + [2.0] * 3, [2.0] * 3 + [8.0] * 3, 30, 100, 20, 40)
    assert found.turn_ratios == [2.0, 4.0]
    print_races([found, replace(found, rival="speculators")])
    said = capsys.readouterr().out
    assert "| eagle3 512x4 | SpecForge | 1,500 (1,000 to 2,000) | 5,000 (2,000 to 8,000) |" in said
    assert said.count("reached") == 1
    assert (
        "Not reached: eagle3 512x4, peak memory above `import torch`, of SpecForge's: 0.3 (aim: at most 0.2)." in said
    )


@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_that_is_not_installed_names_what_installs_it(name: str, tmp_path: Path):
    with pytest.raises(SystemExit, match=f"make {name.lower()}-env"):
        choose_rival(name, tmp_path)
