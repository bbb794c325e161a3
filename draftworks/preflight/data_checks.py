"""What a sample of the data shows: prompts that are shared, parts of mixes, slices, labels, bytes of a stream's step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean

from draftworks.config.data import THINKING
from draftworks.config.registry_files import DatasetSpec, TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.config.strategies import resolve_strategy
from draftworks.data.conversations import Conversation
from draftworks.data.datasets import count_rows
from draftworks.data.slices import LANGUAGE, LENGTH, PROMPT_LENGTH, PROMPT_LENGTHS, SLICE_COLUMNS, SOURCE, THINKING_PAIR
from draftworks.data.sources import SERVED, find_dataset_files
from draftworks.data.split import is_held_out
from draftworks.data.tokenized import TokenRow
from draftworks.errors import DataError
from draftworks.preflight.findings import Findings
from draftworks.preflight.sample_rows import (
    DataUse,
    Sample,
    count_least_tokens,
    find_absent_columns,
    find_absent_values,
    read_usable,
)
from draftworks.storage.names import HELDOUT
from draftworks.storage.words import format_count, list_fitting, suggest, suggest_or_list
from draftworks.targets.registry import Registry

MOST_ROWS = 20_000
"""Rows of a data set that are read for this; of served prompts, those of the sample."""
LARGEST_SHARE = 0.05
"""Share of the rows that may have one prompt before a warning: whole prompts are held out, or none of their rows."""


def check_prompts(target: TargetSpec, samples: Mapping[str, Sample], registry: Registry, findings: Findings) -> None:
    """Report training rows that share a prompt, and prompts of eval sets that are trained on.

    Args:
        samples: by the name of the data set, of all that are trained on or measured on.
    """
    trained = _Prompts()
    for name in target.training_datasets:
        trained.add(registry.load_dataset(name), samples[name], registry)
    _report_shared(f"target {target.name}: data set {' + '.join(target.training_datasets)}", trained, findings)
    for name in target.evals:
        spec = registry.load_eval_set(name)
        if spec.part == "held_out":
            continue
        measured = _Prompts()
        measured.add(registry.load_dataset(spec.dataset), samples[spec.dataset], registry)
        both = measured.rows.keys() & trained.rows.keys()
        learnt = sum(not is_held_out(key, target.data.held_out_share) for key in both)
        if learnt:
            findings.warning(
                f"target {target.name}: eval set {name}: {learnt:,} of {len(measured.rows):,} prompts are trained on too, so it "
                "measures what was learnt by heart. Take them out, or set its part: held_out"
            )


@dataclass
class _Prompts:
    """Distinct rows by the key of their prompt, and an example of each; `whole` if these are all rows that there are."""

    rows: Counter[str] = field(default_factory=Counter)
    shown: dict[str, str] = field(default_factory=dict)
    whole: bool = True
    _ids: set[str] = field(default_factory=set)

    def add(self, dataset: DatasetSpec, sample: Sample, registry: Registry) -> None:
        known = sample.whole or dataset.format == SERVED  # a hook that redacts these may cost more than reading
        rows = sample.items if known else read_usable(dataset, registry.root, sample.kind)
        read = 0
        for read, row in enumerate(islice(rows, MOST_ROWS), start=1):  # noqa: B007
            if row.id not in self._ids:
                self._ids.add(row.id)
                self.rows[row.prompt_key] += 1
                self.shown.setdefault(row.prompt_key, "" if dataset.format == SERVED else f", {_show(row)!r}")
        self.whole = self.whole and (sample.whole or (not known and not sample.skipped and read < MOST_ROWS))


def _show(row: Conversation | TokenRow) -> str:
    """Return the beginning of a prompt; of token rows, their first ids."""
    if isinstance(row, TokenRow):
        return " ".join(map(str, row.input_ids[:8]))
    asked = next((turn.content for turn in row.turns if turn.role == "user"), "")
    return asked[:40]


def _report_shared(where: str, found: _Prompts, findings: Findings) -> None:
    total, shared = found.rows.total(), sum(count for count in found.rows.values() if count > 1)
    if not shared:
        return
    rows = f"{total:,} rows" if found.whole else f"first {total:,} rows"
    findings.note(
        f"{where}: {shared:,} of its {rows} share a prompt (system and first user turn) with another one, and are trained on "
        f"or held out with it: {len(found.rows):,} prompts"
    )
    key, most = found.rows.most_common(1)[0]
    if most > LARGEST_SHARE * total:
        findings.warning(
            f"{where}: {most:,} of its {rows} have one prompt ({most / total:.0%}){found.shown[key]}: all are trained on, or all "
            "held out. Take some out, or let the first user turn differ"
        )


def check_mix(target: TargetSpec, samples: Mapping[str, Sample], registry: Registry, findings: Findings) -> None:
    """Report data of a mix that is tokenized already, and slices with a share that no data set has.

    Args:
        samples: by the name of the data set, of all that are trained on.
    """
    if target.mix is None:
        return
    for name in target.training_datasets:
        if samples[name].kind == "tokens":
            findings.error(
                f"target {target.name}: mix: data set {name} is tokenized already, and only conversations can be mixed"
            )
            return
    for column, shares in target.mix.shares.items():
        absent = _find_absent(column, {value for value, share in shares.items() if share}, target, registry)
        if column == SOURCE:
            _check_sources(absent, target, samples, registry, findings)
        elif absent:
            _report_absent(findings.error, column, absent, target, ())


def _check_sources(
    absent: set[str], target: TargetSpec, samples: Mapping[str, Sample], registry: Registry, findings: Findings
) -> None:
    """Report sources with a share that no data set is or names. Logs may name sources of their own in any row."""
    logs = [samples[name] for name in target.training_datasets if registry.load_dataset(name).format == SERVED]
    seen = {str(item.columns[SOURCE]) for sample in logs for item in sample.items if SOURCE in item.columns}
    if absent - seen:
        report = findings.error if all(sample.whole for sample in logs) else findings.warning
        _report_absent(report, SOURCE, absent - seen, target, {*target.training_datasets, *seen})


def _report_absent(
    report: Callable[[str], None], column: str, absent: set[str], target: TargetSpec, known: Collection[str]
) -> None:
    first = min(absent)
    hint = f"; {suggest(first, sorted(known)) or f'there are {list_fitting(sorted(known))}.'}" if known else "."
    report(
        f"target {target.name}: mix.shares: {column}: no conversation has {list_fitting(sorted(absent), 40)}{hint} Set the share to "
        "0, or give data with it"
    )


def _find_absent(column: str, wanted: set[str], target: TargetSpec, registry: Registry) -> set[str]:
    """Return the values that no row of any data set has; none where they are found out by reading prompts."""
    if column in (THINKING, LANGUAGE):
        return set()
    if column == PROMPT_LENGTH:
        wanted = wanted - set(PROMPT_LENGTHS)
    if column == SOURCE:
        wanted = wanted - set(target.training_datasets)
    for name in target.training_datasets:
        dataset = registry.load_dataset(name)
        if dataset.format != SERVED and wanted:
            wanted = find_absent_values(column, wanted, dataset, registry.root)
    return wanted


def check_slices(target: TargetSpec, samples: Mapping[str, Sample], registry: Registry, findings: Findings) -> None:
    """Report a column to slice by that no eval set has; the reports of those that lack it say so, if one has it.

    Args:
        samples: by the name of the data set, of all from which eval sets are made.
    """
    datasets = [registry.load_dataset(name) for name in samples]
    known = _list_made_columns(target, datasets)
    known |= {name for sample in samples.values() for item in sample.items for name in item.columns}
    for name in _find_absent_slices(target.evaluation.slices, known, datasets, registry):
        hint = suggest_or_list(name, sorted(known))
        findings.error(f"target {target.name}: evaluation.slices: no eval set has a column {name!r}; {hint}")


def _list_made_columns(target: TargetSpec, datasets: Sequence[DatasetSpec]) -> set[str]:
    """Return the columns that eval sets have beside those of their data's rows."""
    found = {LENGTH}
    if target.mix is not None or any(dataset.format == SERVED for dataset in datasets):
        found |= set(SLICE_COLUMNS)
    return found | ({THINKING, THINKING_PAIR} if target.asks_both_ways else set())


