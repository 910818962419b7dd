"""Plan: how a task is laid over the mesh. Decisions only, plain scalars, TOML in and out.

Law: `Plan.from_toml(plan.to_toml()) == plan`, and an impossible plan is refused with all its problems at once.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from fourfold.axes.context.rules.layout import ContextSpec
from fourfold.axes.data.rules.zero import ShardGroups
from fourfold.axes.pipeline.rules.division import StageSpec
from fourfold.axes.pipeline.rules.edges import EdgeSpec
from fourfold.axes.pipeline.rules.in_flight import least_held
from fourfold.axes.pipeline.rules.schedules import ASYNCHRONOUS, SCHEDULES, compute_actions
from fourfold.axes.pipeline.rules.spec import ComputeLists, PipelineSpec
from fourfold.axes.tensor.rules.dims import TensorSpec
from fourfold.plan.batch_split import BatchSplit
from fourfold.plan.codec import CodecSpec
from fourfold.plan.decode import DecodeError, format_pair, from_toml, version_problem
from fourfold.plan.plan_fields import FIELDS, PLAN_FIELDS, PlanFields, plan_problems
from fourfold.plan.recipes import RECIPE_PREFIX, recipe_fields
from fourfold.words.errors import PlanError, Problem
from fourfold.words.field import to_builtin
from fourfold.words.mesh import Mesh
from fourfold.words.program import Verb

VERSION = 1
NUM_SHOWN_BATCHES = 4  # of an asynchronous schedule


AnyClass = TypeVar("AnyClass", bound=type)


def _refuse_unknown_fields(plan_class: AnyClass) -> AnyClass:
    """Let the constructor refuse a mistyped field as a plan file does, and not with a TypeError."""
    construct = vars(plan_class)["__init__"]

    @functools.wraps(construct)
    def init(self: object, *args: Any, **fields: Any) -> None:
        if any(name not in FIELDS for name in fields):
            raise PlanError(plan_problems(fields), where="the plan")
        construct(self, *args, **fields)

    plan_class.__init__ = init
    return plan_class


@_refuse_unknown_fields
@dataclass(frozen=True, kw_only=True)
class Plan(PlanFields):
    """How a task is laid over pp · dp · cp · tp ranks. All scalars; see `docs/plan.md` for each.

    Raises PlanError if a value is illegal or not built yet, or a name is no field.
    """

    def __post_init__(self) -> None:
        # Not `dataclasses.asdict`, which copies each value: a search makes many thousands of plans.
        values = {name: to_builtin(getattr(self, name)) for name in FIELDS}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        problems = plan_problems(values)
        if problems:
            raise PlanError(problems, where="the plan")

    @property
    def codec_spec(self) -> CodecSpec | None:
        """The codec and its parameters; None without a codec."""
        if self.codec == "none":
            return None
        return CodecSpec(
            self.codec,
            matrix_rank=self.codec_rank,
            density=self.codec_density,
            refresh_steps=self.codec_refresh_steps,
        )

    @property
    def ineffective_fields(self) -> dict[str, str]:
        """Fields set to other than their defaults without effect, and what each would need to have one."""
        needs = {name: each.needs for name, each in PLAN_FIELDS.items() if getattr(self, name) != each.default}
        return {name: need.text for name, need in needs.items() if need is not None and not need.holds(self)}

    @property
    def identity_fields(self) -> dict[str, object]:
        """The fields that change what is trained. The identity of a run is saved with these."""
        return {name: getattr(self, name) for name, each in PLAN_FIELDS.items() if each.in_identity(self)}

    @property
    def num_shards(self) -> int:
        """The number of shards of what is stored split; 1 if everything is stored whole."""
        return (self.shard or self.dp) * self.cp if self.zero else 1

    @property
    def sync_interval(self) -> int:
        """Steps after which the weights are the same on all ranks again."""
        return self.local_steps if self.sync == "local" else 1

    @property
    def reduce_group_size(self) -> int:
        """The number of ranks whose gradients are summed: dp · cp."""
        return self.dp * self.cp

    @property
    def shard_groups(self) -> ShardGroups:
        """How many ranks split a bucket, and how many replicas of the shards there are; at zero 0 all ranks and one."""
        size = self.num_shards if self.zero else self.reduce_group_size
        return ShardGroups(size, self.reduce_group_size // size)

    @property
    def batch_split(self) -> BatchSplit:
        """Into how many parts a step cuts a batch."""
        return BatchSplit(self.dp, self.cp, self.microbatches, has_local_batch_norm=self.batch_norm == "local")

    @property
    def context_spec(self) -> ContextSpec:
        """How ranks hold the tokens of a sequence."""
        return ContextSpec(self.cp, self.ring, self.ulysses)

    @property
    def tensor_spec(self) -> TensorSpec:
        """How many ranks split layers, and which dims of the weights."""
        return TensorSpec(self.tp, self.dims, self.ulysses, self.sequence_parallel)

    @functools.cached_property
    def compute_lists(self) -> ComputeLists:
        """By place on the pipeline axis: the forwards and backwards of a step that is drained at its end."""
        return compute_actions("1f1b" if self.is_asynchronous else self.schedule, **self.schedule_sizes)

    @functools.cached_property
    def undrained_lists(self) -> ComputeLists:
        """By place: the forwards and backwards of a few steps in a row; of one, if the schedule is synchronous."""
        num_batches = NUM_SHOWN_BATCHES if self.is_asynchronous else 1
        return compute_actions(self.schedule, **self.schedule_sizes, num_batches=num_batches)

    @property
    def schedule_sizes(self) -> dict[str, Any]:
        """What its schedule is made for, by name."""
        names = ("pp", "microbatches", "interleave", "max_in_flight", "program")
        return {name: getattr(self, name) for name in names}

    @property
    def pipeline_spec(self) -> PipelineSpec:
        """What the schedule is made for."""
        return PipelineSpec(self.pp, self.microbatches, self.interleave, max_in_flight=self.max_in_flight)

    @property
    def is_asynchronous(self) -> bool:
        """Whether steps leave backwards to later steps, and batches use weights that miss updates."""
        return self.pp > 1 and self.schedule in ASYNCHRONOUS

    @property
    def has_plain_flats(self) -> bool:
        """Whether every rank has all of a parameter, once: nothing tells a part of it by its place in a flat."""
        is_once = self.precision == "keep" and self.offload == "none" and not self.is_asynchronous
        return is_once and (self.zero, self.tp, self.sync, self.codec) == (0, 1, "step", "none")

    @property
    def least_held(self) -> float:
        """The activations that the fullest stage holds at a time, at least, relative to a microbatch on all stages."""
        if self.pp == 1:
            return 1.0
        return 1 / self.num_stages if self.is_asynchronous else least_held(self.compute_lists)

    @property
    def divides_backward(self) -> bool:
        """Whether backwards are computed in two halves, those of inputs and those of weights."""
        if self.pp == 1:
            return False
        divides = SCHEDULES[self.schedule].divides_backward
        if divides is None:
            return any(action.verb == Verb.BACKWARD_WEIGHT for each in self.compute_lists for action in each)
        return divides

    @property
    def num_stages(self) -> int:
        """Into how many stages the model is divided; each place on the pipeline axis has `interleave` of them."""
        return self.pp * self.interleave if self.pp > 1 else 1

    @property
    def stage_spec(self) -> StageSpec:
        """Into how many stages the model is divided, and how."""
        return StageSpec(self.stages, self.num_stages, self.pp)

    @property
    def edge_spec(self) -> EdgeSpec:
        """How messages between stages are encoded."""
        return EdgeSpec(self.edge, self.edge_density)

    @property
    def mesh(self) -> Mesh:
        return Mesh(pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp)

    @classmethod
    def from_dict(cls, values: Mapping[str, object], *, where: str = "the plan") -> Self:
        """The plan with these values and defaults for the other fields. Raises PlanError with all problems at once."""
        try:
            return cls(**values)  # type: ignore[arg-type]
        except PlanError as error:
            raise PlanError(error.problems, where=where) from None

    @classmethod
    def from_toml(cls, text: str, *, where: str = "plan.toml") -> Self:
        """Read a plan as `to_toml` writes it: flat keys and `version = 1`."""
        try:
            values = from_toml(text)
        except DecodeError as error:
            raise PlanError(Problem(str(error), "valid TOML"), where=where) from None
        version = values.pop("version", None)
        if type(version) is not int or version != VERSION:
            raise PlanError([version_problem(version, VERSION), *plan_problems(values)], where=where)
        return cls.from_dict(values, where=where)

    @classmethod
    def recipe(cls, name: str, **fields: object) -> Self:
        """The plan of a named system, such as "zero3" or "diloco", with these fields in place of its own.

        `fourfold show recipe:` lists the names. Raises PlanError if there is no such recipe, or a field is wrong.
        """
        where = f"{RECIPE_PREFIX}{name}"
        return cls.from_dict({**recipe_fields(name), **fields}, where=where)

    def to_toml(self, *, defaults: bool = False) -> str:
        """The plan as TOML: the fields that differ from their defaults, or all of them."""
        lines = [f"version = {VERSION}"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and (defaults or value != field.default):
                lines.append(format_pair(field.name, value))
        return "\n".join(lines) + "\n"


def candidate_meshes(size: int, mesh: Mesh) -> list[Mesh]:
    """Meshes of `size` ranks, those most like `mesh` first. Its pp, cp and tp stay, or are 1: others may not fit."""
    axes = itertools.product((mesh.tp, 1), (mesh.pp, 1), (mesh.cp, 1))
    fitting = [(tp, pp, cp) for tp, pp, cp in axes if size % (tp * pp * cp) == 0]
    return [Mesh(pp=pp, dp=size // (tp * pp * cp), cp=cp, tp=tp) for tp, pp, cp in dict.fromkeys(fitting)]
