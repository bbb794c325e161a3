import tempfile
from pathlib import Path

import torch

from draftworks.capture.engine import load_engine
from draftworks.capture.session import capture_features
from draftworks.config.registry_files import CaptureSpec, ResponseSpec, TrainingSpec
from draftworks.config.run_files import CaptureRun, FeatureSet, StoreSpec
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import Conversation, Turn
from draftworks.data.tokenized import TokenizedSet, write_tokens
from draftworks.features.keyed_shared_dir import KeyedSharedDirStore
from draftworks.features.loader import FeatureDataLoader
from draftworks.programs.assembly import build_draft, open_samples
from draftworks.storage.identity import FileDigests
from draftworks.stream.arrival_producer import ProducerParts
from draftworks.stream.row_sources import ConversationSource
from draftworks.stream.topologies import TrainerParts, build_disagg_online_runtime
from draftworks.targets.registry import Registry
from draftworks.targets.resolve import resolve_target
from draftworks.training.backend import ensure_process_group

folder, registry, cpu = Path(tempfile.mkdtemp()), Registry(Path("registry")), torch.device("cpu")
target = resolve_target(registry.load_target("tiny"), registry, FileDigests(folder / "digests.json"))
capture = CaptureRun(
    out=folder / "heldout",
    target=target,
    tokens=folder / "heldout-tokens",
    taps=[2, 4, 5],
    capture=CaptureSpec(device="cpu"),
    store=StoreSpec(root=folder / "heldout-store"),
)
engine = load_engine(target, capture.capture, cpu)


def ask(number: int) -> Conversation:
    return Conversation.of([Turn("user", f"What does function {number} do?"), Turn("assistant", "")], {})


def answer(count: int, first: int) -> ConversationSource:
    """Questions that the target answers; their placeholders for answers are not read."""
    chat = ChatTokenizer.load(target)
    return ConversationSource([ask(first + n) for n in range(count)], chat, ResponseSpec(max_new_tokens=8), 128)


# A held-out set, stored: the target's own answers, and what it thinks of them.
heldout = answer(count=4, first=1000)
write_tokens(capture.tokens, [row for task in heldout.list_tasks("heldout") for row in heldout.make_rows(task, engine)])
capture_features(capture, lambda: engine, TokenizedSet.open(capture.tokens))

with ensure_process_group(cpu):
    options = {"block_size": 4, "num_layers": 1, "layer_ids": [2, 4, 5], "num_anchors": 8}
    draft = build_draft(target, "dflash", options, vocab_mapping=None, seed=0)
    stored = FeatureSet(tokens=capture.tokens, features=capture.out)
    samples = open_samples(stored, capture.store, draft.strategy, target)
    trainer, loader, run = build_disagg_online_runtime(
        TrainerParts(
            strategy=draft.strategy,
            training=TrainingSpec(global_batch_size=4, max_steps=3, compute_dtype="float32"),
            heldout=FeatureDataLoader.for_evaluation(samples.refs, samples.store, 4, draft.strategy.collate),
            device=cpu,
        ),
        ProducerParts(
            source=answer(count=16, first=0),
            capture=capture,
            streams=draft.strategy.feature_names,
            load_engine=lambda: engine,
        ),
        KeyedSharedDirStore(folder / "store"),
        metadata_db_path=folder / "control.sqlite",
    )
    history = run()

print(f"{history.steps} steps, loss {history.first_loss():.3f} to {history.last_loss():.3f}")
