"""Laws of the house that no import contract can say."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "fourfold"


def imports(path: Path) -> set[str]:
    """Every module a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def files(pattern: str = "**/*.py") -> list[Path]:
    return sorted(SOURCE.glob(pattern))


def test_only_comm_and_what_makes_processes_touch_torch_distributed():
    touching = {
        path.relative_to(SOURCE).parts[:2]
        for path in files()
        if any(name.startswith("torch.distributed") for name in imports(path))
    }
    assert {place[0] for place in touching} <= {"parts", "launch", "testing"}
    assert {place for place in touching if place[0] == "parts"} == {("parts", "comm")}


def test_nothing_reads_a_pickle():
    names = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "torch.load", "torch.save"}
    for path in files():
        assert not imports(path) & names, path
        assert "torch.load(" not in path.read_text(), path
        assert "_object_list" not in path.read_text(), path  # torch's object collectives pickle


def test_the_interpreter_can_be_read_in_one_sitting():
    assert len((SOURCE / "step" / "executor.py").read_text().splitlines()) < 150


def test_every_file_opens_with_its_nouns():
    for path in files():
        assert ast.get_docstring(ast.parse(path.read_text())), path


# Names with an underscore that are public by their documentation, and those of the standard library.
PUBLIC = {"_replace", "_asdict", "_fields", "_make", "_exit"}
STANDARD_LIBRARY = {"_getframe", "_current_frames", "_run_exitfuncs", "_lru_cache_wrapper", "_thread"}
# Private names of nn.Module that classes of ours use for attributes of their own.
AMBIGUOUS = {"_parameters", "_buffers", "_modules"}
MAY_NAME_PRIVATE = {
    "parts/torch_private.py": "the one file for torch's private names",
    "step/sequence/transformers.py": "the one file for those of transformers",
    "launch/agent.py": "the one file for those of torchelastic, whose agent it extends",
    "launch/env_store.py": "runs while torch is being imported, so it cannot import torch_private",
}


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


def foreign_private_names(tree: ast.AST, ours: set[str]) -> set[str]:
    """Private names that a file uses and that are none of `ours`: module parts, attributes, strings of `getattr`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_ours = node.attr in ours and (is_own(node.value) or node.attr not in AMBIGUOUS)
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


def test_private_names_of_torch_stand_in_one_file():
    trees = {path: ast.parse(path.read_text()) for path in files()}
    ours = set().union(*map(defined_names, trees.values()))
    for path, tree in trees.items():
        foreign = foreign_private_names(tree, ours) - PUBLIC - STANDARD_LIBRARY
        if str(path.relative_to(SOURCE)) not in MAY_NAME_PRIVATE:
            assert not foreign, f"{path}: {sorted(foreign)} of another package; see parts/torch_private.py"


def test_a_private_name_of_torch_is_seen_in_every_form():
    forms = {
        "import torch._dynamo": "_dynamo",
        "from torch._C import _functorch": "_functorch",
        "torch._C.f()": "_C",
        "tensor._version": "_version",
        "self._optimizer._opt_called = True": "_opt_called",
        "module._buffers.clear()": "_buffers",
        "hasattr(model, '_orig_mod')": "_orig_mod",
    }
    for text, name in forms.items():
        assert name in foreign_private_names(ast.parse(text), {"_buffers"}), text
    assert not foreign_private_names(ast.parse("self._buffers, other._ours"), {"_buffers", "_ours"})
