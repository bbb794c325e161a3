"""Loading an engine on an external server removes the files that killed captures left in its spool."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from fake_sglang import fake_sglang, part_of

from draftworks.capture.engine import EnginePlace, load_engine
from draftworks.config.capture import SGLangSpec
from draftworks.config.registry_files import CaptureSpec
from draftworks.config.run_files import TargetFiles
from draftworks.errors import EngineError
from draftworks.handover.spool import make_request_id, write_part
from draftworks.storage.identity import LayerTap


def test_files_older_than_any_request_are_swept_and_those_of_other_captures_stay(
    tiny_target: TargetFiles, tmp_path: Path
):
    abandoned, awaited = make_request_id(), make_request_id()
    with fake_sglang(tmp_path / "spool") as fake:
        for request_id in (abandoned, awaited):
            write_part(fake.spool, request_id, part_of([1, 2]))
        os.utime(fake.spool / f"{abandoned}.0.safetensors", times=(1e9, 1e9))
        fake.info["model_path"] = tiny_target.model
        fake.failures = [500]  # of its tokenizer, to be done as soon as the server has been examined
        place = EnginePlace(tmp_path / "engine", (LayerTap(2), LayerTap(4)), sglang=SGLangSpec())
        server = {"url": fake.url, "spool": str(fake.spool)}
        capture = CaptureSpec(backend="sglang_server", compute_dtype="float32", server=server)
        with pytest.raises(EngineError, match="failed on /tokenize"):
            load_engine(tiny_target, capture, torch.device("cpu"), place)
        assert [path.name for path in fake.spool.iterdir()] == [f"{awaited}.0.safetensors"]
