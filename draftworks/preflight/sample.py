"""Checks on the first data rows of a target: parsed, rendered, tokenized and measured, without the model."""

from __future__ import annotations

from collections import Counter

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.config.strategies import resolve_strategy
from draftworks.data.chat import ChatTokenizer
from draftworks.data.formats import find_system_names
from draftworks.preflight.data_checks import check_counts, check_mix, check_prompts, check_slices, check_stream_bytes
from draftworks.preflight.findings import Findings
from draftworks.preflight.sample_rows import (
    MAX_JSON_LIST_BYTES,
    DataUse,
    Sample,
    check_lengths,
    list_uses,
    read_sample,
    shorten_reason,
    tokenize_sample,
)
from draftworks.storage.words import format_count, list_fitting
from draftworks.targets.registry import Registry


def check_sample(target: TargetSpec, files: TargetFiles, registry: Registry, findings: Findings) -> None:
    """Check the first rows of every data set of a target; the caller has checked that the files exist."""
    where = f"target {target.name}"
    chat = None
    with findings.collect_errors():
        chat = ChatTokenizer.load(files, True if target.asks_both_ways else target.responses.thinking)
    used: Counter[int] = Counter()
    samples: dict[str, Sample] = {}
    uses: list[DataUse] = []
    named = [*target.training_datasets, *(registry.load_eval_set(name).dataset for name in target.evals)]
    for name in dict.fromkeys(named):
        with findings.collect_errors():
            dataset = registry.load_dataset(name)
            sample = samples[name] = read_sample(dataset, registry.root, files)
            _check_rows(f"data set {name}", sample, target, findings)
            if name in target.training_datasets and sample.kind == "tokens" and target.responses.mode == "regenerate":
                findings.error(
                    f"{where}: data set {name} is tokenized already, so its answers cannot be regenerated. Set responses.mode "
                    "to passthrough"
                )
            if sample.items and (chat is not None or sample.kind == "tokens"):
                tokenized = tokenize_sample(sample, chat, target)
                used += tokenized.counts
                found = list_uses(name, sample, tokenized.rows, target, registry)
                uses += found
                for use in found:
                    check_lengths(f"{where}: data set {name}", use, target, findings)
                if not any(use.whole for use in found):  # else they are among the rows without a sample
                    outside = sum(row.outside for row in tokenized.rows.values())
                    _check_ids(f"{where}: data set {name}", outside, len(tokenized.rows), target, findings)
    if samples.keys() == set(named):  # else a data set without a readable row is reported already
        check_slices(target, samples, registry, findings)
        with findings.collect_errors():
            check_mix(target, samples, registry, findings)
            check_counts(target, uses, registry, findings)
            check_prompts(target, samples, registry, findings)
            check_stream_bytes(target, files, uses, findings)
    if chat is not None:
        _check_vocabulary(where, chat, files, findings)
        _check_mask_tokens(target, files, chat, used, findings)


def _check_rows(where: str, sample: Sample, target: TargetSpec, findings: Findings) -> None:
    if sample.skipped:
        findings.warning(
            f"{where}: {list_fitting(path.name for path in sample.skipped)}: not looked at, as a JSON list of more than "
            f"{MAX_JSON_LIST_BYTES >> 20} MiB has to be read whole. Convert it to JSONL or Parquet"
        )
    if not sample.rows:
        if not sample.skipped:
            findings.error(f"{where}: its files hold no row")
    elif not sample.items:
        findings.error(
            f"{where}: none of its first {sample.rows} rows can be used: {shorten_reason(sample.reasons[0], 110)}"
        )
    elif len(sample.reasons) > target.data.max_rejected_share * sample.rows:
        report = findings.error if sample.whole else findings.warning
        rows = f"its {sample.rows}" if sample.whole else f"its first {sample.rows}"
        report(
            f"{where}: {len(sample.reasons)} of {rows} rows cannot be used (allowed: "
            f"{target.data.max_rejected_share:.0%}, data.max_rejected_share): {shorten_reason(sample.reasons[0], 80)}"
        )
        _check_ids(where, 0 if sample.whole else sample.outside, sample.rows, target, findings)
    if sample.unread:
        keys = list_fitting(f"{key} ({format_count(rows, 'row')})" for key, rows in sorted(sample.unread.items()))
        asked = find_system_names(sample.unread)
        report = findings.warning if asked else findings.note
        hint = f". A system prompt is read under the name system: rename {asked[0]}" if asked else ""
        report(f"{where}: of its first {sample.rows} rows these keys are not read: {keys}{hint}")


def _check_ids(where: str, outside: int, rows: int, target: TargetSpec, findings: Findings) -> None:
    """Report a tokenizer of another model: more rows than may be rejected have ids that the target does not know."""
    if outside > target.data.max_rejected_share * rows:
        findings.error(
            f"{where}: {outside} of its first {rows} rows have token ids beyond the model's vocabulary: they are of another "
            f"model's tokenizer, and the run stops if more than {target.data.max_rejected_share:.0%} are"
        )


def _check_vocabulary(where: str, chat: ChatTokenizer, files: TargetFiles, findings: Findings) -> None:
    if chat.largest_id >= files.vocab_size:
        findings.warning(
            f"{where}: its tokenizer has ids up to {chat.largest_id:,}, the model's vocabulary ends at {files.vocab_size - 1:,}: "
            "rows with a higher id are left out, and many stop the run. Check that they belong together"
        )
    elif chat.largest_id < files.vocab_size // 2:
        findings.warning(
            f"{where}: its tokenizer has ids up to {chat.largest_id:,} of the model's {files.vocab_size:,}. Check that it is the "
            "tokenizer of this model"
        )


def _check_mask_tokens(
    target: TargetSpec, files: TargetFiles, chat: ChatTokenizer, used: Counter[int], findings: Findings
) -> None:
    """Check that the mask token does not occur in text: the draft would confuse such text with masked places.

    A default mask token that does is a warning, a chosen one an error.
    """
    for name, entry in target.strategies.items():
        if "mask_token_id" not in resolve_strategy(name).options.model_fields:
            continue
        where = f"target {target.name}: strategies.{name}.options.mask_token_id"
        chosen = entry.options.get("mask_token_id")
        mask = files.vocab_size - 1 if chosen is None else chosen
        if not isinstance(mask, int) or mask >= files.vocab_size:
            continue  # the strategy's own check reports it
        text = chat.find_ordinary_token(mask)
        if used[mask]:
            message = f"{where}: {mask} is {used[mask]} times in the sample of the data" + (
                f" ({text!r})" if text else ""
            )
        elif text is not None:
            message = f"{where}: {mask} is {text!r}, a token of ordinary text"
        else:
            continue
        if chosen is None:
            findings.warning(f"{message}, and the default: the last id. Set it to the id of a token that no text has")
        else:
            findings.error(f"{message}. Set it to the id of a token that no text has")
