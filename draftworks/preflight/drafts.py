"""Checks that every draft of a target can be built (on device meta) and that servers can read its configuration."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from draftworks.config.registry_files import StrategyEntry, TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.config.strategies import StrategySpec, resolve_strategy
from draftworks.data.vocab import build_vocab_mapping
from draftworks.drafts.strategy import DraftStrategy
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import DraftworksError
from draftworks.evaluation.result import make_example_metrics
from draftworks.preflight.draft_exports import BuiltDraft, check_exports
from draftworks.preflight.findings import Findings
from draftworks.targets.weights import silence_transformers
from draftworks.training.best import BestRule

_FAR = 2
"""Times the proposals that a draft is trained for, beyond which a number of them is doubtful."""
BUILT_IN = "draftworks."
"""What the factories of the package's own strategies begin with."""


@silence_transformers()  # of each rope of each config it would say which keys it does not know
def check_drafts(target: TargetSpec, files: TargetFiles, findings: Findings, unsound: Collection[str] = ()) -> None:
    """Build each strategy's draft on device meta, and check its exports' configs and its number of draft tokens.

    Args:
        unsound: strategies that are reported already, of which none can be built.
    """
    try:
        parts = TargetParts.load(files, tensors=False)
    except DraftworksError as error:
        findings.error(str(error))
        return
    if parts.head_bias:
        findings.warning(
            f"target {target.name}: the model adds lm_head.bias to its logits, and its drafts learn from its head without it: "
            "they will agree with the target less than they could"
        )
    most: dict[str, int | None] = {}
    trained: dict[str, int] = {}
    for name, entry in target.strategies.items():
        if name in unsound:
            continue
        strategy, where = resolve_strategy(name), f"target {target.name}: strategies.{name}"
        options = strategy.parse_options(entry.options, where=f"{where}.options")
        try:
            draft = _build_draft(strategy, options, parts)
        except DraftworksError as error:
            findings.error(f"{where}: {str(error).removeprefix(f'target {target.name}: ')}")
        except Exception as error:  # inconsistent sizes may raise any error, in a plug-in too
            _report_build_failure(strategy, where, error, findings)
        else:
            most[name], trained[name] = draft.max_draft_tokens, draft.draft_tokens
            _check_best_metric(strategy, options, entry, where, findings)
            check_exports(BuiltDraft(strategy, entry, draft, parts, where), target, files, findings)
    _check_proposals(target, most, findings)
    _check_far_proposals(target, {name: known for name, known in trained.items() if most[name] is None}, findings)


def _check_best_metric(
    strategy: StrategySpec, options: Any, entry: StrategyEntry, where: str, findings: Findings
) -> None:
    """Judge the metric that chooses the best draft as the trainer will, by an example of what evaluations report."""
    # A plug-in's own spec may be a copy of a built-in one, with another loss.
    if strategy.metric_sums is None or not strategy.factory.startswith(BUILT_IN):
        return
    try:
        BestRule(entry.training.best_metric).score(make_example_metrics(strategy.metric_sums(options)))
    except DraftworksError as error:
        findings.error(f"{where}.{error}")


def _build_draft(strategy: StrategySpec, options: Any, parts: TargetParts) -> DraftStrategy:
    vocab = None
    if strategy.uses_vocab_mapping:  # any of the right size: its tokens are known only after the answers
        vocab = build_vocab_mapping(np.zeros(parts.vocab_size, dtype=np.int64), options.draft_vocab_size)
    with torch.device("meta"):
        return strategy.load_factory()(options, parts, vocab, 0)


def _report_build_failure(strategy: StrategySpec, where: str, error: Exception, findings: Findings) -> None:
    """Report a failed build: an error for a built-in strategy, a warning for a plug-in, which may need real tensors."""
    message = (
        f"{where}: no draft of these options can be built: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    )
    if strategy.factory.startswith(BUILT_IN):
        findings.error(f"{message}. Correct the sizes in its options")
    else:
        findings.warning(f"{message}. (Built on device meta, without weights, which this strategy may not support)")


def _check_far_proposals(target: TargetSpec, trained: dict[str, int], findings: Findings) -> None:
    """Warn of more proposals per pass than drafts without a limit of their own are trained to make."""
    requested = target.evaluation.draft_tokens
    far = {name: known for name, known in trained.items() if requested is not None and requested > _FAR * known}
    if far:
        known = ", ".join(f"{name} is trained for {count}" for name, count in far.items())
        findings.warning(
            f"target {target.name}: evaluation.draft_tokens: found {requested}; {known}: hardly any later proposal is accepted, "
            "and each costs time. Lower it, or leave it out"
        )


def _check_proposals(target: TargetSpec, most: dict[str, int | None], findings: Findings) -> None:
    requested = target.evaluation.draft_tokens
    limited = {
        name: limit for name, limit in most.items() if limit is not None and requested is not None and requested > limit
    }
    if not limited:
        return
    limits = ", ".join(f"{name} at most {limit}" for name, limit in limited.items())
    message = f"target {target.name}: evaluation.draft_tokens: found {requested}; its drafts propose: {limits}"
    if len(limited) == len(target.strategies):
        findings.error(f"{message}. Lower it, or leave it out")
    else:
        findings.warning(f"{message}; these are measured with what they can propose")
