"""Tied weights: what the first place of a pipeline and the last one use together (embedding and head).

owner   the first place: the weight is its parameter
copy    the last place's: a tensor in place of the parameter, which is in no list of parameters
Law: see `axes/pipeline/rules/ties.py`. A copy is trained by its owner only.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fourfold.comm.edges import ReceivingEdge, SendingEdge
from fourfold.torch_kit.torch_private import own_parameters


class TiedWeights:
    """The tied weights of one rank: those that it owns, or its copies; most ranks have none."""

    senders: Sequence[SendingEdge] = ()
    """The end at which this rank sends them, or their gradients."""

    def copy_forward(self) -> None:
        """Send the weights, or receive them: the weights rest whole."""

    def add_gradients(self) -> None:
        """Send the gradients of the copies, or add them to those of the weights."""


class OwnedWeights(TiedWeights):
    """Those of the first place."""

    def __init__(self, weights: Sequence[nn.Parameter], sender: SendingEdge, receiver: ReceivingEdge) -> None:
        self._weights, self._sender, self._receiver = weights, sender, receiver
        self.senders = [sender]

    def copy_forward(self) -> None:
        self._sender.send([weight.detach() for weight in self._weights])

    def add_gradients(self) -> None:
        for weight, gradient in zip(self._weights, self._receiver.receive(), strict=True):
            # The owner's next backward accumulates into it, and the hook takes both.
            weight.grad = gradient if weight.grad is None else weight.grad + gradient


class CopiedWeights(TiedWeights):
    """Those of the last place."""

    def __init__(self, copies: Sequence[Tensor], sender: SendingEdge, receiver: ReceivingEdge) -> None:
        self._copies, self._sender, self._receiver = copies, sender, receiver
        self.senders = [sender]

    @torch.no_grad()
    def copy_forward(self) -> None:
        for copy, weight in zip(self._copies, self._receiver.receive(), strict=True):
            copy.data = weight
            copy.grad = None

    def add_gradients(self) -> None:
        self._sender.send([torch.zeros_like(copy) if copy.grad is None else copy.grad for copy in self._copies])
        for copy in self._copies:
            copy.grad = None


def replace_by_copy(model: nn.Module, names: Sequence[str], parameter: nn.Parameter) -> Tensor:
    """Put a tensor in place of a parameter under each of these names; it is no parameter of the model any more."""
    copy = parameter.detach().clone().requires_grad_(parameter.requires_grad)
    for name in names:
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        del own_parameters(module)[key]
        vars(module)[key] = copy
    return copy


def aliases_of(ties: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """By name of a copy: the weight."""
    return {alias: name for name, aliases in ties.items() for alias in aliases}
