"""GGUF files of drafts are those of llama.cpp's own converter, byte for byte, and a wrong one fails a gate.

What it made is in gguf_judged.json; the converter itself is asked again by `make test-long`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from export_toys import LLAMA3_ROPE, Toys
from gguf_drafts import CASES, ROUNDINGS, GgufCase, convert, make_gguf_draft, summarise
from mtp_toys import save_target_with_mtp, save_tuned

from draftworks.config.exports import ExportSettings
from draftworks.config.registry_files import StrategyEntry
from draftworks.config.run_files import TargetFiles
from draftworks.config.strategies import resolve_strategy
from draftworks.errors import ConfigError, StoreError
from draftworks.export.canonical import CanonicalDraft
from draftworks.export.conventions import GGUF_PROVENANCE
from draftworks.export.export_format import load_format
from draftworks.export.exporting import ExportResult, choose_formats, export_draft
from draftworks.export.gates import check_export
from draftworks.export.gguf_file import Rounding, write_gguf
from draftworks.export.gguf_vocabulary import find_pre_tokenizer
from draftworks.export.readers.gguf_file import DRAFT_FILE
from draftworks.targets.gguf_header import read_gguf_header
from draftworks.targets.gguf_tokenizer import PRE_TOKENIZERS

JUDGED = json.loads((Path(__file__).parent / "gguf_judged.json").read_text())
OURS = ("dflash.rope.dimension_count", "dflash.vocab_size")
"""Keys that the converter leaves to their defaults, which are the same."""
FILES = [(case, kind) for case in CASES for kind in ROUNDINGS]


def settings(quantise: str | None = None, pre_tokenizer: str | None = None) -> ExportSettings:
    gguf = {"quantise": quantise, "pre_tokenizer": pre_tokenizer}
    return ExportSettings.model_validate({"formats": ["gguf_eagle3"], "gguf": gguf})


def export(draft: CanonicalDraft, case: GgufCase, kind: str, out: Path) -> ExportResult:
    dtype, quantise = ROUNDINGS[kind]
    return export_draft(draft, case.format, out, dtype, settings=settings(quantise))


@pytest.mark.parametrize(("case", "kind"), FILES, ids=str)
def test_a_file_is_that_of_llama_cpps_converter_and_passes_every_gate(
    case: GgufCase, kind: str, tiny_target: TargetFiles, tmp_path: Path
):
    draft = make_gguf_draft(case.strategy, tiny_target, tmp_path / "draft", **case.options)
    made = export(draft, case, kind, tmp_path / "out")
    assert [gate for gate in made.gates if not gate.passed] == []
    ours, judged = summarise(tmp_path / "out" / DRAFT_FILE), JUDGED[f"{case.format}-{kind}"]
    assert ours["tensors"] == judged["tensors"]
    more = {name for name in ours["metadata"] if name not in judged["metadata"] and not name.startswith("draftworks.")}
    assert {name: ours["metadata"][name] for name in judged["metadata"]} == judged["metadata"]
    assert more <= {*OURS}


@pytest.mark.long
def test_the_converter_still_says_what_is_recorded(tiny_target: TargetFiles, tiny_folder: Path, tmp_path: Path):
    asked = []
    for case in CASES:
        draft = make_gguf_draft(case.strategy, tiny_target, tmp_path / case.strategy, **case.options)
        for kind, (dtype, _) in ROUNDINGS.items():
            folder = tmp_path / f"{case.format}-{kind}" / "peer"
            export_draft(draft, case.peer, folder, dtype)
            asked.append(f"{kind}={folder.rename(folder.parent / case.format)}")
    convert(tmp_path, tiny_folder, *asked)
    found = {f"{case.format}-{kind}": summarise(tmp_path / f"{case.format}-{kind}.gguf") for case, kind in FILES}
    assert found == JUDGED


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_the_layer_of_a_target_is_what_the_converter_writes_of_it(kind: str, tmp_path: Path):
    target = save_target_with_mtp(kind, tmp_path / "target")
    convert(tmp_path, tmp_path / "target", f"mtp={tmp_path / 'target'}")
    export_draft(save_tuned(target, tmp_path / "draft", 0.0), "gguf_mtp", tmp_path / "out", "float32")
    ours, theirs = summarise(tmp_path / "out" / DRAFT_FILE), summarise(tmp_path / "mtp.gguf")
    assert ours["tensors"] == theirs["tensors"]
    del ours["metadata"][GGUF_PROVENANCE]
    assert ours["metadata"] == theirs["metadata"]


@pytest.mark.parametrize(
    ("strategy", "options", "reason"),
    [
        ("eagle3", {"layer_ids": [4]}, "1 taps: llama.cpp loads EAGLE-3 drafts of 3"),
        ("eagle3", {"fc_norm": True}, "fc_norm: llama.cpp has one norm"),
        ("eagle3", {"feedback": "post_norm"}, "feedback: post_norm: llama.cpp"),
        ("eagle3", {"sliding_window": 9}, "sliding_window: llama.cpp"),
        ("eagle3", {"norm_output": False}, "norm_output: false"),
        ("dflash", {"sliding_window": 3, "sliding_layers": [1]}, "sliding_layers: in llama.cpp"),
        ("dflash", {"sliding_window": 3, "sliding_window_kind": "anchor"}, "sliding_window_kind anchor: llama.cpp"),
        ("dspark", {"markov_head_type": "rnn"}, "llama.cpp has the vanilla Markov head"),
        ("dspark", {"markov_head_type": "vanilla", "confidence_with_markov": False}, "confidence_with_markov: false"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(strategy: str, options: dict, reason: str, tmp_path: Path):
    draft = Toys.make(tmp_path).draft(strategy, **options)
    with pytest.raises(ConfigError, match=f"cannot be exported as gguf_{strategy}: {reason}"):
        export_draft(draft, f"gguf_{strategy}", tmp_path / "out")


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("eagle3", {"norm_before_residual": True, "norm_before_fc": True}),
        ("eagle3", {"layer_ids": [0, 3, 7], "rope": {"rope_type": "linear", "rope_theta": 50.0, "factor": 2.0}}),
        ("dflash", {"sliding_window": 3}),
        ("dspark", {"confidence_head": False}),
    ],
)
def test_options_that_change_what_is_computed_are_in_the_file(
    strategy: str, options: dict, tiny_target: TargetFiles, tmp_path: Path
):
    [case] = [each for each in CASES if each.strategy == strategy]
    draft = make_gguf_draft(strategy, tiny_target, tmp_path / "draft", **case.options | options)
    assert [gate for gate in export(draft, case, "f32", tmp_path / "out").gates if not gate.passed] == []


SCALED = {**LLAMA3_ROPE, "original_max_position_embeddings": 64}


def test_a_rope_as_llama_3_1s_is_divided_in_eagle3_and_refused_for_blocks(tiny_target: TargetFiles, tmp_path: Path):
    drafts = {
        case.strategy: make_gguf_draft(
            case.strategy, tiny_target, tmp_path / case.strategy, **case.options, rope=SCALED
        )
        for case in CASES[:2]
    }
    made = export(drafts["eagle3"], CASES[0], "f32", tmp_path / "out")
    assert made.passed, made.gates
    header = read_gguf_header(tmp_path / "out" / DRAFT_FILE)
    assert "rope_freqs.weight" in {each.name for each in header.tensors}
    with pytest.raises(ConfigError, match="a rope of type llama3: llama.cpp's dflash computes default, linear, yarn"):
        export(drafts["dflash"], CASES[1], "f32", tmp_path / "refused")


def test_more_candidates_than_a_state_has_room_for_are_refused(tiny_target: TargetFiles, tmp_path: Path):
    case = replace(CASES[2], options={**CASES[2].options, "selector_top_k": 11})
    draft = make_gguf_draft("dflash2", tiny_target, tmp_path / "draft", **case.options)
    with pytest.raises(ConfigError, match="selector_top_k 11: llama.cpp keeps 132 numbers .* a state of 128"):
        export(draft, case, "f32", tmp_path / "out")


@pytest.fixture(scope="module")
def sound(tiny_target: TargetFiles, tmp_path_factory: pytest.TempPathFactory) -> CanonicalDraft:
    return make_gguf_draft("eagle3", tiny_target, tmp_path_factory.mktemp("sound") / "draft", **CASES[0].options)


def turn_back(tensors: dict, metadata: dict) -> None:
    """As a writer that does not know llama.cpp's order of the rope."""
    rows = tensors["blk.0.attn_q.weight"]
    tensors["blk.0.attn_q.weight"] = rows.unflatten(0, (-1, 16, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def take_offsets(tensors: dict, metadata: dict) -> None:
    tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))


