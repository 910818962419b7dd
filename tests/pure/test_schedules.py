"""Laws of schedules: complete, in order, and they end."""

from hypothesis import given
from hypothesis import strategies as st

from fourfold.plan.pipeline.schedules import compute_actions, owner_of, schedule_problems
from fourfold.plan.pipeline.sends import add_sends
from fourfold.plan.simulate import simulate
from fourfold.words.mesh import Mesh
from fourfold.words.program import Action, Verb


@st.composite
def sizes(draw):
    """A schedule and sizes that it can be made for."""
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    pp = draw(st.integers(1, 5))
    if schedule == "interleaved":
        return schedule, {"pp": pp, "microbatches": pp * draw(st.integers(1, 4)), "interleave": draw(st.integers(2, 3))}
    return schedule, {"pp": pp, "microbatches": draw(st.integers(1, 12))}


@given(case=sizes())
def test_every_schedule_is_complete_and_ends(case):
    schedule, size = case
    assert not schedule_problems(schedule, **size)
    lists = compute_actions(schedule, **size)
    num_stages = size["pp"] * size.get("interleave", 1)
    wanted = {
        Action(verb, stage, i)
        for verb in (Verb.FORWARD, Verb.BACKWARD)
        for stage in range(num_stages)
        for i in range(size["microbatches"])
    }
    actions = [(index, action) for index, each in enumerate(lists) for action in each]
    assert len(actions) == len(wanted)
    assert {action for _, action in actions} == wanted
    assert all(owner_of(action.stage, size["pp"]) == index for index, action in actions)
    for program in (lists, add_sends(lists, num_stages)):
        simulate(dict(enumerate(program)), lambda *_: 1.0, mesh=Mesh(pp=size["pp"]))
