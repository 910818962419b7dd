"""Laws of the code base that no import contract can express."""

import ast
import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

from fourfold.plan.plan import Plan

SOURCE = Path(__file__).parents[2] / "src" / "fourfold"

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS, MAX_ATTRIBUTES = 350, 45, 8, 15
# Exceptions to the limits, and why: "FILE" for its lines, "FILE FUNCTION" for its lines or parameters, "FILE CLASS" for
# its attributes.
PUBLIC_SIGNATURE = "public: its keywords are the contract of DESIGN §8"
ALLOWED = {
    "feed/dataloader.py shard": "half of it is the docstring of a public function",
    "parts/sequence/attention.py sequence_attention": "the arguments of scaled_dot_product_attention, and the ring's",
    "plan/check.py sync_problems": "a table of seven refusals",
    "step/parallelize.py parallelize": PUBLIC_SIGNATURE,
    "step/sequence/transformers.py _attention": "the signature that transformers calls",
    "tasks/lm.py task": "every parameter is a setting of the command line",
    "trainer/train.py train": PUBLIC_SIGNATURE,
}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    modules: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def files(pattern: str = "**/*.py") -> list[Path]:
    return sorted(SOURCE.glob(pattern))


def test_only_comm_and_process_launchers_import_torch_distributed():
    importers = {
        path.relative_to(SOURCE).parts[:2]
        for path in files()
        if any(name.startswith("torch.distributed") for name in imports(path))
    }
    assert {parts[0] for parts in importers} <= {"parts", "launch", "doctor", "testing"}
    assert {parts for parts in importers if parts[0] == "parts"} == {("parts", "comm")}


def test_nothing_reads_a_pickle():
    names = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "torch.load", "torch.save"}
    for path in files():
        assert not imports(path) & names, path
        assert "torch.load(" not in path.read_text(), path
        assert "_object_list" not in path.read_text(), path  # torch's object collectives pickle


def test_the_executor_stays_short():
    assert len((SOURCE / "step" / "executor.py").read_text().splitlines()) < 150


def test_every_file_has_a_docstring():
    for path in files():
        assert ast.get_docstring(tree_of(path)), path


def test_no_module_imports_the_package_root():
    # The package root imports every layer lazily, so an import of it from inside is an import upward.
    for path in set(files()) - {SOURCE / "__init__.py"}:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                assert "fourfold" not in {alias.name for alias in node.names}, path
            elif isinstance(node, ast.ImportFrom):
                assert node.module != "fourfold", path


