"""MTP fine-tuning: the target's own layer, its loss, and what it proposes.
Exports of an MTP layer: gates, the names of the target's own files, and refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from coverings import gate_or_long
from gloo_ranks import on_ranks
from ladder_toys import build_ladder, greedy_answers, require_walk_equals_loop
from model_families import in_float64
from mtp_toys import KINDS, SHARD, draw_samples, mtp, save_tuned, sharded_step
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from draftworks.config.base import Dtype
from draftworks.config.exports import ExportSettings
from draftworks.config.run_files import TargetFiles
from draftworks.drafts.strategy import StepContext
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import ConfigError
from draftworks.evaluation.evaluator import Evaluator
from draftworks.evaluation.ladder.replay import forward_with_replay
from draftworks.evaluation.result import make_example_metrics
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.exporting import choose_formats, export_draft
from draftworks.export.importing import import_draft
from draftworks.export.readers.gguf_file import read_gguf_folder
from draftworks.export.readers.reader import ExportFolder, ExportReader, TargetTensors
from draftworks.storage.files import read_json
from draftworks.strategies.mtp.options import MTP
from draftworks.strategies.mtp.reader import read_target_mtp

MakeTarget = Callable[[str], TargetFiles]


# That a draft proposes the same at once and on a live sequence is asked of all of them below.
@pytest.mark.parametrize("kind", gate_or_long(KINDS, ["qwen3_5_text"]))
def test_the_walk_equals_the_real_loop(kind: str, mtp_target: MakeTarget, tiny_folder: Path):
    target = mtp_target(kind)
    model = in_float64(AutoModelForCausalLM.from_pretrained(target.model, dtype=torch.float32).eval())
    answers = greedy_answers(tiny_folder, prompts=4, max_new_tokens=24, model=model)
    require_walk_equals_loop(build_ladder(answers, target, steps=30, make=mtp))


@pytest.mark.parametrize("attends", ["chain", "step"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_samples_give_the_sums_of_padded_ones(kind: str, attends: str, mtp_target: MakeTarget):
    strategy = mtp(TargetParts.load(mtp_target(kind)), attends=attends)
    strategy.model.double()
    samples, names = draw_samples(), ["a", "b", "c"]
    padded, packed = (
        strategy.forward_loss(layout(samples, names), StepContext(training=True))
        for layout in (strategy.collate, strategy.pack)
    )
    torch.testing.assert_close(packed.loss_sum, padded.loss_sum)
    assert packed.loss_weight == padded.loss_weight > 0
    for name, sums in padded.metric_sums.items():
        torch.testing.assert_close(packed.metric_sums[name], sums)
    alone, together = (
        strategy.propose(batch, torch.ones_like(batch["input_ids"], dtype=torch.bool), 3)
        for batch in (strategy.collate(samples, names), strategy.pack(samples, names))
    )
    rows = [alone[row, : len(sample["input_ids"])] for row, sample in enumerate(samples)]
    assert torch.equal(torch.cat(rows), together[0])


@pytest.mark.parametrize("kind", KINDS)
def test_proposing_at_every_row_equals_proposing_on_a_live_sequence(kind: str, mtp_target: MakeTarget):
    strategy, sample = mtp(TargetParts.load(mtp_target(kind))), draw_samples()[1]
    strategy.model.double()
    sample = {**sample, "last": sample["last"].double()}
    batch, drafter = strategy.collate([sample], ["s"]), strategy.drafter()
    at_once = strategy.propose(batch, torch.ones_like(batch["input_ids"], dtype=torch.bool), 4)[0]
    for row, token in enumerate(sample["input_ids"][1:]):
        drafter.extend({"last": sample["last"][row : row + 1]}, token[None])
        assert drafter.propose(4, 0.0, None).tokens.tolist() == at_once[row].tolist()


def test_an_evaluation_reports_what_the_strategy_says(mtp_target: MakeTarget):
    strategy = mtp(TargetParts.load(mtp_target(KINDS[0])))
    batch = strategy.collate(draw_samples(), ["a", "b", "c"])
    found = Evaluator().run(forward_with_replay(strategy, 1), [batch])
    assert found is not None
    assert MTP.metric_sums is not None
    assert found.metrics().keys() == make_example_metrics(MTP.metric_sums(strategy.options)).keys()


def open_reader(target: TargetFiles, parts: TargetParts) -> ExportReader:
    """The independent reader on the target's own files."""
    folder = Path(target.model)
    files = ExportFolder(folder, read_json(folder / "config.json"), load_file(folder / SHARD))
    return read_target_mtp(files, TargetTensors(parts.embedding.double(), parts.head.double()), torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_an_untrained_draft_is_the_targets_own_layer(kind: str, mtp_target: MakeTarget):
    """What it proposes has the probabilities that a reader of the target's files computes, which shares no code."""
    parts = TargetParts.load(mtp_target(kind))
    strategy, reader = mtp(parts), open_reader(mtp_target(kind), parts)
    strategy.model.double()
    sample, generator = draw_samples()[1], torch.Generator().manual_seed(5)
    for length in (2, 8, 12):
        drafter = strategy.drafter()
        following = sample["input_ids"][1 : length + 1]
        drafter.extend({"last": sample["last"][: length - 1].double()}, following[:-1])
        drafter.extend({"last": sample["last"][length - 1 : length].double()}, following[-1:])
        drafter.propose(2, 0.0, None)  # leaves no trace
        proposal = drafter.propose(4, 1.0, generator)
        theirs = reader.log_probabilities({"last": sample["last"][:length]}, following, proposal.tokens)
        # Norms, rotations and routers of transformers are fp32 whatever the model's dtype is.
        torch.testing.assert_close(proposal.probabilities.log(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_a_chain_is_that_of_a_plain_loop(kind: str, mtp_target: MakeTarget):
    """Every labelled place by itself, by the reader: the layer sees what a server's would, fed the sample's own tokens."""
    parts = TargetParts.load(mtp_target(kind))
    strategy, reader = mtp(parts, num_steps=3), open_reader(mtp_target(kind), parts)
    samples = draw_samples()
    output = strategy.forward_loss(strategy.pack(samples, ["a", "b", "c"]), StepContext(training=True))
    sums, counts = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for sample in samples:
        ids, mask = sample["input_ids"], sample["loss_mask"]
        for place in range(len(ids) - 2):
            drawn = ids[place + 2 : place + 5]
            said = reader.log_probabilities(sample["last"][: place + 1], ids[1 : place + 2], drawn)
            for step, label in enumerate(drawn):
                if mask[place + 1 : place + 3 + step].all():
                    sums[step] -= said[step, label]
                    counts[step] += 1
    torch.testing.assert_close(output.metric_sums["loss_sums"], sums, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(output.metric_sums["loss_denoms"], counts)
    weights = torch.tensor([1.0, 0.6, 0.36]) / 1.96
    torch.testing.assert_close(output.loss_sum.double(), (weights * sums).sum(), rtol=1e-4, atol=1e-3)
    assert output.loss_weight == counts[0]


def test_two_sharded_ranks_sum_to_the_gradients_of_one_process(mtp_target: MakeTarget, tmp_path: Path):
    target = mtp_target("deepseek_v3")
    strategy = mtp(TargetParts.load(target))
    batch = strategy.collate(draw_samples()[:2], ["0", "1"])
    strategy.forward_loss(batch, StepContext(training=True)).loss_sum.backward()
    on_ranks(2, tmp_path, sharded_step, target, tmp_path / "gradients")
    found = load_file(tmp_path / "gradients")
    for name, weight in strategy.model.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_exports_pass_every_gate(kind: str, mtp_target: MakeTarget, tmp_path: Path):
    draft = save_tuned(mtp_target(kind), tmp_path / "draft", 0.01)
    choice = choose_formats(draft)
    assert list(choice.refused) == (["speculators_mtp"] if kind == "deepseek_v3" else [])
    for name in choice.chosen:
        result = export_draft(draft, name, tmp_path / name)
        assert result.passed, [gate for gate in result.gates if not gate.passed]


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gguf_file_passes_every_gate_and_has_the_targets_own_head(
    kind: str, dtype: Dtype, mtp_target: MakeTarget, tmp_path: Path
):
    draft = save_tuned(mtp_target(kind), tmp_path / "draft", 0.01)
    made = export_draft(draft, "gguf_mtp", tmp_path / "out", dtype)
    assert [gate for gate in made.gates if not gate.passed] == []
    tensors = read_gguf_folder(tmp_path / "out").tensors
    assert torch.equal(tensors["output.weight"].float(), draft.parts.head.to(getattr(torch, dtype)).float())
    assert torch.equal(tensors["blk.6.nextn.hnorm.weight"], 1 + draft.weights["hidden_norm.weight"])


def test_a_gguf_file_of_a_layer_that_llama_cpp_does_not_read_and_a_quantised_one_are_refused(
    mtp_target: MakeTarget, tmp_path: Path
):
    draft = save_tuned(mtp_target("deepseek_v3"), tmp_path / "draft", 0.0)
    with pytest.raises(
        ConfigError, match="a target of type deepseek_v3: this format's loaders know qwen3_next, qwen3_5"
    ):
        export_draft(draft, "gguf_mtp", tmp_path / "out")
    known = save_tuned(mtp_target("qwen3_next"), tmp_path / "known", 0.0)
    settings = ExportSettings.model_validate({"formats": ["gguf_mtp"], "gguf": {"quantise": "q8_0"}})
    with pytest.raises(ConfigError, match="gguf_mtp: is not quantised, as it holds the target's head"):
        export_draft(known, "gguf_mtp", tmp_path / "out", settings=settings)


@pytest.mark.parametrize("kind", KINDS)
def test_an_untrained_layer_is_exported_as_it_was_read(kind: str, mtp_target: MakeTarget, tmp_path: Path):
    """The same names, shapes and bits as in the target's own file, but for DeepSeek's copies of embedding and head."""
    target = mtp_target(kind)
    export_draft(save_tuned(target, tmp_path / "draft", 0.0), "target_mtp", tmp_path / "out", "float32")
    stored, written = load_file(Path(target.model) / SHARD), load_file(tmp_path / "out" / "model.safetensors")
    copies = {name for name in stored if "embed_tokens" in name or "shared_head.head" in name}
    assert set(written) == set(stored) - copies
    assert all(torch.equal(written[name], stored[name]) for name in written)


def test_a_target_without_such_a_layer_is_refused(
    mtp_target: MakeTarget, tiny_target: TargetFiles, family_target: MakeTarget
):
    with pytest.raises(ConfigError, match="of type qwen3_next.*found llama. Choose another strategy"):
        mtp(TargetParts.load(tiny_target))
    with pytest.raises(ConfigError, match="it was published without one"):
        mtp(TargetParts.load(family_target("qwen3_5_text")))
    with pytest.raises(
        ConfigError, match=r"missing mtp.layers.0.input_layernorm.weight, .* and \d+ more; unknown none"
    ):
        mtp(TargetParts.load(family_target("qwen3_next")))
    with pytest.raises(ConfigError, match="expected a target with files"):
        mtp(replace(TargetParts.load(mtp_target("qwen3_next")), source=None))


def test_what_speculators_tuned_becomes_a_draft_here(mtp_target: MakeTarget, tmp_path: Path):
    target = mtp_target("qwen3_next")
    draft = save_tuned(target, tmp_path / "draft", 0.01)
    export_draft(draft, "speculators_mtp", tmp_path / "peer", "float32")
    imported = import_draft(tmp_path / "peer", target, tmp_path / "imported")
    assert imported.options == draft.options.model_dump(mode="json")
    found = CanonicalDraft.load(tmp_path / "imported", target).weights
    assert all(torch.equal(found[name], weight) for name, weight in draft.weights.items())
    with pytest.raises(ConfigError, match="a layer of other sizes than that of target qwen3_5_text"):
        import_draft(tmp_path / "peer", mtp_target("qwen3_5_text"), tmp_path / "other")
