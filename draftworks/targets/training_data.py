"""The data that a target's drafts are trained and measured on, and its identities. Torch-free; no row is parsed."""

from __future__ import annotations

from pathlib import Path

from draftworks.config.registry_files import DatasetSpec, EvalSpec, TargetSpec
from draftworks.data.slice_weights import SlicePlan, read_plan
from draftworks.data.sources import digest_dataset, find_dataset_files
from draftworks.data.split import SPLIT_KEY
from draftworks.errors import ConfigError
from draftworks.storage.asset_names import HELDOUT
from draftworks.storage.data_records import ConversationsIdentity, EvalSetIdentity
from draftworks.storage.identity import FileDigests, digest
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
    """Return the content digest of what is trained on: that of the data set, or of the mix with names,
    weights and shares."""
    specs, plan = load_training_datasets(target, registry), load_slice_plan(target, registry)
    versions = [digest_dataset(spec, registry.root, digests) for spec in specs]
    if target.mix is None:
        return versions[0]
    named = [[spec.name, version] for spec, version in zip(specs, versions)]
    weights = None if plan is None else plan.identity
    return digest(["mix", named, weights, *([target.mix.shares] if target.mix.shares else [])])


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
