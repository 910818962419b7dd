"""Laws of what people have as data: DataLoaders, Hugging Face datasets, streams. Real libraries, ranks one by one."""

import functools
import itertools
import os
import random
import signal
import subprocess
import sys
from typing import Any, NamedTuple

import datasets
import numpy as np
import pytest
import torch
import transformers
from datasets.distributed import split_dataset_by_node
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from torch.utils import data

import fourfold as ff
from fourfold.comm import init
from fourfold.environment.world import World
from fourfold.feed.feed import Feed
from fourfold.feed.source import fetch
from fourfold.launcher.traceback_text import format_error
from fourfold.orders.sample_order import rows
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.words.errors import DataError
from tests import cases


class Pairs(data.Dataset):
    """Sample i is (i, -i)."""

    def __init__(self, length=20):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index) -> Any:
        return torch.tensor(float(index)), -index


class Dicts(Pairs):
    def __getitem__(self, index) -> Any:
        return {"x": [float(index)] * 2, "labels": -index}


def collate(samples):
    return {"x": torch.tensor([x for x, _ in samples]), "labels": torch.tensor([y for _, y in samples])}


def feeds(source, size, **options):
    """The feed of each of `size` data ranks."""
    result = []
    for rank in range(size):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(init, "world", lambda rank=rank: World(rank=rank, size=size))
            result.append(ff.Feed(source, **options))
    return result


def leaves(batch):
    return batch.values() if isinstance(batch, dict) else batch


def joined(parts):
    """The local batches of all ranks as one list of rows for each tensor of a batch."""
    return [
        list(itertools.chain(*(part.tolist() for part in tensors))) for tensors in zip(*map(leaves, parts), strict=True)
    ]


def epoch(source, size=1, count=None, **options):
    """The global batches of an epoch, put together from all ranks."""
    ranks = [itertools.islice(feed, count) for feed in feeds(source, size, **options)]
    return [joined(parts) for parts in zip(*ranks, strict=True)]


SOURCES = {
    "pairs": lambda length, **how: data.DataLoader(Pairs(length), **how),
    "dicts": lambda length, **how: data.DataLoader(Dicts(length), **how),
    "collated": lambda length, **how: data.DataLoader(Pairs(length), collate_fn=collate, **how),
}


