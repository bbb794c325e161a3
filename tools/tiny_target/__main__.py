"""`python -m tools.tiny_target corpus|model`: remakes what `registry/models/tiny/` ships.

The corpus depends on the version of Python it is read from, so the shipped file is the one that counts; the model
is trained on that file, with one thread and a fixed seed.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import typer

FOLDER = Path(__file__).resolve().parents[2] / "registry" / "models" / "tiny"
HELD_OUT_EVERY = 50

app = typer.Typer(help=__doc__, add_completion=False)


@app.command()
def corpus(folder: Path = FOLDER) -> None:
    """Write corpus.parquet from the standard library of the Python that runs this."""
    from tools.tiny_target.corpus import build_conversations

    rows = build_conversations()
    pq.write_table(pa.Table.from_pylist(rows), folder / "corpus.parquet", compression="zstd")
    characters = sum(len(m["content"]) for row in rows for m in row["messages"])
    print(f"{len(rows)} conversations, {characters / 1e6:.2f} MB of text -> {folder / 'corpus.parquet'}")


@app.command()
def model(folder: Path = FOLDER, steps: int | None = None) -> None:
    """Train tokenizer and weights on corpus.parquet (about 25 minutes on one core)."""
    from dataclasses import replace

    import torch

    from tools.tiny_target import model as tiny

    torch.set_num_threads(1)
    recipe = tiny.Recipe() if steps is None else replace(tiny.Recipe(), steps=steps)
    torch.manual_seed(recipe.seed)
    conversations = [row["messages"] for row in pq.read_table(folder / "corpus.parquet").to_pylist()]
    texts = [f"{m['role']}\n{m['content']}" for messages in conversations for m in messages]
    tokenizer = tiny.train_tokenizer(texts, recipe)
    documents = [tiny.encode_chat(tokenizer, c) for c in conversations]
    held_out = documents[::HELD_OUT_EVERY]
    training = [d for i, d in enumerate(documents) if i % HELD_OUT_EVERY]
    print(f"{sum(map(len, training)):,} training tokens in {len(training)} conversations")

    target = tiny.new_model(recipe, tokenizer)
    print(f"{sum(p.numel() for p in target.parameters()):,} parameters")
    tiny.train(target, training, recipe)
    tiny.save(target, tokenizer, folder)

    prompts = [tiny.encode_chat(tokenizer, c[:1], add_generation_prompt=True) for c in conversations[::HELD_OUT_EVERY]]
    print(f"held-out loss {tiny.heldout_loss(target, held_out, recipe.context):.3f} nats per token")
    print(f"median share of distinct 4-grams over 64 greedy tokens: {tiny.distinct_4grams(target, prompts):.2f}")


if __name__ == "__main__":
    app()
