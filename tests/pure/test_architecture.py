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