@settings(max_examples=20)
@given(
    kind=st.sampled_from(list(SOURCES)),
    length=st.integers(1, 40),
    size=st.integers(1, 4),
    batch_size=st.integers(1, 9),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_the_ranks_of_a_loader_together_have_the_batches_of_one_rank(
    kind, length, size, batch_size, shuffle, drop_last
):
    if drop_last and length < batch_size:
        return
    loader = SOURCES[kind](length, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last)
    alone = epoch(loader)
    assert epoch(loader, size) == alone
    ids = [row for _, labels in alone for row in labels]
    num_samples = length // batch_size * batch_size if drop_last else length
    order = rows(length, 0, 0, 0, length).tolist() if shuffle else list(range(length))
    assert [-each for each in ids] == order[:num_samples]
    assert all(len(labels) == batch_size for _, labels in alone[: length // batch_size])
    assert len(ff.Feed(loader)) == len(alone)


def test_the_feeds_own_arguments_take_precedence_over_the_loaders():
    loader = data.DataLoader(Pairs(10), batch_size=4, shuffle=True, drop_last=True)
    feed = ff.Feed(loader, batch_size=3, shuffle=False, drop_last=False)
    assert [batch[1].tolist() for batch in feed] == [[0, -1, -2], [-3, -4, -5], [-6, -7, -8], [-9]]


def test_collate_fn_is_called_once_for_each_local_batch():
    calls = []

    def counted(samples):
        calls.append(len(samples))
        return collate(samples)

    loader = data.DataLoader(Pairs(10), batch_size=4, drop_last=True, collate_fn=counted)
    for feed in feeds(loader, 2):
        list(feed)
    assert [count for count in calls if count > 1] == [2, 2, 2, 2]  # the fingerprint of the source takes one sample


class Augmented(Pairs):
    """Samples that draw from all generators of their process."""

    def __getitem__(self, index):
        drawn = [torch.rand(()).item(), random.random(), np.random.rand()]
        return torch.tensor(drawn, dtype=torch.float64), index


def all_batches(feed, epochs=1):
    return [(inputs.tolist(), targets.tolist()) for _ in range(epochs) for inputs, targets in feed]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_change_neither_the_batches_nor_where_a_feed_resumes_nor_the_generators_of_training():
    expected = all_batches(ff.Feed(Augmented(), batch_size=4, seed=3), epochs=2)
    loader = data.DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
    first, second = ff.Feed(loader, seed=3), ff.Feed(loader, seed=5)
    before = torch.get_rng_state(), random.getstate()
    begun = [(inputs.tolist(), targets.tolist()) for inputs, targets in itertools.islice(first, 2)]
    second.load_state(first.state)
    assert begun + all_batches(second, epochs=2) == expected
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


class Asked(Augmented):
    """Workers are asked to stop, as all processes of a job often are."""

    def __getitem__(self, index):
        if data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        return super().__getitem__(index)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_read_on_when_all_processes_of_a_job_are_asked_to_stop():
    expected = all_batches(ff.Feed(Augmented(), batch_size=4, shuffle=False))
    assert all_batches(ff.Feed(data.DataLoader(Asked(), batch_size=4, num_workers=2))) == expected


STUCK = """
import os, sys, time, torch, fourfold as ff
class Source:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index >= 4:
            sys.argv[1] == "killed" and os.kill(os.getppid(), 9)
            time.sleep(600)
        return torch.zeros(1), index
batches = iter(ff.Feed(torch.utils.data.DataLoader(Source(), batch_size=4, num_workers=1)))
next(batches)
"""


@pytest.mark.parametrize(("end", "code"), [("ended", 0), ("killed", -signal.SIGKILL)])
def test_a_worker_in_the_middle_of_a_read_ends_with_its_process(end, code, tmp_path):
    command = [sys.executable, "-c", STUCK, end]  # whose pipe is open as long as the worker
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, timeout=60, stdout=subprocess.PIPE, check=False, env=environment)
    assert done.returncode == code
    assert code or not list(tmp_path.iterdir())  # the folder of the worker's sockets


class Ragged(Pairs):
    def __getitem__(self, index):
        return torch.zeros(index), index


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_an_error_for_people_in_a_worker_is_the_same_as_without():
    loader = data.DataLoader(Ragged(), batch_size=4, num_workers=1)
    messages = []
    for source in (loader, Ragged()):
        with pytest.raises(DataError) as caught:
            list(ff.Feed(source, batch_size=4, shuffle=False))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "float32 [0] in sample 0, float32 [1] in sample 1" in messages[0]
    assert "collate_fn" in messages[0]


class Broken(Pairs):
    def __getitem__(self, index):
        raise KeyError("label")


class BrokenStream(data.IterableDataset):
    def __iter__(self):
        raise KeyError("label")


@pytest.mark.parametrize("dataset", [Broken(), BrokenStream()])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_text_of_an_error_in_a_worker_has_the_lines_of_the_user(dataset):
    with pytest.raises(KeyError) as caught:
        list(ff.Feed(data.DataLoader(dataset, batch_size=4, num_workers=1)))
    text = format_error(caught.value.with_traceback(caught.tb.tb_next))  # without this test's line, which is no run's
    assert 'raise KeyError("label")' in text
    assert len(text.splitlines()) <= 10


# ---- Hugging Face -----------------------------------------------------------------------------------

TEXTS = [[3, 1, 2], [2], [4, 4], [1, 2, 3, 4, 4], [3], [2, 1], [4, 1, 1, 2], [1]]


def tokens(count=8) -> Any:
    columns = {"input_ids": TEXTS[:count], "labels": [len(text) for text in TEXTS[:count]], "text": ["x"] * count}
    return datasets.Dataset.from_dict(columns)


def padding():
    vocabulary = {"[PAD]": 0, **{str(number): number for number in range(1, 5)}}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="[PAD]")), pad_token="[PAD]"
    )
    return transformers.DataCollatorWithPadding(tokenizer)


def numeric(**how) -> Any:
    columns = {"x": np.arange(12.0).reshape(6, 2), "labels": list(range(6)), "id": ["a"] * 6}
    return datasets.Dataset.from_dict(columns).with_format("torch", **how)


