"""`make test-long` asks each long test once, and goes on after what passed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tools.long_tests import digest_checkout, list_parts, read_passed

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "marks",
    [("long",), ("hypothesis",), ("long", "sglang"), ("long", "mooncake"), ("long", "cluster"), ("long", "ray")]
    + [("long", "sglang", "mooncake")],
    ids="-".join,
)
@pytest.mark.parametrize("room", ["spec_assets", "data"])
def test_each_long_test_is_in_one_part(marks: tuple[str, ...], room: str):
    asked = [
        part.name
        for part in list_parts(ROOT, "")
        if any(path in ("tests", f"tests/{room}") for path in part.paths)
        and Expression.compile(part.marker).evaluate(lambda name, **_: name in marks)
    ]
    real = [name for name in asked if name.endswith("-real-starts")]
    assert len(asked) - len(real) == 1
    assert not real or marks == ("hypothesis",), "what is long is not asked a second time with real starts"


def test_every_folder_of_tests_is_in_a_part():
    paths = {path for part in list_parts(ROOT, "") for path in part.paths}
    assert {str(path.parent.relative_to(ROOT)).split("/")[1] for path in (ROOT / "tests").glob("*/**/test_*.py")} <= {
        path.removeprefix("tests/") for path in paths
    }


def test_what_passed_counts_for_the_same_checkout_only(tmp_path: Path):
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *who, *command], cwd=tmp_path, check=True)
    state, before = tmp_path / ".git" / "long.json", digest_checkout(tmp_path)
    state.write_text(f'{{"checkout": "{before}", "passed": {{"data": 1.5}}}}')
    assert read_passed(state, digest_checkout(tmp_path)) == {"data": 1.5}
    (tmp_path / "new.py").write_text("")
    assert read_passed(state, digest_checkout(tmp_path)) == {}
    state.write_text("{")
    assert read_passed(state, before) == {}
