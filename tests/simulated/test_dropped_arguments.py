"""Laws of our torch function modes: a torch function is called with all the arguments that it was given."""

import ast
import contextlib
import inspect
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, _tensor, nn

from fourfold.model.fixed_random import without_randomness
from fourfold.model.sdpa_interception import intercept_attention
from fourfold.model.torch_losses import observing
from fourfold.plan.plan import Plan
from fourfold.proof.float64_mode import Float64Mode
from fourfold.proof.weight_write_check import WeightWriteTracker
from fourfold.step.initial_model import _SkipRandomInit
from fourfold.step.memory_bound import _LayerInputMode
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.torch_kit.param_access import DROPPED_ARGUMENTS, ParamAccess
from tests.cases import SEED_LOCK

MODES = {
    "without randomness": lambda: without_randomness(torch.device("cpu")),
    "observing": observing,
    "exact": Float64Mode,
    "routed": lambda: intercept_attention(lambda call: call.run_sdpa()),
    "weight writes": lambda: WeightWriteTracker(nn.Linear(1, 1)),
    "layers": _LayerInputMode,
    "without values": _SkipRandomInit,
}


def wide(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) / 7


def with_out() -> Tensor:
    out = torch.empty(2, 3, dtype=torch.float64)
    torch.chain_matmul(wide(2, 4), wide(4, 5), wide(5, 3), out=out)
    return out


def dim_order() -> str:
    try:
        return str(torch.empty(1, 2, 1).dim_order(ambiguity_check=True))
    except RuntimeError as error:
        return str(error)


A, B = wide(2, 3), wide(2, 3) ** 2
WEIGHT: dict[str, Any] = {"weight": wide(2, 3)}  # torch's annotations lack it
POSITIONAL: Any = (None, None, "sum", wide(2, 3))
CALLS = {
    "l1_loss": lambda: F.l1_loss(A, B, **WEIGHT),
    "l1_loss, unreduced": lambda: F.l1_loss(A, B, reduction="none", **WEIGHT),
    "l1_loss, positional": lambda: F.l1_loss(A, B, *POSITIONAL),
    "l1_loss without weight": lambda: F.l1_loss(A, B),
    "mse_loss": lambda: F.mse_loss(A, B, **WEIGHT),
    "huber_loss": lambda: F.huber_loss(A, B, **WEIGHT),
    "chain_matmul": with_out,
    "dim_order": dim_order,
}


@pytest.mark.filterwarnings("ignore:.*chain_matmul is deprecated")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", MODES)
def test_a_torch_function_mode_drops_no_argument(mode, call):
    expected = CALLS[call]()
    for others in ([], [observing], [MODES[mode]]):
        with contextlib.ExitStack() as stack:
            for each in (MODES[mode], *others):
                stack.enter_context(each())
            got = CALLS[call]()
        assert torch.equal(got, expected) if isinstance(expected, Tensor) else got == expected


def test_a_tracked_parameter_drops_no_argument():
    weight = nn.Parameter(wide(2, 3))
    expected = F.l1_loss(weight, B, **WEIGHT)
    uses = ParamAccess([[weight]])
    assert torch.equal(F.l1_loss(weight, B, **WEIGHT), expected)
    uses.close()


def test_a_weighted_mean_trains_with_its_weights_where_ranks_share_sequences():
    tokens = torch.arange(64).view(4, 16) % 9
    batch = {"tokens": tokens, "positions": torch.arange(16).expand(4, 16)}, tokens

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        options: dict[str, Any] = {"reduction": "none", "weight": outputs.detach().square()}
        return F.l1_loss(outputs, F.one_hot(targets, 9).to(outputs), **options).mean(-1)

    def body(comm):
        with SEED_LOCK:
            torch.manual_seed(3)
            model = Attending().double()
        step = TrainStep(model, loss, lambda p: torch.optim.SGD(p, lr=0.1), plan=plan, communicator=comm, clip=None)
        return [step(batch).loss for _ in range(3)]

    plan = Plan()
    (expected,) = threads.run(1, body)
    plan = Plan(cp=2)
    for got in threads.run(2, body):
        assert got == pytest.approx(expected, rel=1e-9)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = (self.table(tokens) + 0.1 * positions[..., None])[:, None]
        return self.head(F.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0])


# These pass their arguments to modes in another form.
CHANGED = {"einsum", "backward", "grad"}


@pytest.mark.parametrize("module", [torch.functional, F, _tensor, nn.init, torch.autograd])
def test_all_arguments_that_torch_drops_are_listed(module: ModuleType):
    known = {func.__name__: set(names) for func, names in DROPPED_ARGUMENTS.items()}
    assert _dropped(module) == {name: known[name] for name in _dropped(module) if name in known}


def _dropped(module: ModuleType) -> dict[str, set[str]]:
    """By function: the parameters that it does not pass to modes."""
    found: dict[str, set[str]] = {}
    functions = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        for call in (each for each in calls if getattr(each.func, "id", "") == "handle_torch_function"):
            if any(isinstance(keyword.value, ast.Name) and keyword.arg is None for keyword in call.keywords):
                continue  # **kwargs
            passed = [*call.args[2:], *(keyword.value for keyword in call.keywords)]
            names = {node.id for each in passed for node in ast.walk(each) if isinstance(node, ast.Name)}
            given = function.args
            own = [*given.posonlyargs, *given.args, *given.kwonlyargs, *([given.vararg] if given.vararg else [])]
            if function.name not in CHANGED and (missing := {each.arg for each in own} - names):
                found.setdefault(function.name, set()).update(missing)
    return found
