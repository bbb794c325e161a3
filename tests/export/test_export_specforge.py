"""The real SpecForge 0.2.0 loads our exports and computes equal losses and counts; its checkpoints can be imported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from export_toys import HIDDEN, VOCAB, Toys
from safetensors.torch import load_file
from specforge_judge import SpecForgeAnswer, SpecForgeCase, ask_specforge
from torch import Tensor

from draftworks.drafts.strategy import DraftStrategy
from draftworks.drafts.target_parts import TargetParts
from draftworks.evaluation.evaluator import Evaluator
from draftworks.export.canonical import CanonicalDraft, round_target
from draftworks.export.exporting import export_draft
from draftworks.export.importing import import_draft
from draftworks.features.contracts import TrainBatch

pytestmark = pytest.mark.specforge

ROOT = Path(__file__).resolve().parents[2]
MASKS = ([0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1])
ALL_ANSWER = ([1] * 12, [1] * 8, [1] * 5)
"""With other numbers SpecForge's P-EAGLE drops random chains, even if it is set to keep all."""
EVERY_ANCHOR = 1000
TOLERANCE = 3e-6


@dataclass(frozen=True)
class Variant:
    """Our options, and keywords of SpecForge's training model that mean the same.

    Attributes:
        config: changes of the exported config.json.
        cuts: how the samples are cut into batches.
    """

    strategy: str
    format: str
    options: dict[str, Any]
    model: dict[str, Any]
    config: Callable[[dict[str, Any]], dict[str, Any]] = field(default=lambda config: config)
    cuts: tuple[slice, ...] = (slice(0, 2), slice(2, 3))
    masks: tuple[list[int], ...] = MASKS


def eagle3(options: dict[str, Any], model: dict[str, Any], config: Any = None) -> Variant:
    """`norm_output: false` is exported by nothing; SpecForge is told of it in the config of a plain draft."""
    change = config or (lambda found: found)
    return Variant("eagle3", "sglang_eagle3", {"ttt_length": 4, **options}, {"length": 4, **model}, change)


def block(strategy: str, options: dict[str, Any], model: dict[str, Any]) -> Variant:
    options = {"block_size": 4, "num_anchors": EVERY_ANCHOR, "mask_token_id": 5, "layer_ids": [2, 4, 5], **options}
    config = own_class("DominoDraftModel") if strategy == "domino" else lambda found: found
    given = {"block_size": 4, "num_anchors": EVERY_ANCHOR, "mask_token_id": 5, **model}
    return Variant(strategy, f"zlab_{strategy}", options, given, config)


