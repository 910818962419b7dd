"""The step program of the data axis: what one data rank does in one step, as a list of actions.

round      the reductions after one backward; only where gradients rest split does a step have more than one
phase      a forward, a backward or an evaluation: weights that rest split are unsharded in each of them
use order  the buckets in the order in which a phase unshards them; one that is used again later occurs again
undrained  between steps, forwards are left without their backwards: see `axes/pipeline/rules/schedules.py`
Law: every data rank has the same program, so all of them begin the same collectives in the same order.
Law: the last backward of a batch is followed by its reductions and updates, wherever in a step it stands.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from fourfold.axes.data.rules.zero import RESTING_LAYOUTS, RestingLayouts, layout_changes
from fourfold.plan.rank_program import BACKWARD_PHASES
from fourfold.words.layout import Change
from fourfold.words.program import (
    GRAD_NORM,
    LOSS,
    NOMINAL_COUNT,
    TRUST_NORMS,
    USED_PARAMS,
    Action,
    Verb,
    nth_index,
)

# ---- the step program of the data axis -----------------------------------------------------------------------------


UNSHARDED = (Verb.FORWARD, Verb.BACKWARD, Verb.BACKWARD_INPUT)  # the phases that use weights
COMPLETE_BACKWARD = (Verb.BACKWARD, Verb.BACKWARD_WEIGHT)  # all gradients of a microbatch are there


class StepSync(StrEnum):
    """What ranks exchange in a step."""

    GRADIENTS = "gradients"  # every bucket is reduced
    NOTHING = "nothing"  # a local step of local SGD
    WEIGHTS = "weights"  # a local step of local SGD, after which the weights are averaged


class UseOrders(NamedTuple):
    """The use order of each phase."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    evaluate: tuple[int, ...]


def predict_use_orders(num_buckets: int) -> UseOrders:
    """The use orders of a model that uses its parameters in order of definition, each once."""
    backward = tuple(range(num_buckets))  # buckets are numbered in reverse order of definition
    return UseOrders(backward[::-1], backward, backward[::-1])


class DataStepSpec(NamedTuple):
    """What a data rank's step consists of.

    launch_order            the order of reductions, as recorded in the first step; empty: by bucket number
    bucket_stages           by bucket: the stage whose backwards give its gradients, one of several that are
                            interleaved; empty: `stage`
    has_trust_ratios        the optimizer needs norms of single parameters, and ranks hold parts of these
    use_orders              as recorded in the first step; None: as `predict_use_orders` has them
    measures_nominal_count  the step finds out what gradients are divided by before the loss count is known
    computes                the forwards and backwards of the stage, its messages, and the nominal count where a step
                            would measure it; empty: each microbatch in turn
    undrained               the same of a step of an asynchronous schedule; empty: of a synchronous one
    """

    microbatches: int
    num_buckets: int
    resting_layouts: RestingLayouts = RESTING_LAYOUTS[0]
    has_clip: bool = False
    allows_unused: bool = False
    update: str = "after"
    launch_order: tuple[int, ...] = ()
    has_trust_ratios: bool = False
    sync: StepSync = StepSync.GRADIENTS
    use_orders: UseOrders | None = None
    measures_nominal_count: bool = False
    stage: int = 0
    computes: tuple[Action, ...] = ()
    undrained: tuple[Action, ...] = ()
    bucket_stages: tuple[int, ...] = ()

    @property
    def compute_actions(self) -> tuple[Action, ...]:
        """The forwards and backwards of the stage, its messages, and the nominal count if it is measured, in order."""
        count, verbs = Action(Verb.MEASURE, self.stage, NOMINAL_COUNT), (Verb.FORWARD, Verb.BACKWARD)
        computes = self.computes
        if not computes:
            first, *others = (Action(v, self.stage, i) for i in range(self.microbatches) for v in verbs)
            computes = (first, count, *others)
        return tuple(each for each in computes if each != count or self.measures_nominal_count)

    @property
    def reduction_order(self) -> tuple[int, ...]:
        """The launch order; of interleaved stages, the one whose gradients the program completes first comes first."""
        order = self.launch_order or tuple(range(self.num_buckets))
        if not self.bucket_stages:
            return order
        actions = enumerate(self.compute_actions)
        last = {action.stage: position for position, action in actions if action.verb in COMPLETE_BACKWARD}
        return tuple(sorted(order, key=lambda bucket: last[self.bucket_stages[bucket]]))

    def of_stage(self, buckets: Sequence[int], stage: int) -> tuple[int, ...]:
        """Those of these buckets that a stage computes with."""
        return tuple(each for each in buckets if not self.bucket_stages or self.bucket_stages[each] == stage)