def count_as_sglang(tensors: dict, metadata: dict) -> None:
    metadata["eagle3.target_layers"] = [layer - 1 for layer in metadata["eagle3.target_layers"]]


@pytest.mark.parametrize(
    ("damage", "gates"),
    [
        (turn_back, {"tensors_equal", "same_logits"}),
        (take_offsets, {"tensors_equal", "same_logits"}),
        (count_as_sglang, {"layer_ids", "config_round_trip", "same_logits"}),
        (
            lambda tensors, metadata: metadata.update({"eagle3.rope.freq_base": 9.0}),
            {"config_round_trip", "same_logits"},
        ),
        (lambda tensors, metadata: tensors.pop("fc.weight"), {"key_set", "tensors_equal", "fc_width", "same_logits"}),
    ],
)
def test_a_file_that_llama_cpp_would_load_without_a_word_fails_its_gate(
    sound: CanonicalDraft, damage, gates: set[str], tmp_path: Path
):
    export_format = load_format("eagle3", "gguf_eagle3")
    metadata, tensors = export_format.build_config(sound, torch.float32), export_format.build_tensors(sound)
    damage(tensors, metadata)
    write_gguf(tmp_path / DRAFT_FILE, metadata, tensors, Rounding(torch.float32), {})
    found = check_export(tmp_path, export_format, sound, sound.build_strategy(), torch.float32)
    assert {gate.name for gate in found if not gate.passed} == gates


