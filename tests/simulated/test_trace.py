"""Laws of tracing. Ranks are threads."""

from concurrent.futures import Future

import pytest

from fourfold.plan.rank_program import lane_of
from fourfold.testing import threads
from fourfold.trace import utilization
from fourfold.trace.cost import measure_costs, step_costs
from fourfold.trace.step_comparison import simulated_timeline
from fourfold.trace.trace_file import Trace, decode_trace
from fourfold.trainer.tracer import (
    FIRST_SAMPLED,
    MAX_KEPT_STEPS,
    TRACE_FILE,
    SpanRecorder,
    Tracer,
    _without_overlap,
    is_sampled,
)
from fourfold.words.program import Action, Verb
from fourfold.words.trace_events import (
    DATA_LANE,
    DONE_EVENT,
    GATHER_LANE,
    LAUNCHED_EVENT,
    READY_EVENT,
    REDUCE_LANE,
    Span,
)
from tests.cases import Case, batches, build_step, local_batch

pytestmark = pytest.mark.usefixtures("without_dry_run")


def traced(case: Case, size: int, *, every: int = 5, steps: int = 6) -> list[Trace]:
    """The trace that each rank holds at the end of a run."""

    def body(comm):
        step = build_step(case, size, comm)
        tracing = Tracer(step, every=every)
        for number in range(1, steps + 1):
            with tracing.sample(number) as recorder, recorder.reading():
                batch = local_batch(batches(case)[0], size, step.dp_index)
                step(batch)
        return tracing.trace

    return threads.run(size, body)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_records_every_action_of_the_sampled_steps(size, clip):
    trace = traced(Case(clip=clip, microbatches=2, bucket_bytes=1500), size)[0]
    assert trace.steps == [3, 4, 5]
    assert trace.ranks == list(range(size))
    for step in trace.steps:
        for rank in trace.ranks:
            names = {event.name for event in trace.events_of(step=step, rank=rank)}
            assert [event.name for event in trace.events_of(step=step, rank=rank) if event.lane == DATA_LANE] == [
                "data"
            ]
            expected = {str(action) for action in trace.program[rank]}
            # A single rank has nothing to reduce.
            assert expected - names == (set() if size > 1 else {name for name in expected if name[0] == "R"})
            for name in expected:
                if name[0] == "R":
                    assert {f"{name} {what}" for what in (READY_EVENT, LAUNCHED_EVENT, DONE_EVENT)} <= names


def test_a_bucket_is_ready_then_sent_then_reduced_then_done():
    for trace in traced(Case(bucket_bytes=1500), 2):
        for step in trace.steps:
            for rank in trace.ranks:
                at = {event.name: event for event in trace.events_of(step=step, rank=rank)}
                for name in (name for name in at if name[0] == "R" and " " not in name):
                    ready, sent, done = (
                        at[f"{name} {what}"].start for what in (READY_EVENT, LAUNCHED_EVENT, DONE_EVENT)
                    )
                    assert ready <= sent <= at[name].start <= at[name].stop <= done


def test_local_and_averaging_steps_are_recorded_and_simulated_with_their_own_programs():
    trace = traced(Case(sync="local", local_steps=2, bucket_bytes=1500, clip=0.5), 2)[0]
    for step in trace.steps:
        program = trace.program_of_step(step)
        for rank in trace.ranks:
            names = {event.name for event in trace.events_of(step=step, rank=rank)}
            assert {name for name in names if name[1:2] == "0"} == {str(action) for action in program[rank]}
            assert any(name[0] in "PL" for name in names) == (step % 2 == 0)
        times = simulated_timeline(trace, step_costs(trace, step), step)
        assert {rank: len(timed) for rank, timed in times.items()} == {
            rank: len(actions) for rank, actions in program.items()
        }
    assert utilization.seconds_by_category(trace)[utilization.AVERAGE_TIME] > 0


@pytest.mark.parametrize(
    "fields", [{"zero": 1}, {"zero": 2, "update": "in_backward"}, {"sync": "local", "local_steps": 2}]
)
def test_every_action_is_recorded_on_its_lane(fields):
    trace = traced(Case(bucket_bytes=1500, **fields), 2)[0]
    lanes = {str(action): lane_of(action) for actions in trace.program.values() for action in actions}
    found = {event.name: event.lane for event in trace.events if event.name in lanes}
    assert found == {name: lanes[name] for name in found}
    assert any(name[0] in "GP" for name in found)


