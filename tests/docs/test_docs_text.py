"""Links lead somewhere, names of files are those of files, lines are ones that a diff can show."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT, documents, prose

LONGEST_LINE = 120
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(
    r"`((?:draftworks|tests|tools|docs|registry|benchmarks|spec_assets|jobs|sensors|resources|\.ci)/[^`\s]*)`"
)
GENERATED = ("{", "*", "NAME", "…", "registry/data/", "registry/drafts/", "registry/evals/")
EACH = pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))


@functools.cache
def anchors(path: Path) -> set[str]:
    """Of the headings of a page, as mkdocs and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", word) for word in words}


@EACH
def test_links_lead_to_what_is_there(path: Path):
    for link in LINK.findall(prose(path)):
        if link.startswith(("http://", "https://")):
            continue
        place, _, anchor = link.partition("#")
        page = (path.parent / place).resolve() if place else path
        assert page.exists(), link
        assert not anchor or anchor in anchors(page), link


@EACH
def test_files_that_are_named_exist(path: Path):
    if path.name == "CHANGELOG.md":
        return  # it names what was
    named = {name for name in FILE.findall(prose(path)) if not any(part in name for part in GENERATED)}
    assert not {name for name in named if not (ROOT / name.split("::")[0]).exists()}


@EACH
def test_lines_are_not_longer_than_a_diff_shows(path: Path):
    lines = enumerate(path.read_text().splitlines(), start=1)
    assert not [number for number, line in lines if len(line) > LONGEST_LINE and not line.startswith("|")]


def test_every_picture_is_shown():
    shown = {Path(link).name for path in documents() for link in LINK.findall(prose(path))}
    assert {path.name for path in (ROOT / "docs" / "images").iterdir()} <= shown


def test_the_design_lists_every_room_from_the_top_down():
    layout = (ROOT / "tests" / "house" / "test_house_layout.py").read_text()
    rooms = re.findall(r'"(\w+)"', layout[layout.index("ROOMS = [") : layout.index('"""From the ground floor up')])
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text[text.index("The engine, from the top down") :]
    assert re.findall(r"^\| `(\w+)/` \|", table, re.MULTILINE) == rooms[::-1]


def test_the_reference_is_what_the_code_says():
    """`make reference` writes it again."""
    command = [sys.executable, "-W", "ignore", "-m", "tools.docs_reference", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
