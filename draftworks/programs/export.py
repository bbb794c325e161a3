"""`python -m draftworks.programs.export FILE`: write a draft in the formats of servers and run the gates on each.

A draft that a format quantises is walked first, beside the same one in the dtype of the export: what its blocks hold has to
accept about as much of the held-out answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from draftworks.config.run_files import ExportRun
from draftworks.drafts.strategy import DraftStrategy
from draftworks.errors import ConfigError, StoreError
from draftworks.evaluation.acceptance_length import NAME, count_own_token
from draftworks.evaluation.ladder.prompt_acceptance import micro_mean
from draftworks.evaluation.ladder.replay import replay_all
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.export_format import ExportFormat, load_format
from draftworks.export.exporting import ExportResult, choose_formats, export_draft
from draftworks.programs.assembly import Samples, build_evaluation_loader, make_empty_heldout_error, open_samples
from draftworks.programs.program import ProgramContext, run_program

_BATCH = 8


@dataclass(frozen=True)
class QuantisedWalk:
    """What a quantised draft accepts on the held-out answers (walk, rung 3), beside the draft in the dtype of the export.

    Attributes:
        length, plain_length: acceptance lengths τ.
        kept: the one over the other.
        least_kept: share below which the draft is not exported.
    """

    quantise: str
    length: float
    plain_length: float
    kept: float
    least_kept: float
    prompts: int

    def describe(self) -> str:
        return (
            f"{self.quantise}: {NAME} {self.length:.3f} on {self.prompts} held-out prompts, {self.plain_length:.3f} before it was "
            f"quantised: {self.kept:.1%} (walk, rung 3)"
        )


def export(run: ExportRun, ctx: ProgramContext) -> dict[str, Any]:
    """Write every format into a folder of its own. A failed gate is in the report, and is no error here.

    Raises:
        ConfigError: a format that was asked for does not exist or cannot hold this draft, or none can; or a quantised draft
            accepts too little, or cannot be walked.
        StoreError: draft, target, card or held-out features cannot be read.
    """
    card = _read_card(run)
    draft = CanonicalDraft.load(run.draft, run.target)
    choice = choose_formats(draft, run.export.formats)
    for name, reason in choice.refused.items():
        ctx.log(f"{name}: left out: {reason}")
    walks = _walk_quantised(run, draft, choice.chosen, ctx)
    results = [
        export_draft(
            draft,
            name,
            run.out / name,
            run.export.dtype,
            card,
            run.export,
            walks[name].describe() if name in walks else "",
        )
        for name in choice.chosen
    ]
    for result in results:
        ctx.log(_format_gates(result))
    return {
        "formats": {result.format: result.to_json() | _describe_walk(walks, result.format) for result in results},
        "refused": choice.refused,
        "weights_digest": draft.record.weights_digest,
    }


def _describe_walk(walks: Mapping[str, QuantisedWalk], name: str) -> dict[str, Any]:
    return {"quantised": asdict(walks[name])} if name in walks else {}


def _walk_quantised(
    run: ExportRun, draft: CanonicalDraft, names: tuple[str, ...], ctx: ProgramContext
) -> dict[str, QuantisedWalk]:
    """Walk what the quantising formats hold, and the draft as it is; return the figures by format.

    Raises:
        ConfigError: no held-out features are named, or less than the wanted share is kept.
        DataError: no answer can be walked.
    """
    formats = [load_format(draft.record.strategy, name, run.export) for name in names]
    found: dict[str, QuantisedWalk] = {}
    dtype, plain = getattr(torch, run.export.dtype), None
    for export_format in (each for each in formats if each.quantises):
        plain = plain or _walk(run, draft.build_strategy(dtype), ctx)
        walked = _compare(export_format, plain, _walk(run, export_format.build_strategy(draft, dtype), ctx))
        ctx.log(f"{export_format.name}: {walked.describe()}")
        if walked.kept < walked.least_kept:
            raise ConfigError(
                f"{run.draft}: {export_format.name}: {walked.describe()}; expected {walked.least_kept:.1%} at least "
                "(export.gguf.least_kept). Leave export.gguf.quantise out, or lower it"
            )
        found[export_format.name] = walked
    return found


@dataclass(frozen=True)
class _Walked:
    length: float
    prompts: int


def _walk(run: ExportRun, strategy: DraftStrategy, ctx: ProgramContext) -> _Walked:
    if run.heldout is None or run.store is None:
        raise ConfigError(
            f"{run.draft}: a quantised draft is walked before it is handed out: expected `heldout` and `store`, found none"
        )
    samples: Samples = open_samples(run.heldout, run.store, strategy, run.target)
    most = strategy.max_draft_tokens or run.draft_tokens or strategy.draft_tokens
    tokens = min(run.draft_tokens or strategy.draft_tokens, most)
    loader = build_evaluation_loader(samples, strategy, _BATCH, ctx)
    walk = [one.walk for one in replay_all(strategy, loader, tokens, torch.device("cpu"))]
    accepted = micro_mean(walk)
    if accepted is None:
        raise make_empty_heldout_error(run.heldout)
    return _Walked(count_own_token(accepted), len(walk))


def _compare(export_format: ExportFormat, plain: _Walked, walked: _Walked) -> QuantisedWalk:
    settings = export_format.settings.gguf
    return QuantisedWalk(
        quantise=settings.quantise or "",
        length=walked.length,
        plain_length=plain.length,
        kept=walked.length / plain.length,
        least_kept=settings.least_kept,
        prompts=walked.prompts,
    )


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
