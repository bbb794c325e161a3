"""Every strategy makes a draft for a target of every family, which learns from its head and is of a size that servers load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest
import torch
from coverings import cover, gate_or_long
from model_families import FAMILIES, HIDDEN, VOCAB
from strategy_cases import find_cases, list_options
from transformers import AutoModelForCausalLM, LlamaConfig

from draftworks.config.draft_options import choose_layer_shape
from draftworks.config.run_files import TargetFiles
from draftworks.config.strategies import list_strategies, resolve_strategy
from draftworks.data.vocab import build_vocab_mapping
from draftworks.drafts.draft_io import load_draft, save_draft
from draftworks.drafts.strategy import DraftStrategy, StepContext
from draftworks.drafts.target_parts import TargetParts
from draftworks.storage.identity import digest

LAYERS = [1, 3, 4]
BLOCKS = {"block_size": 4, "num_layers": 1, "num_anchors": 4}
OPTIONS = {name: {**list_options(name, BLOCKS), "layer_ids": LAYERS} for name in find_cases()}
for each in OPTIONS.values():
    each.update({"draft_vocab_size": VOCAB} if "draft_vocab_size" in each else {})
THETA_1M = {"rope_type": "default", "rope_theta": 1e6}
MakeTarget = Callable[[str], TargetFiles]


def questions_of(cell: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Each strategy for some family, each family for a chain and for blocks."""
    family, name = cell
    yield "strategy", name
    yield family, "blocks" if "block_size" in OPTIONS[name] else "chain"


STEPS = list(product(FAMILIES, OPTIONS))


@pytest.fixture(scope="module", params=FAMILIES)
def target(request, family_target: MakeTarget) -> TargetFiles:
    torch.set_num_threads(1)
    return family_target(request.param)


@pytest.fixture(scope="module")
def parts(target: TargetFiles) -> TargetParts:
    return TargetParts.load(target)


def make(strategy: str, parts: TargetParts, **options) -> DraftStrategy:
    spec = resolve_strategy(strategy)
    vocab = build_vocab_mapping(np.ones(VOCAB, dtype=np.int64), VOCAB) if spec.uses_vocab_mapping else None
    return spec.load_factory()(spec.parse_options(OPTIONS[strategy] | options, where="test"), parts, vocab, 1)


def samples(strategy: DraftStrategy) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "input_ids": torch.randint(VOCAB, (length,), generator=generator),
            "loss_mask": torch.arange(length) > 2,
            **{name: torch.randn(length, HIDDEN, generator=generator) for name in strategy.feature_names},
        }
        for length in (9, 13)
    ]


def test_every_known_strategy_is_tried():
    of_any_target = set(list_strategies()) - {"mtp"}  # the target's own layer, where it has one: tests/strategies/mtp
    assert set(OPTIONS) == {name for name in of_any_target if resolve_strategy(name).exports}


@pytest.mark.parametrize(
    ("target", "name"), gate_or_long(STEPS, cover(STEPS, questions_of)), indirect=["target"], scope="module"
)
def test_a_draft_takes_a_step(parts: TargetParts, name: str):
    strategy = make(name, parts)
    output = strategy.forward_loss(strategy.collate(samples(strategy), ["a", "b"]), StepContext(0, 1, training=True))
    loss = output.loss_sum / output.loss_weight
    loss.backward()
    # Scores of candidates learn from labels among them, and these are random.
    named = [(name, weight) for name, weight in strategy.model.named_parameters() if not name.startswith("lilicorr.")]
    gradients = [weight.grad for _, weight in named if weight.requires_grad]
    assert torch.isfinite(loss)
    assert all(torch.isfinite(gradient).all() for gradient in gradients if gradient is not None)
    assert sum(gradient is not None and bool(gradient.any()) for gradient in gradients) > len(gradients) // 2


def test_head_and_embedding_are_those_of_the_model(target: TargetFiles, parts: TargetParts):
    """What the first layer reads are rows of the embedding times its scale; what the model says is its head times `last`."""
    model = AutoModelForCausalLM.from_pretrained(target.model, dtype=torch.float32).eval()
    ids = torch.arange(20, 40)[None]
    with torch.no_grad():
        out = model(ids, output_hidden_states=True, use_cache=False)
        torch.testing.assert_close(out.hidden_states[-1] @ parts.head.T, out.logits)
        torch.testing.assert_close(out.hidden_states[0][0], parts.embedding[ids[0]] * parts.embedding_scale)


def test_blocks_begin_with_what_the_targets_own_module_embeds(target: TargetFiles, parts: TargetParts):
    """Servers ask the target's module, whose rows are scaled in some families; EAGLE-3 gets its matrix."""
    embed = AutoModelForCausalLM.from_pretrained(target.model, dtype=torch.float32).get_input_embeddings()
    dflash = make("dflash", parts)
    with torch.no_grad():
        first = dflash.model.embed_blocks(torch.tensor([[7, 9]]))[0, ::4]
        torch.testing.assert_close(first, embed(torch.tensor([7, 9])))
    assert dflash.config().get("embedding_scale", 1.0) == parts.embedding_scale


def test_heads_of_eagle3_are_a_number_that_servers_take(parts: TargetParts):
    config = make("eagle3", parts).config()
    assert HIDDEN % config["num_heads"] == 0
    assert config["num_heads"] % config["num_kv_heads"] == 0
    LlamaConfig(
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_heads"],
        num_key_value_heads=config["num_kv_heads"],
        head_dim=config["head_dim"],
        rope_parameters=config["rope_parameters"],
    )


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_a_rope_of_the_options_comes_before_that_of_the_family(parts: TargetParts, name: str):
    rope = {"rope_type": "default", "rope_theta": 77.0}
    assert make(name, parts, rope=rope).config()["rope_parameters"] == rope


