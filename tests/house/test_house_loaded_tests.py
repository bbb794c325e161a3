"""`make test-loaded`: its files exist, and it tells who failed in any of its turns."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from processes import lives

from tools.loaded_tests import FILES, ROOT, Turn, busy, describe, main, run_tests


def test_its_files_exist():
    assert not [file for file in FILES if not (ROOT / file).exists()]


def test_busy_processes_end_with_the_block():
    before = set(psutil.Process().children())
    with busy(2):
        started = set(psutil.Process().children()) - before
        assert len(started) == 2
    assert not any(map(lives, started))


def test_who_failed_is_told_with_how_often():
    told = describe([Turn(3, ("a::x", "a::y")), Turn(3, ("a::x",)), Turn(3, ())])
    assert told.splitlines() == [
        "failed in 2 of 3 turns: a::x",
        "failed in 1 of 3 turns: a::y",
        "3 turns of 3 tests, 2 tests failed in any",
    ]


@pytest.mark.long
def test_a_failure_in_a_turn_is_its_exit_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (tmp_path / "test_it.py").write_text(
        "from pathlib import Path\ndef test_once():\n    (Path(__file__).parent / 'ran').touch(exist_ok=False)\n"
    )
    assert main(["--turns", "2", "--busy", "1", "--workers", "1", "--rootdir", str(tmp_path), str(tmp_path)]) == 1
    assert "failed in 1 of 2 turns: test_it::test_once" in capfd.readouterr().out


def test_a_run_without_a_report_is_an_error():
    with pytest.raises(RuntimeError, match="exit code 4 and no report"):
        run_tests(["--no-such-option"])
