"""Laws of the code base that no import contract can express."""

import ast
import functools
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fourfold
import fourfold.launcher
from tests.source_files import SOURCE, file_name, files, forget, imports, is_own, module_name, nodes, parsed

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS, MAX_ATTRIBUTES = 600, 60, 8, 15
# Exceptions to the limits, and why: "FILE" for its lines, "FILE FUNCTION" for its lines or parameters, "FILE CLASS" for
# its attributes.
PUBLIC_SIGNATURE = "public: its keywords are the contract of DESIGN §8"
DCP_EXPORT = SOURCE / "checkpoint" / "dcp_export.py"
ALLOWED = {
    "feed/feed.py Feed.__init__": PUBLIC_SIGNATURE,
    "axes/context/work/attention.py context_attention": "those of scaled_dot_product_attention, and the ring's",
    "step/parallelize.py parallelize": PUBLIC_SIGNATURE,
    "model/transformers_attention.py _attention": "the signature that transformers calls",
    "tasks/hf.py task": "every parameter is a setting of the command line",
    "tasks/lm.py task": "every parameter is a setting of the command line",
    "trainer/train.py train": PUBLIC_SIGNATURE,
}


@pytest.fixture(autouse=True, scope="module")
def _forget_the_files() -> Iterator[None]:
    yield
    forget()


def test_only_comm_and_process_launchers_import_torch_distributed():
    importers = {
        file_name(path).split("/")[0]
        for path in files()
        if any(name.startswith("torch.distributed") for name in imports(path)) and path != DCP_EXPORT
    }
    assert importers <= {"comm", "launcher", "doctor", "testing"}


def test_the_format_of_torch_distributed_checkpoint_is_written_in_one_file_and_never_read():
    package = "torch.distributed.checkpoint"
    for path in files():
        found = {name for name in imports(path) if name.startswith(package)}
        assert path == DCP_EXPORT or not found, path
    assert f"{package}.state_dict_saver.save" in imports(DCP_EXPORT)
    names = imported_names(DCP_EXPORT) | {name.rpartition(".")[2] for name in imports(DCP_EXPORT)}
    assert not [name for name in names if re.search("load|read", name, re.IGNORECASE)]


def test_no_import_of_a_submodule_changes_a_public_name():
    # Python sets the attribute `x` of `fourfold` to the submodule `fourfold.x`, whoever imports it first.
    submodules = {each.name for each in pkgutil.iter_modules(fourfold.__path__)}
    assert submodules & set(fourfold.__all__) == {"callbacks", "losses", "optim"}
    for each in pkgutil.iter_modules(fourfold.launcher.__path__, "fourfold.launcher."):
        importlib.import_module(each.name)
    assert fourfold.launch is importlib.import_module("fourfold.launcher.notebook").launch


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
        assert ast.get_docstring(parsed(path)), path


def test_no_module_imports_the_package_root():
    # The package root imports every layer lazily, so an import of it from inside is an import upward.
    for path in set(files()) - {SOURCE / "__init__.py"}:
        for node in nodes(path):
            if isinstance(node, ast.Import):
                assert "fourfold" not in {alias.name for alias in node.names}, path
            elif isinstance(node, ast.ImportFrom):
                assert node.module != "fourfold", path


# What may hand on names of other modules: the console command's entry point, `ff.optim`, torch's private names.
MAY_RE_EXPORT = {"cli", "optim", "torch_kit.torch_private"}


def test_names_are_imported_from_the_module_that_defines_them():
    imported = {f"fourfold.{module_name(path)}": imported_names(path) for path in files() if path.parent != SOURCE}
    for path in files():
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module in imported:
                if node.module.removeprefix("fourfold.") in MAY_RE_EXPORT:
                    continue
                names = {alias.name for alias in node.names}
                submodules = {name for name in names if f"{node.module}.{name}" in imported}
                assert not names & imported[node.module] - submodules, f"{path} imports from {node.module}"


def test_no_module_imports_itself():
    for path in files():
        assert f"fourfold.{module_name(path)}" not in imports(path), path


