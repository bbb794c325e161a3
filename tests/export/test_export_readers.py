"""What the readers compute from each format, and how the formats differ.
Rotary frequencies of the readers equal those of transformers, in either spelling of the config.
Every draft that a format can hold passes every gate in it, and comes back as it was.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from coverings import gate_or_long
from export_toys import CASES, Case, Toys, assert_same_draft
from random_exports import (
    BLOCK_SIZE,
    DRAFT_VOCAB,
    HEAD_DIM,
    NUM_DEPTHS,
    VOCAB,
    RandomExport,
    draft_vocabulary,
    sglang_eagle3,
    speculators_dflash,
    speculators_dflash2,
    speculators_dspark,
    speculators_eagle3,
    speculators_peagle,
    speculators_xpress,
    zlab_dflash,
    zlab_dflash2,
    zlab_domino,
    zlab_dspark,
)
from random_lilicorr import sglang_lilicorr
from safetensors import safe_open
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftworks.errors import ConfigError, StoreError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.exporting import ExportResult, export_draft
from draftworks.export.gates import open_export
from draftworks.export.importing import import_draft
from draftworks.export.readers.arithmetic import RopeTable, read_rope
from draftworks.export.readers.reader import ExportFolder, ExportReader, TargetTensors
from draftworks.strategies.dflash.reader import DFlashReader


@pytest.fixture(scope="session")
def exports(tiny_folder, tiny_tensors) -> dict[str, RandomExport]:
    return {
        "sglang_eagle3": sglang_eagle3(),
        "speculators_eagle3": speculators_eagle3(tiny_folder, tiny_tensors.embedding),
        "speculators_peagle": speculators_peagle(tiny_folder),
        "zlab_dflash": zlab_dflash(),
        "speculators_dflash": speculators_dflash(tiny_folder, draft_vocab=DRAFT_VOCAB),
        "zlab_dflash2": zlab_dflash2(),
        "speculators_dflash2": speculators_dflash2(tiny_folder),
        "zlab_domino": zlab_domino(),
        "zlab_dspark": zlab_dspark(markov_head_type="rnn"),
        "sglang_lilicorr": sglang_lilicorr(),
        "speculators_dspark": speculators_dspark(tiny_folder, draft_vocab=DRAFT_VOCAB, markov_head_type="gated"),
        "speculators_xpress": speculators_xpress(tiny_folder, draft_vocab=DRAFT_VOCAB),
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


def test_every_step_has_a_distribution_over_the_draft_vocabulary(exports, ask, question):
    for export_format, export in exports.items():
        rows = ask(export_format, export)
        assert rows.shape == (len(question.drawn), VOCAB), export_format
        torch.testing.assert_close(rows.exp().sum(-1), torch.ones(len(rows), dtype=torch.float64))
        if "d2t" in export.tensors:
            assert torch.equal(rows[0].isfinite(), draft_vocabulary(DRAFT_VOCAB)["t2d"]), export_format


def test_streams_by_name_are_put_in_the_order_of_the_layer_ids(exports, ask, question):
    low, middle, high = question.features.chunk(3, dim=-1)
    by_name = {"hf5": high, "hf2": low, "hf4": middle, "last": low}
    for export_format, export in exports.items():
        together = ask(export_format, export)
        assert torch.equal(ask(export_format, export, features=by_name), together), export_format


def test_a_stream_that_the_target_does_not_have_is_named(exports, ask, question):
    low, middle, high = question.features.chunk(3, dim=-1)
    with pytest.raises(StoreError, match="lead to hf5: expected some of hf2, hf4, hf3"):
        ask("zlab_dflash", exports["zlab_dflash"], features={"hf2": low, "hf4": middle, "hf3": high})


@pytest.mark.parametrize(
    "export_format",
    ["sglang_eagle3", "speculators_eagle3", "zlab_dflash2", "zlab_domino", "zlab_dspark", "speculators_dspark"],
)
def test_a_step_of_a_chain_depends_on_the_tokens_before_it_alone(export_format, exports, ask, question):
    said, drawn = ask(export_format, exports[export_format]), question.drawn.clone()
    drawn[1] = (drawn[1] + 1) % VOCAB
    other = ask(export_format, exports[export_format], drawn=drawn)
    assert torch.equal(other[:2], said[:2])
    assert not torch.allclose(other[2].exp(), said[2].exp(), atol=1e-4)


@pytest.mark.parametrize(
    "export_format", ["zlab_dflash", "speculators_dflash", "speculators_peagle", "speculators_xpress"]
)
def test_a_block_does_not_depend_on_its_own_tokens(export_format, exports, ask, question):
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
def test_a_memoryless_markov_head_knows_the_last_token_alone_and_a_recurrent_one_all(ask, question, kind):
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
    with pytest.raises(ValueError, match="a block of 6 has 5 proposals, asked for 6"):
        reader.log_probabilities(question.features, question.next_tokens, torch.zeros(6, dtype=torch.int64))
    shifted = read("zlab_domino", exports["zlab_domino"])
    assert len(shifted.log_probabilities(question.features, question.next_tokens, torch.zeros(6).long())) == 6
    dspark = read("zlab_dspark", exports["zlab_dspark"])
    with pytest.raises(ValueError, match="6 proposals, asked for 7"):
        dspark.log_probabilities(question.features, question.next_tokens, torch.zeros(7).long())
    with pytest.raises(ValueError, match="6 proposals, asked for 7"):
        shifted.log_probabilities(question.features, question.next_tokens, torch.zeros(7).long())


def test_a_full_vocabulary_needs_no_mapping(exports, read, tiny_tensors):
    for export_format in ("sglang_eagle3", "speculators_eagle3", "speculators_peagle"):
        bare = exports[export_format].with_tensors(lm_head__weight=tiny_tensors.head.clone())
        bare = bare.without_tensor("d2t").without_tensor("t2d")
        assert torch.equal(read(export_format, bare).vocabulary.ids, torch.arange(VOCAB))


def test_full_attention_is_causal_where_vllm_takes_it_so(ask, tiny_folder):
    """`sliding_window_non_causal: false`, the default of speculators, where the key is there."""
    export = speculators_dflash(tiny_folder)
    said, causal, unsaid = (
        ask("speculators_dflash", changed)
        for changed in (
            export,
            export.with_config(sliding_window_non_causal=False),
            export.without_config("sliding_window_non_causal"),
        )
    )
    assert torch.equal(said, unsaid)
    assert not torch.allclose(said.exp(), causal.exp(), atol=1e-4)


@pytest.mark.parametrize("export_format", ["speculators_dflash", "speculators_dspark", "zlab_dspark"])
def test_a_key_decides_which_row_proposes_first(export_format, exports, read, question):
    """Otherwise a server that reads the key would propose from another position of the block."""
    export, asked = exports[export_format], (question.features, question.next_tokens)
    rows = [
        reader.proposing_rows(*asked, 5)
        for value in (True, False)
        for reader in [backbone_of(read(export_format, export.with_config(sample_from_anchor=value)))]
    ]
    torch.testing.assert_close(rows[0][1:], rows[1][:-1])


def backbone_of(reader: ExportReader) -> DFlashReader:
    return getattr(reader, "backbone", reader)


@pytest.mark.parametrize(
    ("export_format", "key"),
    [
        ("sglang_eagle3", "rms_norm_eps"),
        ("sglang_eagle3", "eagle_config"),
        ("speculators_eagle3", "norm_before_residual"),
        ("speculators_peagle", "mask_token_id"),
        ("zlab_dflash", "block_size"),
        ("zlab_dspark", "markov_rank"),
    ],
)
def test_a_missing_value_that_the_computation_needs_is_an_error(export_format, key, exports, read):
    with pytest.raises(StoreError, match=rf"config\.json: {key}.*: expected a value, found none"):
        read(export_format, exports[export_format].without_config(key))


def test_a_folder_without_a_draft_and_an_unknown_format_are_refused(tmp_path, tiny_tensors):
    with pytest.raises(StoreError, match=r"expected config\.json and model\.safetensors"):
        open_export("zlab_dflash", tmp_path, tiny_tensors)
    with pytest.raises(ConfigError, match="unknown export format 'gguf'"):
        open_export("gguf", tmp_path, tiny_tensors)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
SCALED = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "yarn", **YARN},
    {"rope_type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 0.9},
    {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
]


@pytest.fixture
def read_table(tmp_path):
    def of(**settings) -> RopeTable:
        config = {name: value for name, value in {**sglang_eagle3().config, **settings}.items() if value is not ...}
        return read_rope(ExportFolder(tmp_path, config, {}), "", HEAD_DIM)

    return of


@pytest.mark.parametrize("scaling", SCALED)
def test_frequencies_are_those_of_transformers(scaling, read_table):
    rope = {"rope_theta": 500.0, **scaling}
    config = LlamaConfig(hidden_size=4 * HEAD_DIM, num_attention_heads=4, head_dim=HEAD_DIM, rope_parameters=rope)
    inverse, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    ours = read_table(rope_parameters=rope)
    torch.testing.assert_close(ours.inverse.float(), inverse, rtol=1e-5, atol=0)
    assert ours.scaling == pytest.approx(factor)


def test_unscaled_frequencies_fall_from_one_by_powers_of_theta(read_table):
    inverse = read_table(rope_parameters={"rope_type": "default", "rope_theta": 81.0}).inverse
    assert inverse[0] == 1
    assert inverse[HEAD_DIM // 4] == pytest.approx(1 / 9)


@pytest.mark.parametrize("scaling", [None, *SCALED])
def test_the_spelling_of_transformers_4_says_the_same(scaling, read_table):
    new = read_table(rope_parameters={"rope_type": "default", "rope_theta": 500.0, **(scaling or {})})
    old = read_table(rope_parameters=..., rope_theta=500.0, rope_scaling=scaling)
    assert torch.equal(old.inverse, new.inverse)
    assert old.scaling == new.scaling


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_parameters": ..., "rope_theta": ...},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}},
    ],
)
def test_no_rope_half_a_rope_and_one_that_depends_on_the_length_are_refused(settings, read_table):
    with pytest.raises(StoreError, match=r"config\.json: rope_parameters: expected"):
        read_table(**settings)


@dataclass(frozen=True)
class Export:
    """A draft in a format, with weights of that dtype."""

    case: Case
    dtype: str

    def __str__(self) -> str:
        """The test's id."""
        return f"{self.case}-{self.dtype}"


