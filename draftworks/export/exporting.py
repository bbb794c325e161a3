"""Write a draft in a server's format atomically and run the gates over the written files.

Beside them is a README.md: the model card, if there is one, and how servers load the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from draftworks.config.base import Dtype
from draftworks.config.exports import ExportSettings
from draftworks.errors import ConfigError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.conventions import CARD, DRAFT_FOLDER
from draftworks.export.export_format import ExportFormat, list_formats, load_format
from draftworks.export.gates import GateResult, check_export
from draftworks.storage.files import publish_folder
from draftworks.storage.identity import digest, file_digest


@dataclass(frozen=True)
class ExportResult:
    """The outcome of one export.

    Attributes:
        digest: of the files that a server loads.
        loaders: which software loads it, from which version on.
        commands: the command line that serves the target with it, by server; `DRAFT_FOLDER` stands for its path.
    """

    format: str
    path: Path
    dtype: str
    nbytes: int
    digest: str
    loaders: str
    commands: dict[str, str]
    gates: tuple[GateResult, ...]

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values without the path: a result is moved to its place when it is complete."""
        values = asdict(self)
        del values["path"]
        return values | {"passed": self.passed}


@dataclass(frozen=True)
class FormatChoice:
    """The formats to export in, and for each of the others the reason why it cannot hold the draft."""

    chosen: tuple[str, ...]
    refused: dict[str, str]


def export_draft(
    draft: CanonicalDraft,
    format_name: str,
    out: Path,
    dtype: Dtype = "bfloat16",
    card: str = "",
    settings: ExportSettings | None = None,
    note: str = "",
) -> ExportResult:
    """Write one format into `out`, which is complete or absent, and run the gates over the written files.

    An export that fails a gate is kept for inspection; see `ExportResult.passed`.

    Args:
        out: replaced if it exists.
        card: a model card, the first part of README.md.
        settings: what else the target's entry says of its exports.
        note: a sentence for README.md, such as what was measured of the files.

    Raises:
        ConfigError: no such format, or servers that read it would compute another draft.
        StoreError: the draft's weights do not fit its configuration.
    """
    export_format = load_format(draft.record.strategy, format_name, settings)
    for reason in draft.find_refusals([format_name]).values():
        raise build_refusal_error(draft, format_name, reason)
    torch_dtype = getattr(torch, dtype)
    strategy = export_format.build_strategy(draft, torch_dtype)
    with publish_folder(out) as staging:
        export_format.write_files(staging, draft, torch_dtype, describe_provenance(draft))
        (staging / CARD).write_text(render_readme(export_format, draft, card, note), encoding="utf-8")
    return ExportResult(
        format=format_name,
        path=out,
        dtype=dtype,
        nbytes=(out / export_format.files[-1]).stat().st_size,
        digest=digest([file_digest(out / name) for name in export_format.files]),
        loaders=export_format.describe_loaders(draft),
        commands=export_format.build_serve_commands(draft, DRAFT_FOLDER),
        gates=check_export(out, export_format, draft, strategy, torch_dtype),
    )


def choose_formats(draft: CanonicalDraft, wanted: Sequence[str] | None = None) -> FormatChoice:
    """Return all formats that can hold the draft, or exactly those `wanted`; at least one.

    Raises:
        ConfigError: a wanted format does not exist for this strategy, or cannot hold this draft; or none can, or none
            is wanted.
    """
    names = list_formats(draft.record.strategy) if wanted is None else list(wanted)
    refused = draft.find_refusals(names)
    for name, reason in refused.items():
        if wanted is not None:
            raise build_refusal_error(draft, name, reason)
    chosen = tuple(name for name in names if name not in refused)
    if not chosen:
        raise build_nothing_error(draft, refused)
    return FormatChoice(chosen, refused)


def build_refusal_error(draft: CanonicalDraft, format_name: str, reason: str) -> ConfigError:
    """Return the error for a format that cannot hold the draft; its text names those that can."""
    strategy = draft.record.strategy
    refused = draft.find_refusals()
    others = [name for name in list_formats(strategy) if name not in refused]
    advice = (
        f"It can be exported as {', '.join(others)}" if others else "No format can hold it: train without this option"
    )
    return ConfigError(f"{draft.folder}: cannot be exported as {format_name}: {reason}. {advice}")


def build_nothing_error(draft: CanonicalDraft, refused: Mapping[str, str]) -> ConfigError:
    """Return the error where no format is left: an export without a file would pass every gate."""
    if not refused:
        known = ", ".join(list_formats(draft.record.strategy)) or "none"
        return ConfigError(
            f"{draft.folder}: nothing to export: formats: expected one at least of {known}, found none. "
            "Leave `formats` out for all that fit"
        )
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    return ConfigError(
        f"{draft.folder}: no format can hold this draft: {reasons}. Train without what is named, or make this target's "
        "other assets without the export"
    )


def describe_provenance(draft: CanonicalDraft) -> dict[str, Any]:
    """Return where the exported weights are from: digests, and the options that no format has a key for."""
    return {
        "draftworks": version("draftworks"),
        "strategy": draft.record.strategy,
        "draft": draft.folder.name,
        "weights_digest": draft.record.weights_digest,
        "target_digest": draft.record.target_digest,
        "options": dict(draft.config["options"]),
    }


def render_readme(export_format: ExportFormat, draft: CanonicalDraft, card: str, note: str = "") -> str:
    """Return the text: the model card, or a title where there is none, and a section on serving."""
    lines = [card.rstrip() if card else f"# {draft.record.strategy} draft of {draft.target.name}"]
    lines += [
        "",
        "## Serving",
        "",
        f"Format `{export_format.name}`. Loaded by: {export_format.describe_loaders(draft)}",
        "",
        *([note, ""] if note else []),
    ]
    for server, command in export_format.build_serve_commands(draft, DRAFT_FOLDER).items():
        lines += [f"{server}:", "", "```", command, "```", ""]
    lines.append(f"What the weights are, by digests, is under `provenance` in {export_format.files[0]}.")
    return "\n".join(lines) + "\n"
