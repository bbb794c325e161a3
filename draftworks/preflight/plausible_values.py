"""Warnings and errors for option values that are valid but implausible. Torch-free.

Bounds of errors lie far outside the values that drafts have been trained with; bounds of warnings are set to catch a
mistyped digit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from draftworks.config.mix import THINKING
from draftworks.config.registry_files import TargetSpec, TrainingSpec
from draftworks.config.server_rules import list_server_rules
from draftworks.preflight.findings import Findings

MAX_LR, UNUSUAL_LR = 1.0, 0.03


@dataclass(frozen=True)
class UnusualValue:
    """A value that gets a warning.

    Attributes:
        key: the option's key below `strategies.NAME.training`.
        usual: text of the warning: the usual values, or why this one is doubtful.
    """

    key: str
    value: float
    usual: str


def check_values(target: TargetSpec, findings: Findings) -> None:
    """Check the values of every strategy's training, of the answers and of the evaluation."""
    for name, entry in target.strategies.items():
        where, training = f"target {target.name}: strategies.{name}.training", entry.training
        if training.max_steps == 0:
            continue
        if training.lr >= MAX_LR:
            findings.error(
                f"{where}.lr: found {training.lr:g}: with AdamW nothing is learnt with {MAX_LR:g} or more. Drafts are trained with "
                "1e-5 to 1e-2"
            )
        elif training.lr * training.weight_decay >= 1:
            findings.error(
                f"{where}: lr {training.lr:g} x weight_decay {training.weight_decay:g} is 1 or more: weight decay would "
                "remove all weights in one step. Lower weight_decay"
            )
        if training.pack_overlong == "refuse" and (training.pack_tokens or target.max_length) < target.max_length:
            findings.warning(
                f"{where}.pack_tokens: found {training.pack_tokens}; a longer sample ends the training, and max_length "
                f"{target.max_length} allows one. Raise it, or set pack_overlong to own_row"
            )
        for doubt in _find_unusual(training):
            findings.warning(f"{where}.{doubt.key}: found {doubt.value:g}; {doubt.usual}")
    _check_answers(target, findings)
    _check_comparisons(target, findings)


def _find_unusual(training: TrainingSpec) -> Iterator[UnusualValue]:
    if UNUSUAL_LR < training.lr < MAX_LR:
        yield UnusualValue("lr", training.lr, "drafts are trained with 1e-5 to 1e-2")
    if training.lr < 1e-8:
        yield UnusualValue("lr", training.lr, "with so small a value the draft hardly changes")
    if training.weight_decay > 1:
        yield UnusualValue("weight_decay", training.weight_decay, "0 to 0.1 is usual")
    if training.epochs > 100:
        yield UnusualValue("epochs", training.epochs, "1 to 10 is usual; a draft overfits its data after that")
    if training.processes > 64:
        yield UnusualValue("processes", training.processes, "they are ranks on one machine; one for each GPU is usual")
    if training.global_batch_size > 8192:
        yield UnusualValue("global_batch_size", training.global_batch_size, "16 to 512 samples a step are usual")
    if training.best_metric != "eval/avg_loss" and training.best_mode == "min" and "loss" not in training.best_metric:
        yield UnusualValue(
            "best_mode", 0, f"min takes the draft with the smallest {training.best_metric}, the worst one"
        )


def _check_answers(target: TargetSpec, findings: Findings) -> None:
    where, answers = f"target {target.name}", target.responses
    if answers.temperature > 2:
        findings.warning(
            f"{where}: responses.temperature: found {answers.temperature:g}; above 2 answers are mostly random"
        )
    if answers.mode == "regenerate" and answers.max_new_tokens >= target.max_length:
        findings.warning(
            f"{where}: responses.max_new_tokens {answers.max_new_tokens} with max_length {target.max_length}: an answer of that "
            "length leaves no room for its prompt, and ends at max_length"
        )
    hot = [temperature for temperature in target.evaluation.loop.temperatures if temperature > 5]
    if hot:
        findings.warning(f"{where}: evaluation.loop.temperatures: found {hot}; above 2 answers are mostly random")
    for strategy in target.strategies:
        known = {row.rule for row in list_server_rules(strategy)}
        useless = [rule for rule in target.evaluation.loop.rules or () if known and rule not in known]
        if useless:
            findings.warning(
                f"{where}: evaluation.loop.rules: found {', '.join(useless)}; servers accept drafts of {strategy} by "
                f"{' or '.join(sorted(known))} only"
            )


def _check_comparisons(target: TargetSpec, findings: Findings) -> None:
    """Warn of comparisons, each a job of its own, that would end after they have answered and captured."""
    where, gates = f"target {target.name}", target.gates
    for name, entry in target.strategies.items():
        batch = entry.training.global_batch_size
        if target.capture.storage != "plain" and not gates.fp8_ungated and gates.fp8_samples < batch:
            findings.warning(
                f"{where}: gates.fp8_samples: found {gates.fp8_samples}, fewer than the global_batch_size {batch} of {name}: "
                "judge_fp8 could make no optimizer step. Raise it"
            )
    if not target.asks_both_ways or target.mix is None:
        return
    missing = [way for way, share in target.mix.shares[THINKING].items() if not share]
    if missing:
        findings.warning(
            f"{where}: mix.shares: thinking: the share of {missing[0]} is 0: drafts are measured both ways and learn one. Give "
            "both a share, or set responses.thinking instead"
        )
    if target.comparison.tokens < target.max_length:
        findings.warning(
            f"{where}: comparison.tokens: found {target.comparison.tokens}, less than one sample may have (max_length "
            f"{target.max_length}): compare_thinking may find none that fits. Raise it"
        )
