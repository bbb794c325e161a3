"""Imports: our exports come back as the same draft, variants of other trainers are read, everything else is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from export_toys import FORMATS, VOCAB, Toys, assert_same_draft
from import_toys import Config, Tensors, changed, renamed
from safetensors.torch import load_file, save_file

from draftworks.config.run_files import VOCAB_FILE
from draftworks.data.vocab import VocabMapping
from draftworks.drafts.target_parts import TargetParts
from draftworks.errors import ConfigError, StoreError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.export_format import load_format
from draftworks.export.exporting import export_draft
from draftworks.export.importing import import_draft


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_of_another_trainer_needs_no_provenance(toys: Toys, tmp_path: Path, name: str):
    source = changed(toys.folder / name, tmp_path / "foreign")
    import_draft(source, toys.target, tmp_path / "imported")
    strategy = FORMATS[name]
    expected = CanonicalDraft.load(toys.folder / strategy, toys.target)
    assert_same_draft(CanonicalDraft.load(tmp_path / "imported", toys.target), expected)


def test_a_canonical_draft_is_imported_unchanged(toys: Toys, tmp_path: Path):
    imported = import_draft(toys.folder / "eagle3", toys.target, tmp_path / "imported")
    found, expected = (CanonicalDraft.load(f, toys.target) for f in (tmp_path / "imported", toys.folder / "eagle3"))
    assert (found.record, imported.format) == (expected.record, "draftworks")
    assert torch.equal(torch.from_numpy(imported.vocab.d2t), expected.weights["d2t"])


@pytest.mark.parametrize("source", ["eagle3", "speculators_eagle3"])
def test_the_vocabulary_mapping_lies_beside_an_imported_draft(toys: Toys, tmp_path: Path, source: str):
    imported = import_draft(toys.folder / source, toys.target, tmp_path / "imported")
    mapping = VocabMapping.load(tmp_path / "imported" / VOCAB_FILE)
    assert (
        mapping.digest == imported.vocab.digest == CanonicalDraft.load(toys.folder / "eagle3", toys.target).vocab.digest
    )


def with_embedding(tensors: Tensors, toys: Toys) -> None:
    tensors["embed_tokens.weight"] = TargetParts.load(toys.target).embedding.clone()


def old_rope(config: Config) -> None:
    del config["rope_parameters"]


RELATIVES = {
    "ModelOpt names": ("sglang_eagle3", renamed("midlayer.", "layers.0."), lambda c: None),
    "below model": ("sglang_eagle3", renamed("midlayer.", "model.midlayer."), lambda c: None),
    "only d2t": ("sglang_eagle3", lambda t: t.pop("t2d"), lambda c: None),
    "rope of transformers 4": ("sglang_eagle3", lambda t: None, old_rope),
    "default layers": (
        "sglang_eagle3",
        lambda t: None,
        lambda c: (c.pop("eagle_config"), c.pop("eagle_aux_hidden_state_layer_ids")),
    ),
    "layers for vLLM alone": ("sglang_eagle3", lambda t: None, lambda c: c.pop("eagle_config")),
    "default layers of speculators": (
        "speculators_eagle3",
        lambda t: None,
        lambda c: c.pop("eagle_aux_hidden_state_layer_ids"),
    ),
    "block size beside the mask token": (
        "zlab_dflash",
        lambda t: None,
        lambda c: c["dflash_config"].update(block_size=c.pop("block_size")),
    ),
    "layers without types": ("zlab_dflash", lambda t: None, lambda c: c.pop("layer_types")),
}


@pytest.mark.parametrize("name", RELATIVES)
def test_variants_of_a_format_are_imported(toys: Toys, tmp_path: Path, name: str):
    source, tensors, config = RELATIVES[name]
    import_draft(
        changed(toys.folder / source, tmp_path / "foreign", tensors, config), toys.target, tmp_path / "imported"
    )
    expected = CanonicalDraft.load(toys.folder / FORMATS[source], toys.target)
    assert_same_draft(CanonicalDraft.load(tmp_path / "imported", toys.target), expected)


def test_layers_that_vllm_would_take_for_others_are_named(toys: Toys):
    """Every file of SpecForge's form with ids of its own: to vLLM they are indices of hidden_states."""
    read, key = load_format("eagle3", "sglang_eagle3"), "eagle_aux_hidden_state_layer_ids"
    of_sglang: Config = {"eagle_config": {key: [1, 3, 4]}}
    for config in (of_sglang, {**of_sglang, key: [1, 3, 4]}):
        [remark] = read.list_remarks(config, {})
        assert "[1, 3, 4] was read as SGLang means it" in remark
        assert "vLLM takes such ids for indices of hidden_states" in remark
    [remark] = read.list_remarks({key: [2, 4, 5]}, {})
    assert "[2, 4, 5] was read as vLLM means it" in remark
    export_draft(toys.draft("eagle3"), "sglang_eagle3", toys.folder / "ours")
    ours = json.loads((toys.folder / "ours" / "config.json").read_text())
    assert read.list_remarks(ours, {}) == read.list_remarks({}, {}) == []


