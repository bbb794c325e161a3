"""Tokenizers of every kind that chat models use, made small, and templates that do what those of model families do."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from draftworks.config.run_files import TargetFiles
from draftworks.data.tokenized import TokenRow

SPECIAL = ("<s>", "</s>", "<unk>", "<|start|>", "<|end|>", "[INST]", "[/INST]")
WORDS = (
    "the a model draft token target answer question what is of and to in it that was for on are as his they be this from "
    "have or by one had not but all were when we there can an your which their said if do will each about how up out user "
    "assistant system think Current date 0123456789 .,:;!?<>/\n * 3 é ü 聊天"
)
TOKENIZERS = (
    *("bytes", "bytes, end swallows blanks after it", "bytes, end swallows blanks before it"),
    *("metaspace first", "metaspace always", "metaspace never"),
)

CHATML = (
    "{%- for m in messages -%}{{- '<|start|>' + m['role'] + '\\n' + m['content'] + '<|end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start|>assistant\\n' -}}{%- endif -%}"
)
DATED = "{{- '<|start|>system\\nCurrent date: ' + strftime_now('%d %b %Y (%Y-%m-%d)') + '<|end|>\\n' -}}" + CHATML
MISTRAL = (
    "{{- bos_token -}}{%- if messages[0]['role'] == 'system' -%}{%- set first = messages[0]['content'] + '\\n\\n' -%}"
    "{%- set messages = messages[1:] -%}{%- else -%}{%- set first = '' -%}{%- endif -%}{%- for m in messages -%}"
    "{%- if m['role'] == 'user' -%}{{- '[INST] ' + (first if loop.first else '') + m['content'] + ' [/INST]' -}}"
    "{%- elif m['role'] == 'assistant' -%}{{- ' ' + m['content'] + eos_token -}}"
    "{%- else -%}{{- raise_exception('Only user and assistant roles are supported!') -}}{%- endif -%}{%- endfor -%}"
)
GEMMA = (
    "{{- bos_token -}}{%- if messages[0]['role'] == 'system' -%}{%- set prefix = messages[0]['content'] + '\\n\\n' -%}"
    "{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}"
    "{%- for m in loop_messages -%}{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{- raise_exception('Conversation roles must alternate') -}}{%- endif -%}"
    "{{- '<|start|>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' + (prefix if loop.first else '') -}}"
    "{{- m['content'] | trim + '<|end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start|>model\\n' -}}{%- endif -%}"
)
MACROS = (
    "{%- macro header(role) -%}{{- '<|start|>' + role + '\\n' -}}{%- endmacro -%}"
    "{%- macro said(m) -%}{{- header(m['role']) + m['content'] + '<|end|>' -}}{%- endmacro -%}"
    "{%- for m in messages -%}{{- said(m) + '\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- header('assistant') -}}{%- endif -%}"
)
DROPS_THOUGHTS = (
    "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m['role'] == 'user' -%}{%- set ns.last = loop.index0 -%}"
    "{%- endif -%}{%- endfor -%}{%- for m in messages -%}{%- set content = m['content'] -%}{%- set thought = '' -%}"
    "{%- if m['role'] == 'assistant' and '</think>' in content -%}"
    "{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}{{- '<|start|>' + m['role'] + '\\n' -}}"
    "{%- if m['role'] == 'assistant' and loop.index0 > ns.last -%}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}{%- endif -%}"
    "{{- content + '<|end|>\\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|start|>assistant\\n' -}}"
    "{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}{%- endif -%}"
)
OPENS_THOUGHT = DROPS_THOUGHTS.replace("{{- '<|start|>assistant\\n' -}}", "{{- '<|start|>assistant\\n<think>\\n' -}}")
FORGETS = (
    "{%- for m in messages -%}{%- set content = m['content'] -%}{%- if m['role'] == 'assistant' -%}"
    "{%- set content = content.split('</think>')[-1].lstrip() -%}{%- endif -%}"
    "{{- '<|start|>' + m['role'] + '\\n' + content + '<|end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start|>assistant\\n' -}}"
)
"""As QwQ and DeepSeek R1 print answers: never with their thoughts."""
KEEPS_APART = DROPS_THOUGHTS.replace(
    "{%- if m['role'] == 'assistant' and '</think>' in content -%}",
    "{%- if m.reasoning_content is string -%}{%- set thought = m.reasoning_content -%}"
    "{%- elif m['role'] == 'assistant' and '</think>' in content -%}",
)
BLANKS = CHATML.replace("m['content'] + '<|end|>\\n'", "m['content'] + '  \\n<|end|>\\n'")
TEMPLATES = {
    "chatml": CHATML,
    "dated": DATED,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "macros": MACROS,
    "drops thoughts": DROPS_THOUGHTS,
    "opens a thought": OPENS_THOUGHT,
    "blanks before the end": BLANKS,
}


def write_tokenizer(folder: Path, kind: str) -> int:
    """Write tokenizer.json and tokenizer_config.json; return the number of ids. The end of a turn is not the eos token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    how, _, what = kind.partition(" ")
    trainer: dict[str, Any] = {"vocab_size": 500, "special_tokens": list(SPECIAL), "show_progress": False}
    if how == "metaspace":
        made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False, fuse_unk=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=what, split=True)
        made.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=what)
    else:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([WORDS] * 3, trainers.BpeTrainer(**trainer))
    content = json.loads(made.to_str())
    for token in content["added_tokens"]:
        if token["content"] == "<|end|>" and "swallows" in kind:
            token["rstrip" if "after" in kind else "lstrip"] = True
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 4]}))
    return made.get_vocab_size()


def make_chat_target(folder: Path, tokenizer: str, template: str) -> TargetFiles:
    """A target, without weights, that has a tokenizer of `TOKENIZERS` and a template."""
    size = write_tokenizer(folder, tokenizer)
    (folder / "chat_template.jinja").write_text(template)
    fields = {"digest": "0" * 16, "tokenizer_digest": "0" * 16, "num_layers": 8, "hidden_size": 32}
    return TargetFiles(name="toy", model=str(folder), tokenizer=str(folder), vocab_size=size, context=4096, **fields)


def list_runs(rows: Iterable[TokenRow]) -> list[tuple[list[int], list[int]]]:
    """The supervised runs of samples, each with all ids before it."""
    found = []
    for row in rows:
        ids, mask = row.input_ids.tolist(), row.loss_mask.tolist()
        starts = [at for at in range(len(ids)) if mask[at] and not (at and mask[at - 1])]
        ends = [next((at for at in range(start, len(ids)) if not mask[at]), len(ids)) for start in starts]
        found += [(ids[:start], ids[start:end]) for start, end in zip(starts, ends)]
    return found