def _find_absent_slices(
    wanted: Sequence[str], known: set[str], datasets: Sequence[DatasetSpec], registry: Registry
) -> list[str]:
    """Return the columns that no eval set has. Later rows of JSON may have a column that the first ones lack."""
    left = set(wanted) - known
    try:
        for dataset in datasets:
            if left and dataset.format != SERVED:  # served prompts have the slice columns and no other
                left = find_absent_columns(left, dataset, registry.root)
    except DataError:
        return []  # of files that cannot be read: reported by those who read them
    return [name for name in wanted if name in left]


_LEAST_EXPECTED = 3
"""Held-out rows to expect below which there may be none: each row is held out by its hash, and one set in 20 has none."""
_MOST_ROWS = 1_000_000
_MAX_LIST_BYTES = 16 << 20


def check_counts(target: TargetSpec, uses: Iterable[DataUse], registry: Registry, findings: Findings) -> None:
    """Check the number of rows of every part of the data: exact where all rows are known, otherwise to be expected."""
    known = {use.eval_set or "train": use for use in uses if use.whole}
    share, where = target.data.held_out_share, f"target {target.name}"
    asked = len({row.prompt_key for use in known.values() for row in use.rows})
    for use in known.values():
        if not use.rows:
            findings.error(
                f"{where}: {use.what}: none of {format_count(asked, 'prompt')} (data.held_out_share {share:g}). Give more "
                "conversations with other prompts, or change the share"
            )
    prompts = {name: float(len(use.rows)) for name, use in known.items() if name != "train"}
    if "train" in known:
        rows = len(known["train"].rows)
        several = known["train"].asked and not target.data.only_last_turn
        most = sum(row.answers for row in known["train"].rows) if several else rows
        _check_batches(target, rows, most, findings)
    else:
        total = _count_all(target, registry)
        if total is not None:
            single = target.responses.mode == "passthrough" or target.data.only_last_turn
            _check_batches(target, total * (1 - share), total - 1 if single else None, findings)
            prompts[HELDOUT] = total * share
            if total * share < _LEAST_EXPECTED:
                findings.warning(
                    f"{where}: about {total * share:.1f} of {total:,} conversations are held out (data.held_out_share "
                    f"{share:g}), and a run needs one. Raise the share, or give more"
                )
    _check_least_prompts(target, prompts, findings)


