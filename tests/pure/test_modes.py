"""Laws of where modes are decided: assembly makes strategies of them, and nothing in a step asks again."""

import ast
import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence

import pytest

from fourfold.plan.plan import Plan
from tests.source_files import SOURCE, file_name, files, forget, imports, is_class, is_own, module_name, nodes, parsed


@pytest.fixture(autouse=True, scope="module")
def _forget_the_files() -> Iterator[None]:
    yield
    forget()


# Where a step's parts are chosen, and where what cannot be carried out is refused.
CHOOSES_OR_REFUSES = {
    *("assembly", "stage_assembly", "distributed_optimizer"),
    *("model_checks", "argument_checks", "memory_bound"),
    "axis",  # of an axis: attaches it
}
# What else there depends on a mode of the plan, on the class of a part, or on whether there is one, and why.
CHOSEN_ELSEWHERE = {
    "sdpa_interception.py isinstance DocumentMask": "a mask that a user gives, and that attends by itself",
}
RECORDS = {"NamedTuple", "TypedDict", "Enum", "StrEnum", "IntEnum", "Exception"}


@functools.cache
def plan_modes() -> set[str]:
    """The fields of a plan that are one of several words, or a switch."""
    return {field.name for field in dataclasses.fields(Plan) if isinstance(getattr(Plan(), field.name), str | bool)}


def behaviours() -> set[str]:
    """The classes of Fourfold that are no records."""
    classes = [node for path in files() for node in nodes(path) if is_class(node)]
    return {
        node.name
        for node in classes
        if not any("dataclass" in ast.unparse(each) for each in node.decorator_list)
        and not RECORDS & {ast.unparse(base) for base in node.bases}
    }


