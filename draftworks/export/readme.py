"""The README.md beside exported files: the model card, if there is one, and how servers load the files."""

from __future__ import annotations

from draftworks.export.canonical import CanonicalDraft
from draftworks.export.export_format import ExportFormat
from draftworks.export.names import DRAFT_FOLDER


def render_readme(export_format: ExportFormat, draft: CanonicalDraft, card: str) -> str:
    """Return the text: the model card, or a title where there is none, and a section on serving."""
    lines = [card.rstrip() if card else f"# {draft.record.strategy} draft of {draft.target.name}"]
    lines += [
        "",
        "## Serving",
        "",
        f"Format `{export_format.name}`. Loaded by: {export_format.describe_loaders(draft)}",
        "",
    ]
    for server, command in export_format.build_serve_commands(draft, DRAFT_FOLDER).items():
        lines += [f"{server}:", "", "```", command, "```", ""]
    lines.append("What the weights are, by digests, is under `provenance` in config.json.")
    return "\n".join(lines) + "\n"
