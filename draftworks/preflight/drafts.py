"""Checks that every draft of a target can be built (on device meta), exported and read by servers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftworks.config.draft_options import DraftConfig
from draftworks.config.registry_files import StrategyEntry, TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.config.service import ServingEngine
from draftworks.config.strategies import StrategySpec, resolve_strategy
from draftworks.data.vocab import build_vocab_mapping
from draftworks.drafts.strategy import DraftStrategy
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import DraftworksError
from draftworks.evaluation.report.served import ENGINES
from draftworks.evaluation.result import make_example_metrics
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.conventions import DRAFT_FOLDER, SERVER_COMMANDS
from draftworks.export.export_format import load_format
from draftworks.export.gates import build_server_configs
from draftworks.preflight.findings import Findings
from draftworks.sglang.speculation import Speculation, require_cpu_dtype
from draftworks.storage.words import suggest_or_list
from draftworks.targets.weights import silence_transformers
from draftworks.training.checkpoint_manager import BestRule
from draftworks.vllm.speculation import require_cpu_support


@dataclass(frozen=True)
class BuiltDraft:
    """A draft of a strategy on device meta, with what it was built from.

    Attributes:
        where: key of the strategy in messages.
    """

    strategy: StrategySpec
    entry: StrategyEntry
    draft: DraftStrategy
    parts: TargetParts
    where: str

    def as_canonical(self, files: TargetFiles) -> CanonicalDraft:
        record = DraftConfig(self.strategy.name, self.draft.config(), files.digest, "")
        return CanonicalDraft(Path("draft"), record, self.draft.model.state_dict(), files, self.parts)


def check_exports(built: BuiltDraft, target: TargetSpec, files: TargetFiles, findings: Findings) -> None:
    """Check that the formats hold the draft, that servers read their config.json, and that SGLang can do what is asked."""
    canonical, formats = built.as_canonical(files), built.entry.export.formats
    wanted = [spec.name for spec in built.strategy.usual_exports] if formats is None else formats
    refused = canonical.find_refusals(wanted)
    if refused and (formats is not None or len(refused) == len(wanted)):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        findings.error(f"{built.where}.export: {reasons}. Set formats to others, [] for none")
    written = [name for name in wanted if name not in refused]
    for name in written:
        _check_config(built, canonical, name, findings)
    if target.evaluation.serving.prompts and written:
        _check_serving(built, canonical, target, written, findings)


def _check_config(built: BuiltDraft, canonical: CanonicalDraft, name: str, findings: Findings) -> None:
    """Build the config.json of a format, and parse it with the servers' configuration classes."""
    try:
        config = load_format(built.strategy.name, name, built.entry.export).build_config(
            canonical, getattr(torch, built.entry.export.dtype)
        )
        build_server_configs(config)
    except DraftworksError as error:
        findings.error(f"{built.where}: no server would load its export {name}: {error}")
    except Exception as error:  # a plug-in's format may need weights
        findings.warning(f"{built.where}: its export {name} was not checked: {type(error).__name__}: {error}")


def _check_serving(
    built: BuiltDraft, canonical: CanonicalDraft, target: TargetSpec, written: list[str], findings: Findings
) -> None:
    """Check that the draft that is served is written in a format that an engine loads, and SGLang's command against the
    entry."""
    serving = target.evaluation.serving
    if serving.format is not None and serving.format not in {spec.name for spec in built.strategy.exports}:
        return  # that of another strategy, whose draft is the one that is served
    commands: dict[ServingEngine, dict[str, str]] = {engine: {} for engine in serving.engines}
    for name in written:
        try:
            made = load_format(built.strategy.name, name).build_serve_commands(canonical, DRAFT_FOLDER)
        except Exception:  # a plug-in's format may need weights
            return
        for engine, found in commands.items():
            found |= {name: made[SERVER_COMMANDS[engine]]} if SERVER_COMMANDS[engine] in made else {}
    loaded = sorted({name for found in commands.values() for name in found})
    if serving.format is not None and serving.format not in loaded:
        engines = " or ".join(ENGINES[engine] for engine in serving.engines)
        findings.error(
            f"target {target.name}: evaluation.serving.format: {built.strategy.name} will have no export for {engines} in "
            f"{serving.format}; {suggest_or_list(serving.format, loaded)} Add it to export.formats, or leave it out"
        )
        return
    for engine, found in commands.items():
        if found and serving.starts(engine):
            name = serving.format if serving.format in found else next(iter(found))
            if engine == "sglang":
                _check_command(built, target, found[name], findings)
            elif serving.device == "cpu":
                _check_vllm_on_a_cpu(built, canonical, target, name, findings)


def _check_vllm_on_a_cpu(
    built: BuiltDraft, canonical: CanonicalDraft, target: TargetSpec, name: str, findings: Findings
) -> None:
    """Check that vLLM serves the kind of draft that a format's config.json names."""
    try:
        require_cpu_support(load_format(built.strategy.name, name).build_config(canonical, torch.float32))
    except DraftworksError as error:
        findings.error(f"target {target.name}: {error}")


def _check_command(built: BuiltDraft, target: TargetSpec, command: str, findings: Findings) -> None:
    """Check what the server would be told: the algorithm on a CPU, the number of proposals, arguments of the entry."""
    where, evaluation = f"target {target.name}: evaluation", target.evaluation
    trained = built.draft.draft_tokens
    measured = min(
        evaluation.draft_tokens or trained, built.draft.max_draft_tokens or evaluation.draft_tokens or trained
    )
    try:
        speculation = Speculation.of_command(command, DRAFT_FOLDER, Path("draft")).with_draft_tokens(measured)
        if evaluation.serving.device == "cpu":
            speculation.require_supported("cpu")
            require_cpu_dtype(evaluation.serving.compute_dtype)
    except DraftworksError as error:
        findings.error(f"target {target.name}: {error}")
        return
    if not speculation.sets_draft_tokens and measured != trained:
        findings.error(
            f"{where}.draft_tokens: found {measured}, and in SGLang {built.strategy.name} drafts propose what their own "
            f"config says, {trained}. Leave it out, or set serving.prompts: 0"
        )
    contradicted = speculation.find_contradicted(evaluation.serving.server.args)
    if contradicted:
        findings.error(
            f"{where}.serving.server.args: {', '.join(contradicted)}: set from the draft that is served, which it would "
            "contradict: leave it out"
        )


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
