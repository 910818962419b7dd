"""Module specs: what the rules of the tensor axis need to know of a model, as plain data.

Law: a meta model has the same specs as the model itself.
"""

import sys
from collections.abc import Iterator

from torch import Tensor, nn

from fourfold.axes.tensor.rules.styles import ModuleSpec

# kind -> the classes whose forward does what the kind says
CLASSES: dict[str, tuple[type[nn.Module], ...]] = {
    "linear": (nn.Linear,),
    "embedding": (nn.Embedding,),
    "group_norm": (nn.GroupNorm,),
    "convolution": (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    "transposed_convolution": (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    "attention": (nn.MultiheadAttention,),
}


def module_specs(model: nn.Module) -> list[ModuleSpec]:
    """All modules of the model, each once, under its first name."""
    read_by_parent = _read_by_parent(model)
    return [_spec(name, module, read_by_parent) for name, module in model.named_modules()]


def tied_names(model: nn.Module) -> dict[str, str]:
    """The other names of parameters that have several: the name -> the first one, as `named_parameters` has it."""
    first: dict[Tensor, str] = {}
    names = ((name, first.setdefault(p, name)) for name, p in model.named_parameters(remove_duplicate=False))
    return {name: known for name, known in names if name != known}


def _spec(name: str, module: nn.Module, read_by_parent: dict[nn.Module, str]) -> ModuleSpec:
    class_name = type(module).__name__
    parameters = {key: tuple(p.shape) for key, p in module.named_parameters(recurse=False, remove_duplicate=False)}
    counts = {key: n for key, n in vars(module).items() if type(n) is int and not key.startswith("_")}
    if parent := read_by_parent.get(module):
        return ModuleSpec(name, "other", parameters, counts, f"{class_name} whose weight {parent} reads itself")
    if options := _embedding_options(module):
        class_name += f" with {' and '.join(options)}"
    is_called = getattr(module.forward, "__func__", None) is not nn.Module.forward
    return ModuleSpec(name, module_kind(module), parameters, counts, class_name, is_called)


def module_kind(module: nn.Module) -> str:
    """The kind of a module, as in `ModuleSpec`. "other" also for a layer that does more than its kind says."""
    for kind, classes in _classes().items():
        for each in classes:
            # A subclass with a forward of its own may compute something else.
            if isinstance(module, each) and (type(module).forward is each.forward or _is_scaled(module)):
                return "other" if _embedding_options(module) else kind
    if isinstance(module, nn.MultiheadAttention):
        return "attention"
    is_norm = "norm" in type(module).__name__.lower() and all(p.ndim == 1 for p in module.parameters(recurse=False))
    return "norm" if is_norm and not any(True for _ in module.children()) else "other"


def _is_scaled(module: nn.Module) -> bool:
    """Whether a module is an embedding of transformers that only multiplies what nn.Embedding returns."""
    cls = type(module)
    return cls.__name__.endswith("ScaledWordEmbedding") and cls.__module__.startswith("transformers.")


def _embedding_options(module: nn.Module) -> list[str]:
    """Options of an embedding that need all rows at once, or gradients of another layout."""
    if not isinstance(module, nn.Embedding):
        return []
    options = {
        "max_norm": module.max_norm is not None,
        "scale_grad_by_freq": module.scale_grad_by_freq,
        "sparse gradients": module.sparse,
    }
    return [name for name, is_set in options.items() if is_set]


def _classes() -> dict[str, tuple[type[nn.Module], ...]]:
    """CLASSES, with the Conv1D of transformers if that library is imported."""
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return CLASSES if conv1d is None else {**CLASSES, "conv1d": (conv1d,)}


def _read_by_parent(model: nn.Module) -> dict[nn.Module, str]:
    """Layers whose weights the module around them gives to a fused kernel in evaluation, without calling them."""

    def found() -> Iterator[tuple[nn.Module, str]]:
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoderLayer):
                yield from ((layer, "nn.TransformerEncoderLayer") for layer in (module.linear1, module.linear2))

    return dict(found())
