"""What the readers compute, and the exports they refuse because a server would run another draft."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from export_toys import FORMATS
from random_exports import (
    BLOCK_SIZE,
    NUM_DEPTHS,
    SAYS,
    VOCAB,
    RandomExport,
    draft_vocabulary,
    sglang_eagle3,
    speculators_dflash,
    speculators_dspark,
    speculators_eagle3,
    speculators_peagle,
    zlab_dflash,
    zlab_domino,
    zlab_dspark,
)

from draftworks.errors import ConfigError, StoreError
from draftworks.export.readers.reader import TargetTensors
from draftworks.export.same_logits import open_export


@pytest.fixture(scope="session")
def exports(tiny_folder, tiny_tensors) -> dict[str, RandomExport]:
    return {
        "sglang_eagle3": sglang_eagle3(),
        "speculators_eagle3": speculators_eagle3(tiny_folder, tiny_tensors.embedding),
        "speculators_peagle": speculators_peagle(tiny_folder),
        "zlab_dflash": zlab_dflash(),
        "speculators_dflash": speculators_dflash(tiny_folder, says=SAYS),
        "zlab_domino": zlab_domino(),
        "zlab_dspark": zlab_dspark(markov_head_type="rnn"),
        "speculators_dspark": speculators_dspark(tiny_folder, says=SAYS, markov_head_type="gated"),
    }


@pytest.fixture
def read(tmp_path, tiny_tensors):
    """Opens an export; several in a test get folders of their own."""
    number = itertools.count()

    def opened(export_format: str, export: RandomExport, target: TargetTensors = tiny_tensors):
        return open_export(export_format, export.write(tmp_path / str(next(number))), target)

    return opened


@pytest.fixture
def ask(read, question):
    """The log probabilities that an export gives to the question, (k, V)."""

    def answer(export_format: str, export: RandomExport, **changes):
        asked = vars(question) | changes
        return read(export_format, export).log_probabilities(**asked)

    return answer


@pytest.mark.parametrize("export_format", FORMATS)
def test_every_step_has_a_distribution_over_what_the_draft_can_say(export_format, exports, ask, question):
    rows = ask(export_format, exports[export_format])
    assert rows.shape == (len(question.drawn), VOCAB)
    torch.testing.assert_close(rows.exp().sum(-1), torch.ones(len(rows), dtype=torch.float64))
    if "d2t" in exports[export_format].tensors:
        assert torch.equal(rows[0].isfinite(), draft_vocabulary(SAYS)["t2d"])


@pytest.mark.parametrize("export_format", FORMATS)
def test_streams_by_name_are_put_in_the_order_of_the_layer_ids(export_format, exports, ask, question):
    together = ask(export_format, exports[export_format])
    low, middle, high = question.features.chunk(3, dim=-1)
    by_name = {"hf5": high, "hf2": low, "hf4": middle, "last": low}
    assert torch.equal(ask(export_format, exports[export_format], features=by_name), together)


def test_a_stream_that_the_target_does_not_have_is_named(exports, ask, question):
    low, middle, high = question.features.chunk(3, dim=-1)
    with pytest.raises(StoreError, match="lead to hf5: expected some of hf2, hf4, hf3"):
        ask("zlab_dflash", exports["zlab_dflash"], features={"hf2": low, "hf4": middle, "hf3": high})


@pytest.mark.parametrize(
    "export_format", ["sglang_eagle3", "speculators_eagle3", "zlab_domino", "zlab_dspark", "speculators_dspark"]
)
def test_a_step_of_a_chain_depends_on_the_words_before_it_alone(export_format, exports, ask, question):
    said, drawn = ask(export_format, exports[export_format]), question.drawn.clone()
    drawn[1] = (drawn[1] + 1) % VOCAB
    other = ask(export_format, exports[export_format], drawn=drawn)
    assert torch.equal(other[:2], said[:2])
    assert not torch.allclose(other[2].exp(), said[2].exp(), atol=1e-4)


@pytest.mark.parametrize("export_format", ["zlab_dflash", "speculators_dflash", "speculators_peagle"])
def test_a_block_does_not_depend_on_its_own_words(export_format, exports, ask, question):
    said = ask(export_format, exports[export_format])
    assert torch.equal(ask(export_format, exports[export_format], drawn=question.drawn.flip(0)), said)


def test_a_chain_of_masks_does_not_depend_on_how_long_it_is(exports, ask):
    export = exports["speculators_peagle"]
    whole = ask("speculators_peagle", export, drawn=torch.zeros(NUM_DEPTHS).long())
    for count in range(1, NUM_DEPTHS):
        torch.testing.assert_close(ask("speculators_peagle", export, drawn=torch.zeros(count).long()), whole[:count])
    assert not torch.allclose(whole[1].exp(), whole[2].exp(), atol=1e-4)


def test_the_first_token_of_p_eagle_is_eagle3s_with_the_same_layer(ask, tiny_folder, tiny_tensors):
    alone = speculators_peagle(tiny_folder, embed_requires_grad=False)
    alone = alone.with_config(transformer_layer_config__num_hidden_layers=1)
    alone = replace(alone, tensors={name: t for name, t in alone.tensors.items() if not name.startswith("layers.1.")})
    chain = speculators_eagle3(tiny_folder, alone.tensors["embed_tokens.weight"])
    said, chained = ask("speculators_peagle", alone), ask("speculators_eagle3", chain)
    torch.testing.assert_close(said[0], chained[0])
    assert not torch.allclose(said[1].exp(), chained[1].exp(), atol=1e-4)


def test_p_eagle_reads_the_embedding_of_its_file_and_not_the_targets(ask, tiny_folder, tiny_tensors):
    own = speculators_peagle(tiny_folder)
    other = own.with_tensors(embed_tokens__weight=tiny_tensors.embedding.clone())
    assert not torch.allclose(ask("speculators_peagle", own).exp(), ask("speculators_peagle", other).exp(), atol=1e-4)


def test_both_eagle3_layouts_compute_the_same(exports, ask):
    assert torch.equal(
        ask("sglang_eagle3", exports["sglang_eagle3"]), ask("speculators_eagle3", exports["speculators_eagle3"])
    )


def test_both_dflash_layouts_compute_the_same_without_windows(ask, tiny_folder):
    assert torch.equal(ask("zlab_dflash", zlab_dflash()), ask("speculators_dflash", speculators_dflash(tiny_folder)))


def test_a_window_is_another_one_in_speculators_until_it_holds_everything(ask, tiny_folder, question):
    def both(window: int):
        return (
            ask("zlab_dflash", zlab_dflash(window)),
            ask("speculators_dflash", speculators_dflash(tiny_folder, window=window)),
        )

    moving, anchored = both(window=4)
    assert not torch.allclose(moving, anchored, atol=1e-2)
    moving, anchored = both(window=len(question.features) + BLOCK_SIZE)
    assert torch.equal(moving, anchored)


@pytest.mark.parametrize(("shift_label", "row"), [(True, 0), (False, 1)])
def test_the_first_token_of_a_domino_block_is_its_backbones_own(ask, read, question, shift_label, row):
    domino = zlab_domino().with_config(dflash_config__shift_label=shift_label)
    backbone = read("zlab_dflash", zlab_dflash())
    rows = backbone.rows(question.features, question.next_tokens) @ backbone.head.T
    said = ask("zlab_domino", domino)
    torch.testing.assert_close(said[0], rows[row].log_softmax(-1))
    assert not torch.allclose(said[1], rows[row + 1].log_softmax(-1), atol=0.1)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_both_dspark_layouts_compute_the_same(ask, read, question, tiny_folder, kind):
    exports = {
        "zlab_dspark": zlab_dspark(markov_head_type=kind),
        "speculators_dspark": speculators_dspark(tiny_folder, markov_head_type=kind),
    }
    said = [ask(name, export) for name, export in exports.items()]
    assert torch.equal(*said)
    confidences = [read(name, export).confidence(**vars(question)) for name, export in exports.items()]
    assert torch.equal(*confidences)


def test_without_a_markov_head_a_dspark_block_is_its_backbones_own_from_the_anchor_on(ask, read, question, tiny_folder):
    bare = speculators_dspark(tiny_folder, markov_rank=0, confidence_head_with_markov=False)
    backbone = read("zlab_dflash", zlab_dflash())
    rows = backbone.rows(question.features, question.next_tokens)[: len(question.drawn)]
    torch.testing.assert_close(ask("speculators_dspark", bare), (rows @ backbone.head.T).log_softmax(-1))


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
def test_a_memoryless_markov_head_knows_the_last_word_alone_and_a_recurrent_one_all(ask, question, kind):
    drawn = question.drawn.clone()
    drawn[0] = (drawn[0] + 1) % VOCAB
    for markov, moves in ((kind, False), ("rnn", True)):
        said = [
            ask("zlab_dspark", zlab_dspark(markov_head_type=markov), drawn=words) for words in (question.drawn, drawn)
        ]
        assert not torch.allclose(said[0][1].exp(), said[1][1].exp(), atol=1e-4)
        assert torch.equal(said[0][2], said[1][2]) != moves


def test_a_block_has_no_more_proposals_than_places(read, exports, question):
    reader = read("zlab_dflash", exports["zlab_dflash"])
    with pytest.raises(ValueError, match="5 proposals, asked for 6"):
        reader.log_probabilities(question.features, question.next_tokens, torch.zeros(6, dtype=torch.int64))
    shifted = read("zlab_domino", exports["zlab_domino"])
    assert len(shifted.log_probabilities(question.features, question.next_tokens, torch.zeros(6).long())) == 6
    dspark = read("zlab_dspark", exports["zlab_dspark"])
    with pytest.raises(ValueError, match="6 proposals, asked for 7"):
        dspark.log_probabilities(question.features, question.next_tokens, torch.zeros(7).long())
    with pytest.raises(ValueError, match="6 proposals, asked for 7"):
        shifted.log_probabilities(question.features, question.next_tokens, torch.zeros(7).long())


@pytest.mark.parametrize("export_format", FORMATS)
def test_exactly_the_tensors_of_the_format_are_taken(export_format, exports, read):
    export = exports[export_format]
    for name, tensor in export.tensors.items():
        with pytest.raises(StoreError, match=f"missing: {name}; unknown: none"):
            read(export_format, export.without_tensor(name))
        with pytest.raises(StoreError, match=f"{name}: expected"):
            read(export_format, export.with_tensors(**{name: torch.cat([tensor, tensor])}))
        with pytest.raises(StoreError, match=f"{name}: expected"):
            read(export_format, export.with_tensors(**{name: tensor.to(torch.int32)}))
    with pytest.raises(StoreError, match=r"model\.safetensors: .*unknown: more"):
        read(export_format, export.with_tensors(more=torch.zeros(1)))


REFUSED = [
    ("sglang_eagle3", {"architectures": ["LlamaForCausalLM"]}, "architectures"),
    ("sglang_eagle3", {"eagle_config__use_aux_hidden_state": False}, "eagle_config.use_aux_hidden_state"),
    ("sglang_eagle3", {"eagle_config__eagle_aux_hidden_state_layer_ids": [4, 3, 1]}, "layer_ids"),
    (
        "sglang_eagle3",
        {"eagle_config__eagle_aux_hidden_state_layer_ids": [3]},
        "two layers or more, else fc is skipped",
    ),
    ("sglang_eagle3", {"target_hidden_size": None}, "target_hidden_size"),
    ("sglang_eagle3", {"norm_before_residual": True}, "norm_before_residual"),
    ("sglang_eagle3", {"fc_norm": True, "norm_output": False}, "norm_output: expected no such key"),
    ("sglang_eagle3", {"norm_output": True}, "norm_output: expected no such key"),
    ("sglang_eagle3", {"layer_types": ["sliding_attention"], "sliding_window": 4}, "layer_types: expected"),
    ("sglang_eagle3", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ("sglang_eagle3", {"num_hidden_layers": 2}, "num_hidden_layers"),
    ("sglang_eagle3", {"hidden_act": "gelu"}, "hidden_act"),
    ("sglang_eagle3", {"attention_bias": True}, "attention_bias"),
    ("sglang_eagle3", {"draft_vocab_size": None}, "draft_vocab_size: expected int, found None"),
    ("sglang_eagle3", {"rms_norm_eps": "1e-6"}, "rms_norm_eps: expected float, found '1e-6'"),
    ("speculators_eagle3", {"speculators_model_type": "peagle"}, "speculators_model_type"),
    ("speculators_eagle3", {"speculators_config__verifier__name_or_path": None}, "verifier.name_or_path"),
    ("speculators_eagle3", {"speculators_config__proposal_methods": []}, "proposal_methods"),
    ("speculators_eagle3", {"norm_before_fc": True, "fc_norm": True}, "norm_before_fc"),
    ("speculators_eagle3", {"transformer_layer_config__model_type": "qwen3"}, "model_type"),
    ("speculators_eagle3", {"target_hidden_size": 64}, "target_hidden_size: expected 128"),
    (
        "speculators_eagle3",
        {"transformer_layer_config__layer_types": ["sliding_attention"]},
        "sliding_window: expected int, found no such key",
    ),
    (
        "speculators_eagle3",
        {"transformer_layer_config__layer_types": ["chunked_attention"]},
        "layer_types: expected .'sliding_attention'.",
    ),
    ("speculators_eagle3", {"transformer_layer_config__num_hidden_layers": 2}, "num_hidden_layers"),
    ("speculators_peagle", {"speculators_model_type": "eagle3"}, "speculators_model_type: expected 'peagle'"),
    ("speculators_peagle", {"transformer_layer_config__model_type": "qwen3"}, "model_type"),
    ("speculators_peagle", {"mask_token_id": None}, "mask_token_id: expected int"),
    ("speculators_peagle", {"mask_token_id": VOCAB}, "mask_token_id: expected 0 to 2047"),
    ("speculators_peagle", {"norm_before_fc": True, "fc_norm": True}, "norm_before_fc"),
    ("speculators_peagle", {"speculators_config__proposal_methods": []}, "proposal_methods"),
    ("speculators_peagle", {"target_hidden_size": 64}, "target_hidden_size: expected 128"),
    ("speculators_peagle", {"transformer_layer_config__fc_norm": True}, "fc_norm: expected False or nothing"),
    (
        "speculators_peagle",
        {"transformer_layer_config__num_aux_hidden_states": 4},
        "num_aux_hidden_states: expected 3 or nothing, found 4",
    ),
    (
        "speculators_peagle",
        {"transformer_layer_config__layer_types": ["full_attention", "sliding_attention"]},
        "layer_types: expected .* or nothing",
    ),
    ("zlab_dflash", {"model_type": "llama"}, "model_type"),
    ("zlab_dflash", {"is_causal": True}, "is_causal"),
    ("zlab_dflash", {"layer_types": ["full_attention"]}, "layer_types"),
    ("zlab_dflash", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "use_sliding_window"),
    ("zlab_dflash", {"dflash_config__mask_token_id": VOCAB}, "dflash_config.mask_token_id: expected 0 to 2047"),
    ("zlab_dflash", {"block_size": 1}, "block_size"),
    ("zlab_domino", {"architectures": ["DominoDraftModel"]}, "architectures"),
    ("zlab_domino", {"dflash_config__projector_type": None}, "dflash_config.projector_type: expected 'domino'"),
    ("zlab_domino", {"dflash_config__pure_draft_prefix_len": 0}, "pure_draft_prefix_len: expected 1, found 0"),
    ("zlab_domino", {"dflash_config__shift_label": 1}, "shift_label: expected bool, found 1"),
    ("zlab_domino", {"emb_dim": 7}, "emb_dim: expected 24 or nothing, found 7"),
    ("zlab_dspark", {"architectures": ["DFlashDraftModel"]}, "architectures"),
    ("zlab_dspark", {"markov_rank": 7}, "dflash_config.markov_rank: expected 7 or nothing, found 12"),
    ("zlab_dspark", {"markov_head_type": None}, "markov_head_type: expected int or str or bool, found None"),
    ("zlab_dspark", {"dflash_config__markov_head_type": "gated"}, "dflash_config.markov_head_type: expected 'rnn'"),
    ("zlab_dspark", {"markov_rank": 0, "dflash_config__markov_rank": 0}, "markov_rank: expected 1 or more"),
    ("zlab_dspark", {"sample_from_anchor": False}, "sample_from_anchor: expected True or nothing"),
    ("zlab_dspark", {"is_causal": True}, "is_causal"),
    ("speculators_dspark", {"speculators_model_type": "dflash"}, "speculators_model_type"),
    ("speculators_dspark", {"sample_from_anchor": False}, "sample_from_anchor"),
    ("speculators_dspark", {"block_size": 7}, "proposal_methods: expected block_size speculative_tokens"),
    ("speculators_dspark", {"markov_head_type": "lstm"}, "markov_head_type: expected one of vanilla, gated, rnn"),
    ("speculators_dspark", {"markov_rank": 0}, "confidence_head_with_markov: expected false where markov_rank is 0"),
    ("speculators_dspark", {"sliding_window_non_causal": False}, "vLLM makes full attention causal"),
    ("speculators_dflash", {"sample_from_anchor": True}, "sample_from_anchor"),
    ("speculators_dflash", {"block_size": 8}, "proposal_methods: expected block_size - 1"),
    ("speculators_dflash", {"mask_token_id": None}, "mask_token_id"),
    ("speculators_dflash", {"sliding_window_non_causal": False}, "vLLM makes full attention causal"),
]


@pytest.mark.parametrize(("export_format", "changes", "message"), REFUSED)
def test_a_config_that_a_server_takes_for_another_draft_is_refused(export_format, changes, message, exports, read):
    with pytest.raises(StoreError, match=rf"config\.json: .*{message}"):
        read(export_format, exports[export_format].with_config(**changes))


def test_a_draft_for_another_target_is_refused(exports, read, tiny_tensors):
    other = TargetTensors(tiny_tensors.embedding[:, :64], tiny_tensors.head)
    with pytest.raises(
        StoreError, match=r"embedding is floating point \(2048, 128\), found torch.float32 \(2048, 64\)"
    ):
        read("zlab_dflash", exports["zlab_dflash"], other)


def test_offsets_and_members_must_name_the_same_tokens(exports, read):
    export = exports["sglang_eagle3"]
    with pytest.raises(StoreError, match=r"found 48 that lead to .*These are the ids themselves"):
        read("sglang_eagle3", export.with_tensors(d2t=export.tensors["d2t"] + torch.arange(SAYS)))
    with pytest.raises(StoreError, match="d2t: expected offsets"):
        read("sglang_eagle3", export.with_tensors(t2d=~export.tensors["t2d"]))


def test_a_draft_that_says_everything_may_map_it_in_sglang_alone(exports, read, tiny_folder, tiny_tensors):
    everything = {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    for export_format in ("sglang_eagle3", "speculators_eagle3", "speculators_peagle"):
        export = exports[export_format].with_config(draft_vocab_size=VOCAB)
        export = export.with_tensors(lm_head__weight=tiny_tensors.head.clone())
        bare = export.without_tensor("d2t").without_tensor("t2d")
        assert torch.equal(read(export_format, bare).vocabulary.ids, torch.arange(VOCAB))
        if export_format == "sglang_eagle3":
            assert torch.equal(
                read(export_format, export.with_tensors(**everything)).vocabulary.ids, torch.arange(VOCAB)
            )
        else:
            with pytest.raises(StoreError, match="unknown: d2t, t2d"):
                read(export_format, export.with_tensors(**everything))


def test_a_folder_without_a_draft_and_an_unknown_format_are_refused(tmp_path, tiny_tensors):
    with pytest.raises(StoreError, match=r"expected config\.json and model\.safetensors"):
        open_export("zlab_dflash", tmp_path, tiny_tensors)
    with pytest.raises(ConfigError, match="unknown export format 'gguf'"):
        open_export("gguf", tmp_path, tiny_tensors)
