"""Planted defects apply to the code as it is, are of every room, and `tools.planted_defects` finds who notices one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tools.planted_defects.defects import Defect, read_defects
from tools.planted_defects.judging import read_marks, read_verdicts
from tools.planted_defects.stages import ImportMap

ROOT = Path(__file__).resolve().parents[2]
DEFECTS = read_defects(ROOT / "tests")


def list_folders(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if (path / "__init__.py").is_file()}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.id)
def test_a_planted_defect_applies_once_and_compiles(defect: Defect):
    assert defect.find_problem(ROOT) is None


def test_every_room_has_a_defect_and_every_strategy():
    rooms = list_folders(ROOT / "draftworks") | {"spec_assets", "resources", "jobs", "sensors"}
    assert not rooms - {defect.room for defect in DEFECTS}
    strategies = {Path(defect.file).parent.name for defect in DEFECTS if defect.room == "strategies"}
    assert not list_folders(ROOT / "draftworks" / "strategies") - strategies


def test_defects_are_named_by_words_and_say_whom_they_hurt_and_where_they_come_from():
    assert not [name for name, times in Counter(defect.id for defect in DEFECTS).items() if times > 1]
    for defect in DEFECTS:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", defect.id)
        assert defect.harm.strip(), defect.id
        assert re.fullmatch(r"fix: .+|survived an earlier trial|made up", defect.origin), defect.id


def test_at_least_fifty_defects_of_which_about_half_were_mended_once():
    mended = [defect for defect in DEFECTS if defect.origin != "made up"]
    assert len(DEFECTS) >= 50
    assert len(mended) >= 0.4 * len(DEFECTS)


def test_the_tests_are_selected_as_make_test_selects_them():
    assert read_marks(ROOT / "Makefile").startswith("not long and")


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("LIMIT = 9", "LIMIT = 8", "0 times"),
        ("LIMIT", "MOST", "2 times"),
        ("LIMIT = 3", "LIMIT = (", "would not compile"),
        ("LIMIT = 3", "LIMIT  =  3", "says the same"),
        ("LIMIT = 3", "LIMIT = 4", None),
    ],
)
def test_a_defect_that_cannot_be_planted_is_told(tmp_path: Path, before: str, after: str, problem: str | None):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "limit.py").write_text("LIMIT = 3\nassert LIMIT\n")
    found = Defect("a-b", "jobs/limit.py", before, after, "", "").find_problem(tmp_path)
    assert found is None if problem is None else problem in str(found)
    assert "does not exist" in str(Defect("a-b", "jobs/none.py", before, after, "", "").find_problem(tmp_path))


FILES = {
    "Makefile": "test:\n\tpytest -m 'not long'\n",
    "pyproject.toml": "[tool.pytest.ini_options]\ntimeout = 60\npythonpath = ['tests/toys']\nmarkers = ['long', 'slow']\n",
    "sensors/__init__.py": "",
    "jobs/__init__.py": "",
    "sensors/alarm.py": "LIMIT = 3\n\n\ndef is_loud(level):\n    return level > LIMIT\n",
    "jobs/ring.py": "from sensors.alarm import is_loud\n\n\ndef ring(level):\n    return is_loud(level)\n",
    "tests/sensors/test_sensors_alarm.py": "from sensors.alarm import is_loud\n\n\ndef test_five_is_loud():\n    assert is_loud(5)\n",
    "tests/sensors/test_sensors_other.py": "import sensors.alarm\n\n\ndef test_that_fails_always():\n    assert not sensors.alarm\n",
    "tests/toys/alarm_toys.py": "from sensors.alarm import LIMIT\n",
    "tests/sensors/test_sensors_toy.py": "from alarm_toys import LIMIT\n\n\ndef test_limit():\n    assert int(LIMIT) == 3\n",
    "tests/sensors/test_sensors_rest.py": "def test_nothing():\n    pass\n",
    "tests/jobs/test_jobs_ring.py": "from jobs.ring import ring\n\n\ndef test_three_rings_not():\n    assert not ring(3)\n",
    "tests/jobs/test_jobs_rest.py": "def test_nothing():\n    pass\n",
    "tests/resources/test_resources_rest.py": "def test_nothing():\n    pass\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_near_tests_are_asked_first_then_the_room_and_those_that_import_it(checkout: Path):
    found = ImportMap(checkout).order_stages("sensors/alarm.py")
    near = [f"tests/sensors/test_sensors_{name}.py" for name in ("alarm", "other", "toy")]
    assert [(stage.name, stage.files) for stage in found] == [
        ("near", near),
        ("close", ["tests/jobs/test_jobs_ring.py"]),
        ("room", ["tests/sensors/test_sensors_rest.py"]),
        ("jobs", ["tests/jobs/test_jobs_rest.py"]),
    ]


JUDGE = """
import json, pathlib
from dataclasses import asdict
from tools.planted_defects.defects import Defect
from tools.planted_defects.judging import Judge, append_verdict

def plant(name, before, after):
    return Defect(name, "sensors/alarm.py", before, after, "", "")

copy = pathlib.Path.cwd()
(copy / "notes").mkdir()
judge = Judge(copy, copy / "notes", 60.0)
defects = [plant("seen-near", "level >", "level < -"), plant("seen-above", "> LIMIT", ">= LIMIT")]
verdicts = [judge.judge(each) for each in defects]
doubtful = judge.doubt(verdicts)
verdicts += [judge.judge(each) for each in defects if each.id in doubtful]
verdicts.append(judge.judge(plant("not-seen", "LIMIT = 3", "LIMIT = 3.5")))
verdicts.append(judge.judge(plant("ends-the-run", "return level > LIMIT", "__import__('os').kill(0, 15)")))
for each in verdicts:
    append_verdict(copy / "results", each)
print(json.dumps({"doubtful": sorted(doubtful), "verdicts": [asdict(each) for each in verdicts]}))
"""


@pytest.mark.long
def test_who_notices_a_defect_is_found_and_a_test_that_always_fails_notices_nothing(checkout: Path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), str(ROOT)])}
    command = [sys.executable, "-c", JUDGE]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    noticed = [(each["id"], each["noticed_by"], each["judged"]) for each in said["verdicts"]]
    assert said["doubtful"] == ["seen-above"]
    assert noticed == [
        ("seen-near", "tests/sensors/test_sensors_alarm.py::test_five_is_loud", True),
        ("seen-above", "tests/sensors/test_sensors_other.py::test_that_fails_always", True),
        ("seen-above", "tests/jobs/test_jobs_ring.py::test_three_rings_not", True),
        ("not-seen", None, True),
        ("ends-the-run", None, False),
    ]
    assert (checkout / "sensors" / "alarm.py").read_text() == FILES["sensors/alarm.py"]
    changed = [Defect("seen-near", "sensors/alarm.py", "level >", "level <", "", "")]
    assert not read_verdicts(checkout / "results", changed), "a verdict of another change is none"
