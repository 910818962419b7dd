"""The laws of the data axis on real processes: every transport equals the oracle."""

import pytest

from fourfold.testing.oracle import TOLERANCE
from fourfold.testing.process_world import CaseFailed, SpawnedWorld
from tests.conftest import ROOT

CASES = "tests.spawned.rank_functions"
WRAPPED = "tests.spawned.wrapped_optimizer"
TRANSPORTS = ["shared", "gloo"]


# Uneven batches; the second leaves one rank without a sample, which has no forward and still updates its shard.
HARDEST = {"batch_sizes": [12, 3, 9], "microbatches": 2, "clip": 0.5, "bucket_bytes": 1500}
PLACES = {
    "shared": ({"transport": "shared"}, "shared memory"),
    "gloo": ({"transport": "gloo"}, "gloo (as the plan asks)"),
    "hosts": ({"host": "two"}, "shared memory + gloo between hosts"),
}


# Each transport at two zero levels: ranks that are threads train at every level over each.
@pytest.mark.parametrize(("place", "fields"), [
    ("shared", {"zero": 0, "model": "lm", "bucket_bytes": 5_000}),
    ("shared", {"zero": 2, "model": "frozen", "loss": "masked", "optimizer": "SGD", "update": "in_forward"}),
    ("gloo", {"zero": 1, "model": "tied", "optimizer": "LAMB", "update": "in_forward"}),
    ("gloo", {"zero": 3, "model": "digits", "bucket_bytes": 5_000}),
    ("hosts", {"zero": 0, "model": "lm", "bucket_bytes": 5_000}),
    ("hosts", {"zero": 3, "model": "digits", "bucket_bytes": 5_000}),
])  # fmt: skip
def test_every_transport_trains_as_the_oracle(world, fields, place):
    where, carrier = PLACES[place]
    results = world(4).run(f"{CASES}:deviation", **HARDEST | where | fields)
    assert {result["transport"] for result in results} == {carrier}
    assert max(result["deviation"] for result in results) <= TOLERANCE


@pytest.mark.parametrize("fields", [
    {"transport": "gloo", "zero": 3, "shard": 2, "model": "checkpointed"},
    {"host": "two", "zero": 3, "shard": 2, "model": "reused", "optimizer": "LAMB"},
    {"host": "two", "zero": 2, "model": "tied", "update": "in_backward", "clip": None},
    {"transport": "gloo", "zero": 1, "model": "unused", "unused": "allow"},
])  # fmt: skip
def test_hard_cases_train_as_the_oracle(world, fields):
    results = world(4).run(f"{CASES}:deviation", **HARDEST | fields)
    assert max(result["deviation"] for result in results) <= TOLERANCE


PRECISE = [{"precision": "bf16", "reduce_dtype": "fp32", "zero": zero, "microbatches": 2} for zero in (0, 2)]
ROUNDED = [{"precision": "fp16", "zero": 1}, {"precision": "bf16", "zero": 2}]


@pytest.mark.parametrize(("transport", "host", "rounded"), [("gloo", None, ROUNDED), ("auto", "two", ROUNDED[:1])])
def test_low_precision_weights_and_float32_reductions_keep_their_dtype(world, transport, host, rounded):
    cases = [{**case, "transport": transport} for case in (*PRECISE, *rounded)]
    for results in world(4).run(f"{CASES}:precision_deviations", cases=cases, host=host):
        # Hosts add up in another order than ranks do: float32 hardly minds.
        assert max(results[:2]) < 1e-7
        assert max(results[2:]) < 1e-4


CODED = [
    {"codec": kind, "zero": zero, "clip": 0.5, "microbatches": 2, "bucket_bytes": 1500, "optimizer": "SGD"}
    for kind, zero in [("bf16", 0), ("topk", 0), ("int8", 1), ("powersgd", 0), ("powersgd", 2), ("dct", 2)]
]


@pytest.mark.parametrize(("transport", "host", "coded"), [("gloo", None, CODED), ("auto", "two", CODED[1::2])])
def test_compressed_training_over_gloo_equals_the_codec_oracle(world, transport, host, coded):
    cases = [{**case, "transport": transport} for case in coded]
    for results in world(4).run(f"{CASES}:coded_deviations", cases=cases, host=host):
        for case, result in zip(cases, results, strict=True):
            # The order in which gloo adds 2-byte numbers is its own.
            assert result["deviation"] <= (2**-9 if case["codec"] == "bf16" else TOLERANCE), case
            if case["zero"] == 0 and host is None:
                times = 3 if case["codec"] == "topk" else 2 * 3 / 4
                assert result["sent_bytes"] == pytest.approx(times * result["message_bytes"])


