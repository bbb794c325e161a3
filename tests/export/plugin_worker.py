"""Exports a draft of the plug-in `fused` into its own format, imports it again, and prints a JSON report of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from export_toys import EAGLE3, Toys

from draftworks.export.canonical import CanonicalDraft
from draftworks.export.exporting import choose_formats, export_draft
from draftworks.export.importing import import_draft

toys = Toys.make(Path(sys.argv[1]))
draft = toys.draft("fused_eagle3", **EAGLE3)
(chosen,) = choose_formats(draft).chosen
result = export_draft(draft, chosen, toys.folder / "exported", "float32")
imported = import_draft(result.path, toys.target, toys.folder / "imported")
found = CanonicalDraft.load(imported.folder, toys.target)
report = {
    "taps": [tap.hf_index for tap in draft.taps],
    "layer_ids": json.loads((result.path / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"],
    "gates": {gate.name: gate.description for gate in result.gates},
    "failed": {gate.name: gate.description for gate in result.gates if not gate.passed},
    "imported": [imported.format, imported.strategy],
    "same": (found.record.weights_digest, found.config) == (draft.record.weights_digest, draft.config),
}
print(json.dumps(report))
