"""`python -m draftworks.programs.export FILE`: write a draft in the formats of servers and run the gates on each."""

from __future__ import annotations

from typing import Any

from draftworks.config.run_files import ExportRun
from draftworks.errors import StoreError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.exporting import ExportResult, choose_formats, export_draft
from draftworks.programs.program import ProgramContext, run_program


def export(run: ExportRun, ctx: ProgramContext) -> dict[str, Any]:
    """Write every format into a folder of its own. A failed gate is in the report, and is no error here.

    Raises:
        ConfigError: a format that was asked for does not exist or cannot hold this draft, or none can.
        StoreError: draft, target or card cannot be read.
    """
    card = _read_card(run)
    draft = CanonicalDraft.load(run.draft, run.target)
    choice = choose_formats(draft, run.export.formats)
    for name, reason in choice.refused.items():
        ctx.log(f"{name}: left out: {reason}")
    results = [export_draft(draft, name, run.out / name, run.export.dtype, card, run.export) for name in choice.chosen]
    for result in results:
        ctx.log(_format_gates(result))
    return {
        "formats": {result.format: result.to_json() for result in results},
        "refused": choice.refused,
        "weights_digest": draft.record.weights_digest,
    }


def _read_card(run: ExportRun) -> str:
    if run.card is None:
        return ""
    try:
        return run.card.read_text(encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{run.card}: the model card cannot be read: {error}") from error


def _format_gates(result: ExportResult) -> str:
    failed = [f"{gate.name} ({gate.description})" for gate in result.gates if not gate.passed]
    return f"{result.format}: " + (
        f"failed: {'; '.join(failed)}" if failed else f"all {len(result.gates)} gates passed"
    )


if __name__ == "__main__":
    run_program(ExportRun, export)
