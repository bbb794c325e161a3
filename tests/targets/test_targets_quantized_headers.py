"""Headers of quantised checkpoints: the names and shapes that the model without quantisation would have."""

from __future__ import annotations

import pytest

from draftworks.targets.safetensors_headers import UNKNOWN, TensorHeader, strip_quantization


def make_headers(**tensors: tuple[str, tuple[int, ...]]) -> dict[str, TensorHeader]:
    return {name: TensorHeader(dtype, shape, "model.safetensors") for name, (dtype, shape) in tensors.items()}


NORM = {"a.norm": ("BF16", (8,))}


@pytest.mark.parametrize(
    ("method", "stored", "plain"),
    [
        ("fp8", {"a.weight": ("F8_E4M3", (8, 4)), "a.weight_scale_inv": ("F32", (1, 1))}, {"a.weight": (8, 4)}),
        (
            "gptq",
            {
                "a.qweight": ("I32", (1, 8)),
                "a.qzeros": ("I32", (1, 1)),
                "a.scales": ("F16", (1, 8)),
                "a.g_idx": ("I32", (4,)),
            },
            {"a.weight": UNKNOWN},
        ),
        (
            "compressed-tensors",
            {"a.weight_packed": ("I32", (8, 1)), "a.weight_scale": ("BF16", (8, 1)), "a.weight_shape": ("I64", (2,))},
            {"a.weight": UNKNOWN},
        ),
        ("bitsandbytes", {"a.weight": ("U8", (16, 1)), "a.weight.absmax": ("F32", (1,))}, {"a.weight": UNKNOWN}),
        ("modelopt", {"a.weight": ("U8", (8, 2)), "a.weight_scale": ("F8_E4M3", (8, 1))}, {"a.weight": UNKNOWN}),
        ("mxfp4", {"a_blocks": ("U8", (2, 8, 3, 16)), "a_scales": ("U8", (2, 8, 3))}, {"a": (2, 96, 8)}),
    ],
)
def test_a_packed_weight_stands_for_one_whose_shape_its_bytes_do_not_tell(method, stored, plain):
    found = strip_quantization(make_headers(**stored, **NORM), {"quant_method": method})
    assert {name: header.shape for name, header in found.tensors.items()} == {**plain, "a.norm": (8,)}
    unshaped = {name for name, shape in plain.items() if shape == UNKNOWN}
    assert found.unshaped == unshaped
    assert (found.note is None) == (not unshaped)


def test_without_quantisation_headers_stay_as_they_are():
    headers = make_headers(**{"a.weight": ("U8", (16, 1)), **NORM})
    assert strip_quantization(headers, None).tensors == headers