# What may hand on names of other modules: the console command's entry point, and the file of torch's private names.
MAY_RE_EXPORT = {"cli", "parts.torch_private"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


def test_names_are_imported_from_the_module_that_defines_them():
    imported = {f"fourfold.{module_name(path)}": imported_names(path) for path in files() if path.parent != SOURCE}
    for path in files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module in imported:
                if node.module.removeprefix("fourfold.") in MAY_RE_EXPORT:
                    continue
                names = {alias.name for alias in node.names}
                submodules = {name for name in names if f"{node.module}.{name}" in imported}
                assert not names & imported[node.module] - submodules, f"{path} imports from {node.module}"


def imported_names(path: Path) -> set[str]:
    """The names that a file's `from` imports bind."""
    nodes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in nodes for alias in node.names}


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of a file with its qualified name."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
            name = f"{prefix}{child.name}."
        elif isinstance(child, ast.ClassDef):
            name = f"{prefix}{child.name}."
        yield from functions(child, name)


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without `self` and `cls`."""
    given = function.args
    positional = [arg.arg for arg in given.posonlyargs + given.args]
    if positional[:1] in (["self"], ["cls"]):
        positional = positional[1:]
    return len(positional) + len(given.kwonlyargs) + (given.vararg is not None) + (given.kwarg is not None)


def attributes(cls: ast.ClassDef) -> set[str]:
    """The names that a class stores on `self`, in any method. Fields of records are declared, not stored."""
    return {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def too_large() -> dict[str, str]:
    """What exceeds a limit, and by how much."""
    found: dict[str, str] = {}
    for path in files():
        name, text = path.relative_to(SOURCE).as_posix(), path.read_text()
        if (length := len(text.splitlines())) > MAX_FILE_LINES:
            found[name] = f"{length} lines, at most {MAX_FILE_LINES}"
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and (count := len(attributes(node))) > MAX_ATTRIBUTES:
                found[f"{name} {node.name}"] = f"{count} attributes, at most {MAX_ATTRIBUTES}"
        for function, node in functions(tree):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES or num_parameters(node) > MAX_PARAMETERS:
                limits = f"at most {MAX_FUNCTION_LINES} and {MAX_PARAMETERS}"
                found[f"{name} {function}"] = f"{length} lines and {num_parameters(node)} parameters, {limits}"
    return found


def test_files_functions_and_classes_are_small():
    assert {name: size for name, size in too_large().items() if name not in ALLOWED} == {}


def test_every_exception_to_the_limits_is_still_needed():
    assert set(ALLOWED) - set(too_large()) == set()


def test_every_form_of_storing_an_attribute_is_counted():
    body = """
    a: int
    def f(self, other):
        self.b = self.c, self.d = other.e = 1, 2
        self.f: int = self.b
        self.g += 1
        self.h.i = self.j[0] = 1
        for self.k in other: pass
        with other as (self.l, *self.m):
            def inner(): self.n = 1
    """
    cls = ast.parse(f"class C:{body}").body[0]
    assert isinstance(cls, ast.ClassDef)
    assert attributes(cls) == set("bcdfgklmn")


# Where a step's parts are chosen, and where what cannot be carried out is refused.
CHOOSES_OR_REFUSES = {
    *("assembly", "stage_assembly", "wrapper_assembly"),
    *("model_checks", "argument_checks", "user_optimizer", "memory_bound"),
}
# What else in step/ depends on a mode of the plan, on the class of a part, or on whether there is one, and why.
CHOSEN_ELSEWHERE = {
    "distributed_optimizer.py isinstance DistributedOptimizer": "refuses to be wrapped again",
    "distributed_optimizer.py optional Communicator": "public: the ranks, where they are joined already",
    "replica_drift.py plan.batch_norm": "refuses frozen weights that differ, unless they are a rank's own state",
}
RECORDS = {"NamedTuple", "TypedDict", "Enum", "StrEnum", "IntEnum", "Exception"}


def plan_modes() -> set[str]:
    """The fields of a plan that are one of several words."""
    return {field.name for field in dataclasses.fields(Plan) if isinstance(getattr(Plan(), field.name), str)}


def behaviours() -> set[str]:
    """The classes of Fourfold that are no records."""
    classes = [node for path in files() for node in ast.walk(tree_of(path)) if is_class(node)]
    return {
        node.name
        for node in classes
        if not any("dataclass" in ast.unparse(each) for each in node.decorator_list)
        and not RECORDS & {ast.unparse(base) for base in node.bases}
    }


def is_class(node: ast.AST) -> TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef)


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
        for path in files("step/*.py")
        if path.stem not in CHOOSES_OR_REFUSES
        for choice in choices(tree_of(path), parts)
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


# What step/ asks of flags that are set when an object is made, and why. A flag that a mode has set is such a mode.
FOUND_BY_A_DRY_RUN = "what a dry run has found in the user's model and loss"
CHOSEN_BY_A_DRY_RUN = "what a dry run can compare: it lists its checks and takes the strictest that is possible"
TO_GO = "to go: a mode, or what a mode has set"
ASKED = {
    "_is_last_round": "of one backward",
    "_is_log_rank": "one rank logs for all",
    "has_any_hook": "the user may register hooks at any time",
    "has_pending": "whether updates wait now",
    "index": "of an action",
    "is_causal": "of one call of attention",
    "is_compiled": "of the user's loss function: a compiled one cannot be observed",
    "is_in_backward": "where a dry run has failed",
    "is_mean": "of one call of a loss function",
    "is_model_loss": "refuses a compiled model that computes its own loss",
    "is_synchronized": "whether local steps have just averaged the weights",
    "needs_dry_run": "whether it has been done",
    "num_elements": "of one loss",
    "size": "of the world: decides, when a DriftChecker is made, whether there are replicas to compare",
    **dict.fromkeys(("has_writes", "is_additive", "is_comparable", "is_uneven", "is_unreduced"), FOUND_BY_A_DRY_RUN),
    **dict.fromkeys(("fits_float64", "fits_model_dtype", "has_gradients", "_new_tensors"), CHOSEN_BY_A_DRY_RUN),
    **dict.fromkeys(("_counts_renorms", "_is_sharded", "is_shared", "is_sharded", "is_writer"), TO_GO),
    **dict.fromkeys(("is_training", "keeps_outputs", "reduces_every_backward", "replica_index"), TO_GO),
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
            yield from zip(target.elts, node.value.elts, strict=False)  # a starred target takes several
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
    trees = {path: tree_of(path) for path in files()}
    step = [trees[path] for path in files("step/**/*.py") if path.stem not in CHOOSES_OR_REFUSES]
    assert asked_flags(step, list(trees.values())) == set(ASKED)


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
        "while self.part.flag: pass",
        "x = not part.flag",
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


# Names with an underscore that are public by their documentation, and those of the standard library.
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit"}
STANDARD_LIBRARY = {"_getframe", "_current_frames", "_run_exitfuncs", "_lru_cache_wrapper", "_thread"}
# Private names of nn.Module that classes of Fourfold use for their own attributes.
AMBIGUOUS = {"_parameters", "_buffers", "_modules"}
# The files that may name private names of other packages, and the tests that fail when a release drops one.
# launch/env_store.py runs while torch is being imported, so it cannot import torch_private.
MAY_NAME_PRIVATE = {
    "parts/torch_private.py": "test_torch_private.py",
    "parts/comm/named_process_group.py": "test_process_group_private.py",
    "step/sequence/transformers.py": "test_transformers_private.py",
    "launch/agent.py": "test_torchelastic_private.py",
    "launch/env_store.py": "test_env_store.py",
}
TESTS = SOURCE.parents[1] / "tests" / "simulated"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_names(tree: ast.AST) -> set[str]:
    """Names that a file gives to functions, classes, variables and attributes of `self`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
    return found


