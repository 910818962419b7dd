"""The laws of dropout on the tensor axis: whole features are dropped alike on all ranks, split ones independently."""

import itertools

import pytest
import torch
from torch import Tensor

from fourfold.axes.context.work.dropout import AttentionDropout, DropoutMask
from fourfold.testing.oracle import TOLERANCE
from tests.spawned.tensor_dropout import (
    HEADS,
    HIDDEN,
    KV_HEADS,
    LENGTH,
    SEED,
    WIDTH,
    Drop,
    P,
    eager,
    make_net,
    token_batches,
    token_loss,
)


def test_tensor_ranks_drop_the_same_whole_features_and_data_ranks_others(world):
    ranks = world(4).run("tests.spawned.tensor_dropout:masks", time_limit_seconds=60, dp=2, tp=2)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert ranks[0] != ranks[2]
    assert len(ranks[0]) == 2
    assert ranks[0][0] != ranks[0][1]


RUNS = [
    {"dp": 4 // cp // tp, "cp": cp, "tp": tp, "zero": zero, "microbatches": microbatches}
    for cp, tp, zero, microbatches in [(1, 2, 3, 1), (1, 4, 0, 2), (2, 2, 2, 2)]
]


@pytest.fixture(scope="module")
def trained(world):
    """By run: what each rank has drawn and trained."""
    by_rank = world(4).run("tests.spawned.tensor_dropout:trainings", runs=RUNS, time_limit_seconds=200)
    return [[each[index] for each in by_rank] for index in range(len(RUNS))]


def whole_mask(name: str, step: int, run: dict, ranks: list) -> Tensor:
    """The mask of the whole batch, from those of all ranks."""
    sizes = {"mixed": (8, LENGTH, WIDTH), "hidden": (8, LENGTH, HIDDEN), "scores": (8, HEADS, LENGTH, LENGTH)}
    sizes |= {"result": sizes["mixed"], "values": (8, KV_HEADS, LENGTH, WIDTH // HEADS)}
    split_dim = {"hidden": 2, "scores": 1, "values": 1}.get(name.partition(".")[2])
    whole = torch.full(sizes[name.partition(".")[2]], -1, dtype=torch.int8)
    for rank, found in enumerate(ranks):
        calls = found["kept"][name][step * run["microbatches"] : (step + 1) * run["microbatches"]]
        mask, tp = torch.cat([torch.tensor(each, dtype=torch.int8) for each in calls]), rank % run["tp"]
        token_dim = 2 if name.endswith(("scores", "values")) else 1
        index: list = [slice(None)] * whole.dim()
        index[0] = slice(found["dp"] * len(mask), (found["dp"] + 1) * len(mask))
        if split_dim is not None:
            length, own = whole.shape[split_dim], mask.shape[split_dim]
            start = tp * (length // own) // run["tp"] * own
            index[split_dim] = slice(start, start + own)
        part = whole[tuple(index)].clone()
        positions = torch.tensor(found["positions"])
        known = part.index_select(token_dim, positions)
        assert bool(((known == -1) | (known == mask)).all()), f"{name}: ranks with the same entries drop others"
        whole[tuple(index)] = part.index_copy(token_dim, positions, mask)
    assert not (whole == -1).any()
    return whole.double()


def masked_attention(masks: list):
    """Attention by hand with these masks, in the order of its calls."""

    def attend(block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        scores = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return (scores * masks.pop(0) / (1 - P)) @ v

    return attend


def attention_mask(step: int, call: int, dp: int) -> Tensor:
    """What Fourfold drops in attention with cp > 1, of all heads."""
    samples = torch.cat([torch.arange(8 // dp) + (index << 32) for index in range(dp)])
    dropout, tokens = AttentionDropout(P, SEED, step, call, samples), torch.arange(LENGTH)
    return DropoutMask(dropout, samples, torch.arange(HEADS), tokens, tokens).keep_mask(slice(None), slice(None))


@pytest.mark.parametrize("number", range(len(RUNS)), ids=lambda number: " ".join(map(str, RUNS[number].values())))
def test_one_device_with_the_same_masks_trains_the_same(trained, number):
    run, ranks = RUNS[number], trained[number]
    hashed = [attention_mask(step, call, run["dp"]) for step in range(2) for call in range(2)]
    net = make_net(eager if run["cp"] == 1 else masked_attention(hashed))
    for name in ranks[0]["kept"]:
        index, _, drop = name.partition(".")
        if run["cp"] == 1 or drop != "scores":
            module = net.blocks[int(index)].get_submodule(drop)
            assert isinstance(module, Drop)
            module.masks = [whole_mask(name, step, run, ranks) for step in range(2)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses, norms = [], []
    for inputs, targets in token_batches():
        optimizer.zero_grad()
        loss = token_loss(net(**inputs), targets).mean()
        loss.backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None]).item())
        optimizer.step()
        losses.append(loss.item())
    for found in ranks:
        # A second forward ends in the block's last dropout, before its output.
        drawn = [name for name, kept in found["kept"].items() if kept and name.startswith("0.")]
        assert found["repeated"] == [name for name in drawn if name != "0.result"]
        assert found["losses"] == pytest.approx(losses, abs=TOLERANCE)
        assert found["norms"] == pytest.approx(norms, abs=TOLERANCE)
    for name, p in net.named_parameters():
        weights = torch.tensor(ranks[0]["weights"][name], dtype=torch.float64)
        torch.testing.assert_close(weights, p.detach(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("mesh", [(2, 1, 2), (1, 2, 2)], ids=str)
def test_a_resumed_run_drops_what_it_would_have_dropped(world, tmp_path, mesh):
    mesh = dict(zip(("dp", "cp", "tp"), mesh, strict=True))
    assert all(world(4).run("tests.spawned.tensor_dropout:resumes", folder=str(tmp_path), **mesh))


HUGGING_FACE = [
    {"kind": "gpt2", "attention": "eager", "dp": 2, "tp": 2},
    {"kind": "gpt2", "attention": "sdpa", "tp": 4},
    # Another module drops out here, unless the model attends through Fourfold's interface.
    {"kind": "gpt2", "attention": "eager", "options": {"reorder_and_upcast_attn": True}, "cp": 2, "tp": 2},
    {"kind": "bert", "attention": "eager", "tp": 4},
    {"kind": "bert", "attention": "sdpa", "cp": 2, "tp": 2},
]


def test_models_of_transformers_train_with_their_own_dropout(world):
    ranks = world(4).run("tests.spawned.tensor_dropout:hugging_face", runs=HUGGING_FACE, time_limit_seconds=120)
    for index, run in enumerate(HUGGING_FACE):
        assert all(each[index]["losses"] == ranks[0][index]["losses"] for each in ranks)
        losses = ranks[0][index]["losses"]
        assert losses[-1] < 0.9 * losses[0]
        starts = [[start for _, start in each[index]["slices"] if start is not None] for each in ranks]
        heads = 4 // run["tp"]
        assert starts == [[rank % run["tp"] * heads] for rank in range(4)]  # of the heads of one layer
        assert len(ranks[0][index]["slices"]) == 4  # embeddings, scores, and the outputs of both layers


def test_slices_are_dropped_independently_and_states_stay_equal(trained):
    """Slices of features, of heads, of tokens and of samples."""
    for name in ("hidden", "scores"):
        agreements, kept = [], []
        for run, ranks in zip(RUNS, trained, strict=True):
            for first, second in itertools.combinations(range(4), 2):
                same_samples = ranks[first]["dp"] == ranks[second]["dp"]
                assert (ranks[first]["state"] == ranks[second]["state"]) == same_samples
                if name == "scores" and run["cp"] > 1:
                    continue
                a, b = (torch.tensor(ranks[rank]["kept"][f"1.{name}"]) for rank in (first, second))
                agreements.append((a == b).double().mean().item())
                kept.append(a.double().mean().item())
        mean = sum(agreements) / len(agreements)
        assert mean == pytest.approx(P**2 + (1 - P) ** 2, abs=0.01)
        assert max(agreements) < 0.7
        assert sum(kept) / len(kept) == pytest.approx(1 - P, abs=0.01)


def test_the_same_seed_on_the_same_mesh_is_the_same_training(world, trained):
    again = world(4).run("tests.spawned.tensor_dropout:trainings", runs=[RUNS[2]], time_limit_seconds=60)
    assert [each[0] for each in again] == trained[2]
