"""Every table of every command fits a terminal of 80 columns, and one of 120, with each word and digest whole.
`draftworks slices`: from a fall in traffic over weights to a draft that was trained with them, as a user sees it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from acting_fleet import ActingFleet
from click.testing import Result
from decision_site import HOUR, DecisionSite
from metrics_server import Pages, serve_pages, sglang_pages
from observed_site import ObservedSite
from planning_toys import PlannedTarget
from report_folders import ReportFolders
from service_site import ServiceSite
from sliced_site import publish_sliced_report, publish_weighted_draft
from typer.testing import CliRunner

from draftworks.data.slices import read_plan
from draftworks.decision.record import Choice
from draftworks.evaluation.report import text_tables
from draftworks.evaluation.report.text_tables import SHORT_DIGEST, TextTable, render_text_table
from draftworks.programs.cli import COMMANDS, app
from draftworks.programs.keys import FILES
from draftworks.programs.summary import build_acceptance_table, build_strategy_metrics_table
from draftworks.storage.artifacts import Artifact

DIGEST = re.compile(r"[0-9a-f]{16}")
SENTENCES = {
    "check",
    "doctor",
    "run",
    "ui",
    "engine",
    "import",
    "export-features",
    "notify",
    "promote",
    "rollback",
    "page",
    "new",
}
SENTENCES |= {"exchange", "in-service", "decide", "accept", "hold", "release", "pin", "unpin"}
"""Commands that print no table, or only that of `plan`."""
EVERYTHING = 10_000
Show = Callable[[int], str]


def show_at(monkeypatch: pytest.MonkeyPatch, registry: Path, words: tuple[str, ...]) -> Show:
    """What a command prints in a terminal of a width, always at the same time: tables show ages."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)

    def show(width: int) -> str:
        monkeypatch.setattr(text_tables, "find_terminal_width", lambda: width)
        found = CliRunner().invoke(app, [*words, *([] if words[0] == "keys" else ["--registry", str(registry)])])
        assert found.exit_code == 0, found.output
        return found.stdout

    return show


def split(shown: str) -> set[str]:
    """The words of a table without its header, whatever stands between them in a row, a list or a title."""
    lines = shown.replace("|", " ").splitlines()
    rules = {number for number, line in enumerate(lines) if line.strip() and set(line) <= set(":- ")}
    kept = [line for number, line in enumerate(lines) if not {number, number + 1} & rules]
    return {word for word in re.split(r"[\s,]+", "\n".join(kept)) if word}


def check_widths(show: Show) -> None:
    wide = split(show(EVERYTHING))
    for width in (80, 120):
        shown = show(width)
        assert all(len(line) <= width or len(line.split()) == 1 for line in shown.splitlines()), shown
        lost = {
            word for word in wide - split(shown) if word[:SHORT_DIGEST] not in split(shown) or not DIGEST.match(word)
        }
        assert not lost, shown


def make_drafts(root: Path) -> Path:
    """A draft that was in service, and a tune of it that is."""
    site = DecisionSite(root)
    site.complete(site.publish_draft("a", summary=HOUR), 2.0)
    site.promote()
    site.complete(site.tune("b", summary=HOUR), 2.1)
    site.promote()
    return site.registry


def make_draft(root: Path) -> Path:
    """A draft that is not measured yet."""
    site = ServiceSite(root)
    site.publish_draft("a", summary={"heldout": {"eval/tau": 0.5}, "steps": 9_000, "tokens_per_second": 1234.5})
    return site.registry


def make_decisions(root: Path) -> Path:
    acting = ActingFleet(root)
    acting.set_budget(10.0)
    acting.add("one", act="none")
    acting.add("a-target-with-a-long-name", Choice.UNDECIDED)
    return acting.fleet.registry


def make_slices(root: Path) -> Path:
    site = ServiceSite(root)
    draft = site.publish_draft("a")
    publish_sliced_report(site, draft, {"en": 2.0, "de": 2.0})
    site.publish_export(draft)
    site.promote(draft.path.name)
    publish_sliced_report(site, draft, {"en": 2.0, "de": 1.5}, first=100)
    return site.registry


