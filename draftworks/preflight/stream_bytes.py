"""Check that a stream's limit of bytes lets one optimizer step through."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.config.strategies import resolve_strategy
from draftworks.preflight.findings import Findings
from draftworks.preflight.sample_lengths import count_least_tokens
from draftworks.preflight.sample_tokens import DataUse

_LEAST_TOKENS = 2
"""Tokens of the shortest sample: one of its prompt, and one of its answer."""
_BYTES = {"float32": 4, "bfloat16": 2}


def check_stream_bytes(target: TargetSpec, files: TargetFiles, uses: Iterable[DataUse], findings: Findings) -> None:
    """Compare `streaming.watermark.bytes` with a global batch: of the shortest samples an error, of the usual a warning."""
    limit = None if target.streaming is None else target.streaming.watermark.bytes
    if limit is None:
        return
    lengths = [
        count_least_tokens(row, use.asked, target.max_length)
        for use in uses
        if use.trained
        for row in use.rows
        if row.problem is None
    ]
    size = _BYTES[target.capture.dtype] if target.capture.storage == "plain" else 1
    for name, entry in target.strategies.items():
        strategy = resolve_strategy(name)
        options = strategy.parse_options(entry.options, where=f"target {target.name}: {name}")
        streams = len(strategy.list_features(files.num_layers, options))
        per_token = entry.training.global_batch_size * streams * files.hidden_size * size
        usual = per_token * min(max(fmean(lengths or [_LEAST_TOKENS]), _LEAST_TOKENS), target.max_length)
        if limit < usual:
            report = findings.error if limit < _LEAST_TOKENS * per_token else findings.warning
            report(
                f"target {target.name}: streaming.watermark.bytes: found {limit:,}, and a global batch of {name} has about "
                f"{usual:,.0f} or more: its trainer would wait for ever. Raise it, or lower global_batch_size"
            )
