"""Published configurations pass `draftworks check` at full size with every strategy, or are refused with the reason.

published/SOURCES.md says where each was read. The table in docs/strategies.md is compared with what is found here.
What the last steps would refuse of a draft, its formats and its serving, is refused before the first.
What the draft's vocabulary lacks of the held-out labels is said before a training is paid for.
A target of every family passes `draftworks check`, with a draft of every strategy that trains for it.
A machine that would make results again, only since it chooses another dtype, says so before it does.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from coverings import gate_or_long
from model_families import DRAFT_OPTIONS, FAMILIES, TOKENIZER, TOKENIZER_FILES
from mtp_toys import KINDS
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from draftworks.config.run_files import TargetFiles
from draftworks.drafts.target_parts import TargetParts
from draftworks.preflight.examine import examine_entry
from draftworks.preflight.findings import Findings
from draftworks.preflight.plausible_values import check_made_dtypes
from draftworks.storage.artifacts import Artifact, ArtifactStore, BuildResult
from draftworks.storage.identity import FileDigests
from draftworks.storage.names import TRAINING_FEATURES, of_strategy
from draftworks.targets.fitted_defaults import Machine
from draftworks.targets.resolve import resolve_target

_SHARD_BYTES = 5e9
_ROPE = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "rope_parameters")


class GivenDigests(FileDigests):
    """Digests in which those of weights are given: a terabyte that was never written is not read either."""

    def of_file(self, path: Path) -> str:
        return "0" * 16 if path.suffix == ".safetensors" else super().of_file(path)


def save_published_target(config: Mapping[str, Any], folder: Path) -> None:
    """Write config.json as it is, the tokenizer of `tiny`, and sparse shards of unquantised bfloat16 weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for file in TOKENIZER_FILES:
        shutil.copy(TOKENIZER / file, folder / file)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 0}))
    weight_map = {}
    for number, shard in enumerate(_cut(_list_tensors(folder))):
        name = f"model-{number}.safetensors"
        _write_sparse(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def respell_rope(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the config of a saved target with its rope as transformers 5 writes it, or as 4 did if it is so already."""
    text = dict(config.get("text_config", config))
    plain = {name: value for name, value in text.items() if name not in _ROPE}
    if "rope_parameters" in text:
        rope = dict(text["rope_parameters"])
        moved = {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
        plain |= {**moved, "rope_scaling": None if rope == {"rope_type": "default"} else rope}
    else:
        plain["rope_parameters"] = AutoConfig.from_pretrained(folder).get_text_config().to_dict()["rope_parameters"]
    return {**config, "text_config": plain} if "text_config" in config else plain


def _list_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the model's tensors on device meta, with those of an MTP layer where its family publishes one."""
    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    known = type(config) in AutoModelForCausalLM._model_mapping
    with torch.device("meta"):
        model = (AutoModelForCausalLM if known else AutoModelForImageTextToText).from_config(config)
    tied = getattr(model, "all_tied_weights_keys", {})
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    return tensors | _list_mtp_tensors(config.get_text_config(), tensors)


def _list_mtp_tensors(config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Its decoder layer has the tensors of the model's last one."""
    last, width = config.num_hidden_layers - 1, config.hidden_size
    if config.model_type.startswith(("qwen3_next", "qwen3_5")):
        norms = ("mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding", "mtp.norm")
        layer, fc = "mtp.layers.0.", "mtp.fc"
    elif config.model_type == "deepseek_v3":
        layer = f"model.layers.{last + 1}."
        norms, fc = (f"{layer}hnorm", f"{layer}enorm", f"{layer}shared_head.norm"), f"{layer}eh_proj"
    else:
        return {}
    found = {f"{fc}.weight": torch.empty(width, 2 * width, device="meta")}
    found |= {f"{name}.weight": torch.empty(width, device="meta") for name in norms}
    for name, tensor in tensors.items():
        if inside := re.match(rf"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.{last}\.(.*)$", name):
            found[f"{layer}{inside[1]}"] = tensor
    return found


def _cut(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if shard and 2 * sum(each.numel() for each in (*shard.values(), tensor)) > _SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


def _write_sparse(tensors: Mapping[str, Tensor], path: Path) -> None:
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(encoded)) + encoded)
        stream.truncate(8 + len(encoded) + end)


FOLDER = Path(__file__).parent / "published"
CONFIGS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
WITH_MTP = ("deepseek-v3", "qwen3-next-80b-a3b-thinking", "qwen3.5-9b", "qwen3.5-35b-a3b", "qwen3.5-397b-a17b")
FIRST_OF_ITS_TYPE = {*{config["model_type"]: name for name, config in reversed(CONFIGS.items())}.values()}
"""Of these the gate asks those that differ in more than their sizes."""
LIKE_OTHERS = {"qwen2.5-7b-instruct", "qwen3-30b-a3b", "qwen3.5-35b-a3b", "mistral-7b-instruct-v0.3", "gemma-3-1b-it"}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "strategies.md"


def documented() -> dict[str, str]:
    """Return what the page says of each configuration: of the draft's own, or the reason of a refusal."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {name: row[1] for row in rows for name in re.findall(r"`([^`]+)`", row[0])}


def examine(fleet, model: Path, strategies: Iterable[str]) -> list[str]:
    """Return the errors of a target with the default options of these strategies.

    XPress has one format, whose loaders do not scale embeddings as Gemma does: without an export it can be trained. Two
    layers of the largest targets are more than the probe reads by default.
    """
    gemma = "Gemma3" in (model / "config.json").read_text()
    unwritten = {"export": {"formats": []}}
    entries = {name: unwritten if gemma and name == "xpress" else {} for name in strategies}
    fleet.write(model=str(model), strategies=entries, capture={"probe_gb": 64})
    found = examine_entry("small", fleet.registry, GivenDigests())
    return [one.text for one in found if one.severity == "error"]


def read_parts(fleet) -> TargetParts:
    target = fleet.registry.load_target("small")
    return TargetParts.load(resolve_target(target, fleet.registry, GivenDigests()), tensors=False)


def say_of(errors: list[str], own: Iterable[str]) -> str:
    if errors:
        return f"refused: {errors[0].rsplit('config.json: ')[-1]}"
    return "; ".join(own) or "nothing"


@pytest.mark.parametrize("name", gate_or_long(CONFIGS, FIRST_OF_ITS_TYPE - LIKE_OTHERS))
def test_a_published_target_is_taken_or_refused_as_the_page_says(fleet, name: str):
    model = fleet.root / "model"
    config = {key: value for key, value in CONFIGS[name].items() if key != "quantization_config"}  # of other files
    save_published_target(config, model)
    errors = examine(fleet, model, (*DRAFT_OPTIONS, *(["mtp"] if name in WITH_MTP else [])))
    own: tuple[str, ...] = ()
    if not errors:
        first = read_parts(fleet)
        own = first.own
        respelled: Mapping[str, Any] = respell_rope(config, model)
        (model / "config.json").write_text(json.dumps(respelled))
        assert examine(fleet, model, ["eagle3", "dflash"]) == []
        assert (read_parts(fleet).rope, read_parts(fleet).own) == (first.rope, own)
    assert len(errors) <= 1
    assert documented()[name] == say_of(errors, own)


LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
ROPES = {
    "llama-3.1-8b-instruct": {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192},
    "llama-3.2-1b-instruct": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
    "deepseek-v3": {
        **{"rope_type": "yarn", "rope_theta": 10000, "factor": 40, "original_max_position_embeddings": 4096},
        **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "gemma-3-4b-it": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "qwen3.5-9b": {"rope_type": "default", "rope_theta": 1e7},
}


@pytest.mark.parametrize("name", ROPES)
def test_the_rope_of_a_draft_is_the_published_one(fleet, name: str):
    save_published_target(CONFIGS[name], fleet.root / "model")
    fleet.write(model=str(fleet.root / "model"))
    assert {key: value for key, value in read_parts(fleet).rope.items() if key != "type"} == ROPES[name]


EAGLE = {"eagle3": {"options": {"ttt_length": 2, "draft_vocab_size": 64}}}
DFLASH = {"dflash": {"options": {"mask_token_id": 3, "block_size": 4}}}
DSPARK = {"dspark": {"options": {"mask_token_id": 3, "block_size": 4}}}
CPU = {"prompts": 2, "device": "cpu", "compute_dtype": "float32"}
ANYWHERE = {"prompts": 2, "device": "cuda"}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "dtype": (EAGLE, {"serving": {**CPU, "compute_dtype": "bfloat16"}}, "on a CPU expected float32, found bfloat16"),
    "algorithm": (DSPARK, {"serving": CPU}, "does not serve drafts with --speculative-algorithm DSPARK on a CPU"),
    "class": (
        DSPARK,
        {"serving": {**CPU, "engines": ["vllm"]}},
        "vLLM serves drafts of the class DSparkDraftModel by its Model Runner V2",
    ),
    "proposals": (DFLASH, {"draft_tokens": 2, "serving": ANYWHERE}, "evaluation.draft_tokens: found 2, and in SGLang"),
    "argument": (
        EAGLE,
        {"serving": {**ANYWHERE, "server": {"args": ["--speculative-algorithm", "NGRAM"]}}},
        "serving.server.args: --speculative-algorithm: set from the draft",
    ),
    "argument with its value": (
        EAGLE,
        {"serving": {**ANYWHERE, "server": {"args": ["--speculative-num-steps=9"]}}},
        "serving.server.args: --speculative-num-steps=9",
    ),
    "format of another server": (
        EAGLE,
        {"serving": {**ANYWHERE, "format": "speculators_eagle3"}},
        "will have no export for SGLang in speculators_eagle3; did you mean sglang_eagle3",
    ),
    "format that is not written": (
        {"eagle3": {**EAGLE["eagle3"], "export": {"formats": ["speculators_eagle3"]}}},
        {"serving": {**ANYWHERE, "format": "sglang_eagle3"}},
        "serving.format: eagle3 will have no export for SGLang in sglang_eagle3; there are: none",
    ),
}
SOUND: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "in vLLM": (EAGLE, {"serving": {**CPU, "engines": ["vllm"], "format": "speculators_eagle3"}}),
    "format of one of two servers": (
        EAGLE,
        {"serving": {**CPU, "engines": ["sglang", "vllm"], "format": "speculators_eagle3"}},
    ),
    "in a server that runs": (DSPARK, {"serving": {**CPU, "urls": {"sglang": "http://127.0.0.1:1"}}}),
    "on a CPU": (EAGLE, {"serving": CPU}),
    "not on a CPU": (DSPARK, {"serving": ANYWHERE}),
    "not asked for": (DSPARK, {"serving": {"prompts": 0, "device": "cpu"}}),
    "no draft of SGLang's": (
        {"peagle": {"options": {"draft_vocab_size": 64, "mask_token_id": 3}}},
        {"serving": {"prompts": 2, "device": "cpu"}},
    ),
    "no export": (
        {"eagle3": {**EAGLE["eagle3"], "export": {"formats": []}}},
        {"serving": {**CPU, "format": "sglang_eagle3"}},
    ),
    "as many proposals as trained": (DFLASH, {"draft_tokens": 3, "serving": ANYWHERE}),
    "fewer of a chain": (EAGLE, {"draft_tokens": 1, "serving": ANYWHERE}),
    "the same again": (
        EAGLE,
        {
            "serving": {
                **ANYWHERE,
                "server": {"args": ["--speculative-algorithm", "EAGLE3", "--speculative-eagle-topk=1"]},
            }
        },
    ),
    "format of one of two": (EAGLE | DFLASH, {"serving": {**ANYWHERE, "format": "zlab_dflash"}}),
}


def errors_of(fleet, strategies: dict[str, Any], evaluation: dict[str, Any]) -> list[str]:
    """Without those that depend on this machine, which has no SGLang."""
    fleet.write(strategies=strategies, evaluation=evaluation)
    return [
        error
        for error in fleet.check().errors
        if "needs SGLang" not in error and "needs vLLM" not in error and "needs 1 GPU" not in error
    ]


@pytest.mark.parametrize(("strategies", "evaluation", "message"), REFUSED.values(), ids=REFUSED)
def test_serving_that_the_last_step_refuses_is_an_error(fleet, strategies, evaluation, message):
    (error,) = errors_of(fleet, strategies, evaluation)
    assert message in error
    assert error.startswith("target small: ")


@pytest.mark.parametrize(("strategies", "evaluation"), SOUND.values(), ids=SOUND)
def test_serving_that_it_does_is_none(fleet, strategies, evaluation):
    assert errors_of(fleet, strategies, evaluation) == []


def test_a_format_that_cannot_hold_a_draft_is_refused(fleet, family_target: Callable[[str], TargetFiles]):
    entry = {"options": DRAFT_OPTIONS["xpress"], "export": {"formats": ["speculators_xpress"]}}
    fleet.write(model=family_target("gemma3").model, strategies={"xpress": entry})
    (error,) = fleet.check().errors
    assert "strategies.xpress.export: it cannot be written as speculators_xpress: the target multiplies its" in error


@pytest.mark.parametrize(("formats", "refused"), [(["speculators_mtp"], True), (["target_mtp"], False), (None, False)])
def test_a_format_for_other_types_of_targets_is_refused_where_it_is_asked_for(
    fleet, mtp_target: Callable[[str], TargetFiles], formats, refused: bool
):
    entry = {"export": {} if formats is None else {"formats": formats}}
    fleet.write(model=mtp_target("deepseek_v3").model, strategies={"mtp": entry})
    errors = fleet.check().errors
    assert bool(errors) == refused
    assert all("a target of type deepseek_v3: this format's loaders know" in error for error in errors)


COUNTED = {"draft_vocab_size": 64, "vocab_size": 2048, "coverage": 1.0}


def list_warnings(fleet, var: Path, summary: dict[str, Any]) -> list[str]:
    ArtifactStore(var).obtain("vocab_mapping", "small", summary, lambda out: BuildResult("v", summary))
    found = examine_entry("small", fleet.registry, FileDigests(), var)
    return [one.text for one in found if "vocabulary" in one.text]


def test_a_vocabulary_that_lacks_held_out_labels_is_a_warning(fleet, tmp_path):
    """It had all labels of the training: that share says nothing of other answers."""
    [warning] = list_warnings(fleet, tmp_path / "var", {**COUNTED, "heldout_coverage": 0.9})
    assert "(64 of 2,048 tokens) has 90.0% of the held-out labels (100.0% of those trained on)" in warning


@pytest.mark.parametrize(
    "summary",
    [
        {**COUNTED, "heldout_coverage": 0.97},
        COUNTED,
        {**COUNTED, "draft_vocab_size": 32, "heldout_coverage": 0.5},
    ],
    ids=["enough", "made before it was counted", "of another size"],
)
def test_what_is_enough_or_not_known_is_none(fleet, tmp_path, summary):
    assert list_warnings(fleet, tmp_path / "var", summary) == []


SCALED = ("gemma3_text", "gemma3")
"""Families that multiply their embeddings."""
MakeTarget = Callable[[str], TargetFiles]


def entries(strategies: dict[str, dict]) -> dict[str, dict[str, Any]]:
    return {strategy: {"options": options} for strategy, options in strategies.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_draft_for_a_family_passes(fleet, name: str, family_target: MakeTarget):
    strategies = entries(DRAFT_OPTIONS)
    if name in SCALED:
        strategies["xpress"]["export"] = {"formats": []}  # its one format is read without the scale
    fleet.write(model=family_target(name).model, strategies=strategies)
    assert fleet.check().errors == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_of_its_own_passes(fleet, kind: str, mtp_target: MakeTarget):
    fleet.write(model=mtp_target(kind).model, strategies=entries({"mtp": {}}))
    assert fleet.check().errors == []


DRAFT = of_strategy("eagle3").draft


class Made:
    """Results of the target `small`, each with its record of a dtype."""

    def __init__(self, features: str | None, draft: str | None) -> None:
        kept = {TRAINING_FEATURES: ("capture", features), DRAFT: ("training", draft)}
        self.identities = {asset: {key: {"compute_dtype": dtype}} for asset, (key, dtype) in kept.items() if dtype}

    def find(self, asset: str, target: str) -> Artifact | None:
        identity = self.identities.get(asset)
        return identity and Artifact(asset, target, Path("/nowhere"), identity, "v", {}, {}, 0.0, 0.0)


def warn(fleet, made: Made, **entry: Any) -> list[str]:
    fleet.write(**entry)
    findings = Findings()
    check_made_dtypes(fleet.registry.load_target("small"), fleet.registry, made, findings)  # type: ignore[arg-type]
    return [one.text for one in findings.found if one.severity == "warning"]


@pytest.mark.parametrize(("bfloat16", "chosen"), [(False, "float32"), (True, "bfloat16")])
def test_results_of_another_dtype_are_named_and_those_of_the_same_are_not(fleet, monkeypatch, bfloat16, chosen):
    machine = Machine(0, False, bfloat16)
    monkeypatch.setattr("draftworks.targets.fitted_defaults.read_machine", lambda: machine)
    other = "bfloat16" if chosen == "float32" else "float32"
    assert warn(fleet, Made(None, None)) == []
    assert warn(fleet, Made(chosen, chosen)) == []
    features, draft = warn(fleet, Made(other, other))
    assert f"capture.compute_dtype: features had {other}, the default here is {chosen}" in features
    assert f"strategies.eagle3.training.compute_dtype: its draft had {other}" in draft
    assert draft.endswith(f"set compute_dtype to {other}")


def test_a_dtype_that_the_entry_names_is_meant(fleet, monkeypatch):
    machine = Machine(0, False, True)
    monkeypatch.setattr("draftworks.targets.fitted_defaults.read_machine", lambda: machine)
    trained = {"eagle3": {"options": {"draft_vocab_size": 64}, "training": {"compute_dtype": "float32"}}}
    entry = {"capture": {"compute_dtype": "float32"}, "strategies": trained}
    assert warn(fleet, Made("bfloat16", "bfloat16"), **entry) == []
