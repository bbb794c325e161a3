"""`python -m draftworks.programs.plan FILE`: write a feature set whose features are captured later, while they are used."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from draftworks.capture.capture_plan import StreamPlan, make_refs, make_set_identity, plan_capture
from draftworks.capture.engine import load_engine
from draftworks.capture.probe.probe import EngineProbe
from draftworks.capture.session import capture_missing
from draftworks.capture.verify import recheck
from draftworks.config.run_files import CaptureRun, StoreSpec
from draftworks.data.tokenized import TokenizedSet
from draftworks.distributed.collectives import open_process_group
from draftworks.features.manifest import write_feature_set
from draftworks.features.open_store import open_store
from draftworks.programs.assembly import make_engine_place, temporary_engine_folder
from draftworks.programs.capture import describe_set
from draftworks.programs.program import ProgramContext, run_program

SAMPLES = 4
"""How many samples are captured beforehand, spread over the set, to judge the engine by."""


def plan(run: CaptureRun, ctx: ProgramContext) -> dict[str, Any]:
    """Plan the features of a tokenized set, and check the engine on a few of its samples. One process."""
    tokens = TokenizedSet.open(run.tokens)
    started = time.monotonic()
    streams = StreamPlan.of(run)
    refs = make_refs(run, streams, tokens, store_uri=f"planned://{run.target.digest}")
    with (
        open_process_group(run.capture.device) as device,
        temporary_engine_folder(run.out / "engine") as folder,
        tempfile.TemporaryDirectory(dir=run.out) as scratch,
        ExitStack() as closing,
    ):
        sampled = run.model_copy(update={"store": StoreSpec(root=Path(scratch))})
        store = open_store(sampled.store)
        plan_capture(sampled, tokens, store)  # checks every sample of the set
        engine = load_engine(run.target, run.capture, device, make_engine_place(run, ctx, folder, tokens))
        closing.callback(engine.close)
        report = EngineProbe(run, tokens).compare(engine)
        chosen = refs[:: -(-len(refs) // SAMPLES)]
        capture_missing(sampled, lambda: engine, [tokens[ref.metadata["row"]] for ref in chosen])
        store.refresh()
        check = recheck(engine, store, chosen, tokens)
        store.close()
    manifest = write_feature_set(
        run.out, refs, make_set_identity(run, streams), streams.names, refs[0].feature_store_uri
    )
    return {
        **describe_set(manifest),
        "planned": True,
        "captured_samples": 0,
        "failed_samples": 0,
        "captured_bytes": 0,
        "tokens_per_second": 0,
        "seconds": round(time.monotonic() - started, 2),
        "verification": check.to_json(),
        "probe": report.to_json(),
    }


if __name__ == "__main__":
    run_program(CaptureRun, plan)
