"""Initial weights: a model that begins with the weights in files.

    FILE.safetensors
    FOLDER/model.safetensors
    FOLDER/model.safetensors.index.json    says which of the other files in the folder holds which tensor

Law: with tp > 1 a rank reads its shards of the weights that are split, and no other bytes of them. A tied weight may
stand in the files under one of its names, or under all of them with the same values, which are compared. A tensor that
transformers' `from_pretrained` would read or skip without a word is read or skipped here too.
Law: files are data: no pickle is read, and no name leads out of the folder.

Source: the safetensors format: 8 bytes of length, a JSON header with the place of each tensor, and the tensors.
"""

import errno
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fourfold.checkpoint.restore import dtype_problems, shape_problems
from fourfold.plan.decode import DecodeError, check_not_pipe, from_json, read_bounded
from fourfold.plan.param_spec import TensorShard
from fourfold.step.initial_model import make_initial_model
from fourfold.torch_kit.deferred_init import InitialModel, InitialWeights
from fourfold.words.errors import CheckpointError, Problem, os_error_text
from fourfold.words.run_files import WEIGHTS_NEED

# ---- weight files ---------------------------------------------------------------------------------------------------


INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
MAX_INDEX_BYTES = 2**26
CHUNK_ELEMENTS = 2**22  # of two tensors that are compared


class WeightFiles:
    """Named tensors in files. Only headers are read before `read`.

    shapes, dtypes  of each tensor, by its name; dtypes as safetensors names them
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError with all problems of the files."""
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._file_of: dict[str, Path] = {}
        self._offsets: dict[str, int] = {}
        """Of a tensor's first byte in its file."""
        files, indexed = _files(path)
        for file in files:
            with open_safetensors(file) as opened:
                offsets = _offsets(file)
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    if indexed and indexed.get(name) != file.name:
                        continue  # as from_pretrained, which goes by the index
                    part = opened.get_slice(name)
                    self._file_of[name], self.dtypes[name] = file, part.get_dtype()
                    self.shapes[name], self._offsets[name] = tuple(part.get_shape()), offsets[name]
        lost = [Problem(f"no {name} in {indexed[name]}", f"what {INDEX_FILE} says") for name in indexed
                if name not in self.shapes]  # fmt: skip
        if lost:
            raise CheckpointError(lost, where=str(path))

    def read(self, name: str) -> Tensor:
        """A tensor, in memory that is freed with it."""
        with open_safetensors(self._file_of[name]) as opened:
            return opened.get_tensor(name)

    def read_shard(self, name: str, shard: TensorShard) -> Tensor:
        """A shard of a tensor, in memory of its own."""
        path = self._file_of[name]
        with open_safetensors(path) as opened:
            dtype = opened.get_slice(name)[:0].dtype
            result = torch.empty(shard.local_shape, dtype=dtype)
            if not result.numel():
                return result
            values, size, done = result.view(-1).view(torch.uint8).numpy().data, dtype.itemsize, 0
            with path.open("rb", buffering=0) as file:
                for start, stop in shard.element_ranges:
                    num_bytes = (stop - start) * size
                    _read_into(values[done : done + num_bytes], file.fileno(), self._offsets[name] + start * size)
                    done += num_bytes
        return result

    def are_equal(self, first: str, second: str) -> bool:
        """Whether two tensors of one shape have the same values. A few rows at a time are held."""
        shape = self.shapes[first]
        if not shape:
            return torch.equal(self.read(first), self.read(second))
        rows = max(1, CHUNK_ELEMENTS * shape[0] // max(1, torch.Size(shape).numel()))
        with open_safetensors(self._file_of[first]) as one, open_safetensors(self._file_of[second]) as other:
            pair = one.get_slice(first), other.get_slice(second)
            return all(
                torch.equal(*(each[start : start + rows] for each in pair)) for start in range(0, shape[0], rows)
            )


class StoredWeights(InitialWeights):
    """The weights of a model that files hold, each read when its parameter is cut: of a split one, the part that stays.

    names  of the tensors in the files, by parameter
    """

    def __init__(self, files: WeightFiles, names: Mapping[nn.Parameter, str]) -> None:
        super().__init__()
        self._files, self._names = files, names

    @property
    def are_deferred(self) -> bool:
        return True

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """The values of a whole parameter, in its dtype, on its device, in memory of their own."""
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        return values.copy_(self._files.read(self._names[parameter]))

    def part(self, parameter: nn.Parameter, shard: TensorShard) -> Tensor:
        """See `InitialWeights`."""
        return self._files.read_shard(self._names[parameter], shard).to(parameter.device, parameter.dtype)


def _offsets(path: Path) -> dict[str, int]:
    """The first byte of each tensor of a file whose header safetensors has checked."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}


def _read_into(buffer: memoryview, file: int, offset: int) -> None:
    """Fill a buffer with the bytes of a file from an offset on."""
    done = 0
    while done < len(buffer):
        count = os.preadv(file, [buffer[done:]], offset + done)
        if not count:
            raise OSError("the file has become shorter")
        done += count


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The files to read, and by the name of a tensor that of its file, if there is an index."""
    if not os.path.isdir(path):  # False too for a name that no file system accepts
        return [path], {}
    if (path / INDEX_FILE).is_file():
        indexed = _read_index(path / INDEX_FILE)
        return [path / name for name in dict.fromkeys(indexed.values())], indexed
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE], {}
    pickles = sorted(each.name for each in path.glob("*.bin"))
    got = f"{path} with neither {SINGLE_FILE} nor {INDEX_FILE}" + (
        f", but {pickles[0]}: a pickle, which is never read" if pickles else ""
    )
    raise CheckpointError(Problem(got, WEIGHTS_NEED, "model.save_pretrained(FOLDER) of transformers writes one"))


