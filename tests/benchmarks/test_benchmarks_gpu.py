"""The benchmark of a GPU, on a CPU at small sizes, as on a machine that has the engine alone.
The formulas count what torch does: its linear products to a few percent, its attention per pair of query and key.
The session on a GPU: its budgets, what a kill leaves, what is measured again, and a part for real on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import gpu
import gpu_session
import pytest
import torch
from gpu_cases import (
    SHAPES,
    engine_strategies,
    made_up_draft,
    made_up_samples,
    made_up_target,
    names_of,
    select_options,
)
from gpu_flops import FORMULAS, Layer, Work, peak_flops
from session_page import make_page
from session_rows import RowFile
from session_steps import measure_ceilings, sum_kernels
from session_tasks import Part, Session, Settings, Task, allow, keep_open
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, mm_flop

from draftworks.drafts.strategy import StepContext

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
ABSENT = ["dagster", "dagster_pipes", "pyarrow", "pandas", "matplotlib", "httpx", "psutil", "tenacity"]
ALONE = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({ABSENT}))  # importing one of them fails now
sys.argv = sys.argv[1:]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
SMALL = gpu.Case("tiny", (24, 12), "bfloat16", "auto", False, steps=1, warm_up=0)


@pytest.mark.long
def test_prints_tables_and_writes_json_where_there_is_no_dagster(tmp_path: Path) -> None:
    options = ["--size", "tiny", "--strategy", "dflash", "--length", "24", "--batch", "2", "--steps", "2"]
    command = [sys.executable, "-c", ALONE, str(SCRIPT), *options, "--warm-up", "1", "--device", "cpu"]
    command += ["--peak-tflops", "2", "--json", str(tmp_path / "out.jsonl")]
    paths = os.pathsep.join([str(ROOT), str(SCRIPT.parent)])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "peak 2 TFLOP/s" in done.stdout
    assert done.stdout.count("dflash") == 6
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    compared = [line["difference"] for line in lines if "difference" in line]
    assert [(one["dtype"], one["layout"]) for one in compared] == [
        (dtype, layout) for dtype in ("float32", "bfloat16") for layout in ("padded", "packed")
    ]
    assert max(one["loss"] for one in compared[:2]) < 1e-5 < compared[2]["gradient"] < 0.01
    steps = [line["step"] for line in lines if "step" in line]
    assert [one["layout"] for one in steps] == ["padded", "packed"]
    for one in steps:
        seconds = one["times"]["step_ms"] / 1e3
        assert one["tokens_per_s"] == pytest.approx(36 / seconds)
        assert one["mfu"] == pytest.approx(one["tflop"] / seconds / 2)


@pytest.mark.parametrize("where", ["trainer_core", "measure"])
def test_what_does_not_fit_is_told_and_the_next_one_measured(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    plain, calls = getattr(gpu, where), []

    def full_at_first(*args):
        calls.append(args)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
        return plain(*args)

    monkeypatch.setattr(gpu, where, full_at_first)
    padded, packed = gpu.measured(["dflash"], SMALL, torch.device("cpu"), None)
    assert gpu.result_row(padded).split(maxsplit=2) == ["dflash", "padded", "CUDA out of memory"]
    assert packed.times is not None
    assert gpu.result_row(packed).split()[-1] == "–"


def test_requirements_of_a_gpu_machine_are_the_projects_own() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {*project["dependencies"], *project["optional-dependencies"]["test"]}
    lines = (ROOT / "tools" / "gpu-requirements.txt").read_text().splitlines()
    assert {line for line in lines if not line.startswith("#")} <= known


SHAPE, LENGTHS = SHAPES["tiny"], (40, 40)
ADDED_IN_PLACE = torch.ops.aten.addmm_
"""Which torch's counter does not know."""


class ProductCounter(TorchDispatchMode):
    """Sums torch's own counts by operator.

    torch's FlopCounterMode counts by module as well, with hooks that gradients of a chunk's loss do not allow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        operator = func.overloadpacket
        if operator is ADDED_IN_PLACE:
            self.found[operator] += mm_flop(*args[1:3], out_val=result)
        elif operator in flop_registry:
            self.found[operator] += flop_registry[operator](*args, **(kwargs or {}), out_val=result)
        return result


def counted_and_written_down(name: str):
    strategy = made_up_draft(name, SHAPE, made_up_target(SHAPE), attention="eager")
    samples = made_up_samples(strategy, SHAPE, LENGTHS)
    batch = strategy.collate(samples, names_of(samples))
    with ProductCounter() as counter:
        output = strategy.forward_loss(batch, StepContext(1, 4, training=True))
        output.loss_sum.backward()
    work = Work.of(samples, output.metric_sums["acc_denoms"].tolist())
    return counter.found, FORMULAS[name](SHAPE, select_options(name, SHAPE), work)


@pytest.mark.parametrize("name", engine_strategies())
def test_linear_products_are_those_that_torch_counts(name):
    found, expected = counted_and_written_down(name)
    linear = sum(found[operator] for operator in (torch.ops.aten.mm, torch.ops.aten.addmm, ADDED_IN_PLACE))
    assert linear == pytest.approx(expected.products, rel=0.01)


@pytest.mark.parametrize(("name", "dense"), [("eagle3", 3 * 2 * 40 * 40), ("dflash", 2 * 2 * 64 * (40 + 64))])
def test_attention_is_what_torch_counts_for_as_many_pairs(name, dense):
    """The written-out back end computes every pair, masked or not: `dense`, steps or layers times samples times pairs of each."""
    found, expected = counted_and_written_down(name)
    assert found[torch.ops.aten.bmm] == Layer(SHAPE).attention(dense)
    assert 0.2 * found[torch.ops.aten.bmm] < expected.attention < 0.7 * found[torch.ops.aten.bmm]


def test_padding_and_packing_ask_for_the_same():
    strategy = made_up_draft("dflash", SHAPE, made_up_target(SHAPE))
    samples = made_up_samples(strategy, SHAPE, (40, 25))
    rows = [
        tuple(
            strategy.forward_loss(lay(samples, names_of(samples)), StepContext(1, 4, training=True))
            .metric_sums["acc_denoms"]
            .tolist()
        )
        for lay in (strategy.collate, strategy.pack)
    ]
    assert rows[0] == rows[1]


def test_known_devices_have_a_peak_and_others_none():
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA L40S") == 362e12
    assert peak_flops("cpu") is None


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
    Session(SETTINGS, rows).run([Part("part", 0, (make_task("succeed"),)), Part("part", 9, (make_task("succeed"),))], 1)
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
