"""Options that are valid but implausible, never take effect, or could never do what they are for. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftworks.config.data import THINKING
from draftworks.config.decoding import list_server_rules
from draftworks.config.registry_files import TargetSpec, TrainingSpec
from draftworks.config.run_files import TargetFiles
from draftworks.config.service import LEAST_PROMPTS
from draftworks.errors import DraftworksError
from draftworks.preflight.findings import Findings
from draftworks.storage.artifacts import Artifact, ArtifactStore
from draftworks.storage.names import FP8_GATE, TRAINING_FEATURES, VOCAB_MAPPING, of_strategy
from draftworks.storage.records import DraftIdentity, FeaturesIdentity
from draftworks.targets.registry import Registry
from draftworks.targets.safetensors_headers import BITS, TensorHeader, read_model_headers
from draftworks.targets.training_data import collect_taps, resolve_draft_vocab_size

if TYPE_CHECKING:
    from draftworks.evaluation.ladder.relative_loss import RelativeLoss


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


_LAYER = re.compile(r"^(?!mtp\.)(?!.*(?:vision|visual|audio)).*?\blayers\.(\d+)\.")
_GB = 1e9
_SURE = 0.9
"""Share of the sizes found that must be over the budget: a file may hold tensors that no layer reads."""


def check_probe_reach(target: TargetSpec, files: TargetFiles, findings: Findings) -> None:
    """Check that `capture.probe_gb` is enough for the lowest tap, or for all layers where only `last` is read."""
    if target.capture.allow_unprobed:
        return
    try:
        tensors, taps = read_model_headers(files).tensors, collect_taps(target, files.num_layers)
    except DraftworksError:
        return  # other checks say so
    needed = taps[0] if taps else files.num_layers
    size = sum(_count_bytes(header) for name, header in tensors.items() if _is_below(name, needed)) / _GB
    if size * _SURE > target.capture.probe_gb:
        findings.error(
            f"target {target.name}: capture.probe_gb: {target.capture.probe_gb:g} GB are less than the {size:.3g} GB of the "
            f"{needed} layer(s) before the first that drafts read: nothing could be compared. Raise it, or set allow_unprobed"
        )


def _is_below(name: str, layers: int) -> bool:
    found = _LAYER.match(name)
    return found is not None and int(found[1]) < layers


def _count_bytes(header: TensorHeader) -> float:
    count = 1
    for size in header.shape:
        count *= size
    return count * BITS.get(header.dtype, 0) / 8


_KEY = "compute_dtype"


def check_made_dtypes(target: TargetSpec, registry: Registry, artifacts: ArtifactStore, findings: Findings) -> None:
    """Warn of results that would be made again since another machine, or another version, chose another dtype."""
    for line in _list_differences(registry.read_target(target.name), target, artifacts):
        findings.warning(f"target {target.name}: {line}")


def _list_differences(written: TargetSpec, target: TargetSpec, artifacts: ArtifactStore) -> Iterator[str]:
    features = None if _KEY in written.capture.model_fields_set else artifacts.find(TRAINING_FEATURES, target.name)
    if features is not None:
        made = (FeaturesIdentity.of(features).capture or {}).get(_KEY)
        yield from _describe("capture", "features", made, target.capture.compute_dtype)
    for name, entry in target.strategies.items():
        if _KEY in written.strategies[name].training.model_fields_set:
            continue
        draft = artifacts.find(of_strategy(name).draft, target.name)
        if draft is not None:
            made = (DraftIdentity.of(draft).training or {}).get(_KEY)
            yield from _describe(f"strategies.{name}.training", "its draft", made, entry.training.compute_dtype)


def _describe(key: str, what: str, made: object, chosen: str) -> Iterator[str]:
    if made not in (None, chosen):
        yield (
            f"{key}.{_KEY}: {what} had {made}, the default here is {chosen}: a run makes it again, unless you set {_KEY} to {made}"
        )


def check_decision(target: TargetSpec, registry: Registry, findings: Findings) -> None:
    """Warn of a decision that acts, where the deployment has no budget: then nothing starts by itself."""
    act = "none" if target.decision is None else target.decision.act
    if act != "none" and registry.load_deployment().budget is None:
        findings.warning(
            f"target {target.name}: decision.act is {act}, and deployment.yaml has no budget: nothing starts by itself. Add a "
            "budget, or leave act out"
        )


def check_least_prompts(target: TargetSpec, findings: Findings) -> None:
    """Warn of a number of prompts below which promotions and decisions err more often than they say."""
    for name, spec in (("service", target.service), ("decision", target.decision)):
        if spec is not None and spec.least_prompts < LEAST_PROMPTS:
            findings.warning(
                f"target {target.name}: {name}.least_prompts: found {spec.least_prompts}; below {LEAST_PROMPTS} a draft that "
                "lost a part of the traffic passes too often (docs/benchmarks.md). Raise it, or remove it"
            )


class Fp8GateClosed(DraftworksError):
    """Raised where features in fp8 are asked for and the comparison that this needs has not passed."""


def read_verdicts(gate: Artifact, max_loss: float) -> dict[str, RelativeLoss]:
    """Return what a gate found, by strategy, judged by a limit."""
    from draftworks.evaluation.ladder.relative_loss import RelativeLoss

    return {name: RelativeLoss.from_json(v).judge_by(max_loss) for name, v in gate.summary["strategies"].items()}


def require_passed_fp8_gate(
    artifacts: ArtifactStore, target: TargetSpec, weights: str, strategies: Iterable[str]
) -> None:
    """Check that drafts of these strategies may be trained on the features of the target's entry.

    Args:
        weights: digest of the target's weights.

    Raises:
        Fp8GateClosed: `capture.storage` is an fp8 one, and the gate has not passed for it and these weights.
    """
    storage = target.capture.storage
    if storage == "plain" or target.gates.fp8_ungated:
        return
    where = f"target {target.name}: capture.storage is {storage}"
    advice = f"Run: draftworks run judge_fp8 --target {target.name}, or set capture.storage to plain"
    gate = artifacts.find(FP8_GATE, target.name)
    if gate is None:
        raise Fp8GateClosed(f"{where}, and what drafts lose by that was not measured. {advice}")
    if (gate.identity["target"], gate.identity["storage"]) != (weights, storage):
        raise Fp8GateClosed(
            f"{where}, and what drafts lose by that was measured for storage {gate.identity['storage']} and weights "
            f"{gate.identity['target'][:12]}, not for these ({weights[:12]}). {advice}"
        )
    verdicts = read_verdicts(gate, target.gates.fp8_max_loss)
    for name in strategies:
        if name not in verdicts:
            raise Fp8GateClosed(f"{where}, and what {name} drafts lose by that was not measured. {advice}")
        if verdicts[name].verdict != "passed":
            raise Fp8GateClosed(
                f"{where}, {name}: {verdicts[name].describe()}. Set capture.storage to "
                f"{'fp8_taps or ' if storage == 'fp8' else ''}plain, measure more (gates.fp8_samples, fp8_seeds, fp8_steps, "
                f"or more held-out prompts), or train on it nevertheless with gates.fp8_ungated"
            )


def check_fp8_gate(artifacts: ArtifactStore, target: TargetSpec, weights: str, findings: Findings) -> None:
    """Warn if the gate has not passed: jobs that train end at the first step then, and `judge_fp8` may come first."""
    try:
        require_passed_fp8_gate(artifacts, target, weights, target.strategies)
    except DraftworksError as error:
        findings.warning(str(error))


HELDOUT_COVERAGE = "heldout_coverage"
LEAST_COVERAGE = 0.95
"""Share of held-out labels below which the vocabulary is worth a word: it caps what any draft can have accepted."""


def check_coverage(target: TargetSpec, artifacts: ArtifactStore, findings: Findings) -> None:
    """Warn of a vocabulary that a run before has found to lack many held-out labels, where its size is still asked for."""
    with suppress(DraftworksError):  # sizes that differ and damaged results are told by who needs them
        made, size = artifacts.find(VOCAB_MAPPING, target.name), resolve_draft_vocab_size(target)
        if made is not None and made.summary.get("draft_vocab_size") == size and is_low(made):
            findings.warning(f"target {target.name}: {describe_coverage(made)}")


def is_low(made: Artifact) -> bool:
    """Whether a mapping lacks more of the held-out labels than `LEAST_COVERAGE` leaves; a mapping from before: no."""
    return made.summary.get(HELDOUT_COVERAGE, 1.0) < LEAST_COVERAGE


def describe_coverage(made: Artifact) -> str:
    """Return the shares of labels that a mapping has, and what follows."""
    size, of = made.summary["draft_vocab_size"], made.summary["vocab_size"]
    return (
        f"the draft's vocabulary ({size:,} of {of:,} tokens) has {made.summary[HELDOUT_COVERAGE]:.1%} of the held-out labels "
        f"({made.summary['coverage']:.1%} of those trained on): no draft is right more often. Raise draft_vocab_size, or train "
        "on more answers"
    )