@pytest.mark.parametrize(("transport", "host"), [("gloo", None), ("shared", None), ("auto", "two")])
def test_local_sgd_syncs_over_every_transport(world, transport, host):
    case = {"sync": "local", "local_steps": 2, "outer_lr": 0.7, "outer_momentum": 0.9, "microbatches": 2}
    case |= {"batch_sizes": [12, 9, 3, 12], "bucket_bytes": 1500, "transport": transport}
    for result in world(4).run(f"{CASES}:local_sgd_deviation", fields=case, host=host):
        assert result["deviation"] <= TOLERANCE
        assert [sent > 0 for sent in result["sent_bytes"]] == [False, transport != "shared"] * 2
        if transport == "gloo":
            assert result["sent_bytes"][1] == pytest.approx(2 * 3 / 4 * result["weight_bytes"])


def test_ranks_that_build_different_steps_raise_one_error_and_none_waits(world):
    first, second = world(2).run(f"{CASES}:build_others", time_limit_seconds=60.0)
    assert first == second
    for message, part in zip(
        first, ["pp = 1", "module 4 = torch.nn.Linear", "module 4 = torch.nn.ReLU", "dp = 4"], strict=True
    ):
        assert f"rank 1 has {part}" in message


def test_ranks_start_from_the_weights_of_rank_0(world):
    assert all(world(2).run(f"{CASES}:starts_from_rank_0"))


@pytest.mark.parametrize(("transport", "accumulate"), [("shared", 1), ("gloo", 2)])
def test_a_wrapped_optimizer_trains_as_in_one_process(world, accumulate, transport):
    results = world(2).run(f"{WRAPPED}:trains", accumulate=accumulate, transport=transport)
    assert max(result["deviation"] for result in results) <= TOLERANCE


@pytest.mark.parametrize("kind", ["LARS", "LAMB"])
def test_a_wrapped_layer_wise_optimizer_trains_as_in_one_process(world, kind):
    results = world(2).run(f"{WRAPPED}:trains", accumulate=1, kind=kind)
    assert max(result["deviation"] for result in results) <= TOLERANCE


def test_a_wrapped_optimizer_works_across_hosts(world):
    results = world(4).run(f"{WRAPPED}:trains", accumulate=1, host="two")
    assert {result["transport"] for result in results} == {"shared memory + gloo between hosts"}
    assert max(result["deviation"] for result in results) <= TOLERANCE


@pytest.mark.parametrize("fields", [{"transport": "shared"}, {"transport": "gloo"}, {"host": "two"}])
def test_ranks_with_unequal_data_train_to_the_end(world, fields):
    results = world(4).run(f"{WRAPPED}:uneven", **fields)
    assert max(result["deviation"] for result in results) <= TOLERANCE
    assert all(result["placed"] for result in results)
    assert all(("between hosts" in result["transport"]) == ("host" in fields) for result in results)


def test_no_rank_passes_a_barrier_before_all_have_come(world, tmp_path):
    results = world(4).run(f"{WRAPPED}:meets", folder=str(tmp_path))
    assert results == [[True, rank == 0, "cpu"] for rank in range(4)]


def test_a_group_has_threads_only_while_it_is_referenced(world):
    for held, unnamed, gone in world(2).run(f"{CASES}:threads_of_a_group"):
        assert held == unnamed > 0
        assert gone == 0


def test_gradients_of_two_backwards_add_up(world):
    assert max(world(2).run(f"{WRAPPED}:adds_up")) <= TOLERANCE


def test_backward_names_the_parameter_without_gradient(world):
    for message in world(2).run(f"{WRAPPED}:without_gradient"):
        assert "spare.weight got no gradient" in message


def test_a_backward_after_a_failed_one_is_refused(world):
    for messages in world(2).run(f"{WRAPPED}:after_an_error"):
        assert "a hook of the user's own" in messages[0]
        assert "after one that ended with an error" in messages[1]


