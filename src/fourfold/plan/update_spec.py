"""Update spec: what lowering needs to know of how gradients become an update, besides the plan.

Law: plain data, so that code with torch can describe the optimizer to code without it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class UpdateSpec:
    """How gradients are clipped, and what the optimizer is.

    optimizer              the name of its class
    is_layerwise           its update needs the norms of whole parameters
    num_states             by parameter group: tensors of optimizer state per parameter; needed to count memory
    full_precision_params  the parameters that are computed and updated in their own dtype, whatever the precision
    """

    clip: float | None = None
    optimizer: str = "the optimizer"
    is_layerwise: bool = False
    num_states: tuple[int, ...] = ()
    full_precision_params: frozenset[str] = frozenset()

    def waits_for_norm(self, precision: str) -> bool:
        """Whether updates wait for the norm of all gradients: for a clip, or to know whether they are finite."""
        return self.clip is not None or precision == "fp16"