def named(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def choices(tree: ast.AST, parts: set[str]) -> set[str]:
    """What a file compares of a plan's modes, by which classes it tells parts apart, and which parts may be None."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.Match):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else [node.subject]
            fields = {each.attr for each in sides if isinstance(each, ast.Attribute) and "plan" in ast.unparse(each)}
            found |= {f"plan.{field}" for field in fields & plan_modes()}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            found |= {f"isinstance {name}" for name in named(node.args[1]) & parts}
        elif isinstance(node, ast.AnnAssign | ast.arg) and ast.unparse(node.annotation or node).endswith(" | None"):
            found |= {f"optional {name}" for name in named(node.annotation or node) & parts}
    return found


def test_modes_and_optional_parts_of_a_step_are_chosen_where_it_is_assembled():
    parts = behaviours()
    found = {
        f"{path.name} {choice}"
        for path in [*files("step/*.py"), *files("model/*.py")]
        if path.stem not in CHOOSES_OR_REFUSES
        for choice in choices(parsed(path), parts)
    }
    assert found == set(CHOSEN_ELSEWHERE)


def test_every_form_of_choosing_is_detected():
    forms = {
        "if self._plan.sync == 'local': pass": "plan.sync",
        "x = 'after' != plan.update": "plan.update",
        "match trained.plan.precision:\n case 'fp16': pass": "plan.precision",
        "isinstance(gradients, (list, Unbucketed))": "isinstance Unbucketed",
        "self._rounds: Unbucketed | None = None": "optional Unbucketed",
        "def f(codec: Unbucketed | None): pass": "optional Unbucketed",
    }
    for text, choice in forms.items():
        assert choices(ast.parse(text), {"Unbucketed"}) == {choice}, text
    assert not choices(ast.parse("plan.dp == 1; isinstance(x, list); y: Record | None = None"), {"Unbucketed"})


# The files of lowering and of a step that see the plan itself, and why. Others get numbers, flags and small records.
SEES_THE_PLAN = {
    "plan/check.py": "refuses what does not go together",
    "plan/lowering.py": "decides what follows from it",
    "plan/memory.py": "decides where gradients rest, and counts bytes",
    "step/argument_checks.py": "refuses what is no plan, or none for a wrapped optimizer",
    "proof/attachment.py": "gives it to the axes",
    "axes/context/attach/axis.py": "attaches its axis",
    "axes/data/attach/check.py": "attaches its axis",
    "axes/pipeline/attach/axis.py": "attaches its axis",
    "axes/tensor/attach/axis.py": "attaches its axis",
    "step/assembly.py": "makes the parts of a rank",
    "proof/digests/build.py": "compares the plans of the ranks",
    "step/distributed_optimizer.py": "public: `DistributedOptimizer(…, plan)`; makes its parts",
    "step/memory_bound.py": "counts what a run needs, before its processes start",
    "step/model_checks.py": "refuses what does not go with a model",
    "step/parallelize.py": "public: `parallelize(…, plan)`",
    "step/stage_assembly.py": "makes the parts of a stage",
    "step/train_step.py": "public: `TrainStep.plan`",
}
# The rooms of lowering and of a step, without what describes plans.
SEEN_BY_A_STEP = ("plan", "axes/*/rules", "axes/*/work", "axes/*/attach", "comm", "optim", "torch_kit")
SEEN_BY_A_STEP += ("model", "proof", "step")
MAX_FILES_OF_A_PLAN = 15  # from `parallelize` on


def sights_of_the_plan(tree: ast.AST) -> set[str]:
    """Where a file names the class, takes a plan as an argument or reads a field of what is called a plan."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "Plan":
            found.add("Plan")
        elif isinstance(node, ast.arg) and node.arg == "plan":
            found.add("argument")
        elif isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            found |= {f"plan.{node.attr}"} if owner.removeprefix("_") == "plan" else set()
    return found


def reached_files(first: str) -> set[str]:
    """The files that one imports, and those that they import, and so on."""
    by_module = {f"fourfold.{module_name(path)}": path for path in files() if path.parent != SOURCE}
    reached, waiting = set[str](), [SOURCE / first]
    while waiting:
        path = waiting.pop()
        if (name := file_name(path)) not in reached:
            reached.add(name)
            waiting += [by_module[module] for module in imports(path) & set(by_module)]
    return reached


def test_the_plan_is_seen_only_where_it_is_checked_lowered_or_made_into_parts():
    paths = [path for room in SEEN_BY_A_STEP for path in files(f"{room}/**/*.py")]
    found = {file_name(path) for path in paths if sights_of_the_plan(parsed(path))}
    assert found == {"plan/plan_fields.py", "plan/ask.py", *SEES_THE_PLAN}


def test_no_step_imports_the_planner():
    assert not {name for name in reached_files("step/parallelize.py") if name.startswith("planner/")}


def test_a_plan_enters_few_files_from_parallelize_on():
    entered = set(SEES_THE_PLAN) & reached_files("step/parallelize.py")
    assert {"step/train_step.py", "step/assembly.py", "plan/lowering.py"} <= entered
    assert len(entered) <= MAX_FILES_OF_A_PLAN, entered


def test_every_form_of_seeing_the_plan_is_detected():
    forms = {
        "def f(x: Plan | None): pass": {"Plan"},
        "from fourfold.plan.plan import Plan\nf(Plan(dp=2))": {"Plan"},
        "lambda plan: 1": {"argument"},
        "def f(*, plan): pass": {"argument"},
        "self._plan.sync": {"plan.sync"},
        "blueprint.plan.sync_interval": {"plan.sync_interval"},
        "f(plan.dp)": {"plan.dp"},
    }
    for text, found in forms.items():
        assert sights_of_the_plan(ast.parse(text)) == found, text
    assert not sights_of_the_plan(
        ast.parse("from fourfold.axes.context.rules.layout import ContextSpec\nplanned.dp, split.plan")
    )


# What a step asks of flags that are set when an object is made, and why. A flag that a mode has set is such a mode.
FOUND_BY_A_DRY_RUN = "what a dry run has found in the user's model and loss"
CHOSEN_BY_A_DRY_RUN = "what a dry run can compare: it lists its checks and takes the strictest that is possible"
ASKED = {
    "has_any_hook": "the user may register hooks at any time",
    "has_pending": "whether updates wait now",
    "index": "of an action",
    "is_causal": "of one call of attention",
    "is_compiled": "of the user's loss function: a compiled one cannot be observed",
    "is_asynchronous": "chooses the runner of steps, when a TrainStep is made",
    "is_in_backward": "where a dry run has failed",
    "is_of_model": "refuses a compiled model that computes its own loss",
    "is_of_tokens": "of one draw of dropout",
    "is_synchronized": "whether local steps have just averaged the weights",
    "is_whole": "of one parameter's shard",
    "num_elements": "of one loss",
    "size": "of the world: decides, when a DriftChecker is made, whether there are replicas to compare",
    **dict.fromkeys(("has_writes", "is_additive", "is_comparable", "is_uneven", "is_unreduced"), FOUND_BY_A_DRY_RUN),
    **dict.fromkeys(("is_torch_mean", "mixes_outputs"), FOUND_BY_A_DRY_RUN),
    "is_finite": "of one probe of a loss",
    "is_batch_split": "a mode: only parts of a batch must take the same means, and each its backward",
    **dict.fromkeys(("fits_float64", "fits_model_dtype", "has_gradients", "_new_tensors"), CHOSEN_BY_A_DRY_RUN),
    "_counts_renorms": "a mode: an embedding's max_norm is harmless on one rank",
    "has_local_batch_norm": "a mode: what a dry run need not compare",
}
CONSTRUCTORS = {"__init__", "__post_init__"}


def asked_flags(step: Sequence[ast.AST], all_trees: Sequence[ast.AST]) -> set[str]:
    """The flags that some files ask. By name: flags of two classes with one name are one flag."""
    written = {name for tree in all_trees for is_self, name in stores(tree) if not is_self}
    classes = [node for tree in all_trees for node in ast.walk(tree) if is_class(node)]
    flags = {name for cls in classes for name in flags_of(cls, written)}
    return flags & {name for tree in step for condition in conditions(tree) for name in asked(condition)}


def flags_of(cls: ast.ClassDef, written: set[str]) -> set[str]:
    """Truth values that a class has from when an object is made, and the numbers that a protocol has.

    `written`: attributes that others write into its objects. Not found: methods, and numbers of other classes.
    """
    state = written | {name for is_self, name in stores(cls) if is_self}
    kinds = {"bool", "int"} if "Protocol" in map(ast.unparse, cls.bases) else {"bool"}
    found: set[str] = set()
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) in kinds:
            found.add(ast.unparse(node.target))
        elif isinstance(node, ast.Assign):
            found |= {ast.unparse(target) for target, value in assignments(node) if is_truth(value)}
        elif isinstance(node, ast.FunctionDef) and node.name in CONSTRUCTORS:
            arguments = [*node.args.args, *node.args.kwonlyargs]
            bools = {arg.arg for arg in arguments if arg.annotation and ast.unparse(arg.annotation) == "bool"}
            found |= {
                target.attr
                for each in ast.walk(node)
                if isinstance(each, ast.Assign | ast.AnnAssign)
                for target, value in assignments(each)
                if isinstance(target, ast.Attribute) and is_truth(value, bools)
            }
    properties = [
        node
        for node in cls.body
        if isinstance(node, ast.FunctionDef) and "property" in map(ast.unparse, node.decorator_list)
    ]
    for node in properties * 2:  # twice: a property may read one that stands behind it
        if own_reads(node) & state:
            state.add(node.name)
    return (found | {node.name for node in properties if ast.unparse(node.returns or node) in kinds}) - state


