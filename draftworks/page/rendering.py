"""Writes the page of the fleet: one HTML file that needs no other, no script and no address."""

from __future__ import annotations

from pathlib import Path

from draftworks.evaluation.acceptance_length import NOTE
from draftworks.page.contents import FleetPage, list_rivals
from draftworks.storage.files import publish_file
from draftworks.storage.names import FLEET


def locate_fleet_page(var: Path) -> Path:
    """Return where the page of a folder of results is."""
    return var / FLEET / "fleet.html"


def render_fleet_page(page: FleetPage) -> str:
    """Return the page as HTML; every text in it is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made_ones = {one.status.name for one in page.sections}
    values = {"page": page, "made": made_ones, "rivals": list_rivals(page.sections), "NOTE": NOTE}
    return made.get_template("fleet.html.j2").render(values).lstrip()


def write_fleet_page(path: Path, page: FleetPage) -> None:
    """Write the page to a file, which is replaced whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with publish_file(path) as staging:
        staging.write_text(render_fleet_page(page), encoding="utf-8")
