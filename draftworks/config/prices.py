"""What GPUs and storage cost a deployment. Torch-free."""

from __future__ import annotations

from pydantic import Field

from draftworks.config.base import Spec


class PricesSpec(Spec):
    """Prices with which `draftworks plan` turns hours and bytes into money."""

    gpu_hour: float = Field(
        default=0.0, ge=0, description="One GPU for one hour; a process on the CPU counts as a GPU does."
    )
    storage_gb_month: float = Field(default=0.0, ge=0, description="10^9 bytes of features and results for one month.")
    currency: str = Field(default="USD", min_length=1, max_length=16, description="Name of the currency, as shown.")