def stores(tree: ast.AST) -> Iterator[tuple[bool, str]]:
    """The attributes that are stored outside of constructors, each with whether it is one of `self`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name in CONSTRUCTORS:
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield is_own(node.value), node.attr
        yield from stores(node)


def own_reads(function: ast.FunctionDef) -> set[str]:
    return {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute) and is_own(node.value)}


def assignments(node: ast.Assign | ast.AnnAssign) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Every target with its value."""
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            yield target, node.value


def is_truth(node: ast.AST | None, bools: Collection[str] = ()) -> bool:
    """Whether an expression is a truth value; `bools` are names of truth values."""
    if isinstance(node, ast.BoolOp):
        return any(is_truth(value, bools) for value in node.values)
    is_name = isinstance(node, ast.Name) and node.id in bools
    is_constant = isinstance(node, ast.Constant) and isinstance(node.value, bool)
    return is_name or is_constant or isinstance(node, ast.Compare) or is_not(node)


def is_not(node: ast.AST | None) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def conditions(tree: ast.AST) -> Iterator[ast.expr]:
    """Every expression of a file that decides what happens."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield node.test
        elif isinstance(node, ast.BoolOp | ast.UnaryOp):
            yield node
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.Match):
            yield node.subject


def asked(node: ast.expr) -> Iterator[str]:
    """The attributes whose truth an expression asks, or which it compares with a constant."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.BoolOp | ast.BinOp):
        for value in node.values if isinstance(node, ast.BoolOp) else [node.left, node.right]:
            yield from asked(value)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield from asked(node.operand)
    elif isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        if any(isinstance(side, ast.Constant) for side in sides):
            yield from (side.attr for side in sides if isinstance(side, ast.Attribute))
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("any", "all", "bool"):
        for arg in node.args:
            yield from asked(arg.elt if isinstance(arg, ast.GeneratorExp | ast.ListComp) else arg)
    elif isinstance(node, ast.NamedExpr):
        yield from asked(node.value)


