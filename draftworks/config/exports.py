"""Options of exports: formats, dtype, and how GGUF files are written. Torch-free."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from draftworks.config.base import Dtype, Spec

Quantisation = Literal["q8_0"]


GGUF_FORMATS = "gguf_"
"""What names of formats that are GGUF files begin with."""


class GgufSettings(Spec):
    """How GGUF files of a draft are written."""

    pre_tokenizer: str | None = Field(
        default=None,
        description="llama.cpp's name for how the target's tokenizer cuts text (`tokenizer.ggml.pre`); default recognised by "
        "its expressions.",
    )
    quantise: Quantisation | None = Field(
        default=None,
        description="q8_0: matrices in blocks of 32 numbers of 8 bits, and the held-out answers walked with what the blocks "
        "hold; default as `dtype` says.",
    )
    least_kept: float = Field(
        default=0.98,
        gt=0,
        le=1,
        description="Share of the draft's acceptance length that a quantised one has to keep; with less it is not published.",
    )


class ExportSettings(Spec):
    """Formats and dtype in which a draft is exported for servers."""

    formats: list[str] | None = Field(
        default=None, description="Names of export formats of the strategy; default all that fit, [] for no export."
    )
    dtype: Dtype = Field(default="bfloat16", description="Dtype of the exported weights.")
    gguf: GgufSettings = Field(default_factory=GgufSettings)

    @model_validator(mode="after")
    def _gguf_is_written(self) -> ExportSettings:
        if self.gguf != GgufSettings() and not self.names_gguf:
            raise ValueError(
                "gguf is set, but formats names no GGUF file, such as gguf_eagle3: add it, or leave gguf out"
            )
        return self

    @property
    def names_gguf(self) -> bool:
        return any(name.startswith(GGUF_FORMATS) for name in self.formats or ())

    @property
    def quantises(self) -> bool:
        """Whether a draft is quantised, and walked before it is handed out."""
        return self.gguf.quantise is not None and self.names_gguf

    @model_serializer(mode="wrap")
    def _leave_out_what_is_not_said(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Keys that are newer than existing exports are left out at their defaults, so that these stay hits."""
        values = dump(self)
        return {name: value for name, value in values.items() if name != "gguf" or self.gguf != GgufSettings()}
