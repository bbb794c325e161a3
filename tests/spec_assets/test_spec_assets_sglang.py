"""The whole graph with the target in real SGLang: the same answers and an equally good draft as with transformers, from
stored features and from features that stream to two ranks.
"""

from __future__ import annotations

import pytest
from engine_graphs import require_same_draft

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]


def test_the_graph_makes_the_same_draft_through_sglang(site, tiny_sglang, tmp_path_factory):
    served = site.copy(tmp_path_factory.mktemp("served"))
    server = f"server: {{url: '{tiny_sglang.url}', spool: '{tiny_sglang.spool}'}}"
    text = served.target_file.read_text()
    served.target_file.write_text(text.replace("capture: {", f"capture: {{backend: sglang_server, {server}, "))
    require_same_draft(served, site)