def own_class(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda config: {**config, "architectures": [name]}


def as_peagle(config: dict[str, Any]) -> dict[str, Any]:
    """Weights as speculators writes them, which SpecForge shares, with SpecForge's flat config."""
    shared = {key: config[key] for key in ("draft_vocab_size", "norm_before_residual")}
    return {**config["transformer_layer_config"], **shared, "architectures": ["PEagleDraftModel"]}


DECAYING = {"loss_decay_gamma": 3.0}
VARIANTS = {
    "eagle3": eagle3({}, {}),
    "eagle3_fc_norm": eagle3({"fc_norm": True}, {}),
    "eagle3_lk_alpha": eagle3({"objective": "lk_alpha"}, {"lk_loss_type": "alpha"}),
    "eagle3_lk_lambda": eagle3(
        {"objective": "lk_lambda", "kl_scale": 0.7, "kl_decay": 2.0},
        {"lk_loss_type": "lambda", "kl_scale": 0.7, "kl_decay": 2.0},
    ),
    "dflash": block("dflash", {}, {}),
    "dflash_gamma_window": block("dflash", {"gamma": 3.0, "sliding_window": 5, "sliding_layers": [1]}, DECAYING),
    "dflash_dpace": block("dflash", {"weighting": "dpace"}, {"loss_type": "dpace"}),
    "domino": block("domino", {"shift_label": True}, {"shift_label": True}),
    "domino_unshifted": block("domino", {"shift_label": False, "gamma": 3.0}, {"shift_label": False, **DECAYING}),
    "dspark": block("dspark", {}, {}),
    "dspark_rnn": block("dspark", {"markov_head_type": "rnn", "gamma": 3.0}, DECAYING),
    "peagle": Variant(
        "peagle",
        "speculators_peagle",
        {"num_depths": 3, "mask_token_id": 5, "down_sample_ratio": 1.0, "layer_ids": [2, 4, 5]},
        {"num_depths": 3, "mask_token_id": 5, "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0},
        as_peagle,
        tuple(slice(i, i + 1) for i in range(3)),
        ALL_ANSWER,
    ),
}
NORM_OUTPUT = {"norm_output_true": True, "norm_output_false": False}


@dataclass(frozen=True)
class Judged:
    """Our drafts and SpecForge's answers, by variant."""

    toys: Toys
    folder: Path
    drafts: dict[str, DraftStrategy]
    answers: dict[str, SpecForgeAnswer]

    def saved(self, name: str) -> Path:
        return self.folder / f"{name}-saved"


def samples_of(strategy: DraftStrategy, variant: Variant) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(11)
    names = dict.fromkeys([*strategy.feature_names, "last"])
    return [
        {
            "input_ids": torch.randint(VOCAB, (len(mask),), generator=generator),
            "loss_mask": torch.tensor(mask, dtype=torch.bool),
            **{name: torch.randn(len(mask), HIDDEN, generator=generator) for name in names},
        }
        for mask in variant.masks
    ]


def batches_of(strategy: DraftStrategy, variant: Variant) -> list[TrainBatch]:
    samples, names = samples_of(strategy, variant), ["a", "b", "c"]
    return [strategy.collate(samples[cut], names[cut]) for cut in variant.cuts]


def theirs(strategy: DraftStrategy, batch: TrainBatch, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the batch under SpecForge's names."""
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    ids, mask = batch["input_ids"], batch["loss_mask"]
    there = torch.arange(ids.shape[1]) < lengths[:, None]
    given = {"input_ids": ids, "loss_mask": mask.float()}
    if strategy.name in ("eagle3", "peagle"):
        return {**given, "attention_mask": there, "hidden_state": batch["features"], "target": batch["last"]}
    given["hidden_states"] = batch["features"]
    return {**given, "target_last_hidden_states": batch["last"]} if strategy.name == "dspark" else given


def readable(toys: Toys, variant: Variant, name: str) -> tuple[DraftStrategy, Path]:
    options = {"loss": "specforge", **variant.options}
    draft = toys.draft(variant.strategy, name=f"{name}-draft", **options)
    export = export_draft(draft, variant.format, toys.folder / name, "float32")
    assert export.passed, export.gates
    config = json.loads((export.path / "config.json").read_text())
    (export.path / "config.json").write_text(json.dumps(variant.config(config)))
    return draft.build_strategy(), export.path


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    environment = ROOT / ".venv-specforge"
    if not (environment / "ready").exists():
        pytest.skip("no SpecForge environment: make specforge-env")
    folder = tmp_path_factory.mktemp("specforge")
    toys, drafts, cases = Toys.make(folder), {}, []
    for name, variant in VARIANTS.items():
        drafts[name], path = readable(toys, variant, name)
        cases.append(case_of(name, variant, drafts[name], path, folder))
    for name, value in NORM_OUTPUT.items():
        drafts[name], path = drafts["eagle3"], shutil.copytree(toys.folder / "eagle3", folder / name)
        config = json.loads((path / "config.json").read_text())
        del config["provenance"]
        (path / "config.json").write_text(json.dumps({**config, "norm_output": value}))
        cases.append(case_of(name, VARIANTS["eagle3"], drafts[name], path, folder))
    parts = TargetParts.load(toys.target)
    work, python = tmp_path_factory.mktemp("asked"), environment / "bin" / "python"
    answers = ask_specforge(python, cases, parts.embedding.float(), parts.head.float(), work)
    return Judged(toys, folder, drafts, answers)


def case_of(name: str, variant: Variant, strategy: DraftStrategy, path: Path, folder: Path) -> SpecForgeCase:
    samples = samples_of(strategy, variant)
    batches = zip(batches_of(strategy, variant), variant.cuts)
    tensors = [theirs(strategy, batch, samples[cut]) for batch, cut in batches]
    return SpecForgeCase(name, variant.strategy, path, variant.model, tensors, folder / f"{name}-saved")


def losses_of(strategy: DraftStrategy, variant: Variant) -> list[float]:
    """Losses and counts of an evaluation, by batch."""
    return [Evaluator().run(strategy, [batch]).avg_loss for batch in batches_of(strategy, variant)]


@pytest.mark.parametrize("name", VARIANTS)
def test_losses_are_specforges_from_the_exported_files(judged: Judged, name: str):
    answer = judged.answers[name]
    assert answer.error is None, answer.error
    assert losses_of(judged.drafts[name], VARIANTS[name]) == pytest.approx(answer.losses, rel=TOLERANCE)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.startswith(("eagle3", "peagle", "dflash"))])
def test_an_evaluation_of_several_batches_is_specforges(judged: Judged, name: str):
    theirs = judged.answers[name].evaluation
    ours = Evaluator().run(judged.drafts[name], batches_of(judged.drafts[name], VARIANTS[name])).metrics()
    assert ours["eval/avg_loss"] == pytest.approx(theirs["eval/avg_loss"], rel=TOLERANCE)
    losses = {key: value for key, value in theirs.items() if key.startswith("eval/ploss_")}
    assert {key: ours[key] for key in losses} == pytest.approx(losses, rel=TOLERANCE)
    assert bool(losses) == name.startswith("eagle3")
    if losses:
        same = ("eval/avg_acc", "eval/per_position_acc", "eval/simulated_acc_len")
        assert [ours[key] for key in same] == [pytest.approx(theirs[key]) for key in same]


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.startswith("eagle3")])
def test_counts_and_acceptance_rates_of_every_step_are_specforges(judged: Judged, name: str):
    strategy, answer = judged.drafts[name], judged.answers[name]
    for batch, theirs in zip(batches_of(strategy, VARIANTS[name]), answer.sums, strict=True):
        result = Evaluator().run(strategy, [batch])
        assert list(result.correct) == theirs["acc_corrects"]
        assert list(result.supervised) == theirs["acc_denoms"]
        assert list(result.acceptance_rates.conditional) == pytest.approx(theirs["acceptance_rates"], rel=TOLERANCE)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.startswith(("dflash", "dspark", "domino"))])
