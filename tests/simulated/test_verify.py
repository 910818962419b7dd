"""Laws of `fourfold verify`: it passes correct training, names deviations, and reports what it leaves out."""

import dataclasses
import functools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold.analysis.verify import TOLERANCE, VerifyResult, check_verifiable, verify
from fourfold.cli import verify as command
from fourfold.cli.job import Job
from fourfold.feed.source import TensorSource
from fourfold.plan.plan import Plan
from fourfold.step.dry_run.float64_mode import Float64Mode
from fourfold.step.loss_sum import Loss, sum_loss
from fourfold.step.objective import Objective
from fourfold.testing import oracle
from fourfold.words.errors import PlanError
from fourfold.words.task import Data, Task


class Net(nn.Module):
    """Eight features, three classes; dropout as a module or a number, a random factor, or a softmax in float32."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(8, 16), nn.Linear(16, 3), kind
        self.module, self.dropout = nn.Dropout(0.5 if kind == "module" else 0.0), 0.5 if kind == "number" else 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.module(self.first(x))
        x = F.dropout(x, self.dropout, self.training)
        if self.kind == "narrow":
            x = x.to(torch.float32).softmax(-1, dtype=torch.float32) + x.float()
        if self.kind == "draws":
            x = x * torch.rand(())
        return self.second(x.to(self.second.weight.dtype))


def task(kind: str = "plain", **fields) -> Task:
    torch.manual_seed(0)
    data = Data(train=TensorSource(torch.randn(64, 8), torch.randint(0, 3, (64,))))
    return Task(
        loss=functools.partial(F.cross_entropy, reduction="none"),
        data=lambda: data,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
        schedule=lambda step, steps: 1.0 - step / steps,
        **{"model": functools.partial(Net, kind), "steps": 3, "batch_size": 16, "clip": 0.5, **fields},
    )


class Complex(nn.Module):
    """A complex filter and a complex buffer; the gradient of `phase` has an imaginary part only."""

    rotation: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(8, 16, dtype=torch.complex64) * 0.3)
        self.phase = nn.Parameter(torch.randn(16, dtype=torch.complex64))
        self.register_buffer("rotation", torch.polar(torch.ones(16), torch.arange(16.0)))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = x.to(torch.complex64) @ self.filter * self.rotation
        return self.head((z * torch.exp(1j * z.real.to(torch.complex64))).abs() + self.phase.imag)


PLANS = [Plan(), Plan(microbatches=3), Plan(bucket_bytes=100), Plan(update="in_backward", microbatches=2)]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["plain", "module", "number", "narrow"])
def test_a_correct_training_passes(kind, plan):
    verdict = verify(task(kind, clip=0.5 if plan.update == "after" else None), plan)
    assert verdict is not None
    assert verdict.max_deviation <= TOLERANCE
    assert (
        verdict.weight_deviations.keys()
        == verdict.grad_deviations.keys()
        == {n for n, _ in Net(kind).named_parameters()}
    )
    assert len(verdict.loss_deviations) == 3
    assert verdict.num_dropouts == (kind in ("module", "number"))
    assert not verdict.has_randomness


@pytest.mark.parametrize("plan", PLANS)
def test_complex_parameters_are_compared_in_complex128(plan):
    seen = set()

    class Watched(Complex):
        def forward(self, x: Tensor) -> Tensor:
            seen.update(t.dtype for t in (x, self.filter, self.phase, self.rotation, self.head.weight))
            return super().forward(x)

    verdict = verify(task(model=Watched, clip=0.5 if plan.update == "after" else None), plan)
    assert verdict is not None
    assert verdict.max_deviation <= TOLERANCE
    assert seen == {torch.float64, torch.complex128}


def test_a_wrong_imaginary_part_is_found():
    with mock.patch.object(Objective, "sum_loss", wrong_loss_sum):
        verdict = verify(task(model=Complex), Plan())
    assert verdict is not None
    assert verdict.grad_deviations["phase"] > 1e-7


def test_the_oracle_compares_imaginary_parts():
    a, b = (oracle.TrainingResult([], [], {"w": torch.tensor([1.0 + part * 1j])}) for part in (1.0, 1.5))
    assert oracle.deviation(a, b) == pytest.approx(0.5 / abs(1.0 + 1.5j))


def wrong_loss_sum(objective, value, calls, samples):
    loss = sum_loss(value, samples)
    return Loss(loss.total * 1.0001, loss.count)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nonfinite_number_is_an_infinite_deviation(value):
    good, bad = (oracle.TrainingResult([1.0, number], [], {"w": torch.ones(2)}) for number in (1.0, value))
    assert oracle.deviation(good, good) == 0.0
    for pair in ((bad, good), (good, bad), (bad, bad)):
        assert oracle.deviation(*pair) == float("inf")


def test_a_wrong_gradient_is_found_in_every_loss_and_gradient():
    with mock.patch.object(Objective, "sum_loss", wrong_loss_sum):
        verdict = verify(task(), Plan())
    assert verdict is not None
    assert min(verdict.loss_deviations) > 1e-6
    assert min(verdict.grad_deviations.values()) > 1e-7
    assert not verdict.max_deviation <= TOLERANCE


def test_a_model_that_draws_random_numbers_is_reported():
    verdict = verify(task("draws"), Plan())
    assert verdict is not None
    assert verdict.has_randomness


def table(verdict: VerifyResult) -> str:
    plan = dataclasses.replace(Plan(), dp=2, sp=2)
    return "\n".join(
        command.format_result(Job(task=task(), plan=plan, settings={"task_name": "lm"}, identity={}), verdict)
    )


def test_the_table_shows_what_was_compared_and_what_was_left_out():
    verdict = VerifyResult([1e-12], {"a": 2e-13, "bc": 0.0}, {"a": 1e-5, "bc": float("nan")}, 2, True)
    lines = table(verdict)
    assert lines.startswith("lm on dp 2 × sp 2, compared with one device: 3 steps in float64")
    assert "  a        2.0e-13   1.0e-05" in lines
    assert "largest deviation inf" in lines
    assert "dropout is left out" in lines
    assert "draws random numbers" in lines
    assert "trains as one device does" not in lines
    assert "the dry run of sp = 2 does not see tokens that mix in training mode only, in branches" in lines
    assert "trains as one device does" in table(VerifyResult([0.0], {"a": 0.0}, {"a": 1e-10}, 0, False))


def test_deviations_are_named_and_give_exit_code_1():
    verdict = VerifyResult([1e-12, 1e-3], {"a": 2e-13, "bc": 0.0}, {"a": 1e-5, "bc": float("nan")}, 0, False)
    job = Job(task=task(), plan=Plan(), settings={"task_name": "lm"}, identity={})
    with (
        mock.patch("fourfold.analysis.verify.verify", return_value=verdict),
        pytest.raises(command.VerifyError) as caught,
    ):
        command.verify(job, None)
    assert caught.value.exit_code == 1
    assert "the weight of a deviates by 1.0e-05, and 1 more" in str(caught.value)
    assert "the loss of step 2 deviates by 1.0e-03" in str(caught.value)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=2, codec="topk"),
        Plan(dp=2, sync="local"),
        Plan(batch_norm="local"),
        Plan(dp=2, reduce_dtype="fp32"),
        Plan(pp=2, edge="bf16"),
        Plan(pp=2, schedule="pipedream"),
    ],
)
def test_plans_that_change_the_training_are_refused_with_the_reason(plan):
    with pytest.raises(PlanError, match="trains differently from one device"):
        check_verifiable(plan)


@pytest.mark.parametrize("backward", [lambda loss: loss.backward(), lambda loss: torch.autograd.backward([loss], None)])
def test_the_second_forward_of_a_checkpoint_casts_as_the_first(backward):
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    dtypes = []

    def scaled(x: Tensor) -> Tensor:
        narrow = x.to(torch.float32)
        dtypes.append(narrow.dtype)
        return weight * narrow * narrow

    with Float64Mode():
        x = torch.full((2,), 3.0, dtype=torch.float64)
        backward(checkpoint(scaled, x, use_reentrant=False).sum())
    assert dtypes == [torch.float64] * 2
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((2,), 9.0, dtype=torch.float64))


def test_casts_to_float32_give_float64():
    x = torch.ones(2, dtype=torch.float64)
    with Float64Mode():
        made = [x.float(), x.to(torch.float32), x.to(dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float16)]
        assert {tensor.dtype for tensor in (*made, x.softmax(0, dtype=torch.float32))} == {torch.float64}


OFFSETS = torch.tensor([2, 2, 7], dtype=torch.int32)
GROUPED = {
    "rows": ((9, 8), (3, 8, 16), OFFSETS),
    "columns": ((3, 8, 16), (16, 8), torch.tensor([2, 2, 7], dtype=torch.int32)),
    "inner": ((8, 8), (8, 16), torch.tensor([2, 2, 8], dtype=torch.int32)),
    "batches": ((3, 4, 8), (3, 8, 16), None),
}


@pytest.mark.parametrize("kind", GROUPED)
def test_grouped_products_in_float64_equal_those_of_torch_in_float32(kind):
    first, second, offsets = GROUPED[kind]
    torch.manual_seed(0)
    # torch requires strides in multiples of 16 bytes.
    a, b = torch.randn(first), torch.randn(second).transpose(-2, -1).contiguous().transpose(-2, -1)
    expected = F.grouped_mm(a, b, offs=offsets)
    with Float64Mode():
        product = F.grouped_mm(a.double(), b.double(), offs=offsets)
    assert product.dtype == torch.float64
    computed = {"rows": (slice(0, 7),), "columns": (slice(None), slice(0, 7))}.get(kind, ())
    torch.testing.assert_close(product.float()[computed], expected[computed])


def test_a_mixture_of_experts_of_transformers_is_verified():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "sliding_window": None}

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.inner(tokens).logits.transpose(1, 2)

    tokens = torch.randint(0, 50, (8, 6), generator=torch.Generator().manual_seed(5))
    mixture = dataclasses.replace(
        task(), model=Experts, data=lambda: Data(train=TensorSource(tokens, tokens)), batch_size=4
    )
    verdict = verify(mixture, Plan(microbatches=2))
    assert verdict is not None
    assert verdict.max_deviation <= TOLERANCE


def test_casts_to_complex64_give_complex128():
    x = torch.ones(2, dtype=torch.float64)
    with Float64Mode():
        made = [getattr(x, name)() for name in ("cfloat", "chalf")]
        made += [x.to(torch.complex64), torch.zeros(2, dtype=torch.complex32)]
        assert {tensor.dtype for tensor in made} == {torch.complex128}