def test_a_model_that_torch_lays_over_ranks_itself_is_refused(world):
    for said in world(2).run(f"{WRAPPED}:with_another_wrapper"):
        for build in ("0", "1"):
            assert "try model.module" in said[f"ddp {build}"]
            assert "try model.0.module" in said[f"nested {build}"]
            assert "in FullyShardedDataParallel" in said[f"fsdp {build}"]
            assert "split over devices already" in said[f"dtensor {build}"]
            assert "without fully_shard" in said[f"fsdp2 {build}"]
        assert "model.module(…) in place of model(…)" in said["loop"]


@pytest.mark.parametrize("wraps", [True, False])
def test_all_ranks_begin_with_the_tensors_of_rank_0_of_any_strides(world, wraps):
    assert world(2).run(f"{WRAPPED}:lying_anyhow", wraps=wraps) == [[True] * 5] * 2


def test_a_wrapped_optimizer_keeps_the_gradients_of_earlier_backwards(world):
    # The mean over ranks of 1 and 2 is 1.5; a layer used nowhere has no gradient.
    for gradients in world(2).run(f"{WRAPPED}:with_unused_layers"):
        assert gradients == {"always": 1.5, "earlier": 1.5, "never": None}


SHARED, GLOO, STAGES = {"dp": 2, "transport": "shared"}, {"dp": 2, "transport": "gloo"}, {"pp": 2, "microbatches": 2}
ENDED = "ended its step with an error while rank 0 waited for it"


@pytest.mark.parametrize(
    ("plan", "what", "noticed"),
    [
        *((plan, "loss", ENDED) for plan in (SHARED, GLOO, STAGES)),
        (SHARED, "batch", "rank 1 is at step 2, whose batch is refused"),
        (STAGES, "batch", ENDED),
    ],
)
def test_a_rank_whose_step_fails_is_not_waited_for_though_its_process_goes_on(world, plan, what, noticed, tmp_path):
    case = f"{CASES}:goes_on_after_an_error"
    first, second = world(2).run(case, plan=plan, folder=str(tmp_path), what=what, time_limit_seconds=40.0)
    assert "rank 1" in first
    assert noticed in first
    assert {"loss": "the loss of rank 1", "batch": "a batch of type tuple"}[what] in second


def test_the_death_of_a_rank_is_reported():
    # A world of its own: this one ends.
    with pytest.raises(CaseFailed, match=r"noticed in \d s: rank 1 \(host .*\) died"):
        SpawnedWorld(2, root=ROOT).run(f"{CASES}:dies_without_an_error")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_in_different_calls_raise_an_error_that_names_both(world, transport):
    for message in world(2).run(f"{CASES}:diverges", transport=transport, diverging=[1]):
        assert "rank 0 is at step 3; rank 1 is at evaluate() after step 2" in message


def test_hosts_in_different_calls_raise_an_error_that_names_both(world):
    results = world(4).run(f"{CASES}:diverges", transport="shared", diverging=[2, 3], host="two")
    for rank, message in enumerate(results):
        first, second = rank % 2, rank % 2 + 2
        assert f"rank {first} is at step 3; rank {second} is at evaluate() after step 2" in message


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_backward_that_one_rank_omits_is_an_error(world, transport):
    for message in world(2).run(f"{WRAPPED}:diverges", transport=transport):
        assert (
            "rank 0 is at backward 2 after 1 steps of the optimizer; rank 1 is at backward 2 after 2 steps" in message
        )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_rank_skips_a_step_with_nonfinite_gradients(world, transport):
    for result in world(2).run(f"{CASES}:skips", transport=transport):
        assert result["deviation"] <= TOLERANCE
        assert result["skipped"][0].startswith("step 2: the loss is nan; rank 1, samples")


def test_a_run_names_a_straggler_in_its_log(world, tmp_path):
    for stragglers in world(2).run(f"{CASES}:late_in_data", folder=str(tmp_path)):
        (late,) = stragglers
        assert (late["rank"], late["place"]) == (1, "data")


def test_every_sample_is_fed_once_in_one_order(world):
    by_size = {}
    for size in (2, 4):
        ranks = world(size).run(f"{CASES}:feed", num_samples=23, batch_size=8)
        by_size[size] = [[i for rank in ranks for i in rank[number]] for number in range(3)]
    assert by_size[2] == by_size[4]
    assert sorted(i for batch in by_size[2] for i in batch) == list(range(23))