def make_planned(root: Path) -> Path:
    return PlannedTarget(root, deployment={"prices": {"gpu_hour": 2.5}}).root / "registry"


SHOWN: dict[tuple[str, ...], Callable[[Path], Path]] = {
    ("leaderboard",): make_drafts,
    ("status",): make_drafts,
    ("summary", "small"): make_draft,
    ("usage",): make_drafts,
    ("prune",): make_drafts,
    ("compare", "small/eagle3", "small/eagle3"): make_drafts,
    ("plan", "one"): make_planned,
    ("decisions",): make_decisions,
    ("slices", "small", "eagle3"): make_slices,
    **{("keys", name): lambda root: root for name in FILES},
}


@pytest.mark.parametrize("words", SHOWN, ids=" ".join)
def test_a_command_fits_and_breaks_nothing(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    check_widths(show_at(monkeypatch, SHOWN[words](tmp_path), words))


def test_the_servers_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = Pages(sglang_pages(10, 20, 2))
    with serve_pages(page) as url:
        server = {"name": "front-of-the-second-hall", "url": url, "kind": "sglang", "timeout_s": 30.0}
        site = ObservedSite.make(tmp_path, [server])
        site.observe()
        check_widths(show_at(monkeypatch, site.registry, ("observe", "small", "--no-read")))


def test_the_figures_of_a_draft_fit():
    positions = [0.912, 0.823, 0.734, 0.645, 0.556, 0.467, 0.378]
    metrics = {"eval/simulated_acc_len": 1.06, "eval/per_position_acc": positions, "eval/rung3_walk_acc_len": 1.0}
    drafts = dict.fromkeys(("trained", "untrained", "unigram_and_bigrams_of_the_answers"), metrics)
    summary = {"drafts": drafts, "draft_tokens": 7, "heldout": {"eval/confidence_error": positions, "eval/tau": 0.25}}
    draft = Artifact("dspark_draft", "small", Path("draft"), {}, "v", summary, {}, created=0.0, seconds=0.0)
    for table in (build_acceptance_table("eagle3", draft), build_strategy_metrics_table("dspark", draft)):
        check_widths(lambda width, table=table: render_text_table(table, width))


def test_a_summary_ends_with_the_files_for_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site = ServiceSite(tmp_path)
    draft = site.publish_draft("a", summary={"heldout": {}})
    export = site.publish_export(draft)
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["summary", "small", "--registry", str(site.registry)]).stdout
    assert shown.splitlines()[-1] == f"eagle3: its files for servers are in {export.path.relative_to(tmp_path)}"


def test_a_summary_ends_with_what_costs_nothing_and_warns_of_a_draft_that_loses(tmp_path: Path):
    site, folders = ServiceSite(tmp_path), ReportFolders(tmp_path / "var")
    samples = {f"s{index}": [index, 7] for index in range(6)}
    accepted, copied = ({name: [number, index % 2] for index, name in enumerate(samples)} for number in (1, 3))
    folders.publish_report("mine", folders.publish_answers(samples), accepted, lookup=copied)
    shown = CliRunner().invoke(app, ["summary", "small", "--registry", str(site.registry)]).stdout
    rows = [line.split() for line in shown.splitlines() if line.split()[:1] in (["trained"], ["lookup"])]
    assert rows == [["lookup", "2.750"], ["trained", "2.200", "1.750", "0.800", "0.500"]]  # the walk decides the order
    last = shown.splitlines()[-1]
    assert last.startswith("WARNING eagle3 on heldout: τ 1.750 on the walk, against 2.750 of lookup, the best")


def test_no_command_with_a_table_is_left_out():
    assert {words[0] for words in SHOWN} | {"observe"} | SENTENCES == set(COMMANDS)


def test_a_lost_word_would_be_noticed():
    table = TextTable("", ("a", "b"), (("x" * 30, "y" * 60),))
    with pytest.raises(AssertionError):
        check_widths(lambda width: render_text_table(table, width)[:width])


