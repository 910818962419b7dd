"""Checkpoints that an earlier Fourfold has written, in version 1 of the manifest: they restore what it had saved.

`version_one/*.json` were made by running this file's `make_run` for two steps with the last Fourfold that wrote
version 1, and then for two more from that checkpoint. Tensors are float32 in base64; the states of torch's generators,
which are large, are put in here.
"""

import base64
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor, nn

import fourfold as ff
from fourfold.checkpoint.collect import TrainingState
from fourfold.checkpoint.export import export_weights
from fourfold.checkpoint.initial_weights import load_weights
from fourfold.checkpoint.manager import AttemptDir, CheckpointManager
from fourfold.checkpoint.manifest_file import verify_checkpoint
from fourfold.checkpoint.store import CheckpointStore
from fourfold.feed.feed import Feed
from fourfold.step.ema import EMA
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from tests.checkpoint_runs import MemoryLog

WRITTEN = Path(__file__).parent / "version_one"
PLANS: dict[str, dict[str, Any]] = {
    "sharded-weights": {"zero": 3},
    "residuals": {"codec": "topk", "codec_density": 0.3},
    "local-steps": {"sync": "local", "local_steps": 2, "outer_momentum": 0.9},
}


class Tiny(nn.Module):
    """Two layers with one weight, a third, and a buffer. The shards of two ranks meet within the first weight."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.second.weight = self.first.weight
        self.register_buffer("offset", torch.tensor([0.25, -0.5, 1.0, 0.0, 2.0]))
        for number, p in enumerate(self.parameters()):
            p.data = torch.arange(p.numel()).mul(0.25).sub(1).div(1 + number).view(p.shape)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x + self.offset)))))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1)


def make_run(kind: str, comm: Any, folder: Path) -> tuple[CheckpointManager, TrainingState]:
    """The run on one thread's rank."""
    plan, adam = ff.Plan(dp=2, **PLANS[kind]), functools.partial(torch.optim.AdamW, lr=0.1)
    step = TrainStep(Tiny(), loss, adam, plan=plan, communicator=comm, clip=None)
    source = [(torch.zeros(1), torch.zeros(1))] * 40
    state = TrainingState(step, Feed(source, batch_size=8), EMA(step.weight_shards, 0.5))
    return CheckpointManager(state, AttemptDir(folder, "a"), MemoryLog(), seed=0), state


def train(state: TrainingState, start: int, stop: int) -> None:
    step, ema = state.step, state.ema
    for number in range(start, stop):
        samples = torch.arange(40).view(8, 5).add(number).remainder(7).sub(3).div(4)
        mine = samples[4 * step.rank : 4 * step.rank + 4]
        step((mine, mine[:, :2]))
        if ema is not None and step.is_synchronized:
            ema.update(number + 1)


def decode(text: str) -> Tensor:
    content = bytearray(base64.b64decode(text))
    return torch.frombuffer(content, dtype=torch.float32) if content else torch.empty(0)


def write_checkpoint(kind: str, folder: Path) -> dict[str, Any]:
    """Put the files of the checkpoint on the disk; returns all that was written down of it."""
    written = json.loads((WRITTEN / f"{kind}.json").read_text())
    manifest, target = written["manifest"], CheckpointStore(folder).step_dir(2)
    target.mkdir(parents=True)
    for file, tensors in written["files"].items():
        save_file({name: decode(text).view(shape) for name, (shape, text) in tensors.items()}, target / file)
        content = (target / file).read_bytes()
        manifest["files"][file] = {"num_bytes": len(content), "checksum": xxhash.xxh3_128_hexdigest(content)}
    for rank in range(2):
        state = torch.Generator().manual_seed(rank).get_state()
        manifest["random"].append({"cpu": bytes(state.tolist()).hex(), "device": ""})
    body = json.dumps(manifest).encode()
    (target / "manifest.json").write_bytes(
        b'{"xxh3_128":"%s","manifest":%s}' % (xxhash.xxh3_128_hexdigest(body).encode(), body)
    )
    return written


def whole_tensors(written: dict[str, Any]) -> dict[str, Tensor]:
    """What the files hold, by title, with the pieces of a tensor joined."""
    result = {}
    for title, entry in written["manifest"]["tensors"].items():
        pieces = sorted(entry["stretches"], key=lambda stored: stored["offsets"])
        result[title] = torch.cat([decode(written["files"][stored["file"]][title][1]) for stored in pieces])
    return result


def state_of(step: TrainStep) -> dict[str, Tensor]:
    """The state of a step by title, flat; with local steps the optimizer's states of this rank, as `worker`."""
    state, refs = step.state_dict(), step.state_refs()
    found = {f"model.{name}": value for name, value in state["model"].items()}
    if step.plan.sync == "local":
        local = {f"worker.{n}.{k}": v for n, own in refs["optimizer"].items() for k, v in own.items()}
        found |= {title: torch.cat([*value]) for title, value in local.items() if isinstance(value, list)}
    else:
        found |= {f"optimizer.{n}.{k}": v for n, own in state["optimizer"].items() for k, v in own.items()}
    found |= {f"codec.{n}.{k}": v for n, own in state["codec"].items() for k, v in own.items()}
    found |= {f"outer.{name}": value for name, value in state["outer"].items()}
    return {title: value.reshape(-1).clone() for title, value in found.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("kind", PLANS)
def test_a_checkpoint_of_version_1_restores_what_was_saved_and_training_goes_on(kind, tmp_path):
    written = write_checkpoint(kind, tmp_path)
    saved = whole_tensors(written)
    assert not verify_checkpoint(CheckpointStore(tmp_path).step_dir(2))

    def resume(comm):
        manager, state = make_run(kind, comm, tmp_path)
        progress = manager.resume()
        assert progress is not None
        assert progress.step == 2
        restored = state_of(state.step)
        train(state, 2, 4)
        assert state.ema is not None
        return restored, state_of(state.step), {name: value.reshape(-1) for name, value in state.ema.values.items()}

    ranks = threads.run(2, resume, hosts=2 if kind == "sharded-weights" else 1)
    for rank, (restored, _, _) in enumerate(ranks):
        aliases = written["manifest"]["aliases"]
        for title, value in restored.items():
            expected = saved[aliases.get(title, title)]
            rows = expected.view(2, -1)[rank] if title.startswith("worker.") else expected
            assert torch.equal(value, rows), title
        assert {*saved} - {title for title in saved if title.startswith("ema.")} <= restored.keys()
    for rank, (_, continued, averages) in enumerate(ranks):
        # Another processor may round otherwise.
        for title, text in written["after"].items():
            if title in continued:
                torch.testing.assert_close(continued[title], decode(text), rtol=1e-4, atol=1e-5)
        for value, text in zip(averages.values(), written["averages"][rank], strict=True):
            torch.testing.assert_close(value, decode(text), rtol=1e-4, atol=1e-5)


def test_the_weights_and_averages_of_version_1_are_exported(tmp_path):
    saved = whole_tensors(write_checkpoint("sharded-weights", tmp_path))
    for kind in ("model", "ema"):
        export_weights(CheckpointStore(tmp_path).step_dir(2), tmp_path / kind, ema=kind == "ema")
        model = Tiny()
        load_weights(model, tmp_path / kind)
        for name, value in model.state_dict().items():
            title = f"{kind}.{name.replace('second.weight', 'first.weight')}"
            assert torch.equal(value.reshape(-1), saved.get(title, saved["model.offset"]))