def _read_index(path: Path) -> dict[str, str]:
    """The file of each tensor. Raises CheckpointError with all problems."""
    try:
        weight_map = from_json(read_bounded(path, max_bytes=MAX_INDEX_BYTES), dict[str, Any]).get("weight_map")
    except (DecodeError, OSError) as error:
        text = os_error_text(error) if isinstance(error, OSError) else str(error)
        raise CheckpointError(Problem(f"{path}: {text}", "an index of safetensors files")) from None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(Problem("no weight_map from names to files", "an index"), where=str(path))
    problems = []
    for name in dict.fromkeys(weight_map.values()):
        if name != Path(name).name or not name.endswith(".safetensors"):
            problems.append(Problem(f"{name!r} in weight_map", "a safetensors file in the folder itself"))
        elif not os.path.isfile(path.parent / name):  # False too for a name that is too long
            problems.append(Problem(f"no {name}", "every file that weight_map names", "copy the whole folder"))
    if problems:
        raise CheckpointError(problems, where=str(path))
    return weight_map


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """The file, as safetensors opens it. Raises CheckpointError if it is none."""
    try:
        check_not_pipe(path)
        if path.is_char_device() or path.is_block_device():
            raise OSError(errno.EINVAL, "is a device")
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(Problem(f"{path}: {error}", WEIGHTS_NEED)) from None


# ---- initial weights ------------------------------------------------------------------------------------------------


SKIPPED = r"rotary_emb\.inv_freq$"  # older files of many models; it is computed


def initial_model_of_files(
    make: Callable[[], nn.Module], path: Path, device: torch.device, *, defers: bool, is_log_rank: bool
) -> InitialModel:
    """What `make` makes, with the weights in a file or folder. Raises CheckpointError with all that does not fit.

    defers  the rank's part of a weight is read when it is cut
    """
    initial = make_initial_model(make, device, defers=defers, is_log_rank=is_log_rank)
    if not initial.weights.are_deferred:
        load_weights(initial.model, path)
        return initial
    files, state = WeightFiles(path), initial.model.state_dict(keep_vars=True)
    stored, parameters = _stored_names(initial.model, files), set(initial.model.parameters())
    with torch.no_grad():
        for name in stored:
            if state[name] not in parameters:
                state[name].copy_(files.read(stored[name]))
    names = {state[name]: each for name, each in stored.items() if state[name] in parameters}
    return InitialModel(initial.model, StoredWeights(files, names))


def load_weights(model: nn.Module, path: Path) -> None:
    """Load the weights in a file or folder into a model. Raises CheckpointError with everything that does not fit."""
    files = WeightFiles(path)
    stored, state = _stored_names(model, files), model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, each in stored.items():
            state[name].copy_(files.read(each))


def check_weights(model: nn.Module, path: Path) -> None:
    """Raise CheckpointError unless a file or folder holds this model's weights; the model may be on meta.

    Only headers are read, and both values of a tied weight that stands there twice.
    """
    _stored_names(model, WeightFiles(path))


def _stored_names(model: nn.Module, files: WeightFiles) -> dict[str, str]:
    """The name in the files of each weight and buffer. Raises CheckpointError with everything that does not fit."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    stored = _names_in_model(model, files.shapes, state)
    file_shapes = {name: files.shapes[each] for name, each in stored.items()}
    expected = {name: state[name] for name in _names_to_find(state, stored)}
    problems = shape_problems({name: tuple(value.shape) for name, value in expected.items()}, file_shapes)
    file_dtypes = {name: files.dtypes[each] for name, each in stored.items()}
    problems += dtype_problems({name: value.dtype for name, value in expected.items()}, file_dtypes)
    problems = problems or _tied_problems(state, stored, files)
    if problems:
        raise CheckpointError(problems, where=str(files.path))
    return stored


def _names_to_find(state: Mapping[str, Any], stored: Mapping[str, str]) -> list[str]:
    """The names of the model, of a tied weight those that the files have, or the first."""
    tied: dict[int, list[str]] = {}
    for name, value in state.items():
        tied.setdefault(id(value), []).append(name)
    return [each for names in tied.values() for each in ([n for n in names if n in stored] or names[:1])]


def _tied_problems(state: Mapping[str, Any], stored: Mapping[str, str], files: WeightFiles) -> list[Problem]:
    """Tied names with different values in the files: the last one would win."""
    problems, first = [], {}
    for name in [each for each in state if each in stored]:
        other = first.setdefault(id(state[name]), name)
        if other != name and not files.are_equal(stored[other], stored[name]):
            got = f"{other} and {name} with different values"
            problems.append(Problem(got, "the same values: the model ties them"))
    return problems


def _names_in_model(model: nn.Module, names: Iterable[str], own: Collection[str]) -> dict[str, str]:
    """The names of the tensors in files, by the name that each has in the model; without those that are skipped.

    own: the model's names. Files of a model without its head leave out a prefix, and older files have masks.
    """
    prefix = getattr(model, "base_model_prefix", "")
    patterns = [SKIPPED, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())] if prefix else []
    found = {}
    for name in names:
        full = f"{prefix}.{name}"
        if name not in own and full in own:
            found[full] = name
        elif name in own or not any(re.search(pattern, name) for pattern in patterns):
            found[name] = name
    return found
