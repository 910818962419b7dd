"""Arguments passed in Python: a wrong one raises a FourfoldError that names it."""

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fourfold as ff
from fourfold.plan.rng import generator_seed
from fourfold.show.describe import show
from fourfold.trainer.settings import make_settings
from fourfold.verification.command import verify
from fourfold.words import argument_checks
from fourfold.words.errors import FourfoldError

NAN, INF = math.nan, math.inf
SGD = functools.partial(torch.optim.SGD, lr=0.1)
ODD = [None, "x", b"x", 1.5, -1, NAN, INF, True, [], {}, (), object, object(), 10**400, Fraction(1, 3), np.float32(2)]


def sample(index: int) -> Any:
    return torch.full((4,), float(index)), torch.zeros(1)


class Source:
    """Eight samples; sample 5 is what `odd` returns, if it is given."""

    def __init__(self, odd: Callable[[], Any] | None = None) -> None:
        self.odd = odd

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.odd() if self.odd is not None and index == 5 else sample(index)


def squares(outputs: Any, targets: Any) -> Any:
    return (outputs - targets) ** 2


def task(**given: Any) -> ff.Task:
    fields: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 1),
        "loss": squares,
        "data": lambda: ff.Data(train=Source()),
        "optimizer": SGD,
        "steps": 2,
        "batch_size": 8,
    }
    return ff.Task(**fields | given)


def train(runs: Any, of: ff.Task | None = None, **given: Any) -> ff.FourfoldError | None:
    """The error that a run in this process raises; None if it succeeds."""
    options: dict[str, Any] = {"folder": str(runs), "checkpoint_every": 0, "trace_every": 0, **given}
    try:
        ff.train(of or task(), **options)
    except FourfoldError as error:
        return error
    return None


def refused(run: Callable[[], Any], *words: str) -> None:
    with pytest.raises(FourfoldError) as caught:
        run()
    for word in words:
        assert word in str(caught.value)


@given(st.one_of(st.integers(), st.floats(), st.text(max_size=3), st.none(), st.booleans(), st.sampled_from(ODD)))
def test_argument_checks_never_raise_and_accept_only_valid_values(value: Any) -> None:
    assert bool(argument_checks.int_problems("n", value, minimum=1)) != (type(value) is int and value >= 1)
    for problems in (
        argument_checks.seed_problems(value),
        argument_checks.positive_problems("x", value),
        argument_checks.str_problems("t", value),
    ):
        assert all(problem.got and problem.need for problem in problems)
    if not argument_checks.seed_problems(value):
        torch.Generator().manual_seed(value)


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63, 2**64 - 1])
def test_every_seed_valid_in_torch_gives_each_data_index_a_distinct_valid_seed(seed: int) -> None:
    seeds = [torch.Generator().manual_seed(generator_seed(seed, index)).initial_seed() for index in range(8)]
    assert len(set(seeds)) == 8


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 1.5, "1", None, True, NAN])
def test_a_seed_invalid_in_torch_is_refused_everywhere(seed: Any, tmp_path: Any) -> None:
    want = "need a whole number from -2**63 to 2**64 - 1"
    assert want in str(train(tmp_path, seed=seed))
    refused(lambda: ff.Feed(Source(), batch_size=2, seed=seed), want)
    refused(lambda: ff.parallelize(nn.Linear(4, 1), squares, SGD, seed=seed), want)
    refused(lambda: verify(task(), ff.Plan(), seed=seed), want)


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "steps": (-1, 1.5, "3", NAN),
        "batch_size": (0, -4, 2.5, "4", NAN, True),
        "clip": (0, -1.0, NAN, "a", True),
        "evaluate_every": (-1, 1.5, "a"),
        "trace_every": (-1, None, "a"),
        "checkpoint_every": (-1, None, 1.5),
        "skip_nan": (-1, None, 1.5),
        "peer_timeout": (0, -1.0, "a", NAN),
        "ema": (0, 1, "a", NAN, INF),
        "name": (3, "", "a/b", "..", "a\0b", "a\nb", "\x1b[31m", "x" * 300),
        "folder": (3, None),
        "run_prefix": (None, 3),
        "task_name": (3,),
        "init": (3,),
        "rates": (3, {}),
        "extra_settings": (3, {"a": torch.zeros(1)}),
        "plan": (3, {"dp": 1}, "plan.toml"),
    }.items(),
)
def test_an_invalid_run_setting_is_reported_by_name(name: str, values: tuple[Any, ...], tmp_path: Any) -> None:
    for value in values:
        error = train(tmp_path, **{name: value})
        assert error is not None, value
        assert name in str(error)
        assert error.exit_code == 2


