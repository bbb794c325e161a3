"""Checks of the formats in which a target's drafts are to be written and served, on drafts of device meta."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from draftworks.config.draft_config import DraftConfig
from draftworks.config.registry_files import StrategyEntry, TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.config.strategies import StrategySpec
from draftworks.drafts.strategy import DraftStrategy
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import DraftworksError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.export_format import load_format
from draftworks.export.names import DRAFT_FOLDER
from draftworks.export.server_configs import build_server_configs
from draftworks.preflight.findings import Findings
from draftworks.sglang.speculation import Speculation, require_cpu_dtype
from draftworks.storage.suggestions import suggest_or_list

SERVER = "SGLang"
"""Key of the server in a format's commands."""


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
    wanted = [spec.name for spec in built.strategy.exports] if formats is None else formats
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
        config = load_format(built.strategy.name, name).build_config(
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
    """Check that the draft that is served is written in a format of SGLang's, and its command against the entry."""
    serving = target.evaluation.serving
    if serving.format is not None and serving.format not in {spec.name for spec in built.strategy.exports}:
        return  # that of another strategy, whose draft is the one that is served
    commands: dict[str, str] = {}
    for name in written:
        try:
            made = load_format(built.strategy.name, name).build_serve_commands(canonical, DRAFT_FOLDER)
        except Exception:  # a plug-in's format may need weights
            return
        commands |= {name: made[SERVER]} if SERVER in made else {}
    if serving.format is not None and serving.format not in commands:
        findings.error(
            f"target {target.name}: evaluation.serving.format: {built.strategy.name} will have no export for {SERVER} in "
            f"{serving.format}; {suggest_or_list(serving.format, commands)} Add it to export.formats, or leave it out"
        )
    elif commands:
        _check_command(built, target, commands[serving.format or next(iter(commands))], findings)


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
