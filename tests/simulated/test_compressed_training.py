"""Laws of training with codecs: equal to the oracle's workers at every zero level. Ranks are threads."""

import dataclasses

import pytest
import torch

from fourfold.plan.codec import CODECS
from fourfold.plan.plan import Plan
from fourfold.show.describe import show
from fourfold.step.model_checks import model_problems
from fourfold.tasks import lm
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from tests import codec_oracle
from tests.cases import Case, batches, build_step, local_batch, train_step

pytestmark = pytest.mark.usefixtures("without_dry_run")

STATEFUL = [kind for kind in CODECS if kind not in ("bf16", "fp16")]


def worst(case: Case, size: int, *, unit: float = 1.0) -> float:
    expected = codec_oracle.train(case, size, unit=unit)
    return max(
        threads.run(size, lambda comm: oracle.deviation(train_step(case, build_step(case, size, comm)), expected))
    )


@pytest.mark.parametrize("codec", STATEFUL)
def test_a_state_dict_holds_the_codec_state_of_every_rank(codec):
    case = Case(codec=codec, batch_sizes=(12, 12, 12, 12))

    def begin(comm):
        step = build_step(case, 3, comm)
        for batch in batches(case)[:2]:
            step(local_batch(batch, 3, step.dp_index))
        state = step.state_dict()
        return state, train_step(case, step, skip=2).weights

    saved = threads.run(3, begin)

    def resume(comm):
        step = build_step(case, 3, comm)
        train_step(dataclasses.replace(case, batch_sizes=(9,)), step)  # the codec state of this must be replaced
        step.load_state_dict(saved[0][0])
        return train_step(case, step, skip=2).weights

    for (_, expected), got in zip(saved, threads.run(3, resume), strict=True):
        assert all(torch.equal(got[name], weight) for name, weight in expected.items())


def test_shared_memory_sends_no_bytes():
    case = Case(codec="topk")

    def body(comm):
        step = build_step(case, 2, comm)
        return [step(local_batch(batch, 2, step.dp_index)).sent_bytes for batch in batches(case)]

    assert threads.run(2, body) == [[0.0] * 3] * 2


def test_complex_gradients_are_not_compressed():
    complex_model = torch.nn.Linear(2, 2, dtype=torch.complex64)
    (problem,) = model_problems(complex_model, Plan(codec="int8"))
    assert "weight (torch.complex64)" in problem.got


def test_show_reports_how_much_less_a_codec_sends():
    bucket_bytes, dp = 2**22, 4
    shown = show(Plan(dp=dp, codec="bf16", bucket_bytes=bucket_bytes), lm.task())
    assert "2 times less than without the codec" in shown
    # int8 over 4 ranks: 3 messages of a byte per element, a quarter of 2 · 3/4 · 4 bytes · 2, less 4 / 256 for scales.
    shown = show(Plan(dp=dp, codec="int8", bucket_bytes=bucket_bytes), lm.task())
    assert "1.97 times less than without the codec" in shown
    # Half of all elements over 4 ranks, all-gathered: 3 messages of 6 bytes each, of 2 · 3/4 · 4 bytes.
    shown = show(Plan(dp=dp, codec="topk", codec_density=0.5, bucket_bytes=bucket_bytes), lm.task())
    assert "1.5 times as much as without the codec" in shown


def test_show_reports_fields_without_effect():
    shown = show(Plan(dp=2, codec_density=0.5), lm.task())
    assert '  codec_density = 0.5   no effect without codec = "topk" or "dct"\n' in shown
    assert "no effect" not in show(Plan(dp=2, codec="topk", codec_density=0.5), lm.task())


@pytest.mark.parametrize("size", [1, 2])
def test_powersgd_sends_no_rounding_noise_of_a_rank_deficient_gradient(size):
    # One sample makes matrices of rank 1; other columns would only be rounding, which depends on the order of sums.
    assert worst(Case(codec="powersgd", batch_sizes=(1, 1, 3), bucket_bytes=1500), size) <= TOLERANCE
