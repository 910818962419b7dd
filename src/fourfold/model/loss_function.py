"""Loss functions: what computes the loss of a model's outputs: a function of the user, or the model itself.

Law: a loss gets the batch that it is for, or the batch is refused.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from fourfold.axes.tensor.work.split_logits import whole_logits
from fourfold.model.batch import Microbatch, input_names
from fourfold.model.model_call import model_loss
from fourfold.torch_kit.tensor_tree import tree_map
from fourfold.torch_kit.torch_private import is_compiled_function
from fourfold.words.error_notes import describe_function
from fourfold.words.errors import Problem, TaskError


class LossFunction(Protocol):
    """What computes a loss."""

    is_of_model: bool
    """Whether the model computes its loss itself, in its forward."""
    is_compiled: bool
    """Whether the function is compiled. It is then not observed: under a mode it would run uncompiled."""

    def __call__(self, outputs: Any, part: Microbatch) -> Any:
        """The loss of a microbatch. Raises TaskError for targets that are missing, or not used."""
        ...

    def modules(self, model: nn.Module) -> nn.ModuleList:
        """The modules that the function is, or holds as a method, a partial or a closure; not the model's."""
        ...

    def with_new_graph(self, outputs: Any) -> Any:
        """The outputs, as the start of a graph of what the function computes of them."""
        ...


class ModelLoss:
    """The loss is among the model's outputs."""

    is_of_model, is_compiled = True, False

    def __call__(self, outputs: Any, part: Microbatch) -> Any:
        if part.targets is not None:
            got = "a batch (inputs, targets), and loss = None"
            need = "inputs only, as a dict with the labels among them: the model returns the loss"
            raise TaskError(Problem(got, need, "samples that are dicts, or loss(outputs, targets)"), where="the batch")
        return model_loss(outputs, part.inputs)

    def modules(self, model: nn.Module) -> nn.ModuleList:
        return nn.ModuleList()

    def with_new_graph(self, outputs: Any) -> Any:
        return outputs


class UserLoss:
    """A function loss(outputs, targets)."""

    is_of_model = False

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self._function, self.is_compiled = function, is_compiled_function(function)

    def __call__(self, outputs: Any, part: Microbatch) -> Any:
        if part.targets is None:
            got = f"a batch of {input_names(part.inputs)} without targets, and a loss(outputs, targets)"
            attempt = "loss=None to train the loss that the model returns, or samples (inputs, targets)"
            raise TaskError(Problem(got, "targets for the loss", attempt), where="the batch")
        if self.is_compiled:  # the compiler would look into the collectives that gather logits
            outputs = tree_map(outputs, whole_logits)
        return self._function(outputs, part.targets)

    def __str__(self) -> str:
        return describe_function(self._function)

    def modules(self, model: nn.Module) -> nn.ModuleList:
        function: Any = self._function
        objects = [function, getattr(function, "__self__", None), getattr(function, "func", None)]
        objects += [*getattr(function, "args", ()), *(getattr(function, "keywords", None) or {}).values()]
        cells = getattr(function, "__closure__", None) or ()
        objects += [cell.cell_contents for cell in cells if _is_cell_filled(cell)]
        of_model = set(model.modules())
        modules = dict.fromkeys(each for each in objects if isinstance(each, nn.Module))
        return nn.ModuleList(module for module in modules if module not in of_model)

    def with_new_graph(self, outputs: Any) -> Any:
        return tree_map(outputs, _require_grad)


def _require_grad(tensor: Tensor) -> Tensor:
    """A tensor from which autograd starts a new graph; integers as they are."""
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


def _is_cell_filled(cell: Any) -> bool:
    """Whether a closure's variable has a value yet."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
