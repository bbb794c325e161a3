"""What the real speculators library loads without a word, and our reader refuses: each is a draft that would serve badly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from random_exports import SAYS, VOCAB, RandomExport, speculators_dflash, speculators_dspark, speculators_eagle3
from speculators_judge import Case

from draftworks.errors import StoreError
from draftworks.export.same_logits import open_export

pytestmark = pytest.mark.speculators


@dataclass(frozen=True)
class Fault:
    """A damaged export.

    Attributes:
        refusal: how our reader puts it.
        missing, extra: how the library's tensors then differ from the file, though it says nothing.
    """

    export_format: str
    damage: Callable[[RandomExport], RandomExport]
    refusal: str
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


def without(name: str) -> Callable[[RandomExport], RandomExport]:
    return lambda export: export.without_tensor(name)


def absolute(export: RandomExport) -> RandomExport:
    return export.with_tensors(d2t=export.tensors["d2t"] + torch.arange(SAYS))


def identity_map(export: RandomExport) -> RandomExport:
    return export.with_tensors(d2t=torch.zeros(VOCAB, dtype=torch.int64), t2d=torch.ones(VOCAB, dtype=torch.bool))


FAULTS = {
    "no_fc": Fault("speculators_eagle3", without("fc.weight"), "missing: fc.weight", missing=("fc.weight",)),
    "no_head": Fault("speculators_eagle3", without("lm_head.weight"), "missing: lm_head", missing=("lm_head.weight",)),
    "no_embedding": Fault(
        "speculators_eagle3", without("embed_tokens.weight"), "missing: embed_tokens", missing=("embed_tokens.weight",)
    ),
    "extra": Fault(
        "speculators_eagle3",
        lambda export: export.with_tensors(midlayer__bias=torch.zeros(1)),
        "unknown: midlayer.bias",
        extra=("midlayer.bias",),
    ),
    "absolute_d2t": Fault("speculators_eagle3", absolute, "d2t: expected offsets.*the ids themselves"),
    "descending_ids": Fault(
        "speculators_eagle3",
        lambda export: export.with_config(eagle_aux_hidden_state_layer_ids=[5, 4, 2]),
        "expected ascending integers",
    ),
    "residual_unsaid": Fault(
        "speculators_eagle3",
        lambda export: export.without_config("norm_before_residual"),
        "norm_before_residual: expected bool, found no such key",
    ),
    "no_hidden_norm": Fault(
        "speculators_dflash", without("hidden_norm.weight"), "missing: hidden_norm", missing=("hidden_norm.weight",)
    ),
    "identity_map": Fault("speculators_dflash", identity_map, "unknown: d2t, t2d", extra=("d2t", "t2d")),
    "causal_for_vllm": Fault(
        "speculators_dflash",
        lambda export: export.with_config(sliding_window_non_causal=False),
        "sliding_window_non_causal: expected true",
    ),
    "no_markov_matrix": Fault(
        "speculators_dspark",
        without("markov_head.markov_w2.weight"),
        "missing: markov_head.markov_w2.weight",
        missing=("markov_head.markov_w2.weight",),
    ),
    "no_confidence": Fault(
        "speculators_dspark",
        without("confidence_head.proj.weight"),
        "missing: confidence_head.proj.weight",
        missing=("confidence_head.proj.weight",),
    ),
    "heads_by_modelopts_names": Fault(
        "speculators_dspark",
        lambda export: export.renamed("markov_head.", ""),
        "missing: markov_head.markov_w1.weight, markov_head.markov_w2.weight; unknown: markov_w1.weight",
        missing=("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
        extra=("markov_w1.weight", "markov_w2.weight"),
    ),
    "anchor_passed_over": Fault(
        "speculators_dspark",
        lambda export: export.with_config(sample_from_anchor=False),
        "sample_from_anchor: expected True",
    ),
    "window_forgotten": Fault(
        "speculators_dflash",
        lambda export: export.with_config(
            transformer_layer_config__layer_types=["sliding_attention"] * 2,
            transformer_layer_config__sliding_window=4,
            sliding_window_non_causal=False,
        ),
        "use_sliding_window: expected True",
    ),
}
LOUD = {
    "short_fc": ("speculators_eagle3", lambda export: export.with_tensors(fc__weight=torch.zeros(128, 256))),
    "two_layer_ids": (
        "speculators_eagle3",
        lambda export: export.with_config(eagle_aux_hidden_state_layer_ids=[2, 4]),
    ),
    "no_target": (
        "speculators_dflash",
        lambda export: export.with_config(speculators_config__verifier__name_or_path="no/where/at-all"),
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_folder, tiny_tensors):
    whole = {
        "speculators_eagle3": speculators_eagle3(tiny_folder, tiny_tensors.embedding),
        "speculators_dflash": speculators_dflash(tiny_folder),
        "speculators_dspark": speculators_dspark(tiny_folder),
    }
    damaged = {name: fault.damage(whole[fault.export_format]) for name, fault in FAULTS.items()}
    damaged |= {name: damage(whole[export_format]) for name, (export_format, damage) in LOUD.items()}
    exports = damaged | whole | {"midlayer": whole["speculators_eagle3"].renamed("layers.0.", "midlayer.")}
    root = tmp_path_factory.mktemp("damaged")
    return {name: export.write(root / name) for name, export in exports.items()}


@pytest.fixture(scope="module")
def findings(speculators_judge, folders, question):
    asked = ("speculators_eagle3", "no_fc", "absolute_d2t")
    return speculators_judge(
        [Case(name, folder, question if name in asked else None) for name, folder in folders.items()]
    )


@pytest.mark.parametrize("name", FAULTS)
def test_the_library_is_silent_and_the_reader_is_not(name, findings, folders, tiny_tensors):
    fault, found = FAULTS[name], findings[name]
    assert found.loads, found.error
    assert (tuple(found.missing), tuple(found.extra)) == (fault.missing, fault.extra)
    with pytest.raises(StoreError, match=fault.refusal):
        open_export(fault.export_format, folders[name], tiny_tensors)


def test_a_layer_of_another_name_is_lost_whole(findings, folders, tiny_tensors):
    found = findings["midlayer"]
    assert found.loads
    assert {name.replace("midlayer.", "layers.0.") for name in found.extra} == set(found.missing)
    assert len(found.missing) == 10
    with pytest.raises(StoreError, match=r"missing: layers.0.hidden_norm.*unknown: midlayer.hidden_norm"):
        open_export("speculators_eagle3", folders["midlayer"], tiny_tensors)


def test_what_is_missing_becomes_other_numbers(findings):
    """Not so surely for the embedding: it is whatever the memory held, now and then the right one of an earlier load."""
    assert not torch.allclose(findings["no_fc"].logits, findings["speculators_eagle3"].logits, atol=0.1)


def test_ids_in_place_of_offsets_do_not_show_in_the_logits(findings):
    """So that neither keys, nor tensors, nor logits tell: only the offsets themselves do."""
    assert findings["absolute_d2t"].faithful
    assert torch.equal(findings["absolute_d2t"].logits, findings["speculators_eagle3"].logits)


@pytest.mark.parametrize("name", LOUD)
def test_what_the_library_refuses_the_reader_refuses_or_leaves_to_the_target(name, findings, folders, tiny_tensors):
    assert not findings[name].loads
    if name != "no_target":
        with pytest.raises(StoreError, match=r"fc\.weight: expected floating point"):
            open_export(LOUD[name][0], folders[name], tiny_tensors)
