"""`draftworks compare` as a user calls it: text, JSON, pages, errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from service_site import ServiceSite
from typer.testing import CliRunner

from draftworks.evaluation.ladder.statistics import AcceptanceDifference, Interval
from draftworks.fleet.compared_drafts import find_compared_draft
from draftworks.fleet.comparison_page import render_html, render_markdown
from draftworks.fleet.draft_comparison import EvalSetFigures, Kind, compare_drafts
from draftworks.programs.cli import app
from draftworks.storage.artifacts import BuildResult


@pytest.fixture
def site(tmp_path: Path) -> ServiceSite:
    made = ServiceSite(tmp_path, evals=("code",))
    made.publish("a", {"heldout": 2.0, "code": 1.0})
    made.publish("b", {"heldout": 1.0, "code": 1.5})
    return made


def call(site: ServiceSite, *words: str) -> Result:
    return CliRunner().invoke(app, ["compare", *words, "--registry", str(site.registry)])


def digests(site: ServiceSite) -> list[str]:
    drafts = site.artifacts.list_all("eagle3_draft", "small")
    return [draft.path.name for draft in sorted(drafts, key=lambda draft: draft.created)]


@pytest.mark.usefixtures("pictures")
def test_text_json_and_pages_tell_the_same(site: ServiceSite, tmp_path: Path):
    a, b = digests(site)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "var").rglob("*")}
    shown = call(site, a, "small/eagle3").stdout
    assert "It depends: A accepts more on heldout, B on code." in shown
    assert "heldout: A accepts more: +1.000 accepted tokens per pass (+0.998 to +1.002, paired, 120 prompts" in shown
    found = json.loads(call(site, a, b, "--json").stdout)
    assert [(one["eval_set"], one["difference"], one["kind"]) for one in found["eval_sets"]] == [
        ("heldout", 1.0, "paired"),
        ("code", -0.5, "paired"),
    ]
    assert found["a"]["draft"] == a
    for name in ("page.html", "page.md"):
        assert call(site, a, b, "--out", str(tmp_path / name)).exit_code == 0
        assert "It depends" in (tmp_path / name).read_text()
    assert "data:image/png;base64," in (tmp_path / "page.html").read_text()
    assert "![differences](page.png)" in (tmp_path / "page.md").read_text()
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "var").rglob("*")} == before


def test_a_draft_beside_itself_is_the_same_draft_without_a_signed_zero(site: ServiceSite):
    a, _ = digests(site)
    for other in (a, f"small/eagle3/{a}"):
        shown = call(site, a, other).stdout
        assert "A and B are the same draft." in shown
        assert "clear difference:" not in shown
        assert "-0.0" not in shown
        assert "+0.000 to +0.000" in shown


def test_a_difference_that_rounds_to_zero_has_no_minus():
    found = AcceptanceDifference(0.9998, 1.0, Interval(-0.0004, -0.0001, 0.95), 0.01, prompts=1)
    figures = EvalSetFigures("heldout", kind=Kind.PAIRED, found=found)
    assert figures.describe() == (
        "heldout: B accepts more: +0.000 accepted tokens per pass (+0.000 to +0.000, paired, 1 prompt of both)"
    )


def test_a_table_that_is_wider_than_the_terminal_is_a_list_with_the_same_values(site: ServiceSite):
    found = compare_drafts(*(find_compared_draft(each, site.artifacts) for each in digests(site)))
    wide, narrow = render_markdown(found), render_markdown(found, width=80)
    assert render_markdown(found, width=1000) == wide
    assert max(map(len, narrow.splitlines())) <= 80
    assert re.search("\nheldout\n  A, all its prompts +3.000", narrow)
    cells = {cell.strip() for line in wide.splitlines() if line.startswith("|") for cell in line.split("|")}
    said = " ".join(narrow.split())
    assert all(cell in said for cell in cells if not cell.startswith(":-") and cell != "eval set")


def test_a_page_never_holds_markup_of_the_data(site: ServiceSite, tmp_path: Path):
    identity = {"options": {"<script>": "<b>&"}, "strategy": "eagle3"}
    made = site.artifacts.obtain("eagle3_draft", "small", identity, lambda out: BuildResult("x"))
    a, b = (find_compared_draft(name, site.artifacts) for name in (made.path.name, digests(site)[0]))
    page = render_html(compare_drafts(a, b))
    assert "&lt;script&gt;" in page
    assert "<script>" not in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("small/eagle3", "small/dflash"), "target small has no dflash draft yet"),
        (("small/eagle3", "small/eagle3", "--out", "page.pdf"), "ends in .html or .md"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_1(site: ServiceSite, words: tuple[str, ...], message: str):
    done = call(site, *words)
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert message in done.stderr


def test_it_imports_no_torch(site: ServiceSite):
    code = (
        "import sys; from typer.testing import CliRunner; from draftworks.programs.cli import app; "
        "done = CliRunner().invoke(app, sys.argv[1:]); "
        "sys.exit(done.exit_code or 'torch' in sys.modules)"
    )
    words = ["compare", *digests(site), "--registry", str(site.registry)]
    subprocess.run([sys.executable, "-c", code, *words], check=True)