def test_ropes_and_widths_of_their_own_are_told_with_the_reason(family_target: MakeTarget):
    def own(name: str) -> str:
        return "; ".join(TargetParts.load(family_target(name)).own)

    assert own("llama") == own("qwen3") == own("mistral") == own("gpt_oss") == own("deepseek_v3") == ""
    assert own("qwen3_next") == "rope: over whole heads, of which the target turns 0.25"
    assert "intermediate_size: 72, the total width of the experts that process a token in the target" in own(
        "qwen3_5_moe"
    )
    assert "that of full_attention layers, since the target has one for each of" in own("gemma3")


def test_ropes_that_cannot_be_taken_over_keep_their_base(family_target: MakeTarget):
    ropes = {name: dict(TargetParts.load(family_target(name)).rope) for name in FAMILIES}
    assert ropes["qwen3_next"] == ropes["qwen3_5"] == ropes["qwen3_5_text"] == ropes["qwen3_5_moe"] == THETA_1M
    assert ropes["gemma3"] == ropes["gemma3_text"] == THETA_1M
    assert ropes["gpt_oss"]["rope_type"] == ropes["deepseek_v3"]["rope_type"] == "yarn"
    assert ropes["llama"]["rope_type"] == "llama3"


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}, {"rope_type": "default", "rope_theta": 500.0}),
        ({"rope_type": "longrope", "rope_theta": 9.0, "factor": 2.0, "short_factor": [1.0], "long_factor": [2.0]},
         {"rope_type": "default", "rope_theta": 9.0}),
        (None, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"sliding_attention": {"rope_type": "default", "rope_theta": 3.0},
          "full_attention": {"rope_type": "linear", "rope_theta": 4.0, "factor": 8.0}},
         {"rope_type": "linear", "rope_theta": 4.0, "factor": 8.0}),
    ],
)  # fmt: skip
def test_a_rope_that_drafts_do_not_compute_becomes_one_of_their_own(rope, expected):
    shape = choose_layer_shape(_Config(rope_parameters=rope, head_dim=64))
    assert dict(shape.rope) == expected
    assert len(shape.own) == 1


class _Config:
    """A configuration with the fields that are given, and a few that every one has."""

    hidden_size, num_attention_heads, intermediate_size, rms_norm_eps = 96, 4, 160, 1e-5

    def __init__(self, **fields) -> None:
        self.__dict__.update(fields)


def test_sizes_that_a_config_does_not_say_are_chosen():
    shape = choose_layer_shape(
        _Config(intermediate_size=None, rms_norm_eps=None, num_attention_heads=32, rope_parameters=THETA_1M)
    )
    assert (shape.intermediate_size, shape.rms_norm_eps, shape.head_dim) == (256, 1e-6, 4)
    assert [own.split(":")[0] for own in shape.own] == ["head_dim", "intermediate_size", "rms_norm_eps"]


def test_heads_that_do_not_divide_are_a_draft_of_another_identity(family_target: MakeTarget):
    """Drafts with the target's uneven heads were made before; none of them is taken for one that is made now."""
    for name in ("eagle3", "peagle"):
        spec = resolve_strategy(name)
        options, chosen = (spec.parse_options(OPTIONS[name] | more, "test") for more in ({}, {"num_heads": 4}))
        assert spec.identify_options(options, HIDDEN, 6) != options.to_identity()
        assert (
            spec.identify_options(options, HIDDEN, 4)
            == spec.identify_options(options, HIDDEN, None)
            == options.to_identity()
        )
        assert spec.identify_options(chosen, HIDDEN, 6) == chosen.to_identity()
    dflash = resolve_strategy("dflash").parse_options(OPTIONS["dflash"], "test")
    assert resolve_strategy("dflash").identify_options(dflash, HIDDEN, 6) == dflash.to_identity()


PUBLISHED = {
    "dflash": {},
    "domino": {"emb_dim": 6, "gru_hidden_dim": 5},
    "dspark": {"markov_rank": 6},
    "eagle3": {"ttt_length": 2},
    "peagle": {"num_depths": 2, "num_layers": 1},
}
"""Options of drafts that there were first."""
IDENTITIES = {
    "tiny": "fbb81793b74d396e",
    "llama": "6cd23711abc5863a",
    "qwen3": "b14823237807a7f3",
}
"""Of what these drafts say of themselves, as published: a change makes every draft of such a target stale."""


@pytest.mark.parametrize("name", IDENTITIES)
def test_drafts_of_known_targets_are_what_they_were(name: str, family_target: MakeTarget, tiny_target: TargetFiles):
    parts = TargetParts.load(tiny_target if name == "tiny" else family_target(name))
    assert (
        digest([make(strategy, parts, **options).config() for strategy, options in PUBLISHED.items()])
        == IDENTITIES[name]
    )


def test_a_draft_that_read_other_embeddings_is_not_loaded(family_target: MakeTarget, tmp_path):
    from dataclasses import replace

    from draftworks.errors import StoreError

    parts = TargetParts.load(family_target("gemma3"))
    save_draft(tmp_path, make("dflash", replace(parts, embedding_scale=1.0)), "digest")
    with pytest.raises(StoreError, match=r"draft.embedding_scale: expected 5\.65.*, found None"):
        load_draft(tmp_path, make("dflash", parts), "digest")
