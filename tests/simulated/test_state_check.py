"""Laws of loading: a state that does not fit is refused on every rank before anything changes. Ranks are threads."""

import dataclasses

import pytest
import torch
from safetensors.torch import save_file

from fourfold.checkpoint.initial_weights import load_weights
from fourfold.checkpoint.store import CheckpointStore, Retention
from fourfold.feed.feed import Feed
from fourfold.testing import threads
from fourfold.words.errors import CheckpointError, TaskError
from tests import awkward_models, cases
from tests.cases import Case, batches, build_step, local_batch
from tests.checkpoint_runs import ThreadRun, save_twice

pytestmark = pytest.mark.usefixtures("without_dry_run")

CASE = Case(batch_sizes=(8, 8))


def remove(part, *path):
    def change(state):
        inner = state
        for key in (part, *path)[:-1]:
            inner = inner[key]
        del inner[(part, *path)[-1]]
        return state

    return change


def replace_weight(name, value):
    def change(state):
        state["model"][name] = value
        return state

    return change


STATES = {
    "weights alone": (lambda state: state["model"], "a state without model, optimizer, groups, record"),
    "nothing": (lambda state: None, "a NoneType"),
    "no record": (remove("record"), "a state without record"),
    "a weight less": (remove("model", "head.bias"), r"head\.bias\s+need the model's own names"),
    "a state less": (remove("optimizer", "head.bias"), r"no optimizer state of head\.bias"),
    "half a state": (remove("optimizer", "head.bias", "exp_avg"), r"states of head\.bias without exp_avg\b"),
    "a group less": (lambda state: {**state, "groups": state["groups"][:1]}, "1 groups of options"),
    "another shape": (
        replace_weight("head.bias", torch.zeros(3)),
        r"head\.bias\s+need the model's own names and shapes",
    ),
    "complex": (replace_weight("head.bias", torch.zeros(10, dtype=torch.complex128)), r"head\.bias of complex128"),
}


def load(comm, case, change, *, saved_by=CASE):
    """Load a state that `change` has made of another step's state, on all ranks or on those that `change` chooses."""
    other = build_step(saved_by, comm.size, comm)
    other(local_batch(batches(saved_by)[0], comm.size, other.dp_index))
    state = change(other.state_dict())
    step = build_step(case, comm.size, comm)
    before = step.state_dict()
    try:
        step.load_state_dict(state)
    finally:
        after = step.state_dict()["model"]
        assert all(torch.equal(after[name], value) for name, value in before["model"].items())


@pytest.mark.parametrize("kind", STATES)
def test_a_state_that_does_not_fit_is_refused_before_anything_changes(kind):
    change, message = STATES[kind]
    with pytest.raises(TaskError, match=message):
        threads.run(2, lambda comm: load(comm, CASE, change))


@pytest.mark.parametrize(("before", "after"), [("AdamW", "SGD"), ("SGD", "AdamW"), ("Adam", "AdamW")])
def test_the_state_of_another_optimizer_is_refused(before, after):
    saved_by, case = (dataclasses.replace(CASE, optimizer=name) for name in (before, after))
    with pytest.raises(TaskError, match=f"{after}, and states of {before}"):
        threads.run(2, lambda comm: load(comm, case, lambda state: state, saved_by=saved_by))


def test_a_state_that_does_not_fit_on_one_rank_is_refused_on_all():
    def body(comm):
        with pytest.raises(TaskError, match="a NoneType"):
            load(comm, CASE, lambda state: state if comm.rank else None)

    threads.run(2, body)


def test_two_values_of_a_tied_weight_are_refused(tmp_path):
    weights = cases.model("mlp").state_dict()
    save_file(weights, tmp_path / "weights.safetensors")
    message = r"second\.weight and third\.weight with different values"
    with pytest.raises(CheckpointError, match=message):
        load_weights(cases.model("tied"), tmp_path / "weights.safetensors")
    untied = dataclasses.replace(CASE, optimizer="descent")
    threads.run(1, lambda comm: ThreadRun(untied, comm, tmp_path).run_steps(0, 1, save_at=(1,)))
    tied = dataclasses.replace(untied, model="tied")
    with pytest.raises(CheckpointError, match=message):
        threads.run(1, lambda comm: ThreadRun(tied, comm, tmp_path).checkpoints.resume())


class Copying(cases.MLP):
    """Its state_dict contains copies."""

    def __init__(self) -> None:
        super().__init__("mlp")

    def state_dict(self, *args, **kwargs):
        return {name: value.detach().clone() for name, value in super().state_dict(*args, **kwargs).items()}


class Renaming(cases.MLP):
    """Its state_dict has different names."""

    def __init__(self) -> None:
        super().__init__("mlp")

    def state_dict(self, *args, **kwargs):
        return {f"module.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}


@pytest.mark.parametrize(
    ("kind", "fields", "hosts"),
    [(Copying, {"precision": "bf16"}, 1), (Copying, {"zero": 3}, 2), (Renaming, {}, 1)],
    ids=["rounded copies", "copies of placeholders", "other names"],
)
def test_a_model_whose_state_dict_lacks_its_own_weights_is_refused_when_the_run_begins(
    kind, fields, hosts, tmp_path, monkeypatch
):
    monkeypatch.setitem(awkward_models.AWKWARD_MODELS, "own state_dict", kind)
    case = dataclasses.replace(CASE, model="own state_dict", **fields)
    with pytest.raises(TaskError, match=r"a state_dict\(\) without \w+(\.\w+)? itself and 8 more"):
        threads.run(2, lambda comm: ThreadRun(case, comm, tmp_path), hosts=hosts)


@pytest.mark.parametrize("zero", [0, 1])
def test_where_weights_rest_whole_a_model_may_give_copies_of_them(zero, monkeypatch):
    monkeypatch.setitem(awkward_models.AWKWARD_MODELS, "own state_dict", Copying)

    def body(comm):
        step = build_step(dataclasses.replace(CASE, model="own state_dict", zero=zero), 2, comm)
        return step.state_dict()["model"], {name: p.detach().clone() for name, p in step.model.named_parameters()}

    for saved, weights in threads.run(2, body):
        assert all(torch.equal(saved[name], weight) for name, weight in weights.items())


def test_foreign_names_in_the_checkpoint_folder_are_ignored(tmp_path):
    store = save_twice(tmp_path, 1)
    (store.path / "step-000000009").mkdir()
    (store.path / ".part-of-mine").touch()
    assert store.steps() == [1, 3]
    store.prune(Retention(num_newest=1))
    assert sorted(path.name for path in store.path.iterdir()) == [".part-of-mine", "step-000000009", "step-00000003"]
    assert threads.run(1, lambda comm: ThreadRun(Case(), comm, tmp_path).checkpoints.resume())[0].step == 3
    assert CheckpointStore(tmp_path).steps() == [3]


@pytest.mark.parametrize("number", [2, 3], ids=["within an epoch", "after its last batch"])
def test_a_state_loaded_within_a_loop_moves_the_feed(number):
    feed = Feed([(torch.tensor(n), torch.tensor(n)) for n in range(12)], batch_size=4)
    seen, first_state = [], feed.state
    for _, targets in feed:
        seen.append(targets.tolist())
        if len(seen) == 1:
            first_state = feed.state
        if len(seen) == number:
            feed.load_state(first_state)
    assert len(seen) == number + 2
    assert seen[number] == seen[1]
    assert sorted(seen[0] + seen[-2] + seen[-1]) == list(range(12))
