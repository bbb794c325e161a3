"""Requirements of strategies that the model, or a draft to start from, does not satisfy are refused before the capture."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from draftworks.config.features import StreamingSpec, WatermarkSpec
from draftworks.config.registry_files import EvaluationSpec, StrategyEntry, TargetSpec, TrainingSpec
from draftworks.config.run_files import VOCAB_FILE
from draftworks.config.service import ServingSpec
from draftworks.errors import ConfigError
from draftworks.preflight.compatibility import check_requirements
from draftworks.targets.registry import Registry

OPTIONS = {"draft_vocab_size": 64}


def target(strategy: str = "eagle3", **entry) -> TargetSpec:
    entries = {strategy: StrategyEntry(**entry)}
    return TargetSpec(name="small", model="m", dataset="d", max_length=32, strategies=entries)


def begun(root: Path, **changes) -> TargetSpec:
    """A target whose draft begins from one in `root/peer`."""
    folder = root / "peer"
    folder.mkdir()
    draft = {"options": OPTIONS, "hidden_size": 128, "vocab_size": 2048, "draft_vocab_size": 64}
    strategy, wanted = changes.pop("strategy", "eagle3"), changes.pop("wanted", "eagle3")
    config = {"strategy": strategy, "draft": draft | changes, "target_digest": "t", "weights_digest": "w"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / VOCAB_FILE).touch()
    return target(wanted, options=OPTIONS, start_from="peer")


def test_a_draft_that_fits_may_be_begun_from(tmp_path, tiny_target):
    check_requirements(begun(tmp_path), tiny_target, Registry(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "dflash"}, "expected a draft of eagle3, found one of dflash"),
        ({"hidden_size": 64}, "hidden_size: expected 128, found 64"),
        ({"vocab_size": 99}, "vocab_size: expected 2048, found 99"),
        ({"draft_vocab_size": 65}, "draft_vocab_size: expected 64, found 65"),
        ({"options": {**OPTIONS, "feedback": "post_norm"}}, "feedback: expected pre_norm, found post_norm"),
    ],
)
def test_one_that_does_not_is_refused_with_both_values(tmp_path, tiny_target, changes, message):
    with pytest.raises(ConfigError, match=rf"strategies\.eagle3\.start_from: .*peer: .*{message}"):
        check_requirements(begun(tmp_path, **changes), tiny_target, Registry(tmp_path))


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"mask_token_id": 7}, "mask_token_id: expected 2047, found 7"),
        ({"feature_names": ["hf1", "last"]}, r"feature_names: expected \['hf2', 'hf4', 'hf5', 'last'\], found"),
        ({"mask_token_id": 2047, "feature_names": ["hf2", "hf4", "hf5", "last"]}, None),
    ],
    ids=["mask", "taps", "neither"],
)
def test_one_that_reads_something_else_is_refused(tmp_path, tiny_target, theirs, message):
    entry = begun(tmp_path, strategy="peagle", wanted="peagle", **theirs)
    with nullcontext() if message is None else pytest.raises(ConfigError, match=f"start_from: .*peer: {message}"):
        check_requirements(entry, tiny_target, Registry(tmp_path))


def test_one_that_is_not_there_is_refused(tmp_path, tiny_target):
    missing = target(options=OPTIONS, start_from="nowhere")
    with pytest.raises(ConfigError, match=r"start_from: .*nowhere: not a draft.*draftworks import"):
        check_requirements(missing, tiny_target, Registry(tmp_path))


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("dflash", {"block_size": 40}, "block_size 40 does not fit into samples of at most 32 tokens"),
        ("dflash", {"mask_token_id": 2048}, "mask_token_id 2048 is outside .* Set options.mask_token_id to"),
        ("dflash", {"layer_ids": [2, 8]}, r"\[8\] outside 0\.\.7"),
        ("domino", {"block_size": 40}, "domino: block_size 40 does not fit into samples of at most 32 tokens"),
        ("domino", {"layer_ids": [2, 8]}, r"domino: configured layer ids .*outside 0\.\.7"),
        ("domino", {"pure_draft_prefix_len": 16}, "leaves none of the 16 proposals of a block to correct"),
        (
            "domino",
            {"pure_draft_prefix_len": 2},
            "strategies.domino.export: .*zlab_domino: pure_draft_prefix_len 2: SGLang",
        ),
        (
            "dspark",
            {"block_size": 40},
            "target small: dspark: block_size 40 does not fit into samples of at most 32 tokens",
        ),
        ("dspark", {"layer_ids": [2, 8]}, r"target small: dspark: configured layer ids .*outside 0\.\.7"),
        ("dspark", {"markov_rank": 0}, "dspark: .*markov_rank 0 leaves no Markov embedding"),
        ("peagle", {"num_depths": 31}, "peagle: num_depths 31 does not fit into samples of at most 32 tokens"),
        ("peagle", {"num_depths": 32}, "peagle: num_depths 32 does not fit into samples of at most 32 tokens"),
        ("peagle", {"mask_token_id": 2048}, "peagle: mask_token_id 2048 is outside .* Set options.mask_token_id to"),
        ("peagle", {"layer_ids": [2, 8]}, r"peagle: configured layer ids .*outside 0\.\.7"),
        ("peagle", {"draft_vocab_size": 4096}, "draft_vocab_size 4096 is larger"),
        ("eagle3", {"draft_vocab_size": 4096}, "draft_vocab_size 4096 is larger"),
        (
            "eagle3",
            {"norm_output": False},
            "strategies.eagle3.export: .*sglang_eagle3: norm_output: false.*speculators_eagle3",
        ),
        ("eagle3", {"num_heads": 3, "num_kv_heads": 2}, "num_heads 3 is not a multiple of num_kv_heads 2"),
    ],
)
def test_options_that_do_not_fit_the_target_are_refused(tmp_path, tiny_target, strategy, options, message):
    with pytest.raises(ConfigError, match=message):
        check_requirements(target(strategy, options=options), tiny_target, Registry(tmp_path))


@pytest.mark.parametrize(
    ("formats", "refused"),
    [(None, False), (["speculators_eagle3"], False), ([], False), (["sglang_eagle3"], True)],
)
def test_a_format_that_cannot_hold_the_draft_is_refused_only_where_it_is_wanted(
    tmp_path, tiny_target, formats, refused
):
    wanted = target(options={**OPTIONS, "feedback": "post_norm"}, export={"formats": formats})
    with pytest.raises(ConfigError, match="cannot be written as sglang_eagle3") if refused else nullcontext():
        check_requirements(wanted, tiny_target, Registry(tmp_path))


def test_without_an_export_a_draft_may_be_one_that_no_server_computes(tmp_path, tiny_target):
    research = target(options={**OPTIONS, "norm_output": False}, export={"formats": []})
    check_requirements(research, tiny_target, Registry(tmp_path))


def test_an_unknown_format_is_refused_with_the_closest_name(tmp_path, tiny_target):
    with pytest.raises(ConfigError, match="no export format 'sglang_eagle': did you mean sglang_eagle3"):
        check_requirements(
            target(options=OPTIONS, export={"formats": ["sglang_eagle"]}), tiny_target, Registry(tmp_path)
        )


@pytest.mark.parametrize(("device", "refused"), [("cpu", True), ("cuda", False), ("auto", False)])
def test_attention_without_gradients_on_a_cpu_is_refused_for_a_training_there(tmp_path, tiny_target, device, refused):
    wanted = target(options={**OPTIONS, "attention": "flex"}, training={"device": device})
    with pytest.raises(ConfigError, match="eagle3: attention flex has no gradients") if refused else nullcontext():
        check_requirements(wanted, tiny_target, Registry(tmp_path))


@pytest.mark.parametrize(("name", "refused"), [("sglang_eagle", True), ("sglang_eagle3", False)])
def test_a_format_to_be_served_that_no_strategy_writes_is_refused(tmp_path, tiny_target, name, refused):
    served = EvaluationSpec(serving=ServingSpec(prompts=4, format=name))
    expected = pytest.raises(
        ConfigError, match="serving.format: no export format sglang_eagle; did you mean sglang_eagle3"
    )
    with expected if refused else nullcontext():
        check_requirements(
            target(options=OPTIONS).model_copy(update={"evaluation": served}), tiny_target, Registry(tmp_path)
        )


@pytest.mark.parametrize("strategy", ["eagle3", "peagle"])
def test_heads_with_which_no_server_loads_a_draft_are_refused_with_a_number_that_is(tmp_path, tiny_target, strategy):
    entry = target(strategy, options={**OPTIONS, "num_heads": 6})
    with pytest.raises(
        ConfigError, match=rf"{strategy}: num_heads 6 does not divide .*128.*Set options.num_heads to 4"
    ):
        check_requirements(entry, tiny_target, Registry(tmp_path))
    check_requirements(target(strategy, options={**OPTIONS, "num_heads": 8}), tiny_target, Registry(tmp_path))


@pytest.mark.parametrize("strategy", ["dflash", "dspark"])
def test_a_format_whose_loaders_embed_otherwise_than_the_target_is_refused(tmp_path, family_target, strategy):
    options = {"layer_ids": [1, 3, 4], "block_size": 4}
    entry = target(strategy, options=options, export={"formats": [f"speculators_{strategy}"]})
    with pytest.raises(ConfigError, match=rf"{strategy}.export: .* multiplies its embeddings by 5.657"):
        check_requirements(entry, family_target("gemma3"), Registry(tmp_path))
    check_requirements(entry, family_target("qwen3"), Registry(tmp_path))
    check_requirements(target(strategy, options=options), family_target("gemma3"), Registry(tmp_path))


@pytest.mark.parametrize(("samples", "fits"), [(16, True), (15, False), (None, True)])
def test_a_watermark_below_a_global_batch_is_refused_before_anything_is_captured(tiny_target, tmp_path, samples, fits):
    training = TrainingSpec(global_batch_size=16)
    streamed = target(options=OPTIONS, training=training).model_copy(
        update={"streaming": StreamingSpec(watermark=WatermarkSpec(samples=samples, steps=1))}
    )
    with nullcontext() if fits else pytest.raises(ConfigError, match=r"streaming\.watermark\.samples is 15, expected"):
        check_requirements(streamed, tiny_target, Registry(tmp_path))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_attention_heads": 3}, "hidden size (128) is not a multiple of the number of attention heads (3)"),
        ({"model_type": "llamma"}, "does not know the model_type 'llamma'"),
    ],
    ids=["heads", "type"],
)
def test_a_config_that_its_class_refuses_is_one_line(fleet, values, said):
    """Classes raise errors of their own, of several lines."""
    path = fleet.own_model() / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    errors = fleet.check().errors
    assert all(said in error and "\n" not in error for error in errors), errors
    assert errors
