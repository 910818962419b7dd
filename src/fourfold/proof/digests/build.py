"""Same build: ranks compare what they build a step of, before anything else that is collective.

setting   a plain attribute of a module: a number, a text, a function, or a container or configuration of such
code      the bytecode of a function, with its names and constants; that of all methods for a class of the user's
Law: the exchange is the same whatever a rank builds, and it is the first. So ranks with another model or another plan,
whose next collectives would not pair up, raise the same PlanError, and none waits for another.
Law: two models that were made in the same way have the same items in every process. Values of weights are not read.

Not compared: attributes that begin with `_`, tensors, objects of other classes than configurations (but their class),
and attributes whose name says that they are a rank's own (`RANK_WORDS`).
"""

import dataclasses
import enum
import functools
import inspect
import itertools
import platform
import re
import secrets
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fourfold.comm.communicator import Communicator
from fourfold.model.batch import named_values
from fourfold.optim.user_optimizer import group_indices
from fourfold.plan.plan import Plan
from fourfold.proof.digests.table import DIGEST_BITS, Item, check_same_items, digest, digest_bytes
from fourfold.torch_kit.option_text import describe_options
from fourfold.words.field import value_text
from fourfold.words.version import VERSION

# ---- structure -----------------------------------------------------------------------------------------------------

_RANK_WORDS = (
    "rank ranks device devices gpu host hostname pid seed generator logger verbose debug main master chief primary "
    "path dir folder file time timestamp"
)
RANK_WORDS = frozenset(_RANK_WORDS.split())
"""A word of an attribute's name that says it is a rank's own, such as `local_rank` and `log_dir`."""
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has
HOOKS = (
    *(key for key in sorted(_OF_MODULES) if key.endswith("_hooks")),
    "_post_accumulate_grad_hooks",
)
MAX_DEPTH = 4  # containers and configurations in each other
MAX_TEXT = 120
_CONFIGURATIONS = ("Config", "Namespace")  # ends of names of classes


def model_items(model: nn.Module, shape: Callable[[Tensor], Any]) -> Iterator[Item]:
    """Modules in order, each with its settings, parameters and buffers. `shape`: what of a tensor's shape matters."""
    codes: dict[type, str] = {}
    names: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        mode = "" if module.training else ", in evaluation mode"
        yield f"module {name}" if name else "the model", f"{_class_text(type(module), codes)}{mode}"
        prefix = f"{name}." if name else ""
        for key, value in sorted(vars(module).items()):
            is_setting = key not in _OF_MODULES and not key.startswith("_") and not _is_of_a_rank(key)
            if is_setting and (text := _describe(value)) is not None:
                yield prefix + key, text
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        for key, tensor in itertools.chain(own, module.named_buffers(recurse=False, remove_duplicate=False)):
            first = names.setdefault(id(tensor), prefix + key)
            yield prefix + key, f"the same as {first}" if first != prefix + key else _tensor_text(tensor, shape)


def hook_items(model: nn.Module) -> list[Item]:
    """The hooks of modules and of their parameters, in order."""
    owners = itertools.chain(model.named_modules(), model.named_parameters())
    hooks = ((name, getattr(owner, key, None) or {}) for name, owner in owners for key in HOOKS)
    return [(f"a hook of {name}", _describe(hook) or "") for name, found in hooks for hook in found.values()]


def function_items(function: Any) -> list[Item]:
    """A loss: a function, an object that is called, a module, or None."""
    if isinstance(function, nn.Module):
        return list(model_items(function, lambda tensor: list(tensor.shape)))
    return [("loss", _describe(function) or "")]


def _tensor_text(tensor: Tensor, shape: Callable[[Tensor], Any]) -> str:
    if nn.parameter.is_lazy(tensor):
        return "lazy"
    is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{shape(tensor)} {str(tensor.dtype).removeprefix('torch.')}{', frozen' if is_frozen else ''}"


def _is_of_a_rank(name: str) -> bool:
    return not RANK_WORDS.isdisjoint(re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().split("_"))


def _class_name(kind: type) -> str:
    return re.sub(r"^torch\.nn\.modules\.\w+\.", "torch.nn.", f"{kind.__module__}.{kind.__qualname__}")


def _class_text(kind: type, codes: dict[type, str]) -> str:
    """The class's name; of a user's class also a digest of its code, which may differ between copies of a file."""
    if kind not in codes:
        own = [each for each in kind.__mro__ if not each.__module__.startswith(("torch.", "builtins"))]
        functions = [(key, value) for each in own for key, value in vars(each).items() if inspect.isfunction(value)]
        code = "".join(f"{key} {_code(function.__code__)}\n" for key, function in functions)
        codes[kind] = _class_name(kind) + (f" (code {digest_bytes(code.encode()) & 0xFFFFFFFF:08x})" if code else "")
    return codes[kind]


def _describe(value: Any, depth: int = MAX_DEPTH) -> str | None:
    """A setting as text; None if it is not compared."""
    text = _plain_text(value, depth)
    if text is None or len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]}… (digest {digest_bytes(text.encode()) & 0xFFFFFFFF:08x})"


