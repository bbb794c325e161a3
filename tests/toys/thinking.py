"""A target whose chat template thinks as Qwen 3's does: a switch, and earlier answers without their thoughts."""

from __future__ import annotations

from pathlib import Path

from draftworks.config.run_files import TargetFiles

THINKING_TEMPLATE = """\
{%- set asked = namespace(last=-1) -%}
{%- for message in messages if message.role == 'user' -%}{%- set asked.last = messages.index(message) -%}{%- endfor -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'assistant' and '</think>' in message.content -%}
        {%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
        {%- if loop.index0 > asked.last -%}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}{%- endif -%}
        {{- message.content.split('</think>')[-1].lstrip('\\n') -}}
    {%- else -%}
        {{- message.content -}}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""


def thinking_target(target: TargetFiles, folder: Path) -> TargetFiles:
    """A target with this template instead of its own."""
    path = folder / "thinking.jinja"
    path.write_text(THINKING_TEMPLATE)
    return target.model_copy(update={"chat_template": str(path)})