@pytest.mark.parametrize("source", [
    numeric(columns=["x", "labels"]),
    numeric().remove_columns("id"),
    numeric(columns=["x", "labels"]).with_format(None, columns=["x", "labels"]),
    numeric(columns=["x", "labels"]).with_format("numpy", columns=["x", "labels"]),
    data.DataLoader(numeric(columns=["x", "labels"]), shuffle=True, collate_fn=transformers.default_data_collator),
], ids=["torch", "columns removed", "python", "numpy", "default_data_collator"])  # fmt: skip
def test_a_dataset_of_datasets_is_a_source_in_every_format(source):
    batches = epoch(source, 2, batch_size=4)
    order = rows(6, 0, 0, 0, 6).tolist()
    assert [row for batch in batches for row in batch[1]] == order
    assert [row for batch in batches for row in batch[0]] == [[2.0 * number, 2.0 * number + 1] for number in order]


def test_columns_of_text_and_a_whole_dataset_dict_are_refused_with_what_to_do():
    with pytest.raises(DataError, match=r"sample 0 has a str as 'id' .*remove_columns"):
        list(ff.Feed(numeric(), batch_size=4, shuffle=False))
    whole = datasets.DatasetDict({"train": numeric(), "test": numeric()})
    with pytest.raises(DataError, match=r"source\['train'\]"):
        ff.Feed(whole, batch_size=4)


