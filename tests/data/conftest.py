"""Targets with the tiny tokenizer and the chat templates of well-known model families."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from draftworks.config.run_files import TargetFiles
from draftworks.data.chat import ChatTokenizer

LLAMA3 = (
    "{{- bos_token -}}{%- for m in messages -%}"
    "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' -}}"
    "{%- if m['role'] == 'assistant' -%}{%- generation -%}{{- m['content'] | trim + '<|eot_id|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- m['content'] | trim + '<|eot_id|>' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"
)
QWEN = (
    "{%- if messages[0]['role'] != 'system' -%}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}{%- endif -%}"
    "{%- for m in messages -%}{{- '<|im_start|>' + m['role'] + '\\n' -}}"
    "{%- if m['role'] == 'assistant' -%}{%- generation -%}{{- m['content'] + '<|im_end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- m['content'] + '<|im_end|>' -}}{%- endif -%}{{- '\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
VICUNA = (
    "{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}{{- 'ASSISTANT: ' -}}"
    "{%- generation -%}{{- m['content'].strip() + '<|eot_id|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- m['role'] | upper + ': ' + m['content'].strip() + '\\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'ASSISTANT: ' -}}{%- endif -%}"
)
TEMPLATES = {"llama3": LLAMA3, "qwen": QWEN, "vicuna": VICUNA}
EXTRA_SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def without_markers(template: str) -> str:
    return re.sub(r"\{%-? (end)?generation -?%\}", "", template)


MakeTarget = Callable[..., TargetFiles]


@pytest.fixture(scope="session")
def make_target(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeTarget:
    """A target with the tiny tokenizer, more special tokens, a template (None = none), trimmed offsets if asked."""

    def make(template: str | None, trim_offsets: bool = False) -> TargetFiles:
        folder = tmp_path_factory.mktemp("target")
        content = json.loads((tiny_folder / "tokenizer.json").read_text())
        for number, token in enumerate(EXTRA_SPECIAL, start=2048):
            content["added_tokens"].append({**content["added_tokens"][0], "id": number, "content": token})
        if trim_offsets:
            flags = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
            content["post_processor"] = {"type": "ByteLevel", **flags}
        (folder / "tokenizer.json").write_text(json.dumps(content))
        config = json.loads((tiny_folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": EXTRA_SPECIAL[0]}))
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        fields = {"digest": "0" * 16, "tokenizer_digest": "0" * 16, "num_layers": 8, "hidden_size": 128}
        return TargetFiles(name="toy", model=str(folder), tokenizer=str(folder), vocab_size=2052, context=512, **fields)

    return make


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    return TEMPLATES


@pytest.fixture(scope="session")
def tiny_chat(tiny_target: TargetFiles) -> ChatTokenizer:
    return ChatTokenizer.load(tiny_target)


@pytest.fixture(scope="session")
def chats(make_target: MakeTarget) -> dict[str, ChatTokenizer]:
    """Tokenizers by `family`, `family-plain` (no markers) and `family-trimmed` (offsets without white space)."""
    found = {}
    for family, template in TEMPLATES.items():
        found[family] = ChatTokenizer.load(make_target(template))
        found[f"{family}-plain"] = ChatTokenizer.load(make_target(without_markers(template)))
        found[f"{family}-trimmed"] = ChatTokenizer.load(make_target(without_markers(template), trim_offsets=True))
    return found
