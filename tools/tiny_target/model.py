"""Tokenizer, model and training loop of the target `tiny`: plain PyTorch, one thread, seeded."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, START, END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- message['content'] + '<|im_end|>' -}}{%- endif -%}"
    "{{- '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, beside the corpus."""

    vocab_size: int = 2048
    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    context: int = 512
    batch_size: int = 8
    steps: int = 1500
    warmup: int = 100
    lr: float = 1e-2
    weight_decay: float = 0.4
    seed: int = 20


def train_tokenizer(texts: list[str], recipe: Recipe) -> PreTrainedTokenizerFast:
    """Byte-level BPE, so that any text has tokens; `<|mask|>` is reserved for block drafts and never trained on."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=[PAD, START, END, MASK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        mask_token=MASK,
        chat_template=CHAT_TEMPLATE,
        model_max_length=recipe.context,
        clean_up_tokenization_spaces=False,
    )


def encode_chat(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]], add_generation_prompt: bool = False
) -> list[int]:
    """Return the token ids of a conversation; with `add_generation_prompt`, the answer's header after it."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, return_dict=False)
    return cast("list[int]", ids)


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=cast("int", tokenizer.eos_token_id),
        pad_token_id=cast("int", tokenizer.pad_token_id),
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, documents: list[list[int]], recipe: Recipe) -> None:
    """Next-token prediction over the conversations, shuffled anew each epoch and laid end to end."""
    optimizers = new_optimizers(model, recipe)
    generator = torch.Generator().manual_seed(recipe.seed)
    stream: list[int] = []
    started = time.monotonic()
    model.train()
    for step in range(recipe.steps):
        need = recipe.batch_size * recipe.context
        while len(stream) < need:
            for index in torch.randperm(len(documents), generator=generator).tolist():
                stream += documents[index]
        batch = torch.tensor(stream[:need]).view(recipe.batch_size, recipe.context)
        del stream[:need]
        lr = recipe.lr * _schedule(step, recipe)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = lr
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0 or step == recipe.steps - 1:
            rate = (step + 1) * need / (time.monotonic() - started)
            print(f"step {step}/{recipe.steps}  loss {loss.item():.3f}  {rate:,.0f} tokens/s", flush=True)


def new_optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers (it needs half the steps of AdamW here), AdamW for embedding and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in name)]
    return [
        torch.optim.Muon(matrices, lr=recipe.lr, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _schedule(step: int, recipe: Recipe) -> float:
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def heldout_loss(model: LlamaForCausalLM, documents: list[list[int]], context: int) -> float:
    """Mean cross entropy in nats per token; every document is cut to `context` tokens."""
    model.eval()
    total, count = 0.0, 0
    for document in documents:
        ids = torch.tensor([document[:context]])
        total += model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    return total / count


@torch.no_grad()
def distinct_4grams(model: LlamaForCausalLM, prompts: list[list[int]], tokens: int = 64) -> float:
    """Median over prompts of the share of distinct 4-grams in `tokens` greedy tokens: 1 is no repetition, 0 a loop."""
    model.eval()
    shares = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        answer = model.generate(  # pyright: ignore[reportAttributeAccessIssue] - its protocol leaves its own models out
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )[0, len(prompt) :].tolist()
        grams = [tuple(answer[i : i + 4]) for i in range(len(answer) - 3)]
        shares.append(len(set(grams)) / len(grams))
    return statistics.median(shares)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
