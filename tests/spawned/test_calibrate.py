"""A tiny task, calibrated on two ranks; steps predicted from it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.plan.lowering import lower
from fourfold.plan.plan import Plan
from fourfold.plan.topology import Topology
from fourfold.planner.predict.calibrated_prices import CalibratedPrices
from fourfold.planner.predict.calibration import Calibration, Cut, decode_calibration
from fourfold.planner.predict.step import predict_step
from fourfold.planner.task_facts.source import TaskFacts
from fourfold.tasks import lm

BATCH_SIZE = 8
WORDS = ("lm", "width=16", "layers=4", "heads=2", "length=16", f"batch_size={BATCH_SIZE}")
LIMIT_SECONDS = 240
PLANS = (
    Plan(dp=2),
    Plan(dp=2, zero=1),
    Plan(tp=2),
    Plan(cp=2),
    Plan(cp=2, ulysses=2),
    Plan(pp=2, microbatches=4),
    Plan(pp=2, microbatches=4, schedule="zero-bubble"),
    Plan(dp=2, codec="powersgd"),
    Plan(dp=2, transport="gloo"),
)
BRIEF = """
import sys
from fourfold.planner.calibrate import rank
rank.STEADY_SECONDS = 0.0  # whatever the numbers are, each is taken as few times as it must
from fourfold.cli.rank_main import main
main(sys.argv[1])
"""
PROGRAM = """
import sys
from fourfold.cli import launch
from fourfold.cli.plan.machine import calibrate, format_calibrated
from fourfold.cli.run import resolve

def brief(command, *args, real=launch.launch, **options):
    assert command[:2] == ["-m", "fourfold.cli.rank_main"]
    return real(["brief.py", *command[2:]], *args, **options)

launch.launch = brief
calibrated = calibrate(resolve(sys.argv[1:]), 2, key="tiny", is_forced=True)
if calibrated is None:
    sys.exit("the ranks failed")
print(calibrated.path)
print("\\n".join(format_calibrated(calibrated)), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    """What `fourfold plan calibrate` measures of the task on two ranks, whatever else this machine does."""
    cache = tmp_path_factory.mktemp("cache")
    (cache / "brief.py").write_text(BRIEF)
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *WORDS],
        env=environment,
        cwd=cache,
        timeout=LIMIT_SECONDS,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.split()[-1])
    assert path.is_relative_to(cache)
    return decode_calibration(path.read_bytes(), where=str(path))


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.to_toml().replace("\n", " "))
def test_every_plan_of_two_ranks_has_a_step(calibrated: Calibration, plan: Plan):
    source = TaskFacts(lm.task(width=16, layers=4, heads=2, length=16, batch_size=BATCH_SIZE))
    blueprint = lower(plan, source.specs(plan), Topology.regular(hosts=1, ranks_per_host=2), source.update_spec)
    predicted = predict_step(blueprint, source, CalibratedPrices(calibrated))
    assert 1e-4 < predicted.seconds < 10.0
    assert predicted.terms.compute > 0.0


def test_whole_samples_are_always_measured(calibrated: Calibration):
    records = [each for each in calibrated.segments if each.cut == Cut()]
    assert len({each.signature for each in records}) == 3  # the ends, and one block for all
    assert {each.second_half is None for each in records} == {True, False}
    assert all(each.forward.sizes[-1] == BATCH_SIZE / 2 for each in records)


def test_the_machine_and_the_conditions_are_in_the_file(calibrated: Calibration):
    assert calibrated.is_forced
    assert calibrated.machine.ranks_per_host == 2
    assert calibrated.machine.hosts == 1