def test_collectives_that_run_at_the_same_time_follow_each_other_on_their_lane():
    spans = [Span("R0.0", REDUCE_LANE, 10, 20), Span("G0.0", GATHER_LANE, 12, 24), Span("R0.1", REDUCE_LANE, 15, 30)]
    spans.append(Span("G0.1", GATHER_LANE, 18, 26))
    after = [Span("R0.1", REDUCE_LANE, 20, 30), Span("G0.1", GATHER_LANE, 24, 26)]
    assert _without_overlap(spans) == [*spans[:2], *after]


def test_a_collective_beside_a_ranks_work_is_recorded_until_it_is_done():
    recorder, futures = SpanRecorder(), {}
    for verb, index in ((Verb.REDUCE, 0), (Verb.GATHER, 1), (Verb.UNSHARD, 2)):
        with recorder.action(Action(verb, 0, index)):
            futures[verb] = Future()
            recorder.record_async(verb, index, lambda verb=verb: futures[verb])
    assert recorder.spans == []
    for future in futures.values():
        future.set_result(None)
    assert [span[:2] for span in recorder.spans] == [("R0.0", "reduce"), ("G0.1", "gather"), ("A0.2", "gather")]
    assert all(span.stop > span.start for span in recorder.spans)


def test_a_gather_that_is_a_flag_in_shared_memory_is_recorded_as_it_runs():
    recorder = SpanRecorder()
    with recorder.action(Action(Verb.GATHER, 0, 1)):
        pass
    assert [span[:2] for span in recorder.spans] == [("G0.1", "gather")]


def test_a_trace_names_the_ranks_that_share_memory():
    assert traced(Case(), 2)[0].ranks_by_memory == ((0, 1),)
    assert traced(Case(transport="gloo"), 2, every=0)[0].ranks_by_memory == ()


def test_every_rank_holds_the_same_trace():
    first, second = traced(Case(), 2)
    assert first == second
    assert first.events


def test_a_trace_can_be_priced_and_simulated():
    trace = traced(Case(clip=0.5, bucket_bytes=1500), 2)[0]
    times = simulated_timeline(trace, measure_costs(trace))
    assert [len(times[rank]) for rank in trace.ranks] == [len(trace.program[rank]) for rank in trace.ranks]


def test_only_sampled_steps_are_recorded_and_none_when_off():
    assert [number for number in range(1, 301) if is_sampled(number, 100)] == [*FIRST_SAMPLED, 100, 200, 300]
    assert not any(is_sampled(number, 0) for number in range(1, 301))
    assert traced(Case(), 1, every=0)[0].events == ()


def test_a_recorder_records_nothing_after_its_step():
    case = Case()

    def body(comm):
        step = build_step(case, 1, comm)
        tracing = Tracer(step, every=1)
        with tracing.sample(1) as recorder:
            step(batches(case)[0])
        assert isinstance(recorder, SpanRecorder)
        before = len(recorder.spans)
        step(batches(case)[0])
        return before, len(recorder.spans)

    ((before, after),) = threads.run(1, body)
    assert before == after > 0


@pytest.mark.parametrize("max_kept", [MAX_KEPT_STEPS, 25])
def test_a_long_run_keeps_its_first_and_its_last_samples(max_kept, tmp_path):
    case = Case()

    def body(comm):
        step = build_step(case, 1, comm)
        tracing = Tracer(step, every=5, folder=tmp_path, max_kept=max_kept)
        for number in range(1, 131):
            with tracing.sample(number):
                if is_sampled(number, 5):
                    step(batches(case)[0])
        return decode_trace((tmp_path / TRACE_FILE).read_bytes()).steps

    (steps,) = threads.run(1, body)
    assert len(steps) == max_kept
    assert steps[:2] == list(FIRST_SAMPLED)
    assert steps[2:] == list(range(5, 131, 5))[-(max_kept - 2) :]


def test_recording_does_not_change_training():
    case = Case(clip=0.5)

    def weights(every):
        def body(comm):
            step = build_step(case, 2, comm)
            tracing = Tracer(step, every=every)
            for number, batch in enumerate(batches(case), 1):
                with tracing.sample(number):
                    step(local_batch(batch, 2, step.dp_index))
            return {name: weight.tolist() for name, weight in step.model.state_dict().items()}

        return threads.run(2, body)[0]

    assert weights(1) == weights(0)
