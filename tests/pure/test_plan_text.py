"""Laws of what is printed and drawn of a decision: text and page say the same, and nothing that it does not hold."""

import dataclasses
import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.cli.arguments import parse_values
from fourfold.cli.run import resolve
from fourfold.plan.plan import Plan
from fourfold.planner.plan_text import (
    against,
    best_baseline,
    compared,
    fewer_devices,
    format_decision,
    format_prediction,
    plan_words,
    ranking_rows,
    reasons,
    term_rows,
)
from fourfold.planner.predict.clusters import load_cluster
from fourfold.planner.predict.facts import Workload
from fourfold.planner.predict.gpt_facts import GptFacts
from fourfold.planner.predict.prediction import Prediction
from fourfold.report.plan_pages import describe_decision
from tests.decision_cases import (
    BEST,
    DECISION,
    ELSEWHERE,
    NO_TERMS,
    PLAIN,
    SLOW,
    TOO_LARGE_ELSEWHERE,
    WORKLOAD,
    prediction,
    timed,
)
from tests.report_data import parts, titles, visible_text

PLANS = st.builds(
    Plan,
    dp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    zero=st.integers(0, 3),
    microbatches=st.integers(1, 8),
    schedule=st.sampled_from(["gpipe", "1f1b", "zero-bubble"]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    codec=st.sampled_from(["none", "topk"]),
    codec_density=st.sampled_from([0.01, 0.1]),
)


@given(plan=PLANS)
def test_the_words_of_a_plan_are_that_plan_on_the_command_line(plan):
    values = parse_values(resolve(shlex.split(plan_words(plan))).texts, {}).plan
    again = Plan.from_dict(values)
    without = dict.fromkeys(plan.ineffective_fields, dataclasses.MISSING)
    assert {**dataclasses.asdict(again), **without} == {**dataclasses.asdict(plan), **without}


def test_a_program_of_several_lines_is_one_word_and_what_has_no_effect_is_none():
    program = "0: F0.0 B0.0\n1: F1.0 B1.0"
    words = plan_words(Plan(pp=2, schedule="written", program=program))
    assert shlex.split(words) == ["pp=2", "schedule=written", f"program={program}"]
    assert plan_words(Plan(codec_density=0.1, schedule="gpipe")) == "dp=1"


def test_the_work_of_a_step_is_that_of_its_forwards_and_backwards():
    source = GptFacts(layers=2, width=64, heads=4, vocabulary=96, length=32, batch_size=8)
    work = Workload.of(source, task="gpt", machine="here")
    facts = source.facts(Plan())
    assert work.flops == pytest.approx(8 * 3 * facts.flops)
    assert work.num_parameters == sum(spec.num_elements for spec in source.specs(Plan()))
    again = prediction(Plan(recompute="full"), compute=1000.0)
    assert work.flops_per_second(again) == pytest.approx(8 * (4 * facts.flops - facts.last.flops))
    assert work.flops_per_second(prediction(Plan(dp=4), compute=1000.0)) == pytest.approx(8 * 3 * facts.flops / 4)
    assert (work.batch_size, work.unit, work.num_units) == (8, "tokens", 8 * 32)


def test_a_reason_names_the_term_that_the_first_plan_saves():
    text = against(BEST, PLAIN, error=0.08)
    assert text == "takes 55.0 ms; the first 14.0 ms less: 15.0 ms less of the update"
    assert against(BEST, BEST, error=0.08) == "is the first"
    assert against(BEST, PLAIN, error=0.4) == "takes 55.0 ms, which counts as equal"
    said = dict(reasons(DECISION))
    assert said["data parallel, zero 3"] == "does not fit: 3.00 GiB of 2.00 GiB, 2.25 GiB of it activations"
    assert said["tp within a host"] == "is not possible: tp = 3 with 4 heads, need a divisor of 4"
    pinned = dataclasses.replace(DECISION, baselines={"one": ELSEWHERE, "two": TOO_LARGE_ELSEWHERE})
    assert dict(reasons(pinned)) == {
        "one": "would take 30.0 ms, but dp and zero have to be as pinned",
        "two": "would not fit, and dp has to be as pinned: 1.00 GiB of 512 MiB, 768 MiB of it activations",
    }
    assert best_baseline(pinned) is None
    assert best_baseline(DECISION) == ("data parallel, zero 1", BEST)


def test_plans_within_the_error_of_the_fastest_are_marked_as_equal():
    marks = [row[2] for row in ranking_rows(DECISION, WORKLOAD)[1:]]
    assert marks == ["=", "=", ""]
    assert "of these, the simplest is first" in format_decision(DECISION, WORKLOAD)
    assert "none is more than 2 % faster than these" in format_decision(DECISION, WORKLOAD)
    assert "hosts differ" not in format_decision(dataclasses.replace(DECISION, host_order=(0, 1, 2)), WORKLOAD)
    turned = dataclasses.replace(DECISION, host_order=(2, 0, 1))
    assert "in the order of hosts 2, 0, 1 of" in format_decision(turned, WORKLOAD)
    certain = dataclasses.replace(DECISION, error=0.0)
    assert [row[2] for row in ranking_rows(certain, WORKLOAD)[1:]] == ["", "", ""]
    assert "simplest" not in format_decision(certain, WORKLOAD)


def test_the_first_line_says_that_fewer_devices_are_faster():
    assert fewer_devices(DECISION) == ""
    faster = dataclasses.replace(DECISION, fewer={1: prediction(Plan(), compute=40.0), 2: SLOW})
    head, *others = format_decision(faster, WORKLOAD).splitlines()
    assert head == "1 device is faster: 40.0 ms a step with dp=1, 41.0 ms with 4 devices"
    assert any(line.split()[:4] == ["1", "device", "takes", "40.0"] for line in others)
    assert head in visible_text(describe_decision(faster, WORKLOAD))
    equal = {1: SLOW, 2: prediction(Plan(dp=2), compute=41.2)}
    assert fewer_devices(dataclasses.replace(DECISION, fewer=equal)).startswith("2 devices are as fast: 41.2 ms")


def test_baselines_that_are_one_plan_are_named_once():
    same = dataclasses.replace(DECISION, baselines={"one": BEST, "two": PLAIN, "three": BEST, "four": BEST})
    assert reasons(same)[0] == ("one", "is the first; likewise three and four")
    assert [name for name, _ in reasons(same)] == ["one", "two"]


def test_equality_is_claimed_of_machines_that_were_measured_only():
    said = "no prediction for this machine was compared with a run"
    assert said in format_decision(DECISION, WORKLOAD)
    assert said in visible_text(describe_decision(DECISION, WORKLOAD))
    known = dataclasses.replace(DECISION, is_error_known=True)
    assert said not in format_decision(known, WORKLOAD)
    assert "count as equal, the error of predictions" in format_decision(known, WORKLOAD)
    assert [load_cluster(name).prediction_error > 0 for name in ("dgx-a100", "dgx-h100")] == [True, False]


def test_the_terms_of_a_row_add_up_to_its_step():
    head, *rows = term_rows(compared(DECISION))
    assert head[0] == "in ms"
    for row, each in zip(rows, compared(DECISION).values(), strict=True):
        *terms, whole = map(float, row[1:])
        assert sum(terms) == pytest.approx(whole, abs=0.01 * len(terms))
        assert whole == pytest.approx(1e3 * each.seconds)


def test_rates_follow_from_the_work_of_a_step():
    assert WORKLOAD.units_per_second(BEST) == pytest.approx(32 * 128 / 0.041)
    assert WORKLOAD.share_of_peak(BEST) == pytest.approx(4e9 / (0.041 * 4 * 1e12))
    unknown = dataclasses.replace(WORKLOAD, peak_flops=None)
    assert unknown.share_of_peak(BEST) is None
    assert "of peak" not in format_decision(DECISION, unknown)


def test_a_long_pipeline_shows_the_places_that_matter():
    parts = list(prediction(Plan(pp=16, microbatches=16), 1.0).by_stage)
    parts[5] = parts[5]._replace(activations=9.0 * 2**30)
    plan = Plan(pp=16, microbatches=16)
    text = format_prediction(Prediction(plan, NO_TERMS._replace(compute=1.0), tuple(parts), {}), WORKLOAD)
    assert re.findall(r"^ *pp (\d+) ", text, re.MULTILINE) == ["0", "5", "15"]


def test_no_line_of_the_text_ends_in_spaces():
    for text in (format_decision(DECISION, WORKLOAD), format_prediction(SLOW, WORKLOAD)):
        assert [line for line in text.splitlines() if line != line.rstrip()] == []


def test_the_page_has_every_number_of_the_text():
    page = visible_text(describe_decision(DECISION, WORKLOAD))
    for row in [*ranking_rows(DECISION, WORKLOAD), *term_rows(compared(DECISION)), *reasons(DECISION)]:
        for cell in row:
            assert cell in page, cell
    for text in ("recompute=full (1.50 GiB), or memory=3GiB", "3.00 GiB of 2.00 GiB", "312 plans considered"):
        assert text in page


def test_the_page_draws_the_predicted_step():
    first = timed(Plan(pp=4, microbatches=8))
    data = describe_decision(dataclasses.replace(DECISION, ranked=(first, *DECISION.ranked)), WORKLOAD)
    (drawn,) = (part for part in parts(data, "One step, predicted") if part["kind"] == "lanes")
    assert sum(len(blocks) for _, blocks in drawn["lanes"]) == 8
    assert "One step, predicted" not in titles(describe_decision(DECISION, WORKLOAD))


def test_text_and_page_say_in_which_order_hosts_of_unequal_speed_are_used():
    unequal = dataclasses.replace(DECISION, host_order=(2, 0, 1))
    for say in (format_decision, lambda *given: visible_text(describe_decision(*given))):
        assert "in the order 2, 0, 1" in say(unequal, WORKLOAD)
        assert "differ in speed" not in say(DECISION, WORKLOAD)
