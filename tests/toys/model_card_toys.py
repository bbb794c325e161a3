"""A draft with its target and report: what model cards are made from."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from draftworks.config.registry_files import DatasetSpec
from draftworks.config.run_files import TargetFiles
from draftworks.evaluation.report.summary import ReportSummary, RungScore
from draftworks.storage.artifacts import Artifact

REVISION = "b968826d9c46dd6066d109eabc6255188de91218"
TARGET = TargetFiles(
    name="mine",
    model="Acme/Model-8B",
    revision=REVISION,
    tokenizer="Acme/Model-8B",
    digest="0123456789abcdef",
    tokenizer_digest="fedcba9876543210",
    num_layers=36,
    hidden_size=4096,
    vocab_size=2048,
    context=512,
)
LOCAL = TARGET.model_copy(update={"model": "/home/somebody/models/mine", "revision": None})
DRAFT = Artifact(
    asset="eagle3_draft",
    target="mine",
    path=Path("/var/eagle3_draft/mine/a9fe5ee3947bbcd8"),
    identity={
        "strategy": "eagle3",
        "options": {"ttt_length": 12, "draft_vocab_size": 1024, "layer_ids": None},
        "training": {"lr": 0.002, "seed": 42, "max_steps": None},
        "target": TARGET.digest,
        "tokens": "tokens-version",
        "features": "features-version",
        "vocab_mapping": None,
    },
    data_version="weights-version",
    summary={
        "steps": 1234,
        "published_step": 1200,
        "tokens": 56789,
        "world_size": 8,
        "first_loss": 9.5,
        "last_loss": 2.25,
        "heldout": {"eval/avg_acc": 0.9, "eval/tau": 1.5, "eval/confidence_error": [0.25, 0.125]},
    },
    files={},
    created=0.0,
    seconds=1.0,
)
SCORES = (
    *(RungScore("trained", 0, f"per_position_acc_{1 + i}", 0.9 - 0.05 * i) for i in range(12)),
    RungScore("trained", 1, "simulated_acc_len", 2.75),
    RungScore("trained", 3, "rung3_walk_acc_len", 2.5, None, 2.25, 2.85, 0.95, 40, 300, 3.5),
    RungScore("trained", 4, "rung4_loop_acc_len_t0", 2.4, 0.0, 2.1, 2.6, 0.95, 7, 50, 3.4, 1.62),
    RungScore("bigram", 1, "simulated_acc_len", 0.38),
)
REPORT = ReportSummary(
    target="mine",
    strategy="eagle3",
    eval_set="heldout",
    created=datetime(2026, 5, 4, tzinfo=UTC),
    weights_digest="weights-version",
    draft_tokens=12,
    label_agreement=1.0,
    scores=SCORES,
    provenance={"eval_tokens": "eval-tokens-digest"},
)
DATASET = DatasetSpec(name="chats", files=["chats.jsonl"], licence="CC BY 4.0 | attribution")
