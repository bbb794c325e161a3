"""Whether the probe of an engine reaches a layer that drafts read, by the sizes in the weights' headers. Torch-free."""

from __future__ import annotations

import re

from draftworks.config.registry_files import TargetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import DraftworksError
from draftworks.preflight.compatibility import collect_taps
from draftworks.preflight.findings import Findings
from draftworks.targets.safetensors_headers import BITS, TensorHeader, read_model_headers

_LAYER = re.compile(r"^(?!mtp\.)(?!.*(?:vision|visual|audio)).*?\blayers\.(\d+)\.")
_GB = 1e9
_SURE = 0.9
"""Share of the sizes found that must be over the budget: a file may hold tensors that no layer reads."""


def check_probe_reach(target: TargetSpec, files: TargetFiles, findings: Findings) -> None:
    """Check that `capture.probe_gb` is enough for the lowest tap, or for all layers where only `last` is read."""
    if target.capture.allow_unprobed:
        return
    try:
        tensors, taps = read_model_headers(files).tensors, collect_taps(target, files.num_layers)
    except DraftworksError:
        return  # other checks say so
    needed = taps[0] if taps else files.num_layers
    size = sum(_count_bytes(header) for name, header in tensors.items() if _is_below(name, needed)) / _GB
    if size * _SURE > target.capture.probe_gb:
        findings.error(
            f"target {target.name}: capture.probe_gb: {target.capture.probe_gb:g} GB are less than the {size:.3g} GB of the "
            f"{needed} layer(s) before the first that drafts read: nothing could be compared. Raise it, or set allow_unprobed"
        )


def _is_below(name: str, layers: int) -> bool:
    found = _LAYER.match(name)
    return found is not None and int(found[1]) < layers


def _count_bytes(header: TensorHeader) -> float:
    count = 1
    for size in header.shape:
        count *= size
    return count * BITS.get(header.dtype, 0) / 8
