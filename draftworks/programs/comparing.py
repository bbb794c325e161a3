"""`draftworks compare`: what differs between two drafts, and which one is better on what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftworks.errors import ConfigError, DraftworksError
from draftworks.evaluation.report import text_tables
from draftworks.programs.start import CHECKOUT, report_error
from draftworks.targets.registry import Registry

if TYPE_CHECKING:
    from draftworks.fleet.draft_comparison import DraftComparison

DraftArgument = Annotated[
    str, typer.Argument(help="TARGET/STRATEGY (the newest), TARGET/STRATEGY/DIGEST, a digest, or a report's folder.")
]


def compare(
    a: DraftArgument,
    b: DraftArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write a page with a picture: FILE.html, or FILE.md and FILE.png.")
    ] = None,
    registry: Annotated[Path, typer.Option("--registry", help="The registry folder.")] = CHECKOUT / "registry",
) -> None:
    """Compare two drafts: recipes, data, figures with paired intervals, slices, sizes and costs. Reads records only."""
    from draftworks.fleet.compared_drafts import find_compared_draft
    from draftworks.fleet.comparison_page import describe_comparison, render_markdown
    from draftworks.fleet.draft_comparison import compare_drafts
    from draftworks.storage.artifacts import ArtifactStore

    try:
        if out is not None and out.suffix not in (".html", ".md"):
            raise ConfigError(f"--out {out}: expected a name that ends in .html or .md")
        artifacts = ArtifactStore(Registry(registry).resolve_var_folder())
        found = compare_drafts(find_compared_draft(a, artifacts), find_compared_draft(b, artifacts))
        if out is not None:
            _write_page(out, found)
    except (DraftworksError, OSError) as error:
        raise report_error(error) from None
    width = text_tables.find_terminal_width()
    typer.echo(json.dumps(describe_comparison(found), indent=2) if as_json else render_markdown(found, width=width))


def _write_page(out: Path, found: DraftComparison) -> None:
    """Write the page as HTML or Markdown, by the file's name; a Markdown page has its picture beside it."""
    from draftworks.fleet.comparison_page import plot_differences, render_html, render_markdown
    from draftworks.storage.atomic import publish_file

    picture = plot_differences(found)
    if out.suffix == ".html":
        text = render_html(found, picture)
    else:
        image = out.with_suffix(".png")
        if picture is not None:
            with publish_file(image) as staging:
                staging.write_bytes(picture)
        text = render_markdown(found, None if picture is None else image.name)
    with publish_file(out) as staging:
        staging.write_text(text, encoding="utf-8")