class Bag(torch.nn.Module):
    """A classifier of the mean embedding of the real tokens. Padding changes nothing."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 6)

    def forward(self, input_ids, attention_mask, labels):
        mask = attention_mask.unsqueeze(2)
        mean = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        return {"loss": torch.nn.functional.cross_entropy(self.head(mean), labels)}


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_whose_batches_are_padded_to_different_widths_train_as_one_device(size):
    samples = tokens().remove_columns("text")
    loader = data.DataLoader(samples, batch_size=4, shuffle=True, collate_fn=padding())
    sgd = functools.partial(torch.optim.SGD, lr=0.3)
    torch.manual_seed(0)
    initial = Bag().double().state_dict()

    def trained(comm, num_epochs=3):
        model = Bag().double()
        model.load_state_dict(initial)
        step = TrainStep(model, None, sgd, plan=ff.Plan(dp=comm.size), communicator=comm, clip=None)
        feed = ff.Feed(loader)
        feed._size, feed._index = comm.size, comm.rank  # threads are ranks here
        widths, losses = [], []
        for _ in range(num_epochs):
            for batch in feed:
                widths.append(batch["input_ids"].shape[1])
                losses.append(step(batch).loss)
        return widths, losses, {name: p.detach().clone() for name, p in model.named_parameters()}

    def oracle(num_epochs=3):
        model = Bag().double()
        model.load_state_dict(initial)
        optimizer, losses = sgd(model.parameters()), []
        for number in range(num_epochs):
            for ids in rows(len(samples), 0, number, 0, len(samples)).reshape(-1, 4):
                loss = model(**padding()([samples[int(each)] for each in ids]))["loss"]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return losses, dict(model.named_parameters())

    losses, weights = oracle()
    by_rank = threads.run(size, trained)
    assert len({tuple(widths) for widths, _, _ in by_rank}) > 1
    for _, found, values in by_rank:
        assert found == pytest.approx(losses, rel=0, abs=1e-9)
        for name, weight in weights.items():
            torch.testing.assert_close(values[name], weight, rtol=0, atol=1e-9)


class Boxes(NamedTuple):
    category: Any
    box: Any


class Detector(torch.nn.Module):
    def __init__(self):
        super().__init__()
        with cases.SEED_LOCK:
            torch.manual_seed(0)
            self.trunk, self.category, self.box = (torch.nn.Linear(4, size).double() for size in (4, 3, 2))

    def forward(self, inputs):
        image, (scale,) = inputs
        hidden = torch.tanh(self.trunk(image)) * scale
        return self.category(hidden), self.box(hidden)


def detection_loss(outputs, targets):
    category, box = targets if isinstance(targets, list) else (targets.category, targets.box)
    distance = (outputs[1] - box).square().mean(1)
    return torch.nn.functional.cross_entropy(outputs[0], category, reduction="none") + distance


def detection_sample(number, kind):
    values = torch.randn(7, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return (values[:4], (values[4:5],)), kind(torch.tensor(number % 3), values[5:])


@pytest.mark.parametrize("kind", [Boxes, lambda *values: values])
@pytest.mark.parametrize(("zero", "microbatches"), [(0, 1), (2, 2)])
def test_inputs_and_targets_of_tuples_train_as_one_device(kind, zero, microbatches):
    source, sgd = [detection_sample(number, kind) for number in range(15)], functools.partial(torch.optim.SGD, lr=0.1)

    def trained(comm):
        plan = ff.Plan(dp=comm.size, zero=zero, microbatches=microbatches)
        step = TrainStep(Detector(), detection_loss, sgd, plan=plan, communicator=comm, clip=None)
        feed = Feed.of_data_rank(source, size=comm.size, index=comm.rank, batch_size=6, shuffle=False)
        losses = [step(batch).loss for batch in feed]
        return losses, step.state_dict()["model"]

    model = Detector()
    optimizer, losses = sgd(model.parameters()), []
    for inputs, targets in data.DataLoader(source, batch_size=6):  # pyright: ignore[reportArgumentType]
        optimizer.zero_grad()
        loss = detection_loss(model(inputs), targets).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for found, weights in threads.run(2, trained):
        assert found == pytest.approx(losses, rel=0, abs=1e-9)
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-9)


# ---- Streams ----------------------------------------------------------------------------------------


class Counter(data.IterableDataset):
    """A stream of (i, -i), divided among workers if there are any."""

    def __init__(self, length=22):
        self.length = length

    def __iter__(self):
        info = data.get_worker_info()
        numbers = range(self.length) if info is None else range(info.id, self.length, info.num_workers)
        return ((torch.tensor(float(number)), -number) for number in numbers)


class Sized(Counter):
    def __len__(self):
        return self.length


class RandomStream(Counter):
    """A stream whose samples draw random numbers."""

    def __iter__(self):
        for number in range(self.length):
            yield torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()]), number


@settings(max_examples=10)
@given(
    length=st.integers(1, 40),
    size=st.integers(1, 4),
    batch_size=st.integers(1, 9),
    random_samples=st.booleans(),
    drop_last=st.booleans(),
    with_collate=st.booleans(),
)
def test_the_ranks_of_a_stream_together_have_the_batches_of_one_rank(
    length, size, batch_size, random_samples, drop_last, with_collate
):
    if drop_last and length < batch_size:
        return
    stream = (RandomStream if random_samples else Counter)(length)
    collate_fn = functools.partial(data.default_collate) if with_collate else None
    loader = data.DataLoader(stream, batch_size=batch_size, drop_last=drop_last, collate_fn=collate_fn)
    alone = epoch(loader)
    assert epoch(loader, size) == alone
    numbers = [abs(row) for _, targets in alone for row in targets]
    assert numbers == list(range(length // batch_size * batch_size if drop_last else length))


def test_a_stream_resumes_in_the_middle_of_an_epoch_and_draws_the_same_numbers():
    expected = all_batches(ff.Feed(RandomStream(), batch_size=4, seed=3), epochs=2)
    assert expected[0][0] != expected[6][0]  # of the next epoch
    first, second = ff.Feed(RandomStream(), batch_size=4, seed=3), ff.Feed(RandomStream(), batch_size=4)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    begun = [(inputs.tolist(), targets.tolist()) for inputs, targets in itertools.islice(first, 8)]
    begun += [(inputs.tolist(), targets.tolist()) for inputs, targets in itertools.islice(first, 2)]
    assert first.state[:3] == (3, 1, 8)
    second.load_state(first.state)
    assert begun + all_batches(second) == expected
    assert torch.equal(state, torch.get_rng_state())
    third = ff.Feed(RandomStream(), batch_size=3, seed=3)
    third.load_state(first.state)
    with pytest.raises(DataError, match="position 8 of a stream, and a batch of its samples 6 to 8"):
        next(iter(third))


def test_a_stream_of_datasets_is_shuffled_anew_in_every_epoch_and_equal_on_all_ranks():
    stream = datasets.Dataset.from_dict({"x": list(range(30))}).to_iterable_dataset(num_shards=3)
    stream = stream.shuffle(seed=1, buffer_size=10)
    by_size = []
    for size in (1, 2):
        ranks = feeds(stream, size, batch_size=4)
        by_size.append([[joined(parts) for parts in zip(*ranks, strict=True)] for _ in range(2)])
    assert by_size[0] == by_size[1]
    first, second = ([row for batch in each for row in batch[0]] for each in by_size[0])
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_divide_a_stream_and_ranks_still_have_the_batches_of_one_rank():
    loader = data.DataLoader(Counter(), batch_size=4, num_workers=2)
    alone = epoch(loader)
    assert epoch(loader, 2) == alone
    assert sorted(-row for _, targets in alone for row in targets) == list(range(22))
    first, second = ff.Feed(loader), ff.Feed(loader)
    begun = [next(iter(first))[1].tolist()]
    second.load_state(first.state)
    assert begun + [batch[1].tolist() for batch in second] == [targets for _, targets in alone]


def test_a_feed_of_a_stream_has_a_length_if_the_stream_has_one():
    assert len(ff.Feed(Sized(), batch_size=4)) == 6
    assert len(list(ff.Feed(Counter(), batch_size=4))) == 6
    with pytest.raises(DataError, match="a stream with a length"):
        len(ff.Feed(Counter(), batch_size=4))


def test_a_stream_that_is_divided_already_is_refused_before_a_weight_changes():
    def body(comm):
        columns = {"x": [[float(number)] for number in range(8)], "labels": [[1.0]] * 8}
        whole = datasets.Dataset.from_dict(columns).to_iterable_dataset(num_shards=2)
        feed = ff.Feed(split_dataset_by_node(whole, comm.rank, comm.size), batch_size=2)
        feed._size, feed._index = comm.size, comm.rank
        model = torch.nn.Linear(1, 1)
        sgd = functools.partial(torch.optim.SGD, lr=0.1)
        step = TrainStep(Squared(model), None, sgd, plan=ff.Plan(dp=2), communicator=comm, clip=None)
        before = model.weight.clone()
        with pytest.raises(ff.FourfoldError, match="another source on rank 1 than on rank 0"):
            step(next(iter(feed)))
        return torch.equal(before, model.weight)

    assert threads.run(2, body) == [True, True]


class Squared(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.model(x), labels)}


# ---- What is refused, and what is said --------------------------------------------------------------


class Wrapped(data.DataLoader):
    def __iter__(self):
        return super().__iter__()


def sampled(sampler):
    return data.DataLoader(Pairs(), sampler=sampler)


BATCHES = data.BatchSampler(data.SequentialSampler(Pairs()), 2, False)
REFUSED = {
    "sampler": (lambda: sampled(data.SubsetRandomSampler([1, 2])), "SubsetRandomSampler", "Subset"),
    "replacement": (lambda: sampled(data.RandomSampler(Pairs(), replacement=True)), "RandomSampler", "Subset"),
    "distributed": (lambda: sampled(data.DistributedSampler(Pairs(), 2, 0)), "DistributedSampler", "whole"),
    "batch sampler": (
        lambda: data.DataLoader(Pairs(), batch_sampler=BATCHES), "a batch sampler (BatchSampler)", "batch_size=",
    ),
    "no batches": (lambda: data.DataLoader(Pairs(), batch_size=None), "batch_size=None", "batch_size=64"),
    "wrapped": (lambda: Wrapped(Pairs()), "overrides __iter__", "before it is wrapped"),
    "empty": (lambda: data.DataLoader(Pairs(0)), "source.dataset without samples", "at least one"),
}  # fmt: skip


@pytest.mark.parametrize("which", list(REFUSED))
def test_data_that_a_feed_cannot_divide_is_refused(which):
    make, got, hint = REFUSED[which]
    with pytest.raises(DataError) as caught:
        ff.Feed(make(), batch_size=2)
    assert got in str(caught.value)
    assert hint in str(caught.value)


IMPOSSIBLE: list[tuple[Any, dict[str, Any], str]] = [
    (Pairs(3), {"batch_size": 4, "drop_last": True}, "3 samples, batch_size = 4 and drop_last"),
    (Counter(), {"batch_size": 4, "shuffle": True}, "shuffle = True, and a stream"),
    (Pairs(), {}, "batch_size = None"),
    (Pairs(), {"batch_size": 2, "drop_last": 3, "shuffle": "no"}, "shuffle = 'no'"),
]


def test_impossible_options_of_a_feed_are_refused():
    for source, options, message in IMPOSSIBLE:
        with pytest.raises(DataError, match=message):
            ff.Feed(source, **options)


def test_streams_that_end_too_early_are_refused_instead_of_read_without_end():
    class Once(data.IterableDataset):
        numbers = iter([(1.0, 1), (2.0, 2)])

        def __iter__(self):
            return self.numbers

    feed = ff.Feed(Once(), batch_size=2)
    assert len(list(feed)) == 1
    with pytest.raises(DataError, match=r"a stream without samples .* begins again each time"):
        list(feed)
    with pytest.raises(DataError, match=r"a stream of 3 samples .* a whole batch of 4"):
        list(ff.Feed(Counter(3), batch_size=4, drop_last=True))


@pytest.mark.parametrize("result", [torch.zeros(3), [torch.zeros(3)] * 3, (torch.zeros(5), torch.zeros(5))])
def test_a_collate_fn_that_makes_no_batch_with_a_row_for_each_sample_is_refused(result):
    loader = data.DataLoader(Pairs(), batch_size=3, collate_fn=lambda samples: result)
    with pytest.raises(DataError, match=r"collate_fn (returned a|of 3 samples returned a tensor of)"):
        next(iter(ff.Feed(loader)))


def test_a_rank_without_samples_gets_an_empty_batch_in_the_shapes_of_the_collate_fn():
    loader = data.DataLoader(Pairs(1), batch_size=4, collate_fn=collate)
    empty, full = ([dict(batch) for batch in feed] for feed in feeds(loader, 2))
    assert {name: tuple(value.shape) for name, value in empty[0].items()} == {"x": (0,), "labels": (0,)}
    assert len(empty) == len(full) == 1
    assert full[0]["labels"].tolist() == [0]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_what_a_loader_or_a_stream_loses_is_logged_once_by_rank_0(caplog):
    feeds(data.DataLoader(Pairs(), batch_size=2, shuffle=True), 2)
    assert [record.getMessage() for record in caplog.records] == [
        "source: shuffled by the feed and its seed, not by the sampler of the DataLoader"
    ]
    caplog.clear()
    ff.Feed(data.DataLoader(Pairs(), batch_size=2))
    assert not caplog.records
    feeds(data.DataLoader(Counter(), batch_size=2, num_workers=2), 2)
    for text in ("is a stream (Counter)", "every rank reads all", "2 workers"):
        assert caplog.text.count(text) == 1


def test_getitems_is_used_only_where_samples_draw_nothing():
    class Many(Augmented):
        def __getitems__(self, indices):
            return [(torch.zeros(3, dtype=torch.float64), index) for index in indices]

    assert fetch(Many(), [3, 1])[0].tolist() == [[0.0] * 3] * 2
    seen = []
    fetch(Many(), [3, 1], before_sample=seen.append)
    assert seen == [3, 1]


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_state_with_the_last_batch_of_an_epoch_is_the_beginning_of_the_next_one(drop_last):
    feed = ff.Feed(Pairs(10), batch_size=4, drop_last=drop_last)
    states = [feed.state[1:3] for _ in feed]
    assert states == ([(0, 4), (1, 0)] if drop_last else [(0, 4), (0, 8), (1, 0)])


def test_an_error_of_the_program_names_the_step_the_samples_and_the_source(tmp_path):
    class Failing(Pairs):
        def __getitem__(self, index) -> Any:
            return torch.tensor([1.0 / (index - 13)]), torch.tensor([0.0])

    def loss(outputs, targets):
        calls.append(1)
        assert len(calls) < 3, "a loss that fails"
        return (outputs - targets).square()

    def notes(dataset: Any, loss: Any, valid: Any = None) -> list[str]:
        task = ff.Task(
            model=lambda: torch.nn.Linear(1, 1),
            loss=loss,
            optimizer=functools.partial(torch.optim.SGD, lr=0.1),
            data=lambda: ff.Data(train=dataset, valid=valid),
        )
        options: dict[str, Any] = {"checkpoint_every": 0, "folder": str(tmp_path), "quiet": True}
        options["evaluate_every"] = None if valid is None else 4
        with pytest.raises((ZeroDivisionError, AssertionError)) as caught:
            ff.train(task, steps=5, batch_size=4, seed=1, **options)
        return caught.value.__notes__

    order = rows(20, 1, 0, 0, 20).tolist()
    step = order.index(13) // 4 + 1
    assert notes(Failing(), torch.nn.functional.mse_loss) == [
        "while reading sample 13 of Failing",
        f"in step {step}",
    ]
    calls: list[int] = []
    named = ", ".join(map(str, order[8:12]))
    pairs = data.TensorDataset(torch.ones(20, 1), torch.ones(20, 1))
    assert notes(pairs, loss)[1:] == [
        "  batch: inputs float32 [4, 1], targets float32 [4, 1]",
        f"  samples: {named} (positions 8 to 12 of epoch 0, seed 1)",
        "in step 3",
    ]
    assert notes(pairs, torch.nn.functional.mse_loss, valid=Failing()) == [
        "while reading sample 13 of Failing",
        "in the evaluation after step 4",
    ]