def lower_step(step: DataStepSpec) -> tuple[Action, ...]:
    """The program of a data rank's step: forwards and backwards, reductions in launch order, then updates.

    Reductions stand after the backward that completes them. A runtime may begin each one while that backward still
    runs, as soon as its bucket is ready, in this order. Of interleaved stages, each has the reductions of its own
    buckets. Where gradients rest split, every backward has its own round of reductions; the reduction of bucket b in
    round r has the index r × num_buckets + b.

    Where weights rest split, the unshards of a forward or backward stand in front of it, in the order of use; the n-th
    unshard of bucket b in the step, from 0, has the index n × num_buckets + b.

    A step that averages weights has no reductions: the change of a bucket is pushed after its update, and the averages
    are pulled at the end of the step.

    `update = "in_backward"` puts each update after the last reduction of its bucket; it too may begin while backward
    runs (backward fusion: Jiang et al., "Optimizer Fusion", 2021). `update = "in_forward"` puts the updates of the step
    before in front of the first forward, in the order in which forward uses the buckets; each may be deferred until
    that forward reaches its bucket (forward fusion: ibid.).
    """
    launch_order = step.reduction_order
    updates = {bucket: _update(step, bucket) for bucket in launch_order}
    pushes = {
        bucket: [Action(Verb.PUSH, step.stage, bucket)] if step.sync == StepSync.WEIGHTS else []
        for bucket in launch_order
    }
    actions: list[Action] = []
    if step.update == "in_forward":
        actions += [action for bucket in reversed(launch_order) for action in updates[bucket]]
    actions += _compute_phases(step, launch_order, updates)
    actions += _measures(step)
    for bucket in launch_order:
        actions += (updates[bucket] if step.update == "after" else []) + pushes[bucket]
    if step.sync == StepSync.WEIGHTS:
        actions += [Action(Verb.PULL, step.stage, bucket) for bucket in launch_order]
    return tuple(actions)


def lower_evaluation(step: DataStepSpec, computes: Sequence[Action] = ()) -> tuple[Action, ...]:
    """The program of an evaluation: the forward of one batch, and the sums of its loss and counts.

    computes  the forwards of this place's stages, with their messages; empty: of one stage
    """
    unshards, actions = _Unshards(step), []
    for action in computes or [Action(Verb.FORWARD, step.stage, 0)]:
        if action.verb == Verb.FORWARD:
            actions += unshards.next_phase(unshards.orders.evaluate, action.stage)
        actions.append(action)
    return (*actions, Action(Verb.MEASURE, step.stage, LOSS))


class _Unshards:
    """The unshards of a step, phase by phase: each bucket's are counted, so that each has an index of its own."""

    def __init__(self, step: DataStepSpec) -> None:
        self._step, self._counts = step, Counter[int]()
        self._is_needed = layout_changes(step.resting_layouts).before_use != Change.NONE
        self.orders = step.use_orders or predict_use_orders(step.num_buckets)

    def next_phase(self, order: Sequence[int], stage: int) -> list[Action]:
        """The unshards of a stage's next phase; none if weights rest whole."""
        actions = []
        for bucket in self._step.of_stage(order, stage) if self._is_needed else ():
            index = nth_index(bucket, self._counts[bucket], self._step.num_buckets)
            actions.append(Action(Verb.UNSHARD, self._step.stage, index))
            self._counts[bucket] += 1
        return actions


def update_verbs(layouts: RestingLayouts) -> tuple[Verb, ...]:
    """What updates a bucket: UPDATE, and GATHER if new weights are all-gathered."""
    gathers = layout_changes(layouts).after_update != Change.NONE
    return (Verb.UPDATE, Verb.GATHER) if gathers else (Verb.UPDATE,)


