"""Laws of the memory check: what cannot fit into a host is refused before it is allocated, what could fit never is."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fourfold as ff
from fourfold.environment import host_limits
from fourfold.feed import unpacked
from fourfold.feed.source import fetch
from fourfold.model.model_call import call_model
from fourfold.step import memory_bound
from fourfold.step.initial_model import build_meta_model
from fourfold.step.memory_bound import MemoryPool, activation_bytes_per_sample, measure_bound
from fourfold.tasks import digits, lm
from fourfold.testing.saved_tensors import recording_saved
from fourfold.torch_kit.tensor_tree import tree_leaves, tree_map
from fourfold.words.errors import FourfoldError, SettingError
from tests.pure.test_cli import Refused, refused

__all__ = ["refused"]  # a fixture

GIB = 2**30
WIDE = 64


class Rows:
    def __len__(self) -> int:
        return 10**15

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(WIDE), torch.zeros(1)


class Net(nn.Module):
    """Two layers, used in the way that `kind` says."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, 1), kind
        if kind == "frozen":
            self.requires_grad_(False)
        if kind == "tied":
            self.third = nn.Linear(WIDE, 4 * WIDE)
            self.third.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "checkpointed":
            return checkpoint(self._forward, x, use_reentrant=False)  # type: ignore[return-value]
        if self.kind == "dropped":
            self._forward(x)  # a branch whose result is unused
            return self.second(self.first(x[:, :1].expand_as(x)).relu())
        if self.kind == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.second(self.first(x)).float()
        if self.kind == "no grad":
            with torch.no_grad():
                x = self.first(x)
            return self.second(x)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.first(x)), 0.1, training=self.training)
        return self.second(hidden + self.third(x) if self.kind == "tied" else hidden)


def task(**given: Any) -> ff.Task:
    fields: dict[str, Any] = {
        "model": Net,
        "loss": F.mse_loss,
        "data": lambda: ff.Data(train=Rows()),
        "optimizer": functools.partial(torch.optim.AdamW, lr=1e-3),
        "steps": 2,
        "batch_size": 8,
    }
    return ff.Task(**fields | given)


# ---- the host's memory


