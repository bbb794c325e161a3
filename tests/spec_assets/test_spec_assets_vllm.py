"""The whole graph with the target in real vLLM, kept by `draftworks engine`: the same answers and an equally good draft as with
transformers, from stored features and from features that stream to two ranks.
"""

from __future__ import annotations

import pytest
from engine_graphs import require_same_draft
from ports import reserve_port
from vllm_toys import VLLM

from draftworks.programs.engine import prepare_server
from draftworks.targets.registry import Registry

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.mark.long
def test_the_graph_makes_the_same_draft_through_vllm(site, tmp_path_factory):
    served = site.copy(tmp_path_factory.mktemp("served"))
    spool = tmp_path_factory.mktemp("spool")
    server = f"server: {{url: 'http://127.0.0.1:{reserve_port()}', spool: '{spool}'}}"
    text = served.target_file.read_text()
    served.target_file.write_text(text.replace("capture: {", f"capture: {{backend: vllm_server, {server}, "))
    (served.registry / "deployment.yaml").write_text(f"vllm: {{python: {VLLM.python}}}\n")
    kept = prepare_server("small", Registry(served.registry))
    kept.start()
    try:
        require_same_draft(served, site)
    finally:
        kept.stop()