@pytest.fixture
def site(tmp_path: Path) -> ServiceSite:
    return ServiceSite(tmp_path)


def call(site: ServiceSite, *words: str, strategy: str = "eagle3") -> Result:
    return CliRunner().invoke(app, ["slices", "small", strategy, *words, "--registry", str(site.registry)])


def promote(site: ServiceSite, draft: Artifact) -> None:
    site.publish_export(draft)
    site.promote(draft.path.name)


def test_a_fall_is_named_weighed_and_its_cure_reported(site: ServiceSite, tmp_path: Path):
    first = site.publish_draft("a")
    publish_sliced_report(site, first, {"en": 2.0, "de": 2.0})
    promote(site, first)
    assert "nothing was measured since the promotion" in call(site).stdout
    publish_sliced_report(site, first, {"en": 2.0, "de": 2.001})  # another report, and the same tokens were accepted
    assert "the same draft on the same prompts: no slice can have changed" in call(site).stdout
    fallen = publish_sliced_report(site, first, {"en": 2.0, "de": 1.5}, first=100)
    shown = call(site)
    assert shown.exit_code == 0, shown.stderr
    assert "fell: language de (2 slices compared, corrected by Holm)" in shown.stdout
    assert "-0.50" in shown.stdout

    weights = tmp_path / "weights" / "small.json"
    assert "language de: x 3" in call(site, "--save", str(weights)).stdout
    plan = read_plan(weights)
    assert [(one.column, one.value, one.weight) for one in plan.weights] == [("language", "de", 3.0)]
    assert plan.report == fallen.path.name
    assert "language de: x 1.5" in call(site, "--save", str(weights), "--max-weight", "1.5").stdout
    assert call(site, "--save", str(weights), "--max-weight", "99").exit_code == 1

    second = publish_weighted_draft(site, "b", plan)
    publish_sliced_report(site, second, {"en": 2.0, "de": 1.9}, first=100)
    helped = "Of 1 slice that this draft's data was weighted towards: 1 helped."
    assert f"draft {second.path.name}, not in service. {helped}" in call(site).stdout
    promote(site, second)
    said = call(site).stdout
    assert f"draft {second.path.name}. {helped}" in said
    assert "+0.40" in said
    assert "paired" in said


def test_no_fall_takes_the_weights_away_and_no_measurement_leaves_them(site: ServiceSite, tmp_path: Path):
    weights = tmp_path / "weights.json"
    first = site.publish_draft("a")
    publish_sliced_report(site, first, {"en": 2.0, "de": 2.0})
    promote(site, first)
    assert f"no slice could be compared: {weights} is not written" in call(site, "--save", str(weights)).stdout
    assert not weights.exists()
    publish_sliced_report(site, first, {"en": 2.0, "de": 1.5}, first=100)
    call(site, "--save", str(weights))
    assert len(read_plan(weights).weights) == 1
    assert f"{weights} is left as it is" in call(site, "--save", str(weights), "--least-prompts", "99").stdout
    assert len(read_plan(weights).weights) == 1
    publish_sliced_report(site, first, {"en": 2.0, "de": 2.1}, first=200)
    assert f"written: {weights}, without a weight: no slice fell" in call(site, "--save", str(weights)).stdout
    assert read_plan(weights).weights == ()


def test_what_cannot_be_compared_is_one_clear_error(site: ServiceSite):
    assert "draftworks promote small eagle3" in call(site).stderr
    assert "does not use dflash" in call(site, strategy="dflash").stderr
    first = site.publish_draft("a")
    report = publish_sliced_report(site, first, {"en": 2.0, "de": 2.0})
    promote(site, first)
    assert "eval set code: not in both reports; there is: heldout" in call(site, "--eval-set", "code").stderr
    assert "draft nothing has no report" in call(site, "--draft", "nothing").stderr
    publish_sliced_report(site, first, {"en": 2.0, "de": 1.5}, first=100)
    for path in report.path.rglob("*"):
        path.unlink() if path.is_file() else None
    refused = call(site)
    assert refused.exit_code == 1
    assert "is not there any more" in refused.stderr