def host(folder: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> int | None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(host_limits, "CGROUP_ROOT", folder / "cgroup")
    monkeypatch.setattr(host_limits, "MEMINFO", folder / "meminfo")
    monkeypatch.setattr(host_limits, "PROC_CGROUP", folder / "own")
    return host_limits.available_bytes()


NO_SWAP = {"cgroup/memory.swap.max": "0\n", "cgroup/memory.swap.current": "0\n"}
MEMINFO = "MemTotal: 2000 kB\nMemAvailable:  1000 kB\nSwapFree: 24 kB\nHugePages_Total: 0\n"


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, None),
        ({"meminfo": "nonsense"}, None),
        ({"meminfo": "MemTotal: 5 kB\n"}, None),
        ({"meminfo": MEMINFO}, 1024 * 1024),
        ({"cgroup/memory.max": "max\n", "cgroup/memory.current": "5\n", "meminfo": MEMINFO}, 1024 * 1024),
        ({"cgroup/memory.max": "5000\n", "cgroup/memory.current": "4000\n", **NO_SWAP, "meminfo": MEMINFO}, 1000),
        # What exceeds the limit is swapped out, up to the swap limit.
        ({"cgroup/memory.max": "5000\n", "cgroup/memory.current": "4000\n", "meminfo": MEMINFO}, 1000 + 24 * 1024),
        (
            {
                "cgroup/memory.max": "5000\n",
                "cgroup/memory.current": "4000\n",
                "cgroup/memory.stat": "slab_reclaimable 50\nslab_unreclaimable 7\n",
                "cgroup/memory.swap.max": "600\n",
                "cgroup/memory.swap.current": "200\n",
                "meminfo": MEMINFO,
            },
            1450,
        ),
        (
            {
                "own": "4:memory:/x\n",
                "cgroup/memory/x/memory.limit_in_bytes": "900\n",
                "cgroup/memory/x/memory.usage_in_bytes": "800\n",
                "cgroup/memory/x/memory.memsw.limit_in_bytes": "2000\n",
                "cgroup/memory/x/memory.memsw.usage_in_bytes": "1200\n",
                "meminfo": MEMINFO,
            },
            800,
        ),
        (
            {
                "own": "0::/a/b\n",
                "cgroup/a/b/memory.max": "9000\n",
                "cgroup/a/b/memory.current": "4000\n",
                "cgroup/a/b/memory.stat": "anon 1\ninactive_file 300\nactive_file 30\n",
                "cgroup/a/memory.max": "6000\n",
                "cgroup/a/memory.current": "4500\n",
                "cgroup/a/memory.swap.max": "0\n",
                "meminfo": MEMINFO,
            },
            1500,
        ),
        (
            {
                "own": "4:memory,cpu:/x\n",
                "cgroup/memory/x/memory.limit_in_bytes": "800\n",
                "cgroup/memory/x/memory.usage_in_bytes": "900\n",
                "cgroup/memory/x/memory.memsw.limit_in_bytes": "800\n",
                "cgroup/memory/x/memory.memsw.usage_in_bytes": "900\n",
                "cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
                "cgroup/memory/memory.usage_in_bytes": "900\n",
                "meminfo": MEMINFO,
            },
            0,
        ),
    ],
)
def test_available_memory_is_the_least_of_the_hosts_memory_and_its_limits(
    files: dict[str, str], available: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host(tmp_path, monkeypatch, files) == available


def test_what_a_rank_may_unpack_is_its_part_of_the_memory_or_of_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(tmp_path, monkeypatch, {"meminfo": MEMINFO})
    assert host_limits.total_bytes() == 2000 * 1024
    host(tmp_path, monkeypatch, {"cgroup/memory.max": "6000\n", "cgroup/memory.current": "5999\n"})
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert unpacked.share_bytes.__wrapped__() == 3000
    (tmp_path / "meminfo").unlink()
    assert host_limits.total_bytes() is None


# ---- the bound is a lower bound


def measured_activation_bytes(model: nn.Module, inputs: Any) -> int:
    """Bytes that a real forward keeps: storages saved for backward, and outputs, without parameters."""
    with recording_saved(excluded=model.parameters()) as saved:
        outputs = call_model(model, inputs)
    for tensor in tree_leaves(outputs):
        saved.add(tensor)
    return saved.num_bytes


def image(channels: int) -> Any:
    return digits.Network(channels=channels)


KINDS = ("plain", "frozen", "checkpointed", "dropped", "autocast", "no grad", "tied")
MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    **{kind: (functools.partial(Net, kind), torch.zeros(1, WIDE)) for kind in KINDS},
    "images": (functools.partial(image, 16), torch.zeros(1, 1, 8, 8)),
    "lm": (
        lm.task(width=32, layers=2, heads=8, length=256).model,
        {"tokens": torch.zeros(1, 256, dtype=torch.int64), "positions": torch.arange(256)[None]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_the_activation_bound_is_at_most_what_a_real_forward_keeps(kind: str) -> None:
    make, inputs = MODELS[kind]
    samples = 4
    many = tree_map(inputs, lambda tensor: tensor.repeat(samples, *[1] * (tensor.dim() - 1)))
    bound = samples * activation_bytes_per_sample(build_meta_model(task(model=make)), inputs, is_half_precision=False)
    assert bound <= measured_activation_bytes(make(), many)
    # The bound is useful too: it is above a minimum, which is small only if the model saves little itself.
    least = {"frozen": 4, "checkpointed": 4, "no grad": 4, "autocast": 4 * WIDE}.get(kind, 8 * WIDE)
    assert bound >= samples * least


def test_a_model_with_data_dependent_control_flow_has_no_activation_bound() -> None:
    class DataDependent(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    assert (
        activation_bytes_per_sample(
            build_meta_model(task(model=DataDependent)), torch.zeros(1, WIDE), is_half_precision=False
        )
        == 0
    )


@pytest.mark.parametrize(
    "plan", [ff.Plan(), ff.Plan(dp=4), ff.Plan(dp=4, zero=1), ff.Plan(dp=4, zero=3, microbatches=2)]
)
def test_memory_per_rank_is_that_of_the_host_divided_by_its_ranks(plan: ff.Plan) -> None:
    made = task()
    bounds = [
        measure_bound(
            made, plan, Rows(), build_meta_model(made), num_samples=2**30, pool=MemoryPool("", 24 * GIB, num_ranks)
        )
        for num_ranks in (1, plan.mesh.size)
    ]
    assert bounds[0].model_bytes * plan.mesh.size == pytest.approx(bounds[1].model_bytes)
    assert bounds[0].batch_bytes_per_sample * plan.mesh.size == pytest.approx(bounds[1].batch_bytes_per_sample)
    weights = sum(p.nbytes for p in Net().parameters())
    # One rank has unbucketed gradients only; four ranks have a whole copy each, or shards of one copy.
    whole = {(1, 0): 3, (4, 0): 4 * 4, (4, 1): 1 + 4 + 2, (4, 3): 1 + 4 + 1 + 2}[plan.dp, plan.zero]
    assert bounds[1].model_bytes == pytest.approx(whole * weights, rel=0.05)


def test_a_pipeline_holds_the_microbatches_that_its_schedule_has_in_flight() -> None:
    made = task(model=lambda: nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(4))))

    def activations(**fields: Any) -> float:
        plan, pool = ff.Plan(microbatches=4, **fields), MemoryPool("", 24 * GIB, 1)
        bound = measure_bound(made, plan, Rows(), build_meta_model(made), num_samples=2**30, pool=pool)
        return bound.activation_bytes_per_sample

    whole = activations()
    assert activations(pp=2, schedule="gpipe") == pytest.approx(whole * 4 / 2)  # both stages hold four, of halves
    assert activations(pp=2) == pytest.approx(whole / (1 / 2 + 1))  # two on the first stage, one on the second
    assert activations(pp=2, schedule="2bw") == pytest.approx(whole / 2)


# ---- refusals


def available(monkeypatch: pytest.MonkeyPatch, num_bytes: int | None) -> None:
    monkeypatch.setattr(memory_bound, "available_bytes", lambda: num_bytes)


def train(folder: Path, of: ff.Task, plan: ff.Plan | None = None, **given: Any) -> FourfoldError | None:
    try:
        ff.train(of, plan, folder=str(folder), checkpoint_every=0, trace_every=0, **given)
    except FourfoldError as error:
        return error
    return None


@pytest.mark.parametrize("size", [10**9, 10**30])
def test_a_batch_too_large_for_memory_is_refused_on_the_command_line(refused: Refused, size: int) -> None:
    text = refused("train", "lm", f"batch_size={size}", "-n", "2")
    assert f"batch_size = {size} (an epoch has" in text
    assert "activations" in text
    assert "available on this host" in text
    assert "microbatches" in text
    assert "GiB" in refused("verify", "lm", f"batch_size={size}", "dp=2")


def test_more_processes_than_fit_into_memory_are_refused(refused: Refused) -> None:
    text = refused("train", "mine.py", "-n", "100000", "batch_size=100000")
    assert "100000 processes that take at least 6250 GiB" in text


@pytest.mark.parametrize("setting", ["width=100000000", "width=1000000000000", "width=1e30", "layers=1e9"])
def test_a_model_too_large_for_memory_is_refused_on_the_meta_device(refused: Refused, setting: str) -> None:
    assert "need " in refused("train", "lm", setting, "heads=1", "-n", "1")


def test_train_refuses_a_batch_too_large_for_memory_before_it_writes_a_file(tmp_path: Path) -> None:
    error = train(tmp_path, task(batch_size=10**13))
    assert isinstance(error, SettingError)
    assert "batch_size = 10000000000000 takes at least" in str(error)
    assert not list(tmp_path.iterdir())


def test_train_refuses_a_model_too_large_for_memory_before_it_is_allocated(tmp_path: Path) -> None:
    error = train(tmp_path, task(model=lambda: nn.Sequential(*(nn.Linear(100_000, 100_000) for _ in range(1000)))))
    assert "need at most" in str(error)


@pytest.mark.parametrize("plan", [ff.Plan(), ff.Plan(microbatches=4)])
def test_a_run_is_refused_exactly_if_less_memory_than_the_bound_is_available(
    plan: ff.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, samples = task(batch_size=4096), 4096
    monkeypatch.setattr(Rows, "__len__", lambda self: samples)
    bound = measure_bound(
        made, plan, Rows(), build_meta_model(made), num_samples=samples, pool=MemoryPool("", 2**20, 1)
    )
    total = bound.total_bytes(samples, plan.microbatches, made.steps or 1)
    assert total > samples * bound.batch_bytes_per_sample + samples // plan.microbatches * 4 * 5 * WIDE
    available(monkeypatch, int(total) + 1)
    assert train(tmp_path, made, plan) is None
    available(monkeypatch, int(total) - 1)
    assert "batch_size = 4096 takes at least" in str(train(tmp_path, made, plan))


def test_no_run_is_refused_if_the_available_memory_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, 0)
    assert train(tmp_path, task()) is not None
    available(monkeypatch, None)
    assert train(tmp_path, task()) is None


def test_the_memory_check_leaves_random_initialization_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class RandomInit(Net):
        def __init__(self) -> None:
            super().__init__()
            self.order = torch.randperm(WIDE, device="cpu")  # drawn even if the model is on the meta device

    seen: list[list[int]] = []

    def model() -> nn.Module:
        made = RandomInit()
        seen.append(made.order.tolist())
        return made

    monkeypatch.setattr(Rows, "__len__", lambda self: 16)
    assert train(tmp_path, task(model=model), seed=5) is None
    torch.manual_seed(5)
    assert RandomInit().order.tolist() == seen[-1]


def test_samples_of_different_sizes_are_counted_at_the_smallest_size_seen() -> None:
    class Ragged:
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> Any:
            return self.fetch([index])

        def fetch(self, indices: Any) -> Any:
            return torch.zeros(len(indices), 100 if 0 in indices else 10), torch.zeros(len(indices), 1)

    made = task(data=lambda: ff.Data(train=Ragged()))
    bound = measure_bound(
        made, ff.Plan(), Ragged(), build_meta_model(made), num_samples=8, pool=MemoryPool("", 24 * GIB, 1)
    )
    assert bound.batch_bytes_per_sample == 4 * 11
    assert fetch(Ragged(), [0])[0].nbytes == 400


def test_an_error_of_the_source_is_raised_by_training_and_not_by_the_memory_check(tmp_path: Path) -> None:
    class Failing(Rows):
        def __getitem__(self, index: int) -> Any:
            raise OSError("the disk of this host")

    failing = task(data=lambda: ff.Data(train=Failing()))
    pool = MemoryPool("available on this host", 2**40, 1)
    memory_bound.measure_bound(
        failing, ff.Plan(), failing.data().train, build_meta_model(failing), num_samples=8, pool=pool
    )
    with pytest.raises(OSError, match="the disk of this host"):
        ff.train(failing, folder=str(tmp_path))
    assert list(tmp_path.iterdir())  # the run had begun, so its folder exists
