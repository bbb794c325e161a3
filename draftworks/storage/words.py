"""Numbers, lists and suggestions in sentences that people read; secrets hidden. Standard library only."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping


def shorten(text: str, most: int) -> str:
    """Return a text as one line of at most `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


def format_count(count: int, noun: str) -> str:
    """Return a number with its noun, such as "1 window", "0 windows" and "1,200 windows"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def list_names(names: Iterable[object], most: int = 5, none: str = "none", between: str = ", ") -> str:
    """Return the first names of a list, and how many more it has: "a, b and 3 more". No list is cut without that."""
    known = [str(each) for each in names]
    if len(known) <= most:
        return between.join(known) or none
    return f"{between.join(known[:most])} and {len(known) - most:,} more"


def list_lines(lines: Iterable[str], most: int) -> str:
    """Return the first lines of a list, and a last one that says how many more there are."""
    known = list(lines)
    more = [f"  and {len(known) - most:,} more"] if len(known) > most else []
    return "\n".join([*known[:most], *more])


MASK = "***"
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|WEBHOOK", re.IGNORECASE)
_CREDENTIALS = re.compile(r"//[^/\s@]+@")
_SHORTEST = 4
"""Shorter values are common words or numbers, which could not be masked without harm."""


def mask_secrets(text: str, env: Mapping[str, str], named: Collection[str] = ()) -> str:
    """Return the text without credentials in URLs and values of variables that hold secrets: by their names, or in `named`.

    Values of `named` are masked whatever their length.
    """
    likely = {value.strip() for name, value in env.items() if _SECRET_NAME.search(name)}
    secret = {value for value in likely if len(value) >= _SHORTEST} | {env.get(name, "").strip() for name in named}
    for value in sorted(secret - {""}, key=len, reverse=True):
        text = text.replace(value, MASK)
    return _CREDENTIALS.sub(f"//{MASK}@", text)


_CLOSE = 0.6
"""Least similarity of a suggestion, as `difflib` counts it."""
_LEAST_SHARED = 3
"""Letters that the first word of two names has at least, if only that is equal in them."""
_ROOM = 90
"""Characters that a list of known names may take."""
OTHER_WORDS: dict[str, tuple[str, ...]] = {
    # of keys, as other trainers and servers call them
    "learning_rate": ("lr",),
    "base_lr": ("lr",),
    "max_lr": ("lr",),
    "batch_size": ("global_batch_size", "micro_batch_size"),
    "per_device_train_batch_size": ("micro_batch_size",),
    "train_batch_size": ("global_batch_size",),
    "num_epochs": ("epochs",),
    "num_train_epochs": ("epochs",),
    "steps": ("max_steps",),
    "num_steps": ("max_steps",),
    "total_steps": ("max_steps",),
    "train_steps": ("max_steps",),
    "max_seq_len": ("max_length",),
    "max_seq_length": ("max_length",),
    "max_model_len": ("max_length",),
    "sequence_length": ("max_length",),
    "seq_len": ("max_length",),
    "context_length": ("max_length",),
    "max_tokens": ("max_new_tokens",),
    "lr_scheduler": ("schedule",),
    "lr_scheduler_type": ("schedule",),
    "scheduler": ("schedule",),
    "warmup": ("warmup_ratio",),
    "warmup_steps": ("warmup_ratio",),
    "grad_clip": ("max_grad_norm",),
    "gradient_clipping": ("max_grad_norm",),
    "clip_grad_norm": ("max_grad_norm",),
    "wd": ("weight_decay",),
    "early_stopping": ("patience",),
    "dtype": ("compute_dtype",),
    "precision": ("compute_dtype",),
    "torch_dtype": ("compute_dtype",),
    "packing": ("pack_tokens",),
    "gpus": ("processes",),
    "num_gpus": ("processes",),
    "nproc_per_node": ("processes",),
    "world_size": ("processes",),
    "save_steps": ("save_every",),
    "save_interval": ("save_every",),
    "eval_steps": ("eval_every",),
    "eval_interval": ("eval_every",),
    "logging_steps": ("log_every",),
    "log_interval": ("log_every",),
    "num_speculative_tokens": ("draft_tokens",),
    "num_draft_tokens": ("draft_tokens",),
    "speculative_tokens": ("draft_tokens",),
    "ttt_steps": ("ttt_length",),
    "num_ttt_steps": ("ttt_length",),
    "model_name_or_path": ("model",),
    "model_path": ("model",),
    "model_id": ("model",),
    "target_model": ("model",),
    "commit": ("revision",),
    "val_split": ("held_out_share",),
    "test_size": ("held_out_share",),
    "validation_split": ("held_out_share",),
    "eval_sets": ("evals",),
    "eval": ("evals", "evaluation"),
    "dataset": ("datasets", "dataset"),
    "path": ("files", "root", "url"),
    "paths": ("files",),
    "data_files": ("files",),
    "license": ("licence",),
    "type": ("kind", "format"),
    "base_url": ("url",),
    "endpoint": ("url",),
    "address": ("url",),
    "webhook": ("url", "url_env"),
    "webhook_url": ("url", "url_env"),
    "api_key": ("api_key_env",),
    "timeout": ("timeout_s",),
    "retries": ("attempts",),
    "schedule": ("cron", "schedule"),
    "timezone": ("cron_timezone",),
    "output_dir": ("var",),
    # of values
    "gpu": ("cuda",),
    "nvidia": ("cuda",),
    "fp16": ("bfloat16",),
    "float16": ("bfloat16",),
    "half": ("bfloat16",),
    "bf16": ("bfloat16",),
    "fp32": ("float32",),
    "float": ("float32",),
    "k8s": ("kubernetes",),
    "sbatch": ("slurm",),
    "weights_and_biases": ("wandb",),
    "w&b": ("wandb",),
    "tb": ("tensorboard",),
    "object": ("s3",),
    "gcs": ("s3",),
    "nfs": ("shared_dir",),
    "chatml": ("openai",),
    "messages": ("openai",),
    "conversations": ("sharegpt",),
    "train": ("everything",),
    "all": ("everything",),
    "eval_all": ("evaluate",),
    "list": ("leaderboard", "usage"),
    "status": ("in-service", "summary"),
    "logs": ("ui",),
    "start": ("run", "ui"),
    "deploy": ("promote",),
    "validate": ("check",),
    "lint": ("check",),
    "clean": ("prune",),
    "serve": ("engine", "ui"),
    "export": ("export-features",),
}
"""By another word for it, in lower case and with `_`: the names here. One counts only where it is known."""


def find_close(found: object, known: Iterable[str], most: int = 2) -> list[str]:
    """Return the known names that an unknown name may stand for, the closest first; none for nothing close."""
    names = list(dict.fromkeys(known))
    word = _fold(str(found))
    by_fold = {_fold(name): name for name in reversed(names)}
    if word in by_fold:
        return [by_fold[word]]
    meant = [name for name in OTHER_WORDS.get(word, ()) if name in names]
    if meant:
        return meant[:most]
    close = [by_fold[each] for each in difflib.get_close_matches(word, by_fold, n=most, cutoff=_CLOSE)]
    if close or not word:
        return close
    first = word.partition("_")[0]
    alike = [name for name in names if _fold(name).partition("_")[0] == first] if len(first) >= _LEAST_SHARED else []
    alike = alike or [name for name in names if len(word) > 1 and _fold(name).startswith(word)]
    return alike if len(alike) <= most else []


def rate(found: str, known: str) -> float:
    """Return how alike two names are, 0 to 1, whatever their case and dashes."""
    return difflib.SequenceMatcher(None, _fold(found), _fold(known)).ratio()


def suggest(found: object, known: Iterable[str]) -> str:
    """Return "did you mean X?"; empty where nothing is close."""
    close = find_close(found, known)
    return f"did you mean {' or '.join(close)}?" if close else ""


def suggest_or_list(found: object, known: Iterable[str], room: int = _ROOM) -> str:
    """Return "did you mean X?"; where nothing is close, the known names, in about `room` characters."""
    names = list(known)
    return suggest(found, names) or f"there {'is' if len(names) == 1 else 'are'}: {list_fitting(names, room)}"


def list_fitting(names: Iterable[str], room: int = _ROOM) -> str:
    """Return names after each other, as many as fit into `room` characters; says how many it leaves out."""
    left = list(names)
    if not left:
        return "none"
    shown = [left.pop(0)]
    while left and len(", ".join([*shown, left[0]])) <= room:
        shown.append(left.pop(0))
    return ", ".join(shown) + (f" and {len(left)} more" if left else "")


def _fold(name: str) -> str:
    return "_".join(name.casefold().replace("-", "_").replace(".", "_").split())
