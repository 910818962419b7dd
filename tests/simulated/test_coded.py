"""Training with codecs, all ranks as threads: what the workers of the oracle do, at every zero level."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.plan.codec import KINDS
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from tests import coded
from tests.training import Case, build, train_step

REMEMBERING = [kind for kind in KINDS if kind not in ("bf16", "fp16")]


def worst(case: Case, size: int, *, unit: float = 1.0) -> float:
    expected = coded.train(case, size, unit=unit)
    return max(threads.run(size, lambda ranks: oracle.deviation(train_step(case, build(case, size, ranks)), expected)))


@settings(max_examples=30)
@given(
    codec=st.sampled_from(REMEMBERING),
    size=st.integers(1, 4),
    zero=st.integers(0, 2),
    batch_sizes=st.lists(st.integers(1, 13), min_size=1, max_size=4).map(tuple),
    microbatches=st.integers(1, 3),
    then=st.sampled_from([{}, {"clip": 0.05}, {"update": "in_backward"}]),
    bucket_bytes=st.sampled_from([1500, 4000, 2**20]),
)
def test_every_data_mesh_trains_as_its_workers_would(size, then, **fields):
    assert worst(Case(**fields, **then), size) <= TOLERANCE


@settings(max_examples=12)
@given(
    codec=st.sampled_from(["bf16", "fp16"]),
    size=st.sampled_from([1, 2, 4]),
    zero=st.integers(0, 2),
    microbatches=st.sampled_from([1, 2]),
)
def test_a_cast_trains_as_its_workers_would(codec, size, **fields):
    # Rounding depends on the unit: with even batches it is the count of the first step, everywhere.
    assert worst(Case(codec=codec, batch_sizes=(16, 16, 16), **fields), size, unit=16.0) <= TOLERANCE
