"""What a target's drafts need together: data to train and measure on, with its identities; taps; the size of a vocabulary.

Torch-free; no row is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftworks.config.data import ResponseSpec
from draftworks.config.registry_files import DatasetSpec, EvalSpec, TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.config.strategies import list_strategies, resolve_strategy
from draftworks.data.growing_files import digest_head
from draftworks.data.slices import SlicePlan, read_plan
from draftworks.data.sources import digest_dataset, find_dataset_files
from draftworks.data.split import SPLIT_KEY
from draftworks.errors import ConfigError, DraftworksError
from draftworks.storage.identity import FileDigests, digest
from draftworks.storage.names import HELDOUT
from draftworks.storage.records import AnswersIdentity, ConversationsIdentity, EvalSetIdentity
from draftworks.targets.registry import Registry


def load_training_datasets(target: TargetSpec, registry: Registry) -> list[DatasetSpec]:
    """Return the data sets that are trained on, the target's own first."""
    return [registry.load_dataset(name) for name in target.training_datasets]


def find_training_files(target: TargetSpec, registry: Registry) -> list[Path]:
    """Return the files of all data sets that are trained on."""
    return [
        path for spec in load_training_datasets(target, registry) for path in find_dataset_files(spec, registry.root)
    ]


def load_slice_plan(target: TargetSpec, registry: Registry) -> SlicePlan | None:
    """Return the weights of a target's mix; None where it has none.

    Raises:
        ConfigError: the file is not there yet, or is no plan.
    """
    if target.mix is None or target.mix.weights is None:
        return None
    path = registry.resolve_path(target.mix.weights)
    if not path.exists():
        strategy = next(iter(target.strategies), "STRATEGY")
        eval_set = f" --eval-set {target.evals[0]}" if target.evals else ""
        raise ConfigError(
            f"target {target.name}: mix.weights: no file {path}. Write it with: draftworks slices {target.name} {strategy}"
            f"{eval_set} --save FILE; or leave mix.weights out until then"
        )
    return read_plan(path)


def digest_training_data(target: TargetSpec, registry: Registry, digests: FileDigests) -> str:
    """Return the content digest of what is trained on: that of the data set, or of the mix with names, weights and shares;
    in arrival order that of the first rows, which are prepared before."""
    specs, plan = load_training_datasets(target, registry), load_slice_plan(target, registry)
    rows = None if target.streaming is None else target.streaming.vocabulary_samples
    if rows is not None:
        return digest_dataset(specs[0], registry.root, digests, [digest_head(specs[0], registry.root, rows)])
    versions = [digest_dataset(spec, registry.root, digests) for spec in specs]
    if target.mix is None:
        return versions[0]
    named = [[spec.name, version] for spec, version in zip(specs, versions)]
    weights = None if plan is None else plan.identity
    return digest(["mix", named, weights, *([target.mix.shares] if target.mix.shares else [])])


def identify_arrival(target: TargetSpec, registry: Registry) -> dict[str, Any] | None:
    """Return what decides the samples of drafts that are trained in arrival order, beside the rows that were prepared before:
    settings of the source, not what it has given. None in planned order."""
    settings = None if target.streaming is None else target.streaming.identify_arrival()
    if target.streaming is None or settings is None:
        return None
    dataset = None
    if target.streaming.source is None:
        spec = registry.load_dataset(target.dataset)
        dataset = [spec.files, spec.format, None if spec.served is None else spec.served.to_identity()]
    answers, data = target.responses.to_identity(), target.data.to_identity()
    return {**settings, "dataset": dataset, "answers": answers, "data": data, "max_length": target.max_length}


def digest_datasets(target: TargetSpec, registry: Registry, digests: FileDigests) -> dict[str, str]:
    """Return the content digest of every data set of a target and of its eval sets, by name."""
    names = dict.fromkeys([*target.training_datasets, *(registry.load_eval_set(name).dataset for name in target.evals)])
    return {name: digest_dataset(registry.load_dataset(name), registry.root, digests) for name in names}


def identify_conversations(target: TargetSpec, dataset: str | None, vocab_size: int | None) -> ConversationsIdentity:
    """Return the identity of the conversations that are trained on and of `heldout`.

    Args:
        dataset: content digest of the training data.
    """
    data = target.data.model_dump(include={"max_conversations", "held_out_share", "max_rejected_share"})
    return ConversationsIdentity(dataset, data, vocab_size, SPLIT_KEY)


def identify_eval_set(
    target: TargetSpec, spec: EvalSpec, dataset: str | None, vocab_size: int | None
) -> EvalSetIdentity:
    """Return the identity of the conversations of a named eval set.

    Args:
        dataset: content digest of its data set.
    """
    return EvalSetIdentity(
        dataset=dataset,
        max_conversations=spec.max_conversations,
        max_rejected_share=target.data.max_rejected_share,
        vocab_size=vocab_size,
        held_out_share=target.data.held_out_share if spec.part == "held_out" else None,
        split=SPLIT_KEY if spec.part == "held_out" else None,
        both_ways=target.asks_both_ways or None,
    )


