"""Markdown of a report: its headline, what is left out, its warnings, its loops.
Tables for a terminal of any width, and in Markdown: no word is broken, and no cell breaks the table.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_toys import full_report, prompts, rungs_0_and_1

from draftworks.evaluation.labels import LabelCounts
from draftworks.evaluation.ladder.measurement import TimingContext
from draftworks.evaluation.ladder.prompt_acceptance import Difference
from draftworks.evaluation.report import text_tables
from draftworks.evaluation.report.pages import render_table
from draftworks.evaluation.report.report import Report
from draftworks.evaluation.report.summary import DIFFERENCES, REPORT
from draftworks.evaluation.report.text_tables import SHORT_DIGEST, TextTable, render_text_table
from draftworks.evaluation.report.writing import render_report, save_report

WARNING = "not exact here"


def rows_of(markdown: str, header: str) -> dict[str, list[str]]:
    """Return the rows of the table whose first header begins with `header`, by their first cells."""
    table = next(part for part in markdown.split("\n\n") if part.startswith(f"| {header}"))
    lines = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]
    return {line[0]: line[1:] for line in lines if not line[0].startswith(":")}


def columns_of(**values: list[str]) -> pd.DataFrame:
    return pd.DataFrame(values, index=["s0", "s1", "s2"])


def test_headline_is_the_length_of_the_walk_with_interval_and_speed_up() -> None:
    headline = render_report(full_report()).splitlines()[0]
    for words in ("acceptance length τ **2.50**", "95% interval", "walk (rung 3)"):
        assert words in headline
    assert "1.50× as fast as plain decoding (greedy, 3 prompts)" in headline


def test_what_of_the_eval_set_was_not_measured_is_said() -> None:
    report = full_report()
    assert "Of the eval set" not in render_report(report)
    told = replace(report, provenance={"not_measured": {"dropped_turns": 57, "unfinished_answers": 1200}})
    assert "passes of up to" in render_report(told)
    assert "Of the eval set 57 turns were left out: no room within max_length" in render_report(told)
    assert "; 1,200 answers were cut off by max_new_tokens or max_length." in render_report(told)


def test_headline_without_a_walk_says_which_rung_it_is() -> None:
    assert "acceptance length τ **2.20**, simulated (rung 1)" in render_report(rungs_0_and_1()).splitlines()[0]


def test_table_has_drafts_by_rungs_and_empty_cells_for_what_was_not_measured() -> None:
    table = rows_of(render_report(full_report()), "draft")
    walk = table["draft"].index("τ, walk (rung 3)")
    assert table["trained"][walk].startswith("2.50 (")
    assert table["untrained"][walk].startswith("1.08 (")
    assert table["bigram"][walk] == ""
    assert table["bigram"][table["draft"].index("τ, simulated (rung 1)")] == "1.38"
    assert (
        table["trained"][table["draft"].index("speed-up (temperature 0.7, greedy_draft as vLLM 0.33, SGLang 0.5.23)")]
        == "0.50×"
    )


def test_rungs_that_were_not_measured_are_not_mentioned() -> None:
    text = render_report(rungs_0_and_1())
    assert "Rung 1" in text
    for words in ("Rung 2", "Rung 3", "Rung 4", "walk", "loop", "speed-up", "interval", "nan", "None"):
        assert words not in text


def test_walk_without_a_pass_has_no_number() -> None:
    """Answers of one token: the prefill gives them."""
    report = full_report()
    drafts = {**report.drafts, "trained": replace(report.drafts["trained"], walk=prompts([], []), loops=())}
    text = render_report(replace(report, drafts=drafts, columns=None))
    table = rows_of(text, "draft")
    assert table["trained"][table["draft"].index("τ, walk (rung 3)")] == "none"
    assert "block (rung 2)" in text.splitlines()[0]


def test_histogram_is_of_a_hundred_passes_up_to_the_tokens_proposed() -> None:
    table = rows_of(render_report(replace(full_report(), draft_tokens=4)), "% of passes")
    assert list(table.values()) == [
        ["0", "1", "2", "3", "4"],
        ["33", "17", "17", "33", "0"],
        ["92", "8", "0", "0", "0"],
    ]


def test_slices_are_shown_of_columns_that_have_more_than_one() -> None:
    table = rows_of(render_report(full_report()), "slice by")
    assert "language" not in table
    assert [table["task"][0], table["task"][1]] == ["code", "2"]


@pytest.mark.parametrize("columns", [None, columns_of(language=["en"] * 3)], ids=["no columns", "one slice"])
def test_nothing_to_slice_by_shows_no_slices(columns: pd.DataFrame | None) -> None:
    assert "slice by" not in render_report(replace(full_report(), columns=columns))


def test_one_prompt_has_no_interval() -> None:
    """It would have no width, which looks like certainty."""
    columns = columns_of(task=["code", "chat", "code"])
    text = render_report(replace(full_report(), columns=columns))
    [chat] = [line for line in text.splitlines() if "chat" in line]
    assert "| 2.67  " in chat


def test_many_slices_of_a_column_are_cut_to_the_largest() -> None:
    walk = prompts(*[[1]] * 42)
    columns = pd.DataFrame(
        {"source": [f"site{index}" for index in range(40)] + ["many"] * 2}, index=[prompt.sample_id for prompt in walk]
    )
    report = full_report()
    drafts = {"trained": replace(report.drafts["trained"], walk=walk)}
    text = render_report(replace(report, drafts=drafts, columns=columns))
    assert text.count("| source") == 12
    assert "The largest slices by `source`, and 29 more in `slices.parquet`." in text
    assert "| many" in text


def test_values_cannot_break_the_table() -> None:
    columns = columns_of(task=["a|b", "two\nlines", "x" * 100])
    text = render_report(replace(full_report(), columns=columns))
    table = next(part for part in text.split("\n\n") if part.startswith("| slice by"))
    lines = table.splitlines()
    assert len(lines) == 2 + 3
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {7}
    assert max(map(len, lines)) < 160


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (1.0, "Rungs 2 and 3 are exact: every answer token"),
        (None, "not checked here"),
        (0.973, f"{WARNING}.** Of the answer tokens 97.30%"),
        (0.9999999, f"{WARNING}.** Of the answer tokens 99.99%"),
    ],
)
def test_says_whether_rungs_2_and_3_are_exact(share: float | None, words: str) -> None:
    text = render_report(replace(full_report(), label_agreement=share))
    assert words in text
    assert (WARNING in text) == (share is not None and share < 1)


def test_greedy_answers_of_the_target_get_no_advice_to_make_them_again() -> None:
    counts = LabelCounts(tokens=42_800, differing=81, near_ties=79)
    text = render_report(replace(full_report(), label_agreement=counts.agreement, labels=counts, greedy_answers=True))
    assert WARNING not in text
    assert "regenerate" not in text
    assert "exact but for rounding: the target wrote the answers, greedily, and 99.81% of their tokens" in text
    assert "Of 42,800 tokens 81 differ, 79 of them by a gap between the two logits of at most 1/64" in text
    assert "at most 81 passes are concerned" in text


@pytest.mark.parametrize("greedy", [False, None])
def test_answers_of_the_data_are_to_be_made_again(greedy: bool | None) -> None:
    counts = LabelCounts(tokens=1000, differing=2, near_ties=2)
    text = render_report(replace(full_report(), label_agreement=0.998, labels=counts, greedy_answers=greedy))
    assert WARNING in text
    assert "regenerate the answers greedily with this target" in text


def test_more_than_rounding_explains_is_a_warning_without_that_advice() -> None:
    counts = LabelCounts(tokens=1000, differing=300, near_ties=20)
    text = render_report(replace(full_report(), label_agreement=0.7, labels=counts, greedy_answers=True))
    assert (
        f"{WARNING}.** Of the answer tokens 70.00% are the target's own argmax, although the target wrote them" in text
    )
    assert "more than rounding explains" in text
    assert "regenerate" not in text


def test_draft_that_is_worse_than_another_is_shown_to_be() -> None:
    report: Report = full_report()
    trained, untrained = report.drafts["trained"], report.drafts["untrained"]
    drafts = {"trained": replace(trained, walk=untrained.walk), "untrained": replace(untrained, walk=trained.walk)}
    text = render_report(replace(report, drafts=drafts))
    assert rows_of(text, "beside each other")["untrained"] == ["2.50 (1.00–4.14)", "-1.42 (-3.06 to +0.23)"]
    assert "**Warning: for nothing more is accepted than of this draft.**" in text


def test_acceptance_rates_say_over_which_positions_they_are_and_that_losses_do_not_compare() -> None:
    report = full_report()
    trained = report.drafts["trained"]
    metric_sums = {
        **trained.result.metric_sums,
        **{"acceptance_sums": (3.0, 1.0), "acceptance_denoms": (4.0, 4.0)},
        **{"unconditional_acceptance_sums": (5.0, 2.0), "unconditional_acceptance_denoms": (10.0, 8.0)},
    }
    counted = replace(trained, result=replace(trained.result, metric_sums=metric_sums))
    text = render_report(replace(report, drafts={**report.drafts, "trained": counted}))
    assert "| trained | 75.0 · 25.0 | 50.0 · 25.0 |" in re.sub(" +", " ", text)
    assert "The draft's vocabulary has 40.00% of the labels." in text
    assert "both get better as the vocabulary gets smaller" in text
    assert "acceptance rate" not in render_report(report)


def test_the_walk_of_the_prompts_that_the_loop_decoded_stands_beside_it() -> None:
    """A loop over few prompts and a walk over all differ by the prompts alone."""
    report = full_report()
    trained = report.drafts["trained"]
    greedy = next(loop for loop in trained.loops if not loop.decoding.temperature)
    decoded = replace(greedy, prompts=tuple(one for one in trained.walk if one.sample_id == "s1"))
    drafts = {**report.drafts, "trained": replace(trained, loops=(decoded,))}
    text = render_report(replace(report, drafts=drafts))
    [walk] = [one for one in trained.walk if one.sample_id == "s1"]
    length = f"{1 + walk.accepted / walk.passes:.2f}"
    assert f"decoded 1 of the 3 prompts; on these the walk of `trained` has τ {length}." in text
    assert "The greedy loop decoded" not in render_report(report)


THEN = TimingContext("a GPU", datetime(2026, 3, 1, 22, 0, tzinfo=UTC))
FOUND = (
    Difference("s0", "target", 7, walk=31, loop=None, gap=3.2e-6),
    Difference("s2", "draft", 2, walk=40, loop=41, pass_number=1, place=0),
)


def report_with(differences: tuple[Difference, ...] | None, timing_context: TimingContext | None = THEN) -> Report:
    """Return a report whose greedy loop is compared and timed; its loop at temperature 0.7 is neither."""
    report = full_report()
    trained = report.drafts["trained"]
    greedy, sampled = trained.loops
    loops = (replace(greedy, differences=differences, timing_context=timing_context), sampled)
    return replace(report, drafts={**report.drafts, "trained": replace(trained, loops=loops)})


@pytest.mark.parametrize("differences", [None, (), FOUND], ids=["not compared", "none", "two"])
def test_report_round_trip(differences: tuple[Difference, ...] | None, tmp_path: Path) -> None:
    report = report_with(differences)
    save_report(report, tmp_path)
    assert Report.load(tmp_path) == report


def test_table_and_json_have_every_difference(tmp_path: Path) -> None:
    save_report(report_with(FOUND), tmp_path)
    table = pd.read_parquet(tmp_path / DIFFERENCES)
    assert table["draft"].tolist() == ["trained", "trained"]
    rows = table.drop(columns="draft").astype(object).where(table.notna(), None).to_dict("records")
    assert rows == [asdict(one) for one in FOUND]
    greedy, sampled = json.loads((tmp_path / REPORT).read_text())["drafts"]["trained"]["loops"]
    assert greedy["differences"] == [asdict(one) for one in FOUND]
    assert sampled["differences"] is None


def test_table_without_differences_has_the_same_types(tmp_path: Path) -> None:
    for name, differences in (("some", FOUND), ("none", ())):
        save_report(report_with(differences), tmp_path / name)
    empty = pd.read_parquet(tmp_path / "none" / DIFFERENCES, dtype_backend="pyarrow")
    assert empty.empty
    assert empty.dtypes.equals(pd.read_parquet(tmp_path / "some" / DIFFERENCES, dtype_backend="pyarrow").dtypes)


def test_report_of_before_there_were_differences_is_read(tmp_path: Path) -> None:
    save_report(report_with(None, timing_context=None), tmp_path)
    values = json.loads((tmp_path / REPORT).read_text())
    for loop in values["drafts"]["trained"]["loops"]:
        del loop["differences"], loop["occasion"]
    (tmp_path / REPORT).write_text(json.dumps(values))
    assert Report.load(tmp_path) == report_with(None, timing_context=None)


def test_markdown_says_that_nothing_differs() -> None:
    assert "none of 3 prompts differ" in render_report(report_with(()))


def test_markdown_shows_differences_with_their_gaps() -> None:
    lines = render_report(report_with(FOUND)).splitlines()
    assert any("2 of 3 prompts differ" in line for line in lines)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith(("| s0", "| s2"))]
    assert rows == [
        ["s0", "answer", "7", "31", "ended", "3.2e-06 (target)"],
        ["s2", "proposal of pass 1, same answer", "2", "40", "41", "unknown"],
    ]


def test_markdown_shows_the_first_of_many_differences_and_says_where_the_others_are() -> None:
    many = tuple(replace(FOUND[0], sample_id=f"many{index}") for index in range(20))
    text = render_report(report_with(many))
    assert text.count("\n| many") == 12
    assert f"8 more are in `{DIFFERENCES}`" in text


def test_markdown_without_a_comparison_does_not_speak_of_one() -> None:
    assert "differ" not in render_report(report_with(None))


def test_markdown_says_when_and_where_the_speed_was_measured() -> None:
    assert "Rung 4 was timed: greedy on a GPU, 2026-03-01 22:00 UTC." in render_report(report_with(()))
    assert "was timed" not in render_report(report_with((), timing_context=None))


WORD = st.text(
    st.characters(codec="ascii", categories=["L", "N", "P"], exclude_characters="-,"), min_size=1, max_size=24
)
CELL = st.lists(WORD, max_size=6).map(" ".join)
INDENT = 4
DIGEST = "0123456789abcdef"


@st.composite
def tables(draw: st.DrawFn) -> TextTable:
    names = draw(st.lists(WORD, min_size=1, max_size=8, unique=True))
    rows = draw(st.lists(st.tuples(*(CELL for _ in names)), min_size=1, max_size=4))
    some = st.frozensets(st.sampled_from(names))
    heads = draw(st.integers(1, len(names)))
    return TextTable(draw(CELL), tuple(names), tuple(rows), draw(CELL), right=draw(some), heads=heads)


@given(table=tables(), width=st.integers(30, 140))
def test_every_word_of_every_cell_is_whole_and_every_line_fits(table: TextTable, width: int):
    shown = render_text_table(table, width)
    words = {word for row in table.rows for cell in row for word in cell.split()}
    assert words <= set(shown.replace(",", " ").split())  # the heads of a block have commas between them
    assert all(len(line) <= width for line in shown.splitlines())


@given(table=tables())
def test_a_table_that_fits_is_a_line_for_each_row(table: TextTable):
    lines = render_text_table(table, 10_000).split("\n")
    assert lines == render_text_table(table, None).split("\n")
    assert len(lines) == bool(table.title) + 2 + len(table.rows) + bool(table.caption)


@pytest.mark.parametrize(("width", "digest"), [(200, DIGEST), (60, DIGEST[:SHORT_DIGEST])])
def test_digests_are_shortened_where_that_is_what_makes_a_table_fit(width: int, digest: str):
    row = ("tiny", "eagle3", f"{DIGEST} (in service)", "0.94 (0.80 to 1.10)")
    table = TextTable("", ("target", "strategy", "draft", "accepted"), (row,), digests=frozenset(("draft",)))
    shown = render_text_table(table, width)
    assert digest in shown.split()
    assert len(shown.splitlines()) == 3


def test_numbers_stay_on_their_line_and_a_list_has_the_heads_above():
    row = (
        "training_features",
        "42.8 k (1.87 k to 50 k)",
        "12.5 (4 to 20) min",
        "measured: " + "of this target, here " * 5,
    )
    columns = ("step", "tokens", "time", "rate")
    table = TextTable("plan", columns, (row, row), right=frozenset(("tokens", "time")))
    shown = render_text_table(table, 60).splitlines()
    assert shown[1] == "training_features"
    assert "  tokens  42.8 k (1.87 k to 50 k)" in shown
    assert "  time    12.5 (4 to 20) min" in shown


def test_a_file_gets_the_whole_table(capsys: pytest.CaptureFixture[str]):
    assert text_tables.find_terminal_width() is None
    text_tables.print_table(TextTable("t", ("a", "b"), (("x " * 200, "y"),)))
    assert max(map(len, capsys.readouterr().out.splitlines())) > 390
    text_tables.print_text("word " * 100)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_no_text_is_taken_for_markup():
    table = TextTable("[bold]t[/]", ("a",), (("[red]x",), ("[/nothing]",)))
    assert re.findall(r"\S+", render_text_table(table, 80)) == ["[bold]t[/]", "a", "-" * 10, "[red]x", "[/nothing]"]


def lines_of(text: str) -> list[str]:
    return re.sub(" +", " ", text).splitlines()


def test_columns_are_the_keys_in_the_order_in_which_they_first_occur() -> None:
    lines = lines_of(render_table([{"a": 1, "b": 2}, {"c": 3, "a": None}]))
    assert (lines[0], lines[2:]) == ("| a | b | c |", ["| 1 | 2 | |", "| None | | 3 |"])


def test_no_text_breaks_the_table() -> None:
    lines = lines_of(render_table([{"a": "x|y\nz", "b": "0.10"}]))
    assert lines[2:] == ["| x\\|y z | 0.10 |"]


def test_long_cells_are_cut_only_where_that_is_asked_for() -> None:
    assert lines_of(render_table([{"a": "l" * 50}]))[2] == f"| {'l' * 50} |"
    assert lines_of(render_table([{"a": "l" * 50}], max_cell_length=40))[2] == f"| {'l' * 39}… |"


def test_without_a_row_there_is_a_header_or_nothing() -> None:
    assert render_table([]) == ""
    assert lines_of(render_table([], ("a", "b")))[0] == "| a | b |"
