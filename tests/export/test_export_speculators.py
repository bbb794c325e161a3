"""The real speculators library and our independent readers compute the same logits from the same folder."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from random_exports import (
    DRAFT_VOCAB,
    speculators_dflash,
    speculators_dflash2,
    speculators_dspark,
    speculators_eagle3,
    speculators_peagle,
    speculators_xpress,
)
from speculators_judge import Case

from draftworks.export.gates import open_export

pytestmark = pytest.mark.speculators

EAGLE3 = {
    "eagle3": {},
    "eagle3_norm_before_residual": {"norm_before_residual": True},
    "eagle3_norm_before_fc": {"norm_before_fc": True},
    "eagle3_fc_norm": {"fc_norm": True},
    "eagle3_norm_output": {"norm_output": True},
    "eagle3_1": {"fc_norm": True, "norm_output": True},
}
WINDOW = {
    "transformer_layer_config__layer_types": ["sliding_attention"],
    "transformer_layer_config__sliding_window": 4,
    "transformer_layer_config__use_sliding_window": True,
}
WINDOWED = {
    "eagle3_window": {},
    "eagle3_as_trained": {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
}
"""The second has the defaults of `speculators train`, except for the size of the window."""
PEAGLE = {
    "peagle": {},
    "peagle_norm_before_residual": {"norm_before_residual": True},
    "peagle_norm_before_fc": {"norm_before_fc": True},
    "peagle_fc_norm": {"fc_norm": True},
    "peagle_window": {"window": 5},
}
ONE_PASS = "peagle_norm_output"
DFLASH = {
    "dflash": {},
    "dflash_window": {"window": 4},
    "dflash_window_both_ways": {"window": 4, "sliding_window_non_causal": True},
}
DFLASH2 = {"dflash2": {}, "dflash2_three_taps": {"conv_kernel_size": 3, "conv_group_size": 32}}
WINDOW_BY_DEFAULT = "dflash2_window"
"""Nothing is said of the direction: in this strategy alone the library's default is both ways."""
DSPARK = {
    "dspark": {},
    "dspark_gated": {"markov_head_type": "gated", "confidence_head_with_markov": False},
    "dspark_rnn": {"markov_head_type": "rnn"},
    "dspark_no_markov": {"markov_rank": 0, "confidence_head_with_markov": False},
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
REDUCED = {"dflash_reduced": {"draft_vocab": DRAFT_VOCAB}}
XPRESS = {
    "xpress": {},
    "xpress_one_pass": {"num_jacobi_passes": 1},
    "xpress_reduced": {"draft_vocab": DRAFT_VOCAB},
}
REDUCED_DSPARK = {"dspark_reduced": {"draft_vocab": DRAFT_VOCAB, "enable_confidence_head": False}}
CASES = (
    *EAGLE3,
    *WINDOWED,
    *PEAGLE,
    ONE_PASS,
    *DFLASH,
    *DFLASH2,
    WINDOW_BY_DEFAULT,
    *REDUCED,
    *DSPARK,
    *REDUCED_DSPARK,
    *XPRESS,
    "eagle3_llama3_rope",
)
BACK_ENDS = ("eager", "sdpa")


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_folder, tiny_tensors):
    root = tmp_path_factory.mktemp("exports")
    exports = {name: speculators_eagle3(tiny_folder, tiny_tensors.embedding, **EAGLE3[name]) for name in EAGLE3}
    for name, settings in WINDOWED.items():
        exports[name] = speculators_eagle3(tiny_folder, tiny_tensors.embedding, **settings).with_config(**WINDOW)
    exports |= {name: speculators_peagle(tiny_folder, **PEAGLE[name]) for name in PEAGLE}
    exports[ONE_PASS] = speculators_peagle(tiny_folder, norm_output=True)
    exports |= {name: speculators_dflash(tiny_folder, **settings) for name, settings in (DFLASH | REDUCED).items()}
    exports |= {name: speculators_dflash2(tiny_folder, **sizes) for name, sizes in DFLASH2.items()}
    layers = exports["dflash2"].config["transformer_layer_config"]["num_hidden_layers"]
    kinds = {"transformer_layer_config__layer_types": ["sliding_attention"] * layers}
    exports[WINDOW_BY_DEFAULT] = exports["dflash2"].with_config(**WINDOW | kinds)
    for name, settings in (DSPARK | REDUCED_DSPARK).items():
        exports[name] = speculators_dspark(tiny_folder, **settings)
    exports |= {name: speculators_xpress(tiny_folder, **settings) for name, settings in XPRESS.items()}
    scaled = exports["eagle3"].with_config(transformer_layer_config__rope_parameters=LLAMA3_ROPE)
    exports["eagle3_llama3_rope"] = scaled
    return {name: export.write(root / name) for name, export in exports.items()}


@pytest.fixture(scope="module")
def findings(speculators_judge, folders, question):
    return speculators_judge(
        [Case(f"{name}-{end}", folder, question, end) for name, folder in folders.items() for end in BACK_ENDS]
    )


@pytest.mark.parametrize("case", CASES)
def test_the_library_takes_every_tensor_and_needs_no_other(case, findings):
    for end in BACK_ENDS:
        assert findings[f"{case}-{end}"].faithful, findings[f"{case}-{end}"]


@pytest.mark.parametrize("end", BACK_ENDS)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_reader(case, end, findings, folders, tiny_tensors, question):
    reader = open_export(f"speculators_{case.split('_')[0]}", folders[case], tiny_tensors)
    ours = reader.logits(question.features, question.next_tokens, question.drawn)
    theirs = findings[f"{case}-{end}"].logits
    assert torch.equal(theirs.isfinite(), ours.isfinite())
    ours, theirs = ours[ours.isfinite()], theirs[theirs.isfinite()]
    # The full vocabulary has logits up to 13, whose rounding in fp32 is larger.
    assert float((theirs - ours).abs().max()) < 1e-5 * max(1.0, float(ours.abs().max()))


@pytest.mark.parametrize(
    "names",
    [
        (*EAGLE3, *WINDOWED, "eagle3_llama3_rope"),
        tuple(PEAGLE),
        tuple(DFLASH),
        tuple(DSPARK),
        ("xpress", "xpress_one_pass"),
    ],
)
def test_every_option_changes_the_logits(names, findings):
    """Otherwise equal logits would not show that the options were read."""
    for one, other in combinations(names, 2):
        logits = [findings[f"{name}-eager"].logits for name in (one, other)]
        assert float((logits[0] - logits[1]).abs().max()) > 1e-2, (one, other)


def test_what_a_next_pass_would_be_fed_is_nothing_to_a_draft_of_one_pass(findings):
    assert torch.equal(findings["peagle-eager"].logits, findings[f"{ONE_PASS}-eager"].logits)


@pytest.mark.parametrize("end", BACK_ENDS)
@pytest.mark.parametrize("case", DSPARK)
def test_confidences_are_those_of_the_reader(case, end, findings, folders, tiny_tensors, question):
    reader = open_export("speculators_dspark", folders[case], tiny_tensors)
    ours = reader.confidence(question.features, question.next_tokens, question.drawn)
    torch.testing.assert_close(findings[f"{case}-{end}"].confidence.double(), ours, rtol=1e-5, atol=1e-5)


def test_a_draft_without_a_confidence_head_has_no_confidence(findings):
    assert findings["dspark_reduced-eager"].confidence is None