def test_a_cut_file_and_an_absent_one_are_one_line(sound: CanonicalDraft, tmp_path: Path):
    export_format = load_format("eagle3", "gguf_eagle3")
    with pytest.raises(StoreError, match=f"expected {DRAFT_FILE}, found no such file"):
        export_format.read_files(tmp_path)
    export(sound, CASES[0], "f32", tmp_path / "out")
    whole = (tmp_path / "out" / DRAFT_FILE).read_bytes()
    (tmp_path / "out" / DRAFT_FILE).write_bytes(whole[:-2000])
    [readable] = check_export(tmp_path / "out", export_format, sound, sound.build_strategy(), torch.float32)
    assert not readable.passed
    assert "it is cut" in readable.description


def test_a_format_on_request_is_written_only_where_it_is_named(sound: CanonicalDraft):
    assert "gguf_eagle3" not in choose_formats(sound).chosen
    assert choose_formats(sound, ["gguf_eagle3"]).chosen == ("gguf_eagle3",)
    spec = resolve_strategy("eagle3")
    usual = ["sglang_eagle3@2", "speculators_eagle3"]
    assert spec.identify_exports(None) == spec.identify_exports(["sglang_eagle3"]) == usual
    assert spec.identify_exports(["gguf_eagle3"]) == [*usual, "gguf_eagle3"]
    assert "gguf" not in StrategyEntry().export.model_dump()
    assert settings("q8_0").model_dump()["gguf"]["quantise"] == "q8_0"


def test_settings_of_files_that_are_not_written_are_refused():
    with pytest.raises(ValueError, match="gguf is set, but formats names no GGUF file, such as gguf_eagle3"):
        ExportSettings.model_validate({"gguf": {"quantise": "q8_0"}})
    assert not ExportSettings(formats=["gguf_eagle3"]).quantises
    assert settings("q8_0").quantises


SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "use_regex": False}
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize(
    ("parts", "ignores", "name"),
    [
        ([{"type": "ByteLevel", "use_regex": True}], False, "gpt-2"),
        ([{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}], False, "smollm"),
        ([SPLIT | {"pattern": {"Regex": LLAMA3}}, BYTES], True, "llama-bpe"),
        ([SPLIT | {"pattern": {"Regex": LLAMA3}}, BYTES], False, "dbrx"),
        ([SPLIT | {"pattern": {"Regex": LLAMA3.replace("{1,3}", "")}}, BYTES], False, "qwen2"),
        ([SPLIT | {"pattern": {"Regex": r"\w+"}}, BYTES], False, None),
        ([{"type": "Whitespace"}], False, None),
    ],
)
def test_a_cut_is_known_by_its_expressions(parts: list, ignores: bool, name: str | None):
    found = find_pre_tokenizer(
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}, "model": {"ignore_merges": ignores}}
    )
    assert found == name


def test_a_cut_without_a_name_is_asked_for_and_a_wrong_name_is_refused(
    sound: CanonicalDraft, tiny_folder: Path, tmp_path: Path
):
    tokenizer = json.loads((tiny_folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer | {"pre_tokenizer": {"type": "Whitespace"}}))
    draft = replace(sound, target=sound.target.model_copy(update={"tokenizer": str(tmp_path)}))
    names = ", ".join(sorted(PRE_TOKENIZERS))
    with pytest.raises(ConfigError, match=f"not known: set export.gguf.pre_tokenizer .* one of {names}"):
        export_draft(draft, "gguf_eagle3", tmp_path / "out")
    with pytest.raises(ConfigError, match="export.gguf.pre_tokenizer: 'qwen': did you mean qwen2"):
        export_draft(draft, "gguf_eagle3", tmp_path / "out", settings=settings(pre_tokenizer="qwen"))
    made = export_draft(draft, "gguf_eagle3", tmp_path / "out", settings=settings(pre_tokenizer="qwen2"))
    assert made.passed
    assert read_gguf_header(tmp_path / "out" / DRAFT_FILE).metadata["tokenizer.ggml.pre"] == "qwen2"
