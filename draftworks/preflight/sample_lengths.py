"""Checks of the lengths of samples: room for answers, what is cut, packed rows, and the share that is learnt."""

from __future__ import annotations

from collections.abc import Sequence

from draftworks.config.registry_files import TargetSpec
from draftworks.data.split import is_held_out
from draftworks.preflight.findings import Findings
from draftworks.preflight.sample_tokens import DataUse, RowTokens

_WARNING_SHARE = 0.5
"""Share of lost or cut rows in a sample above which a warning is given, whatever is allowed."""


def check_lengths(where: str, use: DataUse, target: TargetSpec, findings: Findings) -> None:
    """Check one use of a data set. What is not certain from the rows that are known is a warning."""
    if not use.rows:
        return
    usable = _check_rejected(where, use, target, findings)
    if not usable:
        return
    if use.asked and target.responses.max_new_tokens == 1:
        findings.error(
            f"{where}: responses.max_new_tokens is 1: a draft proposes what follows the first token of an answer, so nothing "
            "could be measured. Raise it"
        )
        return
    cut = [] if use.asked else [row.length for row in usable if row.length > target.max_length]
    if len(cut) > _WARNING_SHARE * len(usable):
        findings.warning(
            f"{where}: max_length {target.max_length} cuts {len(cut)} of {use.what}, the longest of {max(cut):,} tokens: "
            "tokens after the cut are not learnt"
        )
    if use.trained:
        _check_packing(where, use, usable, target, findings)
    _check_supervised_share(where, use, usable, target, findings)


def count_least_tokens(row: RowTokens, asked: bool, max_length: int) -> int:
    """Return the tokens that the sample of a row has at least."""
    return row.prompt + 1 if asked else min(row.length, max_length)


def _explain_loss(row: RowTokens, asked: bool, max_length: int) -> str | None:
    """Return why a run gets no sample of a row; None if it gets one."""
    if row.problem is not None or (row.answer_problem is not None and not asked):
        return row.problem or row.answer_problem
    if asked and row.prompt >= max_length:
        return f"a prompt of {row.prompt:,} tokens leaves no room within max_length {max_length}"
    if not asked and not row.supervised:
        return f"no supervised token in the first {max_length} of {row.length:,}"
    return None


def _check_rejected(where: str, use: DataUse, target: TargetSpec, findings: Findings) -> Sequence[RowTokens]:
    """Check the share of rows that give no sample, as the run does; return the others."""
    losses = {row.id: _explain_loss(row, use.asked, target.max_length) for row in use.rows}
    usable = [row for row in use.rows if losses[row.id] is None]
    reasons = [reason for reason in losses.values() if reason is not None]
    total, limit = len(use.rows), target.data.max_rejected_share
    if not usable and all(row.problem or (row.answer_problem and not use.asked) for row in use.rows):
        findings.error(f"{where}: none of {use.what}: {reasons[0]}")
    elif not usable and use.asked:
        findings.error(
            f"{where}: the prompts of {use.what} leave no room for an answer within max_length {target.max_length}. Raise "
            f"max_length, or take shorter conversations"
        )
    elif not usable and use.whole:
        findings.error(f"{where}: none of {use.what} gives a sample: {reasons[0]}. Raise max_length")
    elif len(reasons) > min(limit, _WARNING_SHARE) * total:
        report = findings.error if use.whole and len(reasons) > limit * total else findings.warning
        report(
            f"{where}: {len(reasons):,} of {use.what} give no sample ({len(reasons) / total:.1%}; allowed: {limit:.1%}, "
            f"data.max_rejected_share): {reasons[0]}"
        )
    return usable


def _check_packing(
    where: str, use: DataUse, usable: Sequence[RowTokens], target: TargetSpec, findings: Findings
) -> None:
    """Report samples that are longer than the packed rows, which would end the training."""
    if target.mix is not None or (target.data.max_conversations is not None and not use.whole):
        return  # which rows are trained on is not known
    known = [row for row in usable if use.whole or not is_held_out(row.prompt_key, target.data.held_out_share)]
    lengths = [count_least_tokens(row, use.asked, target.max_length) for row in known]
    for name, entry in target.strategies.items():
        training = entry.training
        if training.pack_tokens is None or training.pack_overlong != "refuse":
            continue
        over = [length for length in lengths if length > training.pack_tokens]
        if over:
            findings.error(
                f"{where}: {len(over):,} of {use.what} have up to {max(over):,} tokens, more than pack_tokens "
                f"{training.pack_tokens} of {name}, and the training ends there. Raise it, or set pack_overlong to own_row"
            )


def _check_supervised_share(
    where: str, use: DataUse, usable: Sequence[RowTokens], target: TargetSpec, findings: Findings
) -> None:
    """Report a share of supervised tokens that is too small even if every answer is as long as it may be."""
    least = target.data.min_supervised_share
    learnt = [_count_most_learnt(row, use.asked, target) for row in usable]
    tokens = [
        row.prompt + most if use.asked else min(row.length, target.max_length) for row, most in zip(usable, learnt)
    ]
    if sum(learnt) >= least * sum(tokens):
        return
    # a server may refuse some prompts, and the share is larger if these have the longest
    refused = int(target.data.max_rejected_share * len(usable)) if use.asked else 0
    over = sorted(most - least * total for most, total in zip(learnt, tokens))
    report = findings.error if use.whole and sum(over[refused:]) < 0 else findings.warning
    longer = f" with responses.max_new_tokens {target.responses.max_new_tokens}" if use.asked else ""
    report(
        f"{where}: of {use.what}{longer}, at most {sum(learnt) / sum(tokens):.1%} of tokens are supervised, and the run stops "
        f"below {least:.1%} (data.min_supervised_share)"
    )


def _count_most_learnt(row: RowTokens, asked: bool, target: TargetSpec) -> int:
    """Return the tokens of a row that are supervised at most."""
    if not asked:
        return row.supervised
    most = target.responses.max_new_tokens * (1 if target.data.only_last_turn else row.answers)
    return min(most, target.max_length - row.prompt) if row.answers == 1 else most
