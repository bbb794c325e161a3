"""Plug-in of vLLM: a weight-transfer engine that reads a new draft from the one folder that the server was started with.

All of vLLM's own engines move weights between GPUs. This one needs none: `/update_weights` names nothing but the SHA-256 of
the weights that are to be served, so no request can make the server read another file. A draft that the server cannot take
over is refused before anything is changed, and the former one serves on.

The folder of this file on vLLM's PYTHONPATH is all the installation there is; nothing of Draftworks is imported here.
Start: `--weight-transfer-config '{"backend": "draftworks_folder"}' --additional-config '{"draftworks_folder": FOLDER}'`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngineFactory,
)

BACKEND = "draftworks_folder"
"""Name of the engine, and of the key of `--additional-config` that has the folder."""
CONFIG, WEIGHTS = "config.json", "model.safetensors"
_NOT_SERVED = ("provenance", "transformers_version")
"""Keys of a draft's config.json that do not decide how it is served."""


def register() -> None:
    """Make the engine known to vLLM, once in each of its processes."""
    try:
        WeightTransferEngineFactory.register_engine(BACKEND, FolderEngine)
    except ValueError:
        return  # vLLM may call its plug-ins again


@dataclass
class FolderInitInfo(WeightTransferInitInfo):
    """Nothing: the folder is set when the server starts."""


@dataclass
class FolderUpdateInfo(WeightTransferUpdateInfo):
    """SHA-256 of the `model.safetensors` to be served, in hexadecimal."""

    sha256: str


class FolderEngine(WeightTransferEngine[FolderInitInfo, FolderUpdateInfo]):
    """Loads a draft from `additional_config["draftworks_folder"]`, with the shapes and config of the one served so far.

    Raises (all methods):
        ValueError: the server was not started with a folder, or the draft there is not one that it can take over.
    """

    init_info_cls = FolderInitInfo
    update_info_cls = FolderUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        folder = (vllm_config.additional_config or {}).get(BACKEND)
        if not isinstance(folder, str) or not Path(folder).is_absolute():
            raise ValueError(f'--additional-config: expected {{"{BACKEND}": "/ABSOLUTE/FOLDER"}}, found {folder!r}')
        self._folder = Path(folder)
        self._config = _read_config(self._folder)
        self._shapes = _list_shapes(load((self._folder / WEIGHTS).read_bytes()))

    def init_transfer_engine(self, init_info: FolderInitInfo) -> None:
        """Do nothing: there is no peer to find."""

    def start_weight_update(self) -> None:
        """Do nothing: all is done in `receive_weights`, after the draft was examined."""

    def finish_weight_update(self) -> None:
        """Do nothing, as `start_weight_update`."""

    def shutdown(self) -> None:
        """Do nothing: no file stays open."""

    def receive_weights(self, update_info: FolderUpdateInfo) -> None:
        """Load the draft in the folder into the draft that serves; the target is refused."""
        if self.model is self._default_model:
            raise ValueError("only a draft is exchanged: begin with /start_draft_weight_update")
        tensors = self._read_draft(update_info.sha256)
        own = _leave_out_shared(tensors, self.model, self._default_model)

        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        initialize_layerwise_reload(self.model)
        self.model.load_weights(list(own.items()))  # pyright: ignore[reportCallIssue]
        finalize_layerwise_reload(self.model, self.model_config)

    def _read_draft(self, sha256: str) -> dict[str, Tensor]:
        """Return the tensors of the folder, all read at once, after a comparison with what the server was started with."""
        content = (self._folder / WEIGHTS).read_bytes()
        found = hashlib.sha256(content).hexdigest()
        if found != sha256:
            raise ValueError(f"{self._folder / WEIGHTS}: expected SHA-256 {sha256[:80]!r}, found {found!r}")
        config = _read_config(self._folder)
        other = sorted(key for key in {*config, *self._config} if config.get(key) != self._config.get(key))
        if other:
            raise ValueError(f"{self._folder / CONFIG}: other {', '.join(other)} than at the start: restart the server")
        tensors = load(content)
        shapes = _list_shapes(tensors)
        other = sorted(name for name in {*shapes, *self._shapes} if shapes.get(name) != self._shapes.get(name))
        if other:
            raise ValueError(
                f"{self._folder / WEIGHTS}: other {', '.join(other)} than at the start: restart the server"
            )
        return tensors


def _read_config(folder: Path) -> dict[str, Any]:
    """Return what decides how a draft is served, with the digest of the target that it was trained for."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    target = (config.get("provenance") or {}).get("target_digest")
    return {key: value for key, value in config.items() if key not in _NOT_SERVED} | {"target_digest": target}


def _list_shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: (tensor.dtype, *tensor.shape) for name, tensor in tensors.items()}


def _leave_out_shared(tensors: dict[str, Tensor], draft: nn.Module, target: nn.Module) -> dict[str, Tensor]:
    """Return the tensors without those of modules that the draft shares with the target, which has to keep its weights.

    vLLM shares an embedding or a head where the draft's is equal to the target's.
    """
    of_target = set(target.modules())
    shared = {
        f"{place}.{name}": parameter
        for place, module in draft.named_modules()
        if module in of_target
        for name, parameter in module.named_parameters(recurse=False)
    }
    kept = dict(tensors)
    for place, parameter in shared.items():
        for name in [each for each in tensors if place == each or place.endswith(f".{each}")]:
            given = kept.pop(name).to(parameter.dtype)
            served = parameter.data[: len(given)].cpu()  # vLLM pads vocabularies
            if not torch.equal(given, served):
                raise ValueError(
                    f"{name}: the server shares it with the target, and the new draft has another: restart"
                )
    return kept