@dataclass(frozen=True)
class Exported:
    asked: Export
    toys: Toys
    draft: CanonicalDraft
    result: ExportResult


EXPORTS = [Export(case, dtype) for dtype in ("bfloat16", "float32") for case in CASES]


def has_a_tied_target(export: Export) -> bool:
    """One case of each format."""
    return export.case.tied


# A tensor that is not rounded shows in bfloat16 only. What is rounded against the wish shows in any case of a format.
@pytest.fixture(
    scope="module",
    ids=str,
    params=gate_or_long(EXPORTS, lambda export: export.dtype == "bfloat16" or has_a_tied_target(export)),
)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    asked, folder = request.param, tmp_path_factory.mktemp("exported")
    toys = asked.case.toys(folder)
    draft = toys.draft(asked.case.strategy, **asked.case.options)
    return Exported(asked, toys, draft, export_draft(draft, asked.case.format, folder / "out", asked.dtype))


def test_every_gate_passes(exported: Exported):
    assert [gate for gate in exported.result.gates if not gate.passed] == []
    assert len(exported.result.gates) == 11
    with safe_open(exported.result.path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        floating = {file.get_tensor(name).dtype for name in file.keys() if name not in ("d2t", "t2d")}  # noqa: SIM118
    assert floating == {getattr(torch, exported.asked.dtype)}


def test_what_was_exported_comes_back(exported: Exported, tmp_path: Path):
    case, draft = exported.asked.case, exported.draft
    imported = import_draft(exported.result.path, exported.toys.target, tmp_path / "imported")
    found = CanonicalDraft.load(tmp_path / "imported", exported.toys.target)
    assert_same_draft(found, draft, getattr(torch, exported.asked.dtype))
    assert found.config["options"] == draft.config["options"]
    assert (imported.format, imported.strategy) == (case.format, case.strategy)
    assert found.build_strategy().drafter() is not None
