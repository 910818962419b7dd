"""A schedule's timeline as text: a row for each pipeline index, a column for each unit of time.

cell  the action that begins in a unit; `──` where it goes on, `·` where the index waits
unit  the shortest block of a stage
Law: a row's cells without marks are the index's compute actions in order.
"""

from collections.abc import Sequence

from fourfold.axes.pipeline.rules.spec import EQUAL_COSTS, BlockCosts
from fourfold.plan.simulate import TimedAction, simulate
from fourfold.words.mesh import Mesh
from fourfold.words.program import Action

GOES_ON, WAITS, MORE = "─", "·", "…"


def timeline_text(
    lists: Sequence[Sequence[Action]], *, costs: BlockCosts = EQUAL_COSTS, width: int | None = None
) -> str:
    """A line per index: `0  F0 F1 ·  ·  B0 ── B1 ──`. With several stages on an index, an action names its stage:
    `F4.1` is the forward of microbatch 1 on stage 4.

    `lists`: with or without messages, which take no time. `width`: of a line, in characters; what is longer is cut.
    """
    program = {index: tuple(actions) for index, actions in enumerate(lists)}
    timeline = simulate(program, lambda _, action: costs.of(action), mesh=Mesh(pp=len(lists)))
    unit = min((cost for cost in costs if cost), default=1.0)
    has_stages = any(action.stage >= len(lists) for actions in lists for action in actions)
    rows = [
        _cells([timed for timed in times if costs.of(timed.action)], unit, has_stages) for times in timeline.values()
    ]
    cell_width = max((len(cell) for row in rows for cell in row), default=1)
    head_width = len(str(len(rows) - 1))
    return "\n".join(_line(f"{index:>{head_width}}", row, cell_width, width) for index, row in enumerate(rows))


def _cells(times: Sequence[TimedAction], unit: float, has_stages: bool) -> list[str]:
    """What an index does in each unit, up to the end of its last action."""
    row: list[str] = []
    for action, start, end in times:
        first, stop = int(start / unit + 0.5), int(end / unit + 0.5)  # not round(): 1.5 and 2.5 would meet at 2
        row += [WAITS] * (first - len(row))
        name = str(action) if has_stages else f"{action.verb.value}{action.index}"
        row += [name, *[GOES_ON] * (stop - first - 1)]
    return row


def _line(head: str, row: Sequence[str], cell_width: int, width: int | None) -> str:
    cells = [cell * cell_width if cell == GOES_ON else cell.ljust(cell_width) for cell in row]
    room = len(cells) if width is None else max(0, (width - len(head) - 1) // (cell_width + 1))
    if len(cells) > room:
        cells = [*cells[: max(0, room - 1)], MORE]
    return f"{head}  {' '.join(cells)}".rstrip()