def test_all_wrong_settings_are_reported_at_once(tmp_path: Any) -> None:
    text = str(train(tmp_path, steps=-1, batch_size=0, seed="x", clip=-1, ema=2))
    for name in ("steps", "batch_size", "seed", "clip", "ema"):
        assert f"{name} = " in text


def test_numpy_numbers_are_accepted_and_python_ints_stay_ints() -> None:
    theirs = make_settings(task(), batch_size=np.int64(4), clip=np.float32(2), seed=np.uint8(3))
    assert theirs == make_settings(task(), batch_size=4, clip=2.0, seed=3)
    assert type(make_settings(task(), clip=1).clip) is int


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model", nn.Linear(4, 1), "an instance of Linear"),
        ("model", None, "a function that makes the model"),
        ("data", ff.Data(train=Source()), "a function that opens the data"),
        ("optimizer", torch.optim.SGD([torch.ones(1)], lr=0.25), "functools.partial(torch.optim.SGD, lr=0.25)"),
        ("optimizer", "AdamW", "a function from parameters to a torch optimizer"),
        ("loss", "mse", "a function (outputs, targets) -> loss"),
        ("schedule", 3, "a function (step, steps) -> factor"),
        ("evaluate", 3, "evaluate"),
        ("sample", 3, "sample"),
        ("unit", 3, "unit"),
        ("steps", 1.5, "steps"),
        ("batch_size", 0, "batch_size"),
        ("clip", -1, "clip"),
        ("tuned_for", 0, "tuned_for"),
    ],
)  # fmt: skip
def test_an_invalid_task_is_refused_when_it_is_made(field: str, value: Any, words: str) -> None:
    refused(lambda: task(**{field: value}), words)


@pytest.mark.parametrize("other", [None, 3, "lm", task, ff.Task])
def test_every_function_that_takes_a_task_refuses_anything_else(other: Any, tmp_path: Any) -> None:
    for run in (lambda: ff.train(other), lambda: show(ff.Plan(), other), lambda: verify(other, ff.Plan())):
        refused(run, "need a Task")


@pytest.mark.parametrize("value", [None, "AdamW", 3])
def test_anything_but_an_optimizer_or_its_factory_is_refused(value: Any) -> None:
    refused(lambda: ff.parallelize(nn.Linear(4, 1), squares, value), "optimizer", "a torch optimizer, or a function")


@pytest.mark.parametrize("value", [None, "x", nn.Linear(4, 1, device="meta"), lambda: 3])
def test_anything_but_a_materialized_model_or_its_function_is_refused(value: Any) -> None:
    refused(lambda: ff.parallelize(value, squares, SGD), "the arguments of parallelize", "model")


@pytest.mark.parametrize("value", [None, "x", lambda: nn.Linear(4, 1), nn.Linear, nn.Linear(4, 1, device="meta")])
def test_anything_but_a_materialized_model_cannot_be_wrapped(value: Any) -> None:
    optimizer = torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.1)
    refused(lambda: ff.DistributedOptimizer(optimizer, value), "the arguments of DistributedOptimizer", "model")


def test_distributed_optimizer_wraps_only_torch_optimizers() -> None:
    model = nn.Linear(4, 1)
    for value in (SGD, None, model):
        refused(lambda value=value: ff.DistributedOptimizer(value, model), "need a torch optimizer")  # type: ignore[arg-type]


@pytest.mark.parametrize("lr", [INF, NAN, torch.tensor(INF), -1, None, "a"])
def test_an_invalid_learning_rate_is_refused_before_the_first_step(lr: Any, tmp_path: Any) -> None:
    factory = functools.partial(torch.optim.SGD, lr=lr)
    for run in (
        lambda: ff.parallelize(nn.Linear(4, 1), squares, factory),
        lambda: show(ff.Plan(), task(optimizer=factory)),
    ):
        refused(run)
    assert train(tmp_path, task(optimizer=factory)) is not None


