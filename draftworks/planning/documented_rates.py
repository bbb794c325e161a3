"""Speeds that are documented elsewhere, for deployments that have measured nothing yet. Each says whose figure it is."""

from __future__ import annotations

from dataclasses import dataclass

from draftworks.planning.estimates import Estimate, Source
from draftworks.planning.measurements import Program
from draftworks.targets.resolve import TargetShape

_TINY = TargetShape(num_layers=8, hidden_size=128)
_8B = TargetShape(num_layers=36, hidden_size=4096)
_LLAMA_8B = TargetShape(num_layers=32, hidden_size=4096)
OF_TARGET: tuple[Program, ...] = ("regenerate", "capture")
"""Programs that run the target; the others run a draft."""


@dataclass(frozen=True)
class DocumentedRate:
    """Tokens per second of one device.

    Attributes:
        shape: of the target that it was measured with.
    """

    tokens_per_s: Estimate
    start_s: Estimate
    shape: TargetShape
    text: str

    def scale_to(self, program: Program, shape: TargetShape) -> Estimate:
        return self.tokens_per_s * (measure_size(program, self.shape) / measure_size(program, shape))


def measure_size(program: Program, shape: TargetShape) -> float:
    """Return what the time of one token is proportional to: weights of the target's layers, or of one draft layer."""
    layers = shape.num_layers if program in OF_TARGET else 1
    return float(layers * shape.hidden_size**2)


_HERE = "the demo, on one of two cores of an AMD EPYC with AVX2"
_START_CPU, _START_GPU = Estimate(4.0, 8.0, 20.0), Estimate(20.0, 60.0, 300.0)
_ON_CPU: dict[Program, DocumentedRate] = {
    "regenerate": DocumentedRate(Estimate(2000, 4350, 6000), _START_CPU, _TINY, _HERE),
    "capture": DocumentedRate(Estimate(2500, 7000, 12000), _START_CPU, _TINY, _HERE),
    "train": DocumentedRate(Estimate(2000, 5100, 10000), _START_CPU, _TINY, _HERE),
    "evaluate": DocumentedRate(Estimate(150, 500, 1500), _START_CPU, _TINY, _HERE),
    "export": DocumentedRate(Estimate.exactly(1.0), _START_CPU, _TINY, _HERE),
}
_ON_GPU: dict[Program, DocumentedRate] = {
    "regenerate": DocumentedRate(
        Estimate(1500, 3160, 12000), _START_GPU, _LLAMA_8B, "AccelMark issue 39: SGLang 0.5.6, Llama-3.1-8B, one A100"
    ),
    "capture": DocumentedRate(
        Estimate(9000, 27000, 40000), _START_GPU, _8B, "SpecForge #661: prefill of an 8B target, one H200"
    ),
    "train": DocumentedRate(
        Estimate(2200, 6650, 20000), _START_GPU, _8B, "SpecForge #661: Domino, 6.5 samples of 1,024 tokens/s, one H200"
    ),
    "evaluate": DocumentedRate(
        Estimate(200, 900, 4000), _START_GPU, _8B, "a seventh of the training's, as in the demo"
    ),
    "export": DocumentedRate(Estimate.exactly(1.0), _START_GPU, _8B, "no figure: what starting a program takes"),
}


def find_documented(program: Program, on_gpu: bool) -> DocumentedRate:
    return (_ON_GPU if on_gpu else _ON_CPU)[program]


def make_source(rate: DocumentedRate) -> Source:
    return Source("documented", rate.text)
