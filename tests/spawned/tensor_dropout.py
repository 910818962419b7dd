"""What the ranks of a spawned world do about dropout on the tensor axis. Results are JSON."""

import functools
import hashlib
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fourfold as ff
from fourfold.axes.context.attach.check import ContextCheck
from fourfold.axes.data.attach.check import ForwardCheck
from fourfold.checkpoint.collect import TrainingState
from fourfold.checkpoint.manager import AttemptDir, CheckpointManager, TrainingProgress
from fourfold.model.rank_dropout import DrawSlices
from fourfold.step.train_step import TrainStep
from fourfold.torch_kit.torch_private import is_in_backward
from tests import cases
from tests.checkpoint_runs import MemoryLog


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(self.up(x)))


def masks(dp: int, tp: int) -> list[list[bool]]:
    """Which features of this rank were dropped, by step."""
    step = ff.parallelize(
        nn.Sequential(Block()),
        lambda outputs, targets: (outputs - targets).square().mean(1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ff.Plan(dp=dp, tp=tp),
        tensor={"*.up": "column", "*.down": "row"},
    )
    generator = torch.Generator().manual_seed(step.dp_index)
    batches = [(torch.randn(4, 8, generator=generator), torch.zeros(4, 8)) for _ in range(2)]
    found: list[list[bool]] = []
    step.dry_run(batches[0], training=True)
    step.model.get_submodule("0.dropout").register_forward_hook(
        lambda module, inputs, output: found.append((output == 0).flatten().tolist())
    )
    for batch in batches:
        step(batch)
    return found


# ---- the law: with the masks that were drawn, one device trains the same --------------------------------------------

P, SEED, WIDTH, HEADS, KV_HEADS, HIDDEN, LENGTH, VOCABULARY = 0.25, 5, 16, 8, 2, 32, 8, 9
RULES = {
    "blocks.*.qkv": "column(heads, kv_heads, kv_heads)",
    "blocks.*.out": "row(heads)",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
}
DROPS = ("mixed", "result", "hidden", "values", "scores")


class Drop(nn.Module):
    """A dropout that remembers what it kept; `masks` are used in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.kept_again: list[Tensor] = []
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.masks:
            return x * self.masks.pop(0) / (1 - P)
        out = F.dropout(x, P, self.training)
        (self.kept_again if is_in_backward() else self.kept).append(out.detach() != 0)
        return out


class AttentionBlock(nn.Module):
    """Dropout of scores, of values, of split and of whole features."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.attend = HEADS, KV_HEADS, attend
        self.qkv, self.out = nn.Linear(WIDTH, WIDTH + 2 * KV_HEADS * WIDTH // HEADS), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.mixed, self.result, self.hidden, self.values, self.scores = (Drop() for _ in DROPS)

    def forward(self, x: Tensor) -> Tensor:
        sizes = (self.heads, self.kv_heads, self.kv_heads)
        heads = self.qkv(x).unflatten(-1, (sum(sizes), -1)).transpose(1, 2)
        q, k, v = heads.split(sizes, dim=1)
        mixed = self.attend(self, q, k, self.values(v))
        x = x + self.mixed(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.result(self.down(self.hidden(F.gelu(self.up(x)))))


def eager(block: AttentionBlock, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    return block.scores((q @ k.mT).softmax(-1)) @ v


def sdpa(block: AttentionBlock, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=P if block.training else 0.0, enable_gqa=True)


class Net(nn.Module):
    """`checkpoints`: whether the first block is computed again in backward."""

    def __init__(self, attend: Any, *, checkpoints: bool) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(AttentionBlock(attend) for _ in range(2))
        self.head, self.checkpoints = nn.Linear(WIDTH, VOCABULARY), checkpoints

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        self.positions = positions[0].tolist()
        x = self.embedding(tokens) + self.places(positions)
        first, second = self.blocks
        return self.head(second(checkpoint(first, x, use_reentrant=False) if self.checkpoints else first(x)))


def make_net(attend: Any, *, checkpoints: bool = False) -> Net:
    torch.manual_seed(1)
    return Net(attend, checkpoints=checkpoints).double()


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")


def token_batches() -> list[Any]:
    """The global batches of two steps."""
    generator = torch.Generator().manual_seed(3)
    draw = functools.partial(torch.randint, 0, VOCABULARY, (8, LENGTH), generator=generator)
    positions = torch.arange(LENGTH).expand(8, LENGTH)
    return [({"tokens": draw(), "positions": positions}, draw()) for _ in range(2)]


def trainings(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What this rank has drawn and trained, by run. Of the dry runs, that of the tensor axis is made."""
    with (
        mock.patch.object(ForwardCheck, "is_needed", return_value=False),
        mock.patch.object(ContextCheck, "is_needed", return_value=False),
    ):
        return [_training(**fields) for fields in runs]


def _training(**fields: Any) -> dict[str, Any]:
    plan = ff.Plan(**fields)
    net = make_net(eager if plan.cp == 1 else sdpa, checkpoints=True)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    step = ff.parallelize(net, token_loss, optimizer, plan, clip=1e9, seed=SEED, drift_check=1, tensor=RULES)
    batches = [cases.local_batch(batch, plan.dp, step.dp_index) for batch in token_batches()]
    step.dry_run(batches[0], training=True)
    drops = {f"{index}.{name}": getattr(block, name) for index, block in enumerate(net.blocks) for name in DROPS}
    for drop in drops.values():
        drop.kept, drop.kept_again = [], []
    metrics = [step(batch) for batch in batches]
    weights = {name: weight.tolist() for name, weight in step.named_weights()}
    return {
        "dp": step.dp_index,
        "positions": net.positions,
        "kept": {name: [each.tolist() for each in drop.kept] for name, drop in drops.items()},
        "repeated": [name for name, drop in drops.items() if _repeats(drop)],
        "losses": [each.loss for each in metrics],
        "norms": [each.grad_norm for each in metrics],
        "weights": weights if step.rank == 0 else {},
        "state": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
    }


def _repeats(drop: Drop) -> bool:
    """Whether second forwards have dropped what the first ones did."""
    return len(drop.kept_again) == len(drop.kept) > 0 and all(map(torch.equal, drop.kept, drop.kept_again))


def resumes(folder: str, dp: int, cp: int, tp: int) -> bool:
    """Whether a run that resumes after its first step goes on with the same bits. Saved in `folder`."""

    def make_step() -> tuple[TrainStep, CheckpointManager]:
        net, optimizer = make_net(eager if cp == 1 else sdpa), functools.partial(torch.optim.SGD, lr=0.1)
        step = ff.parallelize(net, token_loss, optimizer, ff.Plan(dp=dp, cp=cp, tp=tp), seed=SEED, tensor=RULES)
        return step, CheckpointManager(TrainingState(step, None), AttemptDir(Path(folder), "a"), MemoryLog(), seed=SEED)

    step, manager = make_step()
    first, second = (cases.local_batch(batch, dp, step.dp_index) for batch in token_batches())
    step(first)
    manager.save(TrainingProgress(1))
    manager.wait()
    losses = [step(second).loss]
    again, manager = make_step()
    assert manager.resume() is not None
    losses.append(again(second).loss)
    pairs = zip(step.model.parameters(), again.model.parameters(), strict=True)
    return losses[0] == losses[1] and all(torch.equal(a, b) for a, b in pairs)


# ---- models of transformers -----------------------------------------------------------------------------------------


def hugging_face(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The losses of models of transformers with their own dropout, and their slices by module."""
    return [_hugging_face(**run) for run in runs]


def _hugging_face(kind: str, attention: str, options: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    import transformers  # in each process; other cases do without

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "n_positions": 16}
    config = {"gpt2": transformers.GPT2Config, "bert": transformers.BertConfig}[kind]
    model_class = {"gpt2": transformers.GPT2LMHeadModel, "bert": transformers.BertForMaskedLM}[kind]
    extra = {"intermediate_size": 64, "bos_token_id": 0, "eos_token_id": 0, "attn_implementation": attention}
    extra |= options or {}
    torch.manual_seed(1)
    model = model_class(config(**sizes, **extra))
    loss = lambda outputs, targets: token_loss(outputs.logits, targets)  # noqa: E731
    optimizer = functools.partial(torch.optim.Adam, lr=1e-2)
    step = ff.parallelize(model, loss, optimizer, ff.Plan(**fields), clip=1.0, drift_check=1)
    tokens = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(12).expand(4, 12)
    batch = cases.local_batch(({"input_ids": tokens, "position_ids": positions}, tokens), step.plan.dp, step.dp_index)
    with mock.patch.object(DrawSlices, "learn", autospec=True, side_effect=DrawSlices.learn) as learn:
        losses = [step(batch).loss for _ in range(4)]
    found = [each for call in learn.call_args_list for each in call.args[1]]
    return {
        "losses": losses,
        "slices": [(each.module, None if each.part is None else each.part.start) for each in found],
    }