def identify_eval_data(
    name: str, target: TargetSpec, vocab_size: int, registry: Registry, digests: FileDigests
) -> ConversationsIdentity | EvalSetIdentity:
    """Return the identity that the conversations of an eval set, named or `heldout`, would have if made now.

    Raises:
        DraftworksError: its data set or a file of it cannot be read.
    """
    if name == HELDOUT:
        return identify_conversations(target, digest_training_data(target, registry, digests), vocab_size)
    spec = registry.load_eval_set(name)
    dataset = digest_dataset(registry.load_dataset(spec.dataset), registry.root, digests)
    return identify_eval_set(target, spec, dataset, vocab_size)


ANSWERS_REVISION = 3
"""Increased when the same conversations give other samples: 3 asks each turn as a server does, also in mode passthrough, with
whole answers as labels, and goes on after an answer that was cut."""


def make_answers_identity(
    spec: TargetSpec, files: TargetFiles, conversations: str, part: str, responses: ResponseSpec
) -> AnswersIdentity:
    """Return the identity of a set of answered conversations.

    Args:
        conversations: content version of the prepared conversations; `part` is the part of them that is answered.
    """
    taken = AnswersIdentity(
        conversations=conversations,
        part=part,
        responses=responses.model_dump(include={"mode", "thinking"}, exclude_none=True),
        target=None,
        tokenizer=files.tokenizer_digest,
        max_length=spec.max_length,
        only_last_turn=spec.data.only_last_turn,
        revision=ANSWERS_REVISION,
    )
    if responses.mode == "passthrough":
        return taken
    answered = replace(taken, responses=responses.to_identity(), target=files.digest)
    if responses.endpoint is not None:
        return answered
    capture = spec.capture
    return replace(
        answered, compute_dtype=capture.compute_dtype, backend=capture.engine, args=capture.engine_args or None
    )


def make_greedy_settings(target: TargetSpec, kind: str) -> ResponseSpec:
    """Return the settings for answers of eval sets: greedy, by the engine of capture, with the `thinking` of the
    training data.

    Data that is tokenized already is passed through, since it has no prompts.

    Args:
        kind: of the data set, "tokens" or "conversations".
    """
    mode = "passthrough" if kind == "tokens" else "regenerate"
    return ResponseSpec(mode=mode, max_new_tokens=target.responses.max_new_tokens, thinking=target.responses.thinking)


_OWN_KEY = re.compile(rb"^(strategies)[ \t]*:", re.MULTILINE)


def list_used_strategies(registry: Registry) -> list[str]:
    """Return the strategies that at least one target uses, sorted.

    An entry is parsed only if its text has the name of a strategy that none before it uses. One that cannot be loaded
    counts as using all that its text mentions: what exists then does not change when the mistake is put right.
    """
    names = b"|".join(re.escape(name.encode()) for name in list_strategies())
    mention = re.compile(rb"(?<![\w-])(%s)(?![\w-])" % names)
    found: set[str] = set()
    for target in registry.list_targets():
        mentioned = registry.find_in_target_file(target, mention)
        if not registry.find_in_target_file(target, _OWN_KEY):
            mentioned |= _list_default_strategies()
        if mentioned <= found:
            continue
        try:
            found.update(registry.load_target(target).strategies)
        except DraftworksError:
            found |= mentioned
    return sorted(found)


def _list_default_strategies() -> set[str]:
    """Return the strategies of an entry without the key `strategies`."""
    return set(TargetSpec.model_fields["strategies"].get_default(call_default_factory=True))


def describe_new_strategy(strategy: str) -> str:
    """Return what to do about a strategy that no entry named when the code location was loaded."""
    return f"strategy {strategy} is new to this code location: reload it (in the UI under Deployment)"


def collect_taps(target: TargetSpec, num_layers: int) -> list[int]:
    """Return the hf_index of every tap that any strategy of the target needs, ascending and without duplicates.

    Raises:
        ConfigError: a strategy's taps lie outside the target or collide.
    """
    taps: set[int] = set()
    for name, entry in target.strategies.items():
        strategy = resolve_strategy(name)
        options = strategy.parse_options(entry.options, where=f"target {target.name}: {name}")
        with name_target_in_errors(target):
            taps.update(tap.hf_index for tap in strategy.taps(num_layers, options))
    return sorted(taps)


def resolve_draft_vocab_size(target: TargetSpec) -> int | None:
    """Return the size of the reduced vocabulary that the target's strategies share; None if none of them has one.

    Raises:
        ConfigError: two strategies of the target ask for different sizes.
    """
    sizes: dict[str, int] = {}
    for name, entry in target.strategies.items():
        strategy = resolve_strategy(name)
        if strategy.uses_vocab_mapping:
            options = strategy.parse_options(entry.options, where=f"target {target.name}: {name}")
            sizes[name] = options.draft_vocab_size
    if len(set(sizes.values())) > 1:
        raise ConfigError(
            f"target {target.name}: strategies share one draft vocabulary, but ask for sizes {sizes}. "
            "Set the same options.draft_vocab_size for all of them"
        )
    return next(iter(sizes.values()), None)


@contextmanager
def name_target_in_errors(target: TargetSpec) -> Iterator[None]:
    """Prefix a ConfigError raised inside with the target's name; a strategy's own error names only the strategy."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"target {target.name}: {error}") from error