@pytest.mark.parametrize(("means", "layers"), [("sglang", [3, 4, 5]), ("vllm", [2, 3, 4])])
def test_layers_of_either_meaning_are_whose_one_says(toys: Toys, tmp_path: Path, means: str, layers: list[int]):
    """A trainer that writes SGLang's layout for vLLM's runner is not told from SpecForge by any key."""
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}

    def of_a_peer(config: Config) -> None:
        config |= {"eagle_config": ids, **ids}

    source = changed(toys.folder / "sglang_eagle3", tmp_path / "foreign", config=of_a_peer)
    found = import_draft(source, toys.target, tmp_path / "imported", layer_ids_mean=means)
    assert found.options["layer_ids"] == layers
    assert f"[2, 3, 4] was read as {'SGLang' if means == 'sglang' else 'vLLM'} means it" in str(found.remarks)


@pytest.mark.parametrize("kind", ["anchor", "anchor_both_ways"])
@pytest.mark.parametrize("strategy", ["dflash", "dflash2", "dspark", "xpress"])
def test_windows_that_speculators_trains_by_default_go_out_and_come_in(
    toys: Toys, tmp_path: Path, strategy: str, kind: str
):
    some = (
        None if (strategy, kind) == ("dflash2", "anchor") else [1]
    )  # the one that its format cannot say of some layers
    options = {"sliding_window": 5, "sliding_layers": some, "sliding_window_kind": kind}
    draft = toys.draft(strategy, name=f"{strategy}-{kind}", **options)
    exported = export_draft(draft, f"speculators_{strategy}", tmp_path / "out", "float32")
    assert exported.passed, exported.gates
    found = import_draft(tmp_path / "out", toys.target, tmp_path / "imported")
    assert {name: found.options[name] for name in options} == options
    assert_same_draft(CanonicalDraft.load(found.folder, toys.target), draft)


def test_names_of_specforges_first_norms_are_known(toys: Toys, tmp_path: Path):
    draft = toys.draft("eagle3", name="normed", fc_norm=True)
    export_draft(draft, "sglang_eagle3", toys.folder / "normed-export", "float32")
    old = {f"fc_norm.{i}.weight": f"aux_norm_{place}.weight" for i, place in enumerate(("low", "mid", "high"))}

    def rename(tensors: Tensors) -> None:
        for name, other in old.items():
            tensors[other] = tensors.pop(name)

    source = changed(toys.folder / "normed-export", tmp_path / "foreign", rename)
    import_draft(source, toys.target, tmp_path / "imported")
    assert_same_draft(CanonicalDraft.load(tmp_path / "imported", toys.target), draft)