def test_a_nonfinite_option_is_reported_with_its_param_group_but_an_infinite_bound_is_allowed() -> None:
    def two(parameters: Any) -> Any:
        weight, bias = parameters
        return torch.optim.AdamW([{"params": [weight]}, {"params": [bias], "weight_decay": NAN}], lr=0.1)

    refused(lambda: ff.parallelize(nn.Linear(4, 1), squares, two), "weight_decay = nan in group 1")
    ff.parallelize(nn.Linear(4, 1), squares, functools.partial(torch.optim.Rprop, lr=0.1, step_sizes=(1e-6, INF)))


def test_an_error_in_the_users_factory_is_raised_unchanged() -> None:
    def wrong(parameters: Any) -> Any:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        ff.parallelize(nn.Linear(4, 1), squares, wrong)


@pytest.mark.parametrize("factor", [NAN, INF, None, "a"])
def test_a_nonfinite_schedule_factor_ends_the_run_before_the_step(factor: Any, tmp_path: Any) -> None:
    error = train(tmp_path, task(schedule=lambda step, steps: factor if step else 1.0))
    assert "the schedule's factor at step 2" in str(error)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda o, t: squares(o, t).detach(), "a loss without a gradient"),
        (lambda o, t: torch.tensor(squares(o, t).mean().item()), "a loss without a gradient"),
        (lambda o, t: (squares(o, t).sum().detach(), 8), "a loss without a gradient"),
        (torch.no_grad()(squares), "a loss without a gradient"),
        (lambda o, t: (o > t).long(), "a loss without a gradient"),
        (lambda o, t: o.to(torch.complex64), "complex"),
        (lambda o, t: (squares(o, t).sum(), None), "count = None"),
        (lambda o, t: (squares(o, t).sum(), -4), "count = -4"),
        (lambda o, t: (squares(o, t).sum(), 10**400), "count = 1000000"),
        (lambda o, t: (squares(o, t).sum(), -torch.ones(())), "count = a Tensor"),
        (lambda o, t: (squares(o, t), 4), "sum of shape [8, 1]"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_refused(loss: Any, words: str, tmp_path: Any) -> None:
    error = train(tmp_path, task(loss=loss))
    assert words in str(error)
    assert error is not None
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (lambda: None, ("sample 5 is None",)),
        (lambda: (None, torch.zeros(1)), ("sample 5: inputs is None",)),
        (lambda: (torch.zeros(4), None), ("sample 5: targets is None",)),
        (lambda: (torch.zeros(5), torch.zeros(1)), ("inputs: float32 [4] in sample", "float32 [5] in sample 5", "pad")),
        (lambda: (torch.zeros(4).double(), torch.zeros(1)), ("float32 [4]", "float64 [4] in sample 5", "convert")),
        (lambda: (torch.zeros(4), torch.zeros(1).long()), ("targets: float32 [1]", "int64 [1] in sample 5")),
        (lambda: ({"x": torch.zeros(4)}, torch.zeros(1)), ("in sample 5",)),
    ],
)  # fmt: skip
def test_a_sample_that_differs_from_the_others_is_reported_with_its_number_and_both_shapes(
    odd: Any, words: Any, tmp_path: Any
) -> None:
    data = lambda: ff.Data(train=Source(odd))  # noqa: E731
    text = str(train(tmp_path, task(data=data)))
    for word in words:
        assert word in text
    refused(lambda: list(ff.Feed(Source(odd), batch_size=8)), *words)
    refused(lambda: verify(task(data=data), ff.Plan()), *words)


@pytest.mark.parametrize("kind", [np.float32, float, int, torch.as_tensor])
def test_scalar_samples_are_collated_into_tensors(kind: Any) -> None:
    samples = [(kind(1), kind(2))] * 4
    (batch,) = list(ff.Feed(samples, batch_size=4))
    assert all(isinstance(part, torch.Tensor) and part.shape[0] == 4 for part in batch)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ((sample(i) for i in range(3)), "generator"),
        (None, "source = None"),
        (3, "source = 3"),
        ({1, 2}, "set"),
        ({"a": 1}, "dict"),
        ("hello", "source = 'hello'"),
        ([], "without samples"),
        (type("NoItems", (), {"__len__": lambda self: 4})(), "NoItems"),
        (type("Negative", (), {"__len__": lambda self: -1, "__getitem__": lambda self, i: i})(), "Negative"),
        (type("Huge", (), {"__len__": lambda self: 10**30, "__getitem__": lambda self, i: i})(), "Huge"),
    ],
)
def test_a_source_without_indexed_samples_is_refused(source: Any, words: str, tmp_path: Any) -> None:
    refused(lambda: ff.Feed(source, batch_size=2), words)
    where = words.replace("source", "train")
    assert where in str(train(tmp_path, task(data=lambda: ff.Data(train=source))))


