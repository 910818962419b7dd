"""Optimizer proxy: an optimizer that stands for another one, whose state, groups and attributes it shows as its own.

Law: whatever torch, a scheduler or a GradScaler reads or sets on the proxy, it reads or sets on the wrapped optimizer,
except the attributes that the proxy's own class gives it until `_is_built` is set.
"""

from typing import Any

import torch


class OptimizerProxy(torch.optim.Optimizer):
    """Forwards to `_optimizer`. A subclass sets `_optimizer` first, and `_is_built` last."""

    _optimizer: torch.optim.Optimizer
    _is_built: bool

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:  # type: ignore[override]
        self._optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._optimizer.state

    @state.setter
    def state(self, state: Any) -> None:  # type: ignore[override]
        self._optimizer.state = state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set attributes that the proxy does not have, such as a GradScaler's scale, on the wrapped optimizer."""
        if self._is_own_attribute(name):
            super().__setattr__(name, value)
        else:
            setattr(self._optimizer, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own_attribute(name):
            super().__delattr__(name)
        else:
            delattr(self._optimizer, name)

    def _is_own_attribute(self, name: str) -> bool:
        attributes = self.__dict__
        return name in attributes or "_is_built" not in attributes or hasattr(type(self), name)