def test_the_targets_own_embedding_may_be_in_the_file_and_no_other(toys: Toys, tmp_path: Path):
    source = changed(toys.folder / "sglang_eagle3", tmp_path / "own", lambda t: with_embedding(t, toys))
    import_draft(source, toys.target, tmp_path / "imported")
    other = changed(source, tmp_path / "other", lambda t: t["embed_tokens.weight"].mul_(2))
    with pytest.raises(StoreError, match=r"embed_tokens\.weight differs from the target's"):
        import_draft(other, toys.target, tmp_path / "refused")


def test_a_whole_vocabulary_needs_neither_mapping_nor_head(toys: Toys, tmp_path: Path):
    draft = toys.draft("eagle3", name="whole", draft_vocab_size=VOCAB)
    export_draft(draft, "sglang_eagle3", toys.folder / "whole-export", "float32")

    def borrow(tensors: Tensors) -> None:
        for name in ("d2t", "t2d", "lm_head.weight"):
            del tensors[name]

    source = changed(
        toys.folder / "whole-export", tmp_path / "foreign", borrow, lambda c: c.update(draft_vocab_size=None)
    )
    import_draft(source, toys.target, tmp_path / "imported")
    found = CanonicalDraft.load(tmp_path / "imported", toys.target)
    assert torch.equal(found.weights["lm_head.weight"], TargetParts.load(toys.target).head.float())
    assert not found.weights["d2t"].any()


def test_shards_are_imported(toys: Toys, tmp_path: Path):
    source = shutil.copytree(toys.folder / "zlab_dflash", tmp_path / "sharded")
    weights = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, source / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    import_draft(source, toys.target, tmp_path / "imported")
    expected = CanonicalDraft.load(toys.folder / "dflash", toys.target)
    assert_same_draft(CanonicalDraft.load(tmp_path / "imported", toys.target), expected)
    (source / "b.safetensors").unlink()
    with pytest.raises(StoreError, match=r"b\.safetensors: missing"):
        import_draft(source, toys.target, tmp_path / "refused")


def test_pickled_weights_are_refused(toys: Toys, tmp_path: Path):
    source = changed(toys.folder / "zlab_dflash", tmp_path / "foreign")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(StoreError, match=r"pytorch_model\.bin would have to be unpickled"):
        import_draft(source, toys.target, tmp_path / "imported")


def tree(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("source", ["eagle3", "sglang_eagle3"])
@pytest.mark.parametrize("out", ["peer", "held", "held/file", ".", "held/..", "new/..", "link"])
def test_an_import_never_replaces_what_exists(
    toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, out: str
):
    shutil.copytree(toys.folder / source, tmp_path / "peer")
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "file").write_text("kept")
    (tmp_path / "link").symlink_to("nowhere")
    before = tree(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(Path(out)))}: expected a path that does not exist"):
        import_draft(Path("peer"), toys.target, Path(out))
    assert tree(tmp_path) == before
    assert (tmp_path / "link").is_symlink()


def test_a_folder_without_a_config_is_refused(toys: Toys, tmp_path: Path):
    with pytest.raises(StoreError, match=r"config\.json is missing"):
        import_draft(tmp_path, toys.target, tmp_path / "imported")


def test_a_draft_of_ours_for_another_target_is_refused(toys: Toys, tmp_path: Path):
    other = toys.target.model_copy(update={"digest": "f" * 16})
    with pytest.raises(StoreError, match="a draft of the target with digest"):
        import_draft(toys.folder / "eagle3", other, tmp_path / "imported")


def test_a_hint_that_is_no_option_is_an_error_of_the_config(toys: Toys, tmp_path: Path):
    source = shutil.copytree(toys.folder / "sglang_eagle3", tmp_path / "foreign")
    config = json.loads((source / "config.json").read_text())
    config["provenance"]["options"]["ttt_length"] = 0
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="ttt_length"):
        import_draft(source, toys.target, tmp_path / "imported")
