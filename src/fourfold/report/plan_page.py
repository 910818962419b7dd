"""Plan page: what `fourfold show` prints, as an HTML file, with the timeline of a pipeline's schedule as a drawing.

unit  the time of a forward on one stage; a backward takes two, its halves one each, and messages take none
Law: the drawing has the actions of the programs that would run, at the times of the printed timeline.
"""

from collections.abc import Sequence
from html import escape

from fourfold.plan.pipeline.spec import EQUAL_COSTS
from fourfold.plan.plan import Plan
from fourfold.plan.simulate import Timeline, makespan, simulate
from fourfold.report.html_page import render_card, render_page
from fourfold.report.html_table import render_text
from fourfold.report.svg import Block, Lane, lane_chart
from fourfold.words.mesh import AXES, Mesh
from fourfold.words.program import Action, Verb

STYLES = {
    Verb.FORWARD: ("forward", "forward"),
    Verb.BACKWARD: ("backward", "backward"),
    Verb.BACKWARD_INPUT: ("backward", "backward of inputs"),
    Verb.BACKWARD_WEIGHT: ("update", "backward of weights"),
}
# In the drawing's units: the name of an action fits into a unit of time.
UNIT_WIDTH, MARGINS, MIN_WIDTH = 36, 166, 1120


def render_plan(plan: Plan, text: str) -> str:
    """The page of a plan. `text`: what `fourfold show` prints."""
    title = " × ".join(f"{axis} {plan.mesh.axis_size(axis)}" for axis in AXES if plan.mesh.axis_size(axis) > 1)
    printed = f"<h2>What each rank does, sends and stores</h2><pre>{render_text(text)}</pre>"
    cards = [render_card(_timeline_card(plan), wide=True) if plan.pp > 1 else "", render_card(printed, wide=True)]
    body = f'<div class="cards">{"".join(cards)}</div>'
    return render_page(title or "one rank", "what fourfold show prints of a plan", body)


def schedule_timeline(lists: Sequence[Sequence[Action]]) -> Timeline:
    """When each place on the pipeline axis runs its actions, in units."""
    program = {index: tuple(actions) for index, actions in enumerate(lists)}
    return simulate(program, lambda _, action: EQUAL_COSTS.of(action), mesh=Mesh(pp=len(lists)))


def _timeline_card(plan: Plan) -> str:
    timeline = schedule_timeline(plan.undrained_lists)
    rows = [
        Lane(f"pp {index}", [Block(str(t.action), t.start, t.end, STYLES[t.action.verb][0]) for t in times])
        for index, times in timeline.items()
    ]
    verbs = {timed.action.verb for times in timeline.values() for timed in times}
    keys = [f'<span class="key {style}"></span>{name}' for verb, (style, name) in STYLES.items() if verb in verbs]
    end = makespan(timeline)
    width = max(MIN_WIDTH, MARGINS + UNIT_WIDTH * round(end))
    drawing = lane_chart(
        rows, end=end, title="Timeline", x="time, in forwards of a stage", width=width, unit="forwards", decimals=0
    )
    several = "A few steps in a row. " if plan.is_asynchronous else ""
    note = f"F1.0: the forward of microbatch 0 on stage 1. {several}With equal stages; messages take no time."
    return (
        f"<h2>Timeline of {escape(plan.schedule)}</h2>"
        f'<div class="scroll"><div style="min-width: {width}px">{drawing}</div></div>'
        f'<p class="note">{"".join(keys)} · {escape(note)}</p>'
    )