def is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def foreign_private_names(tree: ast.AST, ours: set[str]) -> set[str]:
    """Private names that a file uses and that are not in `ours`: module parts, attributes, strings of `getattr`.

    A name reached through `super()` belongs to the base class, though the class defines it too.
    """
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_ours = node.attr in ours and (is_own(node.value) or node.attr not in AMBIGUOUS)
            is_ours = is_ours and not is_super(node.value)
            if is_private(node.attr) and not is_ours:
                found.add(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            parts = ".".join([*names, getattr(node, "module", None) or ""]).split(".")
            found |= {part for part in parts if is_private(part) and part not in ours}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            found |= {text for text in texts if is_private(text) and text not in ours}
    return found


def test_private_names_are_used_in_these_files_only():
    trees = {path: tree_of(path) for path in files()}
    ours = set().union(*map(defined_names, trees.values()))
    for path, tree in trees.items():
        foreign = foreign_private_names(tree, ours) - PUBLIC - STANDARD_LIBRARY
        if str(path.relative_to(SOURCE)) not in MAY_NAME_PRIVATE:
            assert not foreign, f"{path}: {sorted(foreign)} of another package; see parts/torch_private.py"


def test_every_private_name_outside_torch_private_is_in_the_test_of_its_file():
    # Those of torch_private are behind functions, each of which has a test (test_torch_private).
    for name, test in MAY_NAME_PRIVATE.items():
        if name != "parts/torch_private.py":
            tree, text = ast.parse((SOURCE / name).read_text()), (TESTS / test).read_text()
            foreign = foreign_private_names(tree, defined_names(tree)) - PUBLIC - STANDARD_LIBRARY
            assert foreign, f"{name} names nothing private any more"
            assert {each for each in foreign if each not in text} == set(), name


def test_one_file_imports_transformers_and_the_launcher_alone_torchelastic():
    importers: dict[str, set[str]] = {"transformers": set(), "torch.distributed.elastic": set()}
    for path in files():
        for package, names in importers.items():
            if any(f"{name}.".startswith(f"{package}.") for name in imports(path)):
                names.add(path.relative_to(SOURCE).as_posix())
    assert importers["transformers"] == {"step/sequence/transformers.py"}
    launcher = {"launch/agent.py", "launch/local_job.py", "launch/local_rendezvous.py"}
    assert importers["torch.distributed.elastic"] == launcher


def test_every_form_of_using_a_private_name_is_detected():
    forms = {
        "import torch._dynamo": "_dynamo",
        "from torch._C import _functorch": "_functorch",
        "torch._C.f()": "_C",
        "tensor._version": "_version",
        "self._optimizer._opt_called = True": "_opt_called",
        "module._buffers.clear()": "_buffers",
        "hasattr(model, '_orig_mod')": "_orig_mod",
        "super()._start_workers(group)": "_start_workers",
    }
    for text, name in forms.items():
        assert name in foreign_private_names(ast.parse(text), {"_buffers", "_start_workers"}), text
    assert not foreign_private_names(ast.parse("self._buffers, other._ours"), {"_buffers", "_ours"})