def test_accuracies_of_blocks_are_specforges_over_all_places(judged: Judged, name: str):
    strategy, answer = judged.drafts[name], judged.answers[name]
    for batch, theirs in zip(batches_of(strategy, VARIANTS[name]), answer.sums, strict=True):
        result = Evaluator().run(strategy, [batch])
        assert sum(result.correct) / sum(result.supervised) == pytest.approx(theirs["accuracy"], rel=1e-6)
        if strategy.name == "domino":
            # Theirs counts the target's own token too.
            assert 1 + result.metrics()["eval/accept_len"] == pytest.approx(theirs["accept_len"], rel=1e-5)


@pytest.mark.parametrize("name", [*(name for name in VARIANTS if name != "peagle"), *NORM_OUTPUT])
def test_what_specforge_writes_comes_in_and_computes_the_same(judged: Judged, name: str, tmp_path: Path):
    """P-EAGLE can be imported in speculators' layout only."""
    answer, toys = judged.answers[name], judged.toys
    assert answer.error is None, answer.error
    variant = VARIANTS.get(name, VARIANTS["eagle3"])
    imported = import_draft(judged.saved(name), toys.target, tmp_path / "in")
    assert imported.strategy == variant.strategy
    draft = CanonicalDraft.load(tmp_path / "in", toys.target)
    written = load_file(tmp_path / "in" / "model.safetensors")
    for key, tensor in judged.drafts[name].model.state_dict().items():
        torch.testing.assert_close(written[key], tensor.to(written[key].dtype), rtol=0, atol=0, msg=key)
    own = {key: value for key, value in variant.options.items() if key not in ("layer_ids", "mask_token_id")}
    as_trained = {**imported.options, "loss": "specforge", **own, "norm_output": imported.options.get("norm_output")}
    if variant.strategy != "eagle3":
        del as_trained["norm_output"]
    options = draft.spec.parse_options(as_trained, where="test")
    parts = round_target(TargetParts.load(toys.target), torch.float32)
    strategy = draft.spec.load_factory()(options, parts, imported.vocab, 0)
    strategy.model.load_state_dict(draft.weights)
    assert losses_of(strategy, variant) == pytest.approx(answer.losses, rel=TOLERANCE)


def test_an_unnormed_output_is_another_draft(judged: Judged):
    plain, told, unnormed = (judged.answers[name].losses for name in ("eagle3", *NORM_OUTPUT))
    assert told == plain
    assert unnormed != pytest.approx(plain, rel=1e-2)