def imported_names(path: Path) -> set[str]:
    """The names that a file's `from` imports bind."""
    statements = [node for node in nodes(path) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in statements for alias in node.names}


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


@functools.cache
def too_large() -> dict[str, str]:
    """What exceeds a limit, and by how much."""
    found: dict[str, str] = {}
    for path in files():
        name = file_name(path)
        if (length := len(path.read_text().splitlines())) > MAX_FILE_LINES:
            found[name] = f"{length} lines, at most {MAX_FILE_LINES}"
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and (count := len(attributes(node))) > MAX_ATTRIBUTES:
                found[f"{name} {node.name}"] = f"{count} attributes, at most {MAX_ATTRIBUTES}"
        for function, node in functions(parsed(path)):
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


# Names with an underscore that are public by their documentation, and those of the standard library.
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit"}
STANDARD_LIBRARY = {
    "_getframe",
    "_current_frames",
    "_run_exitfuncs",
    "_clear",
    "_shutdown",
    "_lru_cache_wrapper",
    "_thread",
}
# Private names of nn.Module that classes of Fourfold use for their own attributes.
AMBIGUOUS = {"_parameters", "_buffers", "_modules"}
# The files that may name private names of other packages, and the tests that fail when a release drops one.
# launcher/env_store.py runs while torch is being imported, so it cannot import torch_private.
MAY_NAME_PRIVATE = {
    "torch_kit/torch_private.py": "test_torch_private.py",
    "torch_kit/torch_dispatch.py": "test_torch_dispatch.py",
    "comm/process_group_lifecycle.py": "test_process_group_private.py",
    "model/transformers_attention.py": "test_transformers_private.py",
    "checkpoint/initial_weights.py": "test_transformers_private.py",
    "launcher/local_job.py": "test_torchelastic_private.py",
    "launcher/env_store.py": "test_env_store.py",
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
    trees = {path: parsed(path) for path in files()}
    ours = set().union(*map(defined_names, trees.values()))
    for path, tree in trees.items():
        foreign = foreign_private_names(tree, ours) - PUBLIC - STANDARD_LIBRARY
        if file_name(path) not in MAY_NAME_PRIVATE:
            assert not foreign, f"{path}: {sorted(foreign)} of another package; see torch_kit/torch_private.py"


def test_every_private_name_outside_torch_private_is_in_the_test_of_its_file():
    # Those of torch_private are behind functions, each of which has a test (test_torch_private).
    for name, test in MAY_NAME_PRIVATE.items():
        if name != "torch_kit/torch_private.py":
            tree, text = parsed(SOURCE / name), (TESTS / test).read_text()
            foreign = foreign_private_names(tree, defined_names(tree)) - PUBLIC - STANDARD_LIBRARY
            assert foreign, f"{name} names nothing private any more"
            assert {each for each in foreign if each not in text} == set(), name


def test_few_files_import_transformers_and_the_launcher_alone_torchelastic():
    importers: dict[str, set[str]] = {"transformers": set(), "torch.distributed.elastic": set()}
    for path in files():
        for package, names in importers.items():
            if any(f"{name}.".startswith(f"{package}.") for name in imports(path)):
                names.add(file_name(path))
    assert importers["transformers"] == {"model/transformers_attention.py", "tasks/hf.py"}
    launcher = {
        "launcher/local_job.py",
        "launcher/rank_start.py",
    }
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


def test_every_file_that_a_text_names_is_there():
    """A path is relative to the package, to the repository, or to the text's folder or one above it."""
    root = SOURCE.parents[1]
    for text in [*files(), *root.glob("docs/*.md"), root / "CONTRIBUTING.md"]:
        if text.name == "measured-notes.md":  # as files were called when it was measured
            continue
        for name in re.findall(r"`([a-z_]+/[a-z_/0-9]+\.py)`", text.read_text(encoding="utf-8")):
            folders = [SOURCE, root, *list(text.parents)[: len(text.relative_to(root).parts)]]
            is_there = any((folder / name).is_file() for folder in folders) or name == "path/to/file.py"
            assert is_there, f"{text.relative_to(root)} names {name}"
