"""The session on a GPU: its budgets, what a kill leaves, what is measured again, and a part for real on a CPU."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import gpu_session
import pytest
import torch
from session_page import make_page
from session_rows import RowFile
from session_steps import measure_ceilings, sum_kernels
from session_tasks import Part, Session, Settings, Task, allow, keep_open

SETTINGS = Settings("cpu", "tiny", (24, 12), steps=1, warm_up=1)


def hang(task: Task, settings: Settings, rows: RowFile, ready) -> None:
    ready()
    rows.add(task.part, task.name, key="first", ms=1.0)
    time.sleep(600)


def succeed(task: Task, settings: Settings, rows: RowFile, ready) -> None:
    ready()
    rows.add(task.part, task.name, key="figure", ms=2.0)


def fail(task: Task, settings: Settings, rows: RowFile, ready) -> None:
    raise ValueError("no such kernel\nand more")


def make_task(name: str, cap: float = 30.0) -> Task:
    return Task("part", name, f"{__name__}:{name}", cap)


@pytest.fixture
def rows(tmp_path: Path) -> RowFile:
    return RowFile(tmp_path / "rows.jsonl", "card")


def test_a_task_that_hangs_is_killed_keeps_its_rows_and_the_session_goes_on(rows: RowFile) -> None:
    tasks = (make_task("hang", 1.0), make_task("fail"), make_task("succeed"))
    Session(SETTINGS, rows).run([Part("part", 60, tasks)], 60)
    found = [(row["task"], row.get("key"), row.get("problem")) for row in rows.read() if "ended" not in row]
    assert set(found) == {
        ("hang", "first", None),
        ("hang", None, "killed after 1 s"),
        ("fail", None, "ValueError: no such kernel"),
        ("succeed", "figure", None),
    }
    assert [name for name in ("hang", "fail", "succeed") if rows.ended("part", name)] == ["succeed"]


def test_what_has_no_time_left_is_left_out_and_told(rows: RowFile) -> None:
    Session(SETTINGS, rows).run([Part("part", 0, (make_task("succeed"),)), Part("part", 9, (make_task("fail"),))], 1)
    assert [row["problem"] for row in rows.read()] == ["left out: no time is left"] * 2


def test_a_task_gets_the_least_of_its_cap_its_part_and_the_session() -> None:
    task = make_task("succeed", 30)
    assert [allow(task, 50, 40), allow(task, 20, 40), allow(task, 50, 10), allow(task, 3, 40)] == [30, 20, 10, 0]


def test_resumed_only_what_this_card_lacks_is_measured(rows: RowFile) -> None:
    other = RowFile(rows.path, "other card")
    rows.add("strategies", "eagle3 default", key="step", ended=1)
    other.add("strategies", "dflash default", key="step", ended=1)
    rows.add("strategies", "domino default", problem="killed after 45 s")
    with rows.path.open("a") as file:
        file.write('{"card": "card", "part"')
    parts = gpu_session.list_parts(["strategies"], rows, gpu_session.BUDGETS)
    (kept,) = keep_open(parts, rows, resume=True, only=["default"])
    assert len(kept.tasks) == len(gpu_session.STRATEGIES) - 1
    assert {"dflash default", "domino default"} <= {task.name for task in kept.tasks}
    assert len(keep_open(parts, rows, resume=False)[0].tasks) == 2 * len(gpu_session.STRATEGIES)


def test_kernels_are_those_of_the_strategies_with_the_least_mfu(rows: RowFile) -> None:
    assert gpu_session.find_worst(rows) == ["domino", "xpress"]
    for name, mfu in {"eagle3": 0.3, "dspark": 0.1, "peagle": 0.2}.items():
        rows.add("strategies", f"{name} default", key="step", strategy=name, mode="default", mfu=mfu)
    assert gpu_session.find_worst(rows) == ["dspark", "peagle"]


def test_idle_is_what_no_kernel_covers() -> None:
    def event(name: str, begin: int, length: int) -> SimpleNamespace:
        given = {"name": name, "start_ns": begin, "duration_ns": length, "device_type": "DeviceType.CUDA"}
        return SimpleNamespace(**{key: lambda value=value: value for key, value in given.items()})

    found = sum_kernels([event("a", 0, 10), event("b", 5, 10), event("a", 35, 5)], torch.device("cuda"))
    assert found["idle_share"] == pytest.approx(0.5)
    assert [(each["name"], each["calls"]) for each in found["kernels"]] == [("a", 2), ("b", 1)]


def test_ceilings_are_measured_and_are_on_the_page(rows: RowFile) -> None:
    task = Task("ceilings", "ceilings", "session_steps:measure_ceilings", 20)
    measure_ceilings(task, SETTINGS, rows, lambda: None)
    product, copy = (json.loads(line) for line in rows.path.read_text().splitlines())
    assert product["tflops"] == pytest.approx(2 * 256**3 / product["ms"] / 1e9)
    assert copy["tb_per_s"] > 0
    rows.add("peers", "dflash SpecForge", problem="killed after 80 s")
    page = make_page(rows.path)
    assert "| product |" in page
    assert "dflash SpecForge: killed after 80 s" in page
