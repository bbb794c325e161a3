"""The benchmark of feature IO: every side is timed on the same bytes, and shares are medians of the turns' quotients.
The benchmark of the demo reads what its report says, and copies no result that would be a hit.
Rates of engine `hf`: all sides work on the same tokens, and shares are of the same turn.
The benchmark of the code location makes a registry whose targets are sound, and counts the time of its processes.
Shares of the raw calls' speed, computed round by round.
docs/benchmarks.md is what `benchmarks/page.py` makes of the kept results, and of nothing else.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import code_location
import mooncake_store
import page
import pytest
import torch
from demo import choose_left_out, read_walk
from feature_io import TIMES, format_turns, list_aims, measure
from figures import Aim, format_table
from hf_rates import Rate, print_turns
from hf_rates import measure as measure_hf
from mooncake_store import Side
from page import COMMANDS, PAGE, RESULTS, ROOT, TEMPLATE, Machine, Result, read_results, render_page, run_benchmark

from draftworks.targets.registry import Registry


def test_every_side_is_timed_and_leaves_nothing_behind(tmp_path: Path):
    found = measure(samples=2, tokens=8, hidden=16, folder=tmp_path)
    assert tuple(found) == TIMES
    assert all(rate > 0 for rates in found.values() for rate in rates)
    assert list(tmp_path.iterdir()) == []


def test_a_share_is_of_the_baseline_of_the_same_turn():
    turns = [{action: [10.0 ** (turn + at % 2), 1.0] for at, action in enumerate(TIMES)} for turn in range(3)]
    table = format_turns("this", turns).splitlines()
    assert table[2] == "| plain write | 10.00 (1.00 to 100.00) | 1.00 (1.00 to 1.00) |  |  |"
    assert "| 10.00 (10.00 to 10.00) | 1.00 (1.00 to 1.00) |" in table[3]


def test_a_read_that_is_slow_has_to_be_near_its_baseline():
    turn = dict.fromkeys(TIMES, [3.0, 1.0])
    assert [aim.reached for aim in list_aims([turn])] == [True, True, True]
    assert [aim.reached for aim in list_aims([{**turn, "copy + hash": [4.0, 1.0]}])] == [True, False, True]
    assert [aim.reached for aim in list_aims([{**turn, "first read": [4.0, 1.0], "copy + hash": [9.0, 1.0]}])][1]


def test_the_walk_is_that_of_the_trained_draft_with_its_interval(tmp_path: Path) -> None:
    folder = tmp_path / "eagle3_report" / "tiny" / "digest" / "heldout"
    folder.mkdir(parents=True)
    walk = {"rung": 3, "acceptance": {"micro": 1.0918, "low": 1.0, "high": 1.2}}
    drafts = {"trained": {"rungs": [{"rung": 1, "acceptance": None}, walk]}}
    (folder / "report.json").write_text(json.dumps({"drafts": drafts}))
    assert read_walk(tmp_path, "eagle3") == "2.092 (2.000 to 2.200)"


def test_a_copy_of_a_checkout_has_its_registry_and_no_results(tmp_path: Path) -> None:
    for name in ("var/eagle3_draft", "draftworks/storage", ".venv/lib", ".venv-sglang", ".dagster/storage"):
        (tmp_path / "one" / name).mkdir(parents=True)
    (tmp_path / "one" / ".dagster" / "dagster.yaml").touch()
    shutil.copytree(tmp_path / "one", tmp_path / "two", ignore=choose_left_out)
    copied = {path.relative_to(tmp_path / "two").as_posix() for path in (tmp_path / "two").rglob("*")}
    assert copied == {"draftworks", "draftworks/storage", ".dagster", ".dagster/dagster.yaml"}


@pytest.mark.long
def test_all_sides_make_the_same_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    turns = measure_hf(tmp_path, conversations=5, turns=1)
    tokens = {name: rates[0].tokens for name, rates in turns.items()}
    assert tokens["capture"] == tokens["bare forward"] == tokens["bare forward, no head"] > 0
    assert 0 < tokens["greedy generate"] <= tokens["greedy answers"]  # it stops where the longest prompt has to
    assert tokens["sampled generate"] > 0
    print_turns(turns)
    assert "aim: at least 1.5" in capsys.readouterr().out


def test_a_share_is_of_the_rival_of_the_same_turn(capsys: pytest.CaptureFixture[str]):
    ours, rival = [Rate(10, 1, 1), Rate(30, 1, 1)], [Rate(5, 1, 1), Rate(10, 1, 1)]
    names = ("greedy answers", "sampled answers", "capture")
    rivals = ("greedy generate", "sampled generate", "bare forward", "bare forward, no head")
    print_turns(dict.fromkeys(names, ours) | dict.fromkeys(rivals, rival))
    assert "| greedy generate | 8 (5 to 10) | 2.50 (2.00 to 3.00) |" in capsys.readouterr().out


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


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


def test_shares_are_medians_of_quotients_and_all_sides_run_in_every_round(monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr(mooncake_store.time, "perf_counter", clock)
    freed: list[str] = []

    def build(name: str, put_s: float, get_s: float) -> Side:
        return Side(
            name,
            lambda index, _: clock.work(put_s * (1 + index)),  # each round is slower than the one before
            lambda index, _: clock.work(get_s * (1 + index)),
            lambda _: freed.append(name),
        )

    figures = mooncake_store.measure([build("raw", 1.0, 2.0), build("ours", 1.25, 4.0)], torch.zeros(250_000), rounds=5)
    assert figures["raw"] == {"put_mb_per_s": 0, "get_mb_per_s": 0, "put_share_of_raw": 1.0, "get_share_of_raw": 1.0}
    assert (figures["ours"]["put_share_of_raw"], figures["ours"]["get_share_of_raw"]) == (0.8, 0.5)
    assert sorted(freed) == ["ours"] * 7 + ["raw"] * 7


RESULT = Result(
    command="python benchmarks/x.py",
    date="2026-11-24T03:00:00+00:00",
    machine=Machine("A CPU", "AVX2", 1, "2.13.0"),
    load=(0.5, 0.1),
    seconds=3,
    output=f"{format_table(['', 'ms'], [['ours', '3 (2 to 4)']])}\n\n* {Aim('ours', 3, 2, at_most=True)}",
)


def test_the_page_is_that_of_the_kept_results():
    assert PAGE.read_text() == render_page(TEMPLATE.read_text(), read_results(RESULTS))


def test_every_benchmark_has_its_place_and_its_script():
    places = re.findall(r"<!-- result (\w+) -->", TEMPLATE.read_text())
    assert sorted(places) == sorted(COMMANDS)
    assert all((ROOT / re.findall(r"benchmarks/\w+\.py", command)[0]).exists() for command in COMMANDS.values())
    assert {path.stem for path in RESULTS.glob("*")} <= set(COMMANDS)


def test_a_section_without_its_result_is_left_out_and_named():
    template = "# Page\n\n## One\n\ntext\n\n<!-- result hf_rates -->\n\n## Two\n\n<!-- result prune -->\n"
    text = render_page(template, {"hf_rates": RESULT})
    assert "## One\n\ntext\n\n```bash\npython benchmarks/x.py\n```\n\n| " in text
    assert "*24 November 2026; A CPU (AVX2, 1 core), torch 2.13.0; load 0.1 to 0.5.*" in text
    assert "## Two" not in text
    assert "* `python benchmarks/prune.py`" in text.partition("## Without figures")[2]


def test_a_missed_aim_is_listed_and_a_reached_one_is_not():
    template = "## One\n\n<!-- result hf_rates -->\n"
    missed = render_page(template, {"hf_rates": RESULT}).partition("## Aims that were not reached\n\n")[2]
    assert missed.startswith("* ours: 3 (aim: at most 2). (`hf_rates`)\n")
    reached = replace(RESULT, output=f"* {Aim('ours', 3, 2)}")
    assert "not reached" not in render_page(template, {"hf_rates": reached})


def test_output_without_a_table_is_shown_as_text():
    assert "```text\na  b\n```" in replace(RESULT, output="a  b\n").render()


def test_a_benchmark_that_fails_keeps_the_result_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(page, "COMMANDS", {"prune": "false", "plan": "echo ms"})
    monkeypatch.setattr(page, "TEMPLATE", tmp_path / "template.md")
    (tmp_path / "template.md").write_text("## A\n\n<!-- result prune -->\n\n## B\n\n<!-- result plan -->\n")
    RESULT.write(tmp_path / "prune.json")
    with pytest.raises(SystemExit, match="prune"):
        page.main(only=None, render=False)
    assert Result.read(tmp_path / "prune.json") == RESULT
    assert "```text\nms\n```" in (tmp_path / "page.md").read_text()


def test_a_run_file_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page, "ROOT", tmp_path)
    with pytest.raises(FileNotFoundError, match="make demo"):
        run_benchmark("echo {eagle3_draft}")