def _update(step: DataStepSpec, bucket: int) -> list[Action]:
    return [Action(verb, step.stage, bucket) for verb in update_verbs(step.resting_layouts)]


def _compute_phases(
    step: DataStepSpec, launch_order: tuple[int, ...], updates: Mapping[int, list[Action]]
) -> list[Action]:
    """The forwards and backwards with their unshards, the measures of the loss, the reductions.

    The measure of the loss stands in front of the first backward behind all forwards, or of the receipt of its
    gradient: what other stages need has been sent. What a backward sends back goes before its reductions.
    """
    unshards, rounds = _Unshards(step), Counter[int]()
    num_forwards = sum(action.verb == Verb.FORWARD for action in step.compute_actions)
    num_left = Counter(action.stage for action in step.compute_actions if action.verb in COMPLETE_BACKWARD)
    every_backward = layout_changes(step.resting_layouts).after_backward != Change.NONE
    actions: list[Action] = []
    reductions: list[Action] = []
    for action in step.compute_actions:
        if action.verb != Verb.SEND_BACKWARD:
            actions += reductions
            reductions = []
        num_forwards -= action.verb == Verb.FORWARD
        if num_forwards == 0 and action.verb in BACKWARD_PHASES:
            num_forwards = -1
            actions.append(Action(Verb.MEASURE, step.stage, LOSS))
        if action.verb in UNSHARDED:
            orders = unshards.orders
            order = orders.forward if action.verb == Verb.FORWARD else orders.backward
            actions += unshards.next_phase(order, action.stage)
        actions.append(action)
        if action.verb in COMPLETE_BACKWARD:
            num_left[action.stage] -= 1
            is_last = num_left[action.stage] == 0
            if is_last or every_backward:
                buckets = step.of_stage(launch_order, action.stage)
                round_number = rounds[action.stage] if every_backward else 0
                reductions = _reductions(step, round_number, buckets, updates, is_last=is_last)
            rounds[action.stage] += 1
    return [*actions, *reductions]


def _reductions(
    step: DataStepSpec,
    round_number: int,
    buckets: Sequence[int],
    updates: Mapping[int, list[Action]],
    *,
    is_last: bool,
) -> list[Action]:
    """The reductions of a round, with the updates fused into those of the last one."""
    actions = []
    for bucket in buckets:
        if step.sync == StepSync.GRADIENTS:
            actions.append(Action(Verb.REDUCE, step.stage, nth_index(bucket, round_number, step.num_buckets)))
        if is_last and step.update == "in_backward":
            actions += updates[bucket]
    return actions


def _measures(step: DataStepSpec) -> list[Action]:
    """The measures that need all gradients."""
    wanted = {USED_PARAMS: step.allows_unused, GRAD_NORM: step.has_clip, TRUST_NORMS: step.has_trust_ratios}
    return [Action(Verb.MEASURE, step.stage, scalars) for scalars, is_wanted in wanted.items() if is_wanted]


# ---- undrained program ---------------------------------------------------------------------------------------------


def lower_undrained(step: DataStepSpec) -> tuple[Action, ...]:
    """The program of a step between others. A step after a drain has the same one: of its backwards, those that have no
    forward yet do not run.
    """
    launch_order = step.launch_order or tuple(range(step.num_buckets))
    last = step.microbatches - 1
    end_of_batch = [Action(Verb.REDUCE, step.stage, bucket) for bucket in launch_order]
    end_of_batch += [Action(Verb.UPDATE, step.stage, bucket) for bucket in launch_order]
    actions: list[Action] = []
    waiting: list[Action] = []
    for action in step.undrained:
        if action.verb != Verb.SEND_BACKWARD:
            actions += waiting
            waiting = []
        actions.append(action)
        if action == Action(Verb.FORWARD, step.stage, last):
            actions.append(Action(Verb.MEASURE, step.stage, LOSS))
        if action == Action(Verb.BACKWARD, step.stage, last):
            waiting = end_of_batch
    return (*actions, *waiting)
