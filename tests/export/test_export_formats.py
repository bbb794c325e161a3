"""Every draft that a format can hold passes every gate in it; what it cannot hold is refused with the reason.
Layer ids by format: the table of conventions for a target of 36 layers, and what is refused.
Checkpoints of other software: whole, from their folder alone, or one clear error.
Targets that scale their embeddings: formats whose servers look up unscaled ones are refused for block drafts.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from export_toys import FORMATS, LLAMA3_ROPE, VOCAB, Toys
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig, Qwen3Config

from draftworks.config.strategies import list_strategies, resolve_strategy
from draftworks.errors import ConfigError, StoreError
from draftworks.export import export_format as formats_module
from draftworks.export.canonical import CONFIG, INDEX, WEIGHTS, CanonicalDraft, read_checkpoint
from draftworks.export.conventions import from_format, to_format
from draftworks.export.export_format import load_format
from draftworks.export.exporting import choose_formats, export_draft
from draftworks.export.gates import compare_with_reader
from draftworks.export.importing import import_draft
from draftworks.storage.identity import LayerTap


@pytest.fixture
def toys(tmp_path: Path) -> Toys:
    return Toys.make(tmp_path)


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def layer_config(config: dict) -> dict:
    """Return the section of a config.json that describes the decoder layers."""
    return config.get("transformer_layer_config", config)


ANCHORED = {"sliding_window": 3, "sliding_window_kind": "anchor"}
FROM_TOKENS = {
    "zlab_dflash": "exported as speculators_dflash",
    "zlab_dspark": "exported as speculators_dspark",
    "zlab_dflash2": "exported as speculators_dflash2",
    "zlab_domino": "No format can hold it",
    "sglang_lilicorr": "No format can hold it",
}
"""Formats in which a window counts from each token, and what holds one that counts from the anchor."""


def test_every_registered_format_is_tried_here():
    registered = {spec.name for name in list_strategies() for spec in resolve_strategy(name).usual_exports}
    registered -= {"target_mtp", "speculators_mtp"}  # of targets that have such a layer: tests/strategies/mtp
    assert registered == set(FORMATS)
    for name, strategy in FORMATS.items():
        assert (load_format(strategy, name).name, load_format(strategy, name).strategy) == (name, strategy)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("sglang_eagle3", {"feedback": "post_norm"}, "feedback: post_norm.*exported as speculators_eagle3"),
        ("sglang_eagle3", {"norm_output": False}, "norm_output: false.*No format can hold it"),
        ("speculators_eagle3", {"norm_output": False}, "norm_output: false.*No format can hold it"),
        ("sglang_eagle3", {"norm_before_fc": True}, "norm_before_fc: SGLang.*exported as speculators_eagle3"),
        (
            "sglang_eagle3",
            {"norm_before_residual": True},
            "norm_before_residual: SGLang.*exported as speculators_eagle3",
        ),
        ("sglang_eagle3", {"sliding_window": 9}, "sliding_window: SGLang reads none.*exported as speculators_eagle3"),
        ("sglang_eagle3", {"layer_ids": [4]}, "one tap.*exported as speculators_eagle3"),
        ("sglang_eagle3", {"layer_ids": [0, 4]}, "layer_ids .*embeddings.*exported as speculators_eagle3"),
        ("zlab_dflash", {"layer_ids": [0, 4]}, "layer_ids .*embeddings.*exported as speculators_dflash"),
        ("zlab_domino", {"layer_ids": [0, 4]}, "layer_ids .*embeddings.*No format can hold it"),
        ("zlab_domino", {"pure_draft_prefix_len": 0}, "pure_draft_prefix_len 0: SGLang.*No format can hold it"),
        ("speculators_dflash", {"sliding_window": 3}, "sliding_window.*exported as zlab_dflash"),
        ("zlab_dspark", {"layer_ids": [0, 4]}, "layer_ids .*embeddings.*exported as speculators_dspark"),
        ("zlab_dspark", {"markov_rank": 0, "confidence_head": False}, "markov_rank 0: SGLang.*as speculators_dspark"),
        ("sglang_lilicorr", {"candidate_topk": 5}, "candidate_topk 5: SGLang takes a power of two.*No format"),
        ("speculators_dspark", {"sliding_window": 3}, "sliding_window.*exported as zlab_dspark"),
        (
            "speculators_dflash2",
            ANCHORED | {"sliding_layers": [1]},
            "sliding_window_kind anchor in some of the layers: vLLM",
        ),
        *((name, ANCHORED, f"sliding_window_kind anchor: .*{instead}") for name, instead in FROM_TOKENS.items()),
    ],
)
def test_what_a_server_would_compute_otherwise_is_refused(toys: Toys, name: str, options: dict, reason: str):
    draft = toys.draft(FORMATS[name], **options)
    with pytest.raises(ConfigError, match=f"cannot be exported as {name}: {reason}"):
        export_draft(draft, name, toys.folder / "out")
    assert not (toys.folder / "out").exists()


def test_formats_that_cannot_hold_a_draft_are_left_out_unless_asked_for(toys: Toys):
    draft = toys.draft("eagle3", feedback="post_norm")
    choice = choose_formats(draft)
    assert (choice.chosen, list(choice.refused)) == (("speculators_eagle3",), ["sglang_eagle3"])
    with pytest.raises(ConfigError, match="cannot be exported as sglang_eagle3"):
        choose_formats(draft, ["sglang_eagle3"])


def test_a_draft_that_no_format_can_hold_is_an_error_with_every_reason(toys: Toys):
    with pytest.raises(ConfigError, match="sglang_eagle3: norm_output: false.*speculators_eagle3: norm_output: false"):
        choose_formats(toys.draft("eagle3", norm_output=False))


def test_to_want_no_format_at_all_is_an_error(toys: Toys):
    with pytest.raises(ConfigError, match="formats: expected one at least of sglang_eagle3, speculators_eagle3"):
        choose_formats(toys.draft("eagle3"), [])


def test_an_unknown_format_is_an_error_with_the_closest_names(toys: Toys):
    with pytest.raises(ConfigError, match="no export format 'sglang_eagle': did you mean sglang_eagle3"):
        export_draft(toys.draft("eagle3"), "sglang_eagle", toys.folder / "out")


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("sglang_eagle3", [1, 3, 4]),
        ("speculators_eagle3", [2, 4, 5]),
        ("speculators_peagle", [2, 4, 5]),
        ("zlab_dflash", [1, 3, 5]),
        ("speculators_dflash", [2, 4, 6]),
        ("zlab_dflash2", [1, 3, 5]),
        ("speculators_dflash2", [2, 4, 6]),
        ("zlab_domino", [1, 3, 5]),
        ("zlab_dspark", [1, 3, 5]),
        ("speculators_dspark", [2, 4, 6]),
        ("sglang_lilicorr", [1, 3, 5]),
    ],
)
def test_layer_ids_count_as_the_format_does(toys: Toys, name: str, ids: list[int]):
    export_draft(toys.draft(FORMATS[name]), name, toys.folder / "out")
    config = config_of(toys.folder / "out")
    places = [config, config.get("eagle_config", {}), config.get("dflash_config", {})]
    keys = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids")
    of_vllm = [[2, 4, 5]] if name == "sglang_eagle3" else []
    assert [place[key] for place in places for key in keys if key in place] == [*of_vllm, ids]


@pytest.mark.parametrize("name", FORMATS)
def test_both_spellings_of_rope_are_the_targets(tmp_path: Path, name: str):
    toys = Toys.make(tmp_path, rope=LLAMA3_ROPE)
    export_draft(toys.draft(FORMATS[name]), name, tmp_path / "out")
    config = layer_config(config_of(tmp_path / "out"))
    make = LlamaConfig if config["model_type"] == "llama" else Qwen3Config
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    new = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    assert make(**old).rope_parameters == make(**new).rope_parameters == make(**config).rope_parameters == LLAMA3_ROPE


def test_sglang_is_not_told_a_target_hidden_size(toys: Toys):
    """SGLang tests whether the key exists, so null would count as present."""
    export_draft(toys.draft("eagle3"), "sglang_eagle3", toys.folder / "out")
    assert "target_hidden_size" not in config_of(toys.folder / "out")


@pytest.mark.parametrize("name", ["speculators_eagle3", "speculators_peagle"])
def test_speculators_gets_no_mapping_where_it_has_none(toys: Toys, name: str):
    draft = toys.draft(FORMATS[name], draft_vocab_size=VOCAB)
    export_draft(draft, name, toys.folder / "out")
    with safe_open(toys.folder / "out" / "model.safetensors", "pt") as file:
        assert not {"d2t", "t2d"} & set(file.keys())


@pytest.mark.parametrize("name", FORMATS)
def test_provenance_names_what_was_exported(toys: Toys, name: str):
    draft = toys.draft(FORMATS[name])
    export_draft(draft, name, toys.folder / "out")
    found = config_of(toys.folder / "out")["provenance"]
    assert found["weights_digest"] == draft.record.weights_digest
    assert found["target_digest"] == toys.target.digest
    assert found["draft"] == "draft"
    assert found["draftworks"]


@pytest.mark.parametrize(
    ("options", "needed"),
    [({}, "Any SGLang"), ({"fc_norm": True}, "#24663.*fc_norm"), ({"layer_ids": [1, 3, 4, 6]}, "#24663.*4 taps")],
)
def test_the_readme_says_which_sglang_loads_the_draft(toys: Toys, options: dict, needed: str):
    export_draft(toys.draft("eagle3", **options), "sglang_eagle3", toys.folder / "out")
    text = (toys.folder / "out" / "README.md").read_text()
    serving = text[text.index("## Serving") :]
    assert re.search(needed, serving)
    assert "--speculative-draft-model-path DRAFT_FOLDER --speculative-num-steps 3" in serving


@pytest.mark.parametrize(
    ("options", "vllm"),
    [({}, True), ({"markov_head_type": "rnn"}, False), ({"markov_rank": 0, "confidence_head": False}, False)],
)
def test_vllm_is_told_to_serve_the_markov_head_that_it_has_and_no_other(toys: Toys, options: dict, vllm: bool):
    result = export_draft(toys.draft("dspark", **options), "speculators_dspark", toys.folder / "out")
    assert bool(result.commands) == vllm
    if vllm:
        assert '"method": "dspark", "num_speculative_tokens": 4' in result.commands["vLLM, target first"]
    else:
        assert "Not vLLM" in result.loaders


@pytest.mark.parametrize(("confidence", "said"), [(True, "not `static`"), (False, "has to stay `static`")])
def test_the_readme_says_when_sglang_looks_at_confidences(toys: Toys, confidence: bool, said: str):
    export_draft(toys.draft("dspark", confidence_head=confidence), "zlab_dspark", toys.folder / "out")
    text = (toys.folder / "out" / "README.md").read_text()
    assert said in text
    assert "--speculative-algorithm DSPARK --speculative-draft-model-path DRAFT_FOLDER" in text


def test_the_model_card_comes_first_in_the_readme(toys: Toys):
    export_draft(toys.draft("eagle3"), "sglang_eagle3", toys.folder / "out", card="---\ntags: []\n---\n# A card\n")
    text = (toys.folder / "out" / "README.md").read_text()
    assert text.startswith("---\ntags: []\n---\n# A card\n\n## Serving\n")


def test_equal_drafts_have_equal_digests_and_others_do_not(toys: Toys):
    draft = toys.draft("eagle3")
    digests = [export_draft(draft, "sglang_eagle3", toys.folder / name).digest for name in ("a", "b")]
    digests.append(export_draft(draft, "sglang_eagle3", toys.folder / "c", "float32").digest)
    assert digests[0] == digests[1] != digests[2]


def test_a_failed_export_leaves_the_one_before_as_it_was(toys: Toys, monkeypatch: pytest.MonkeyPatch):
    draft, out = toys.draft("eagle3"), toys.folder / "out"
    export_draft(draft, "sglang_eagle3", out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def no_space(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(formats_module, "publish_json", no_space)
    with pytest.raises(OSError, match="no space"):
        export_draft(draft, "sglang_eagle3", out, "float32")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    with pytest.raises(OSError, match="no space"):
        export_draft(draft, "sglang_eagle3", toys.folder / "new")
    assert sorted(path.name for path in toys.folder.iterdir()) == ["draft", "out", "target"]


def test_a_draft_of_another_target_is_refused(toys: Toys):
    toys.draft("eagle3")
    other = toys.target.model_copy(update={"digest": "f" * 16})
    with pytest.raises(StoreError, match="Export it with the target it was trained for"):
        CanonicalDraft.load(toys.folder / "draft", other)


def test_altered_weights_are_refused(toys: Toys):
    draft = toys.draft("eagle3")
    path = draft.folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreError, match="altered: expected digest"):
        CanonicalDraft.load(draft.folder, toys.target)


EAGLE3 = [LayerTap(2), LayerTap(18), LayerTap(33)]
DFLASH = [LayerTap(2), LayerTap(10), LayerTap(18), LayerTap(26), LayerTap(34)]

TABLE = [
    ("speculators_eagle3", EAGLE3, [2, 18, 33]),  # vLLM's own default for 36 layers: [2, n // 2, n - 3]
    ("speculators_peagle", EAGLE3, [2, 18, 33]),
    ("sglang_eagle3", EAGLE3, [1, 17, 32]),  # SpecForge's default: [1, n // 2 - 1, n - 4]
    ("speculators_dflash", DFLASH, [2, 10, 18, 26, 34]),
    ("zlab_dflash", DFLASH, [1, 9, 17, 25, 33]),  # as in the published draft for Qwen3-8B
    ("zlab_dflash2", DFLASH, [1, 9, 17, 25, 33]),
    ("speculators_dflash2", DFLASH, [2, 10, 18, 26, 34]),
    ("zlab_domino", DFLASH, [1, 9, 17, 25, 33]),
    ("zlab_dspark", DFLASH, [1, 9, 17, 25, 33]),  # as in the published recipes for Qwen3-4B
    ("speculators_dspark", DFLASH, [2, 10, 18, 26, 34]),
    ("speculators_xpress", DFLASH, [2, 10, 18, 26, 34]),
    ("sglang_lilicorr", DFLASH, [1, 9, 17, 25, 33]),
]


@pytest.mark.parametrize(("export_format", "taps", "ids"), TABLE)
def test_ids_are_those_of_the_published_drafts_for_36_layers(export_format, taps, ids):
    assert to_format(export_format, taps) == ids
    assert from_format(export_format, ids) == tuple(taps)


@pytest.mark.parametrize("export_format", FORMATS)
def test_ids_lead_back_to_the_layers_in_every_format(export_format):
    assert from_format(export_format, to_format(export_format, EAGLE3)) == tuple(EAGLE3)


@pytest.mark.parametrize("export_format", [row[0] for row in TABLE])
@pytest.mark.parametrize("ids", [[], [3, 2], [2, 2], [-1, 4], [1, True], [1.0, 2]])
def test_ids_that_do_not_name_columns_of_fc_are_refused(export_format, ids):
    with pytest.raises(ConfigError, match="expected ascending integers"):
        from_format(export_format, ids)


@pytest.mark.parametrize("export_format", ["sglang_eagle3", "zlab_dflash"])
def test_the_embeddings_have_no_id_where_layers_are_counted_by_their_output(export_format):
    with pytest.raises(ConfigError, match=r"found \[-1, 4\]"):
        to_format(export_format, [LayerTap(0), LayerTap(5)])


def test_an_unknown_format_is_answered_with_the_closest_ones():
    with pytest.raises(ConfigError, match="did you mean zlab_dflash"):
        to_format("z-lab_dflash", EAGLE3)


def test_layer_ids_need_no_torch():
    code = "import sys, draftworks.export.conventions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def save_shard(path: Path, *names: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.ones(2) for name in names}, path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / CONFIG).write_text("{}")
    return tmp_path / "draft"


def write_index(folder: Path, **shard_of: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": shard_of}))


def test_shards_are_read_as_one_file_is(folder: Path):
    save_shard(folder / WEIGHTS, "a", "b")
    whole = read_checkpoint(folder).tensors
    (folder / WEIGHTS).unlink()
    save_shard(folder / "1.safetensors", "a")
    save_shard(folder / "2.safetensors", "b")
    write_index(folder, a="1.safetensors", b="2.safetensors")
    assert read_checkpoint(folder).tensors.keys() == whole.keys()


@pytest.mark.parametrize("shard", ["../1.safetensors", "inner/1.safetensors", "{}/1.safetensors", "1.safetensors\0"])
def test_an_index_names_files_of_its_own_folder_only(folder: Path, shard: str):
    for place in (folder, folder.parent, folder / "inner"):
        save_shard(place / "1.safetensors", "a")
    write_index(folder, a=shard.format(folder))
    with pytest.raises(StoreError, match="is not the name of a file in this folder"):
        read_checkpoint(folder)


def test_an_index_and_its_files_hold_the_same_tensors(folder: Path):
    save_shard(folder / "1.safetensors", "a")
    write_index(folder, a="1.safetensors", b="1.safetensors")
    with pytest.raises(StoreError, match="do not hold the same tensors"):
        read_checkpoint(folder)


BLOCKS = {"dflash": "zlab_dflash", "dflash2": "zlab_dflash2", "domino": "zlab_domino", "dspark": "zlab_dspark"}


@pytest.fixture
def gemma(tmp_path: Path) -> Toys:
    return Toys.make(tmp_path / "gemma", tied=True, model_type="gemma")


@pytest.mark.parametrize("strategy", BLOCKS)
def test_an_independent_reader_with_the_servers_embeddings_computes_the_same(gemma: Toys, strategy: str):
    draft = gemma.draft(strategy)
    assert draft.parts.embedding_scale == 4.0
    result = export_draft(draft, BLOCKS[strategy], gemma.folder / "out", "float32")
    assert result.passed
    bare = replace(draft, parts=replace(draft.parts, embedding_scale=1.0))
    found = compare_with_reader(gemma.folder / "out", BLOCKS[strategy], bare, draft.build_strategy(), torch.float32)
    assert found.largest > 0.1


@pytest.mark.parametrize("strategy", ["dflash", "dflash2", "dspark"])
def test_formats_whose_loaders_look_up_unscaled_embeddings_are_left_out(gemma: Toys, strategy: str):
    choice = choose_formats(gemma.draft(strategy))
    assert choice.chosen == (BLOCKS[strategy],)
    assert choice.refused == {
        f"speculators_{strategy}": "the target multiplies its embeddings by 4, which its loaders do not do"
    }


def test_eagle3_reads_unscaled_embeddings_as_its_servers_do(gemma: Toys):
    assert len(choose_formats(gemma.draft("eagle3")).chosen) == 2
    assert export_draft(gemma.draft("eagle3"), "sglang_eagle3", gemma.folder / "out", "float32").passed


def test_a_draft_that_was_trained_on_unscaled_embeddings_does_not_come_in(gemma: Toys, tmp_path: Path):
    plain = Toys.make(tmp_path / "plain", tied=True)
    export_draft(plain.draft("dflash"), "speculators_dflash", tmp_path / "peer", "float32")
    import_draft(tmp_path / "peer", plain.target, tmp_path / "fits")
    with pytest.raises(
        ConfigError, match=r"multiplies its embeddings by 4.* trained on other embeddings than drafts here read"
    ):
        import_draft(tmp_path / "peer", gemma.target, tmp_path / "imported")