def _plain_text(value: Any, depth: int) -> str | None:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | enum.Enum):
        return str(value) if isinstance(value, enum.Enum) else repr(value)
    if isinstance(value, torch.dtype | torch.memory_format | torch.Size):
        return str(value)
    if isinstance(value, Tensor | torch.device | torch.Generator) or depth == 0:
        return None
    if isinstance(value, type):
        return _class_name(value)
    if isinstance(value, functools.partial):
        return _container("partial", [value.func, value.args, value.keywords], depth)
    if isinstance(value, types.FunctionType):
        return _function_text(value, depth)
    if isinstance(value, types.MethodType | types.BuiltinFunctionType):
        return value.__qualname__
    if isinstance(value, dict):
        return _mapping("", value, depth)
    if isinstance(value, list | tuple):
        return _container("", value, depth)
    if isinstance(value, set | frozenset):
        return _container("", sorted(str(_plain_text(each, depth - 1)) for each in value), depth)
    name = _class_name(type(value))
    if not isinstance(value, nn.Module) and (dataclasses.is_dataclass(value) or name.endswith(_CONFIGURATIONS)):
        public = {key: each for key, each in sorted(getattr(value, "__dict__", {}).items()) if key[:1] != "_"}
        return _mapping(name, public, depth)
    return name


def _container(name: str, values: Any, depth: int) -> str:
    return f"{name}({', '.join(str(_plain_text(each, depth - 1)) for each in values)})"


def _mapping(name: str, values: Mapping[Any, Any], depth: int) -> str:
    named = [(key if isinstance(key, str) else str(_plain_text(key, 1)), value) for key, value in values.items()]
    texts = [f"{key}: {_plain_text(value, depth - 1)}" for key, value in named if not _is_of_a_rank(key)]
    return f"{name}({', '.join(texts)})"


def _function_text(function: types.FunctionType, depth: int) -> str:
    """Name and code of a function, with its default values and what it has kept of the functions around it."""
    kept = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    cells = {name: cell.cell_contents for name, cell in kept if cell != types.CellType()}
    values = _mapping("", {**cells, "defaults": function.__defaults__, **(function.__kwdefaults__ or {})}, depth)
    text = f"{_code(function.__code__)} {values}"
    return f"{function.__module__}.{function.__qualname__} (code {digest_bytes(text.encode()) & 0xFFFFFFFF:08x})"


def _code(code: types.CodeType) -> str:
    """The same in every process: sets among constants are in the order of a process."""
    constants = [_code(each) if isinstance(each, types.CodeType) else _plain_text(each, 2) for each in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


# ---- build ---------------------------------------------------------------------------------------------------------


NOT_OF_THE_USER = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[2]))
"""Folders of Python's library and of this package."""


def check_same_build(
    ranks: Communicator,
    call: str,
    model: nn.Module,
    *,
    plan: Plan,
    options: Mapping[str, Any],
    loss: Any = None,
    optimizer: Optimizer | None = None,
    shape: Callable[[Tensor], Any] = lambda tensor: list(tensor.shape),
) -> None:
    """Raise PlanError, on every rank, unless all ranks build the same step. Collective; of the whole world.

    call       what builds it, such as "ff.parallelize"
    optimizer  None: it is made later, see `check_same_optimizer`
    shape      what of a tensor's shape must be the same
    """
    kinds: dict[str, Iterable[Item]] = {
        "call": [("", call)],
        "versions": version_items(),
        "plan": [(name, value_text(value)) for name, value in dataclasses.asdict(plan).items()],
        "options": [(name, str(value)) for name, value in options.items()],
        "model": model_items(model, shape),
        "loss": function_items(loss),
    }
    if optimizer is not None:
        kinds["optimizer"] = optimizer_items(optimizer, model)
    check_same_items(ranks, kinds)


def check_same_optimizer(ranks: Communicator, optimizer: Optimizer, model: nn.Module) -> None:
    """Raise PlanError, on every rank, unless all ranks have the same optimizer. Collective."""
    check_same_items(ranks, {"optimizer": optimizer_items(optimizer, model)})


def version_items() -> list[Item]:
    python = ".".join(platform.python_version_tuple()[:2])
    return [("fourfold", VERSION), ("torch", torch.__version__), ("Python", python)]


def build_digest(model: nn.Module, plan: Plan, options: Mapping[str, Any], loss: Any, batch: tuple[Any, Any]) -> int:
    """Of what decides whether a step on such a batch is right: the model, the loss, their code and hooks, the plan, the
    options, packages, and the batch's names, dtypes and dims, but no size and no value. A batch without samples, which
    shows nothing, has the digest of no other.
    """
    tensors = [(name, each) for name, each in named_values("batch", batch) if isinstance(each, Tensor)]
    items = [
        *version_items(),
        *package_items(model),
        *((name, str(value)) for name, value in (dataclasses.asdict(plan) | dict(options)).items()),
        *model_items(model, lambda tensor: list(tensor.shape)),
        *hook_items(model),
        *function_items(loss),
        *((name, f"{tensor.dtype} {tensor.dim()}") for name, tensor in tensors),
    ]
    return digest(items) if any(tensor.numel() for _, tensor in tensors) else secrets.randbits(DIGEST_BITS)


def package_items(model: nn.Module) -> list[Item]:
    """Versions of the packages that supply modules; and digests of the user's own files, which have no version."""
    packages = sorted({type(module).__module__.partition(".")[0] for module in model.modules()})
    versions = [(name, str(getattr(sys.modules.get(name), "__version__", ""))) for name in packages]
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    own = sorted(filter(_is_of_the_user, files))
    return versions + [("file", str(digest_bytes(Path(file).read_bytes()))) for file in own if Path(file).is_file()]


@functools.lru_cache(maxsize=2**15)  # of thousands of modules, for every step that is built
def _is_of_the_user(file: str) -> bool:
    is_outside = file.endswith(".py") and not file.startswith(NOT_OF_THE_USER)
    return is_outside and {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def optimizer_items(optimizer: Optimizer, model: nn.Module) -> list[Item]:
    """Class, options of the groups, and which parameter is in which group."""
    groups = group_indices(optimizer, dict(model.named_parameters()))
    return [
        *describe_options(optimizer).items(),
        *((f"the group of {name}", str(index)) for name, index in groups.items()),
    ]
