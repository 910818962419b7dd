"""Weight files: a shard that is read by itself is the part of the whole tensor, and no other bytes are read."""

import itertools
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fourfold.axes.tensor.work.layers import local_part
from fourfold.checkpoint.initial_weights import StoredWeights, WeightFiles
from fourfold.plan.param_spec import ShardPiece, TensorShard
from fourfold.words.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("without_dry_run")

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool]
# Rows, and columns; last shards that are shorter, and empty; a vector; a convolution's channels; parts of a fused
# weight, of which places share one; a fused weight of [in, out].
SHARDS = [
    *(TensorShard.even((12, 5), dim, index, 3) for dim in (0, 1) for index in range(3)),
    *(TensorShard.even((29, 4), 0, index, 4) for index in range(4)),
    *(TensorShard.even((5, 3), 0, index, 4) for index in range(4)),
    TensorShard.even((7,), 0, 1, 2),
    *(TensorShard.even((4, 6, 3, 2), dim, 1, 2) for dim in (0, 1)),
    TensorShard((12, 4), 0, (ShardPiece(2, 4), ShardPiece(8, 9, 1, 2), ShardPiece(10, 11, 1, 2))),
    TensorShard((4, 12), 1, (ShardPiece(2, 4), ShardPiece(6, 8), ShardPiece(8, 12))),
    TensorShard((0, 4), 1, (ShardPiece(2, 4),)),
]


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(math.prod(shape))
    return (100 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


@pytest.fixture
def ranges(monkeypatch):
    """The bytes [start, stop) that are read, as the system is asked for them."""
    read, found = os.preadv, []

    def counted(file, buffers, offset):
        count = read(file, buffers, offset)
        found.append((offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", counted)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_shard_is_the_part_of_the_whole_tensor_and_its_bytes_are_all_that_is_read(dtype, tmp_path, ranges):
    whole = {f"{number}.weight": values(shard.shape, dtype) for number, shard in enumerate(SHARDS)}
    save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    files = WeightFiles(tmp_path)
    for (name, tensor), shard in zip(whole.items(), SHARDS, strict=True):
        ranges.clear()
        part = files.read_shard(name, shard)
        expected = local_part(tensor, shard)
        assert part.dtype == dtype
        assert part.shape == expected.shape
        assert torch.equal(part.view(torch.uint8), expected.view(torch.uint8)) if part.numel() else not ranges
        assert sum(stop - start for start, stop in ranges) == part.nbytes
        assert all(one[1] != other[0] for one, other in itertools.pairwise(ranges))  # as few as can be


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_shard_has_the_dtype_of_its_parameter(dtype, tmp_path):
    whole = values((6, 8), torch.float32)
    save_file({"weight": whole}, tmp_path / "model.safetensors")
    parameter = nn.Parameter(torch.empty(6, 8, dtype=dtype))
    weights = StoredWeights(WeightFiles(tmp_path / "model.safetensors"), {parameter: "weight"})
    shard = TensorShard.even((6, 8), 1, 1, 2)
    assert torch.equal(weights.part(parameter, shard), local_part(weights.whole(parameter), shard))


def test_reads_that_return_less_than_they_were_asked_for_go_on(tmp_path, monkeypatch):
    read, whole = os.preadv, values((6, 8), torch.float64)
    save_file({"weight": whole}, tmp_path / "a.safetensors")
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: read(file, [buffers[0][:7]], offset))
    shard = TensorShard.even((6, 8), 0, 1, 2)
    assert torch.equal(WeightFiles(tmp_path / "a.safetensors").read_shard("weight", shard), whole[3:])


def test_a_file_that_has_become_shorter_is_an_error(tmp_path, monkeypatch):
    path = Path(tmp_path / "a.safetensors")
    save_file({"weight": values((6, 8), torch.float64)}, path)
    files = WeightFiles(path)
    monkeypatch.setattr(os, "preadv", lambda *args: 0)
    with pytest.raises(CheckpointError, match="the file has become shorter"):
        files.read_shard("weight", TensorShard.even((6, 8), 0, 1, 2))


def test_a_pipe_a_device_and_a_name_that_no_file_has_are_errors(tmp_path):
    with pytest.raises(CheckpointError, match="is a device"):
        WeightFiles(Path("/dev/zero"))
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="is a pipe"):
        WeightFiles(tmp_path / "x.safetensors")
    name = "a" * 5000 + ".safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{name}"}}}}')
    with pytest.raises(CheckpointError, match="every file that weight_map names"):
        WeightFiles(tmp_path)