def test_a_step_asks_no_flag_that_a_mode_has_set():
    rooms = ("step", "model", "proof", "axes/*/attach", "axes/pipeline/work")
    paths = [path for room in rooms for path in files(f"{room}/**/*.py")]
    step = [parsed(path) for path in paths if path.stem not in CHOOSES_OR_REFUSES]
    assert asked_flags(step, list(map(parsed, files()))) == set(ASKED)


def test_every_form_of_a_flag_is_detected():
    forms = [
        "class C(NamedTuple):\n flag: bool",
        "class C(Protocol):\n flag: int",
        "class C:\n flag = False",
        "class C:\n other, flag = 1, True",
        "class C:\n def __init__(self, flag: bool): self.flag = flag",
        "class C:\n def __init__(self, *, flag: bool): self.other, self.flag = 1, flag",
        "class C:\n def __init__(self, plan): self.flag = plan.zero == 3",
        "class C:\n def __init__(self, plan): self.flag: bool = not plan.codec",
        "class C:\n def __init__(self, plan): self.flag = bool and plan.dp > 1",
        "class C:\n def __init__(self, other): other.flag = False",
        "class C:\n @property\n def flag(self) -> bool: return self._plan.zero > 0",
    ]
    for text in forms:
        assert asked_flags([ast.parse("if part.flag: pass")], [ast.parse(text)]) == {"flag"}, text


def test_every_form_of_asking_a_flag_is_detected():
    forms = [
        "if part.flag: pass",
        "while not self.part.flag: pass",
        "x = 1 if part.flag and y else 2",
        "x = part.flag or 1",
        "[x for x in y if part.flag]",
        "if part.flag == 0: pass",
        "if any(part.flag for part in parts): pass",
        "if y and (x := part.flag): pass",
        "match part.flag:\n case 1: pass",
    ]
    flag = ast.parse("class C:\n flag = True")
    for text in forms:
        assert asked_flags([ast.parse(text)], [flag]) == {"flag"}, text
    assert asked_flags([ast.parse("f(part.flag); x = part.flag; g(x.flag()) if y else 1")], [flag]) == set()


def test_what_changes_after_an_object_is_made_is_no_flag():
    states = [
        "class C:\n def __init__(self): self.flag = False\n def f(self): self.flag = True",
        "class C:\n flag: bool\ndef f(c): c.flag = True",
        "class C:\n @property\n def flag(self) -> bool: return self._x\n def f(self): self._x = 1",
        "class C:\n @property\n def flag(self) -> bool: return self.g\n"
        " @property\n def g(self): return self.x\n def f(self): self.x = 1",
    ]
    for text in states:
        assert asked_flags([ast.parse("if part.flag: pass")], [ast.parse(text)]) == set(), text