@pytest.mark.parametrize("opened", [None, Source(), [sample(0)]])
def test_a_data_function_that_does_not_return_data_is_refused(opened: Any, tmp_path: Any) -> None:
    assert "need the task's data() to return a Data" in str(train(tmp_path, task(data=lambda: opened)))


@pytest.mark.parametrize("found", [3, {"accuracy": 3}, {"accuracy": (1, 2, 3)}])
def test_the_return_value_of_evaluate_is_checked(found: Any, tmp_path: Any) -> None:
    given = {"evaluate": lambda outputs, targets: found, "data": lambda: ff.Data(train=Source(), valid=Source())}
    assert "need a dict from names to pairs (sum, count)" in str(train(tmp_path, task(**given)))


@pytest.mark.parametrize("batch", [(torch.zeros(()), torch.zeros(())), (torch.zeros(4, 4), torch.zeros(()))])
def test_a_batch_without_a_sample_dim_is_refused(batch: Any) -> None:
    step = ff.parallelize(nn.Linear(4, 1), squares, SGD)
    refused(lambda: step(batch), "without dims")


@pytest.mark.parametrize(("target", "place"), [
    ((torch.zeros(4, 1), ["a"] * 4), "targets[1][0] of type str"),
    ({"box": [torch.zeros(4, 1), None]}, "targets['box'][1] of type NoneType"),
    ({"box": np.zeros((4, 1))}, "try torch.as_tensor(targets['box'])"),
    (torch.zeros(()), "targets, a tensor without dims"),
    ((torch.zeros(4, 1), torch.zeros(3)), "4 in targets[0], 3 in targets[1]"),
])  # fmt: skip
def test_what_no_batch_can_be_cut_by_is_named_by_its_place(target: Any, place: str) -> None:
    step = ff.parallelize(nn.Linear(4, 1), squares, SGD)
    refused(lambda: step((torch.zeros(4, 4), target)), place)


@pytest.mark.parametrize("state", [None, (0, 0), ("a", 0, 0), (0, 0, 1.5), (0, 0, 99)])
def test_an_invalid_feed_state_is_refused(state: Any) -> None:
    refused(lambda: ff.Feed(Source(), batch_size=2).load_state(state), "the feed")


@pytest.mark.parametrize("name", ["schedule", "scale", "warmup", "batch_size", "milestones", "drop", "floor"])
def test_invalid_lr_schedule_arguments_of_any_type_are_reported_by_name(name: str) -> None:
    for value in ([[]], {"a": 1}, "x", object(), NAN, -1.5):
        refused(lambda value=value: ff.LRSchedule(**{name: value}), name)  # type: ignore[arg-type]


def test_a_model_that_something_else_lays_over_devices_is_refused_by_name(tmp_path: Any) -> None:
    engine = type("DeepSpeedEngine", (nn.Module,), {})  # by name: the package is not installed
    replicated = type("DDP", (nn.Module,), {})  # the class that torch's replicate(…) puts before a module's own
    for kind, attempt in (
        (nn.DataParallel, "model.0.module"),
        (engine, "model.0 before deepspeed.initialize"),
        (replicated, "model.0 without replicate"),
    ):

        def model(kind: Any = kind) -> nn.Module:
            return nn.Sequential(kind(nn.Linear(4, 1)) if kind is nn.DataParallel else kind(), nn.Linear(4, 1))

        made, words = model(), (f"model.0 in {kind.__name__}", f"try {attempt}")
        refused(lambda made=made: ff.parallelize(made, squares, SGD), *words)
        refused(lambda make=model: ff.parallelize(make, squares, SGD), *words)
        refused(lambda made=made: ff.DistributedOptimizer(SGD(made.parameters()), made), *words)
        refused(lambda make=model: verify(task(model=make), ff.Plan()), *words)
        assert words[0] in str(train(tmp_path, task(model=model)))
