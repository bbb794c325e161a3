"""What is asked of a change: the tests near it and of its room, those that use a toy, and itself if it is a test."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.changed_tests import ALWAYS, list_changed_files, select_tests

FILES = {
    "sensors/alarm.py": "LIMIT = 1\n",
    "sensors/other.py": "import sensors.alarm\n",
    "jobs/ring.py": "import sensors.other\n",
    "tests/toys/bell.py": "",
    "tests/sensors/test_sensors_alarm.py": "import sensors.alarm\n",
    "tests/sensors/test_sensors_rest.py": "",
    "tests/jobs/test_jobs_ring.py": "import jobs.ring\nimport bell\n",
    "tests/jobs/test_jobs_rest.py": "",
    "tests/docs/test_docs_links.py": "",
    "docs/page.md": "",
    ALWAYS[0]: "",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("sensors/alarm.py", ["tests/sensors/test_sensors_alarm.py", "tests/sensors/test_sensors_rest.py"]),
        ("sensors/alarm.md.j2", ["tests/sensors/test_sensors_alarm.py", "tests/sensors/test_sensors_rest.py"]),
        ("jobs/ring.py", ["tests/jobs/test_jobs_ring.py", "tests/jobs/test_jobs_rest.py"]),
        ("tests/toys/bell.py", ["tests/jobs/test_jobs_ring.py"]),
        ("tests/jobs/test_jobs_rest.py", ["tests/jobs/test_jobs_rest.py"]),
        ("tests/jobs/conftest.py", ["tests/jobs"]),
        ("docs/page.md", ["tests/docs"]),
        ("pyproject.toml", ["tests/house"]),
    ],
)
def test_a_change_selects_what_is_near_it(checkout: Path, changed, expected):
    assert select_tests(checkout, [changed]) == [*expected, *([] if "tests/house" in expected else ALWAYS[:1])]


def test_several_changes_select_each_test_once_and_a_folder_holds_its_files(checkout: Path):
    changed = ["sensors/alarm.py", "tests/sensors/test_sensors_alarm.py", "tests/sensors/conftest.py"]
    assert select_tests(checkout, changed) == ["tests/sensors", ALWAYS[0]]


def test_changed_files_are_those_that_differ_or_are_new_and_still_there(checkout: Path):
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *words], cwd=checkout, check=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    assert list_changed_files(checkout, "HEAD") == []
    (checkout / "sensors" / "alarm.py").write_text("LIMIT = 2\n")
    (checkout / "jobs" / "ring.py").unlink()
    (checkout / "jobs" / "new.py").touch()
    assert list_changed_files(checkout, "HEAD") == ["sensors/alarm.py", "jobs/new.py"]
    git("commit", "-qam", "second")
    assert list_changed_files(checkout, "HEAD~1") == ["sensors/alarm.py", "jobs/new.py"]
    with pytest.raises(subprocess.CalledProcessError):
        list_changed_files(checkout, "nowhere")
