"""Edges: how activations and their gradients are encoded between two stages, and how many bytes that is.

row      the last dim of an activation: the features of one token
coded    a floating-point tensor with rows; others (ids, masks, one number a sample) travel as they are
bf16     every element in two bytes
int8     every element in one byte, and one scale for each row
dct      the largest elements of each row; zeros are never sent. The gradient has the same mask: its values alone travel
Law: the bytes of a message follow from its shape, and for dct from how many elements are kept; at most `num_sent` of
a row are.

Source: Gupta et al. (2021), Alg. 2 (DCT-MP). The paper has a threshold for each sample; for a text that would tell a
token what comes after it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fourfold.plan.density import num_sent
from fourfold.words.errors import Problem

EDGES = ("none", "bf16", "int8", "dct")
DEFAULT_DENSITY = 0.1
SCALE_BYTES = 4
INDEX_BYTES = 2
MAX_INDEXED = 2 ** (8 * INDEX_BYTES)  # columns that an index can name


class EdgeSpec(NamedTuple):
    """How edges are encoded. `density`: the fraction of a row that dct keeps; the paper's η is 1 − density."""

    kind: str = "none"
    density: float = DEFAULT_DENSITY

    def codes(self, shape: Sequence[int], element_bytes: int, *, is_float: bool) -> bool:
        """Whether a tensor is coded; otherwise it travels as it is."""
        if not is_float or len(shape) < 2 or 0 in shape:
            return False
        if self.kind == "dct":
            return num_sent(shape[-1], self.density) < shape[-1]
        return self.kind != "none" and element_bytes > {"bf16": 2, "int8": 1}[self.kind]


class EdgeBytes(NamedTuple):
    """Bytes of a coded tensor, and of its gradient."""

    forward: int
    backward: int

    @property
    def both(self) -> int:
        return self.forward + self.backward


def uses_indices(rows: int, columns: int, num_kept: int) -> bool:
    """Whether dct names the kept elements by indices, with a count for each row, and not by a bit for each element."""
    return columns <= MAX_INDEXED and INDEX_BYTES * (rows + num_kept) < -(-rows * columns // 8)


def edge_bytes(spec: EdgeSpec, rows: int, columns: int, element_bytes: int, num_kept: int | None = None) -> EdgeBytes:
    """Bytes of a coded tensor [rows, columns]. `num_kept`: of dct; None: rows without zeros, of which most is sent."""
    num_elements = rows * columns
    if spec.kind == "none":
        return EdgeBytes(num_elements * element_bytes, num_elements * element_bytes)
    if spec.kind == "bf16":
        return EdgeBytes(num_elements * 2, num_elements * 2)
    if spec.kind == "int8":
        return EdgeBytes(num_elements + rows * SCALE_BYTES, num_elements + rows * SCALE_BYTES)
    kept = rows * num_sent(columns, spec.density) if num_kept is None else num_kept
    positions = INDEX_BYTES * (rows + kept) if uses_indices(rows, columns, kept) else -(-num_elements // 8)
    return EdgeBytes(positions + kept * element_bytes, kept * element_bytes)


def edge_note(spec: EdgeSpec) -> str | None:
    """What a user must know of compressed edges; None without them."""
    if spec.kind == "none":
        return None
    field = f'edge = "{spec.kind}"' + (f", edge_density = {spec.density:g}" if spec.kind == "dct" else "")
    return f"{field}: stages compute with what arrives, so this is another training than without it"


def edge_problems(edge: str, density: float, pp: int) -> list[Problem]:
    """What does not go with the plan's `edge` and `edge_density`."""
    problems = []
    if edge != "none" and pp == 1:
        got = f'edge = "{edge}" with pp = 1'
        problems.append(Problem(got, "pp above 1: an edge joins two stages", 'pp = 2, or edge = "none"'))
    if edge != "dct" and density != DEFAULT_DENSITY:
        got = f'edge_density = {density:g} with edge = "{edge}"'
        problems.append(Problem(got, 'edge = "dct": others send every element', 'edge = "dct", or no edge_density'))
    return problems
