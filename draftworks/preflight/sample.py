"""Checks on the first data rows of a target: parsed, rendered, tokenized and measured, without the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.config.strategies import resolve_strategy
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import Conversation
from draftworks.data.token_rows import TokenRow
from draftworks.errors import DataError
from draftworks.preflight.findings import Findings
from draftworks.preflight.sample_rows import MAX_JSON_LIST_BYTES, Sample, read_sample
from draftworks.preflight.slice_columns import check_slices
from draftworks.targets.registry import Registry

_WARNING_SHARE = 0.5
"""Share of lost or cut rows in a sample above which a warning is given."""


@dataclass
class Tokenized:
    """Token statistics of a sample, with the data's own answers.

    Attributes:
        lengths: number of tokens of each sequence, prompt and answer, before any cut.
        prompts: number of tokens of each conversation's first prompt.
        counts: occurrences of each token id.
        reasons: for each conversation that cannot be tokenized, why.
    """

    lengths: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)


def check_sample(target: TargetSpec, files: TargetFiles, registry: Registry, findings: Findings) -> None:
    """Check the first rows of every data set of a target; the caller has checked that the files exist."""
    where = f"target {target.name}"
    chat = None
    with findings.collect_errors():
        chat = ChatTokenizer.load(files, True if target.asks_both_ways else target.responses.thinking)
    used: Counter[int] = Counter()
    samples: dict[str, Sample] = {}
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
                tokenized = _tokenize(sample, chat, target)
                used += tokenized.counts
                _check_lengths(f"{where}: data set {name}", tokenized, sample, target, findings)
    if samples.keys() == set(named):  # else a data set without a readable row is reported already
        check_slices(target, samples, registry, findings)
    if chat is not None:
        _check_vocabulary(where, chat, files, findings)
        _check_mask_tokens(target, files, chat, used, findings)


def _check_rows(where: str, sample: Sample, target: TargetSpec, findings: Findings) -> None:
    if sample.skipped:
        findings.warning(
            f"{where}: {', '.join(path.name for path in sample.skipped)}: a JSON list of more than "
            f"{MAX_JSON_LIST_BYTES >> 20} MiB has to be read whole for its first rows, so it was not looked at. Convert it to "
            "JSONL or Parquet to have it checked"
        )
    if not sample.rows:
        if not sample.skipped:
            findings.error(f"{where}: its files hold no row")
    elif not sample.items:
        findings.error(f"{where}: none of its first {sample.rows} rows can be used, the first: {sample.reasons[0]}")
    elif len(sample.reasons) > target.data.max_rejected_share * sample.rows:
        findings.warning(
            f"{where}: {len(sample.reasons)} of its first {sample.rows} rows cannot be used, and the run stops if that is so "
            f"of more than {target.data.max_rejected_share:.0%} (data.max_rejected_share). The first: {sample.reasons[0]}"
        )


def _tokenize(sample: Sample, chat: ChatTokenizer | None, target: TargetSpec) -> Tokenized:
    found = Tokenized()
    for item in sample.items:
        if isinstance(item, TokenRow):
            found.lengths.append(len(item))
            found.counts.update(item.input_ids.tolist())
            continue
        assert chat is not None, "a set of conversations is looked at only where the chat template could be loaded"
        try:
            ids = chat.encode(item, target.data.only_last_turn).input_ids.tolist()
            prompt = len(chat.encode_prompt(_first_prompt(item)))
        except DataError as error:
            found.reasons.append(str(error))
            continue
        found.lengths.append(len(ids))
        found.prompts.append(prompt)
        found.counts.update(ids)
    return found


def _first_prompt(conversation: Conversation) -> Sequence[Any]:
    """Return the turns before the assistant's first turn."""
    turns = conversation.turns
    return turns[: next(number for number, turn in enumerate(turns) if turn.role == "assistant")]


def _check_lengths(where: str, found: Tokenized, sample: Sample, target: TargetSpec, findings: Findings) -> None:
    total, limit = len(sample.items), target.max_length
    if found.reasons and not found.lengths:
        findings.error(f"{where}: none of its first {total} conversations can be tokenized: {found.reasons[0]}")
        return
    if len(found.reasons) > target.data.max_rejected_share * total:
        findings.warning(
            f"{where}: {len(found.reasons)} of its first {total} conversations cannot be tokenized, the first: {found.reasons[0]}"
        )
    if target.responses.mode == "regenerate" and found.prompts:
        lost = sum(length >= limit for length in found.prompts)
        message = f"{where}: {lost} of its first {total} prompts leave no room for an answer within max_length {limit}"
        if lost == len(found.prompts):
            findings.error(f"{message}. Raise max_length, or take shorter conversations")
        elif lost > _WARNING_SHARE * len(found.prompts):
            findings.warning(f"{message}; the longest has {max(found.prompts):,} tokens")
        return
    cut = sum(length > limit for length in found.lengths)
    if cut > _WARNING_SHARE * len(found.lengths):
        findings.warning(
            f"{where}: max_length {limit} cuts {cut} of its first {total} samples, the longest of {max(found.lengths):,} tokens: "
            "tokens after the cut are not learnt"
        )


def _check_vocabulary(where: str, chat: ChatTokenizer, files: TargetFiles, findings: Findings) -> None:
    if chat.largest_id >= files.vocab_size:
        findings.warning(
            f"{where}: its tokenizer has ids up to {chat.largest_id:,}, the model's vocabulary ends at {files.vocab_size - 1:,}: "
            "text with a higher id stops the run. Check that it is the tokenizer of this model"
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
