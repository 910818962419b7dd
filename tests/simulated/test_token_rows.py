"""Laws of token rows: packing loses nothing, and training on rows equals training on documents; ranks are threads."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fourfold as ff
from fourfold.cli.feed_pack import run_pack
from fourfold.feed.token_rows import IGNORED_TARGET, TokenRows
from fourfold.losses import cross_entropy
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import threads
from fourfold.words.errors import DataError
from tests.cases import SEED_LOCK

documents = st.lists(st.lists(st.integers(0, 255), max_size=40), min_size=1, max_size=150)


@settings(max_examples=20, deadline=None)
@given(documents, st.integers(1, 24))
def test_each_token_and_its_target_are_in_one_row_once_with_the_bounds_of_their_document(given_documents, length):
    rows = TokenRows(given_documents, length)
    packed, found = list(rows), []
    for inputs, targets in packed:
        tokens, positions, starts = (inputs[key] for key in ("tokens", "positions", "document_starts"))
        assert {len(each) for each in (tokens, positions, starts, targets)} == {length}
        assert np.array_equal(starts + positions, np.arange(length))
        for start in np.unique(starts):
            here = starts == start
            if (targets[here] == IGNORED_TARGET).all():
                continue  # padding
            assert np.array_equal(tokens[here][1:], targets[here][:-1])  # the next token is the target
            found.append((*tokens[here].tolist(), int(targets[here][-1])))
    pieces = [
        tuple(document[start : start + length + 1])
        for document in given_documents
        for start in range(0, len(document) - 1, length)
    ]
    assert sorted(found) == sorted(pieces)
    assert rows.num_tokens == sum(len(piece) - 1 for piece in pieces)
    assert rows.num_tokens + rows.num_padding == length * len(packed)
    assert rows.num_short == sum(len(document) < 2 for document in given_documents)


def counted(logits, targets):
    """The sum of the losses, and how many there are."""
    return cross_entropy(logits, targets).sum(), (targets != IGNORED_TARGET).sum()


def batch_of(rows):
    inputs = {key: torch.tensor(np.stack([row[0][key] for row in rows])) for key in rows[0][0]}
    return inputs, torch.tensor(np.stack([targets for _, targets in rows]))


def train_singly(model, batches):
    """One optimizer step per batch of documents, each document in a forward of its own."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches:
        optimizer.zero_grad()
        tokens = [torch.tensor(document) for document in batch]
        total = sum(len(each) - 1 for each in tokens)
        for each in tokens:
            logits = model(each[None, :-1], torch.arange(len(each) - 1)[None])
            (cross_entropy(logits, each[None, 1:]).sum() / total).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dp": 2},
        {"cp": 2},
        {"cp": 3, "ring": "plain"},
        {"cp": 2, "ring": "rsa"},
        {"cp": 2, "ring": "gather", "dp": 2},
        {"cp": 4, "ulysses": 2},
        {"tp": 2, "cp": 2},
        {"pp": 2, "microbatches": 2},
        {"pp": 2, "cp": 2, "microbatches": 2},
    ],
    ids=str,
)
def test_training_on_rows_equals_training_on_documents_singly(fields):
    length, numbers = 25, np.random.default_rng(3)  # 25 divides by no cp: rows are padded once more
    batches = [[numbers.integers(0, 256, size).tolist() for size in numbers.integers(2, 20, 12)] for _ in range(3)]
    with SEED_LOCK, torch.random.fork_rng([]):
        torch.manual_seed(5)
        model = lm.LanguageModel(width=32, layers=2, heads=4, kv_heads=2).double()
    expected = train_singly(copy.deepcopy(model), batches)
    plan = Plan(**fields)
    global_rows = [batch_of(list(TokenRows(batch, length))) for batch in batches]

    def body(comm):
        step = TrainStep(
            copy.deepcopy(model),
            counted,
            lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
            plan=plan,
            communicator=comm,
            tensor=lm.TENSOR_RULES if plan.tp > 1 else {},
        )
        for inputs, targets in global_rows:
            mine = slice(step.dp_index, None, plan.dp)
            step(({key: tensor[mine] for key, tensor in inputs.items()}, targets[mine]))
        state = step.state_dict()
        return torch.cat([state["model"][name].flatten() for name, _ in model.named_parameters()])

    for found in threads.run(plan.mesh.size, body):
        assert (found - expected).abs().max() <= 1e-9


def test_the_command_packs_lines_of_text_into_rows_that_a_feed_reads(tmp_path, capsys):
    lines = ["a line", "another line, which is longer", "x", "the end"]
    (tmp_path / "lines.txt").write_text("\n".join(lines) + "\n")
    assert run_pack([str(tmp_path / "lines.txt"), str(tmp_path / "rows.pack"), "row_tokens=16"]) == 0
    assert "1 documents of fewer than two tokens left out" in capsys.readouterr().out
    pack = ff.Pack(tmp_path / "rows.pack")
    inputs, targets = next(iter(ff.Feed(pack, batch_size=len(pack), shuffle=False)))
    assert set(inputs) == {"tokens", "positions", "document_starts"}
    assert sorted(targets[targets != IGNORED_TARGET].tolist()) == sorted("".join(each[1:] for each in lines).encode())


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ([0.5, 1.0], "document 1: float64"),
        ([[1, 2], [3, 4]], r"document 1: int64 \[2, 2\]"),
        ([1, -2], "document 1: int64"),
        ([[1], [2, 3]], "document 1: list"),
        (None, "document 1: NoneType"),
        ({"label": 3}, "document 1: a dict of label"),
    ],
)
def test_a_document_that_is_no_tokens_is_named(document, text):
    with pytest.raises(DataError, match=text):
        list(TokenRows([[1, 2, 3], document], 8))
