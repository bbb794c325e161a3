"""The training backend of several processes: FSDP2, on gloo and NCCL alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from draftworks.drafts.strategy import DraftStrategy
from draftworks.errors import ConfigError
from draftworks.training.backend import TrainingBackend


class FSDPTrainingBackend(TrainingBackend):
    """FSDP2 (`fully_shard`): the strategy's blocks, then the whole model, over all ranks of the process group; or HSDP.

    The sharded fp32 parameters are the masters; forward and backward see them in `compute_dtype`, gradients are reduced
    in fp32. Weights stay whole between forward and backward of a window (ZeRO-2): drafts are small.

    Args:
        device: the device of this rank. Needs an initialised process group; one of a single rank is enough.
        ranks_per_copy: HSDP: consecutive ranks, such as those of one node, that shard one copy of the weights; gradients
            are reduced inside a copy and then summed over the copies. None: one copy over all ranks.
    """

    def __init__(
        self,
        device: torch.device,
        compute_dtype: torch.dtype = torch.float32,
        ranks_per_copy: int | None = None,
    ) -> None:
        self.device = device
        self._ranks_per_copy = ranks_per_copy
        # Inputs are not cast: the teacher's hidden states in bf16 would have other argmaxes. Models cast what they need.
        self._policy = MixedPrecisionPolicy(compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        self._model: nn.Module | None = None
        self._parameters: dict[str, nn.Parameter] = {}

    def prepare_model(self, strategy: DraftStrategy) -> None:
        mesh = make_mesh(self.device.type, dist.get_world_size(), self._ranks_per_copy)
        model = strategy.model.to(self.device)
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
        for module in [*strategy.fsdp_blocks(), model]:
            fully_shard(module, mesh=mesh, mp_policy=self._policy, reshard_after_forward=False)
        for method in strategy.model_methods:
            register_fsdp_forward_method(model, method)
        for module in _sharded(model):
            # In this order: a divide factor alone would select a pre-multiplied sum, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
        self._model = model
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    @property
    def model(self) -> FSDPModule:
        """The draft, sharded in place by `fully_shard`, which makes its class an FSDPModule too."""
        if not isinstance(self._model, FSDPModule):
            raise RuntimeError("prepare_model has not been called")
        return self._model

    def backward(self, loss: Tensor, *, is_boundary: bool = True) -> None:
        self.model.set_requires_gradient_sync(is_boundary)
        self.model.set_reshard_after_backward(is_boundary)
        loss.backward()

    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self._parameters

    def full_state_dict(self) -> dict[str, Tensor]:
        model: Any = self.model
        return cast(
            dict[str, Tensor],
            get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)),
        )


def make_mesh(device_type: str, world_size: int, ranks_per_copy: int | None) -> DeviceMesh:
    """Return the mesh over which weights are sharded: 1-D, or 2-D (copy, shard) if there are several copies.

    Raises:
        ConfigError: the ranks cannot be divided into copies of that size.
    """
    if ranks_per_copy is None or ranks_per_copy == world_size:
        return init_device_mesh(device_type, (world_size,))
    if world_size % ranks_per_copy:
        raise ConfigError(
            f"training.shard_within: node needs as many ranks on each node, found {world_size} ranks, {ranks_per_copy} of"
            " them on this one"
        )
    return init_device_mesh(
        device_type, (world_size // ranks_per_copy, ranks_per_copy), mesh_dim_names=("copy", "shard")
    )


def _sharded(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
