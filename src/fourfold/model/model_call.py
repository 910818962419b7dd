"""Model calls: a model called on the inputs of a batch, its mode, and the loss among its outputs."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fourfold.model.batch import find_positions, has_token_dim, input_names
from fourfold.torch_kit.tensor_tree import tree_leaves, tree_map
from fourfold.words.error_notes import innermost_self
from fourfold.words.errors import Problem, TaskError


def call_model(model: torch.nn.Module, inputs: Any, real_tokens: Tensor | None = None) -> Any:
    """The model's outputs, without those of padding tokens. A dict of inputs is passed as keyword arguments.

    `real_tokens`: the indices of the tokens that are not padding; None: all.
    """
    try:
        outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    except RuntimeError as error:
        if "type" in str(error) and (note := _dtype_note(innermost_self(error, torch.nn.Module), inputs)):
            error.add_note(note)
        raise
    if real_tokens is None:
        return outputs
    length = find_positions(inputs).shape[1]
    return tree_map(outputs, lambda tensor: tensor[:, real_tokens] if has_token_dim(tensor, length) else tensor)


TRAINED_DTYPES = "trained_dtypes"  # of a module that is converted for a comparison: its weights' dtypes before


def _dtype_note(failed: torch.nn.Module, inputs: Any) -> str:
    """What to do if no input has a dtype of the failed module's weights, as the columns of a table often have not."""
    weights = list(failed.parameters(recurse=False))
    dtypes = [each.dtype for each in tree_leaves(inputs)], [each.dtype for each in weights]
    # `verify` computes in float64: advice is about the dtype that is trained.
    trained = getattr(failed, TRAINED_DTYPES, dtypes[1])
    given, held, needed = (sorted({str(each).removeprefix("torch.") for each in some}) for some in (*dtypes, trained))
    takes_indices = isinstance(failed, torch.nn.Embedding | torch.nn.EmbeddingBag)
    if not needed or takes_indices or {*given} & {*held}:
        return ""
    # Not every source has a dtype= of its own.
    attempt = f"x.to(torch.{needed[0]}) in forward or in ff.Transformed(source, …); or dtype= of ff.open_source, or of "
    attempt += "fourfold feed pack"
    if any(each.startswith("complex") for each in given):  # a cast would drop the imaginary parts
        attempt = "torch.view_as_real in the source, or weights of that dtype"
    need = f"what the weights take, of {', '.join(needed)}"
    return f"  inputs of {', '.join(given)}\n    need {need}\n    try {attempt}"


@contextlib.contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode; afterwards every module is back in its own mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def model_loss(outputs: Any, inputs: Any) -> Any:
    """The loss among a model's outputs: `.loss`, ["loss"], or the only scalar of a tuple. Raises TaskError."""
    if isinstance(outputs, Tensor):
        return outputs
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, tuple | list):
        tensors = [each for each in outputs if isinstance(each, Tensor)]
        scalars = [each for each in tensors if each.dim() == 0 and each.is_floating_point()]
        loss = scalars[0] if len(scalars) == 1 else None
    if isinstance(loss, Tensor):
        return loss
    got = f"loss = None, and outputs ({type(outputs).__name__}) without a loss, of inputs {input_names(inputs)}"
    need = 'outputs with .loss, ["loss"], or one scalar in a tuple'
    raise TaskError(Problem(got, need, '"labels" in each sample, or loss(outputs, targets)'), where="the loss")