def count_dataset(dataset: DatasetSpec, root: Path, most: int) -> int | None:
    """Return how many rows a data set has at most, `most` if there are more; None if a large file had to be read whole.

    Raises:
        DataError: a file cannot be read.
    """
    found = 0
    for path in find_dataset_files(dataset, root):
        rows = count_rows(path, most - found, _MAX_LIST_BYTES)
        if rows is None:
            return None
        found += rows
        if found >= most:
            return most
    return found


def _count_all(target: TargetSpec, registry: Registry) -> int | None:
    """Return how many conversations are used at most; None if that is not known, or more than matters."""
    largest = max((entry.training.global_batch_size for entry in target.strategies.values()), default=0)
    share, least = target.data.held_out_share, max(_LEAST_EXPECTED, _find_least_prompts(target))
    enough = min(_MOST_ROWS, int(largest / (1 - share) + least / share) + 1)
    found, limit = 0, target.data.max_conversations
    for name in target.training_datasets:
        rows = count_dataset(registry.load_dataset(name), registry.root, enough)
        if rows is None or found + rows >= enough:
            return limit if limit is not None and limit < enough else None
        found += rows
    return found if limit is None else min(found, limit)


def _check_batches(target: TargetSpec, expected: float, most: int | None, findings: Findings) -> None:
    """Compare each strategy's global batch with the samples that are to be expected, and with the most there can be."""
    for name, entry in target.strategies.items():
        size = entry.training.global_batch_size
        where = f"target {target.name}: strategies.{name}.training.global_batch_size"
        advice = "not enough for one optimizer step. Lower it, or use more data"
        if most is not None and most < size:
            findings.error(f"{where}: found {size}, and there are at most {most:,} samples to train on: {advice}")
        elif expected < size:
            findings.warning(
                f"{where}: found {size}, and there are about {expected:,.0f} conversations to train on: {advice}"
            )


def _find_least_prompts(target: TargetSpec) -> int:
    return max((spec.least_prompts for spec in (target.service, target.decision) if spec is not None), default=0)


def _check_least_prompts(target: TargetSpec, prompts: Mapping[str, float], findings: Findings) -> None:
    """Warn of eval sets with so few prompts that nothing is ever decided by them."""
    least = _find_least_prompts(target)
    ways = 2 if target.asks_both_ways else 1
    for name, found in prompts.items():
        if 0 < ways * found < least:
            findings.warning(
                f"target {target.name}: eval set {name} has about {ways * found:,.0f} prompts, and below {least} "
                "(service.least_prompts, decision.least_prompts) nothing is decided. Give more, or lower them"
            )


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
