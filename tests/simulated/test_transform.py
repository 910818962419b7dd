"""Laws of transforms: what a sample becomes depends on (seed, epoch, sample) alone."""

import functools
import io
import operator
import os
import pickle
import random
import signal
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import fourfold as ff
from fourfold.feed.feed import Feed
from fourfold.feed.position import Position
from fourfold.feed.transform import Transformed
from fourfold.words.errors import DataError, WorkerDiedError

NUM_SAMPLES = 23
SOURCE = [(torch.full((3,), float(number)), number) for number in range(NUM_SAMPLES)]


def jitter(sample, generator):
    inputs, number = sample
    return inputs + torch.rand(3, generator=generator), number


def by_sample(batches):
    """The inputs of each sample, by its number."""
    return {
        int(number): row.tolist() for inputs, numbers in batches for row, number in zip(inputs, numbers, strict=True)
    }


def epoch_of(size, batch_size, *, seed=3, epoch=0, position=0, source=SOURCE, transform=jitter):
    """What all data ranks together get in an epoch, from a position on."""
    found = {}
    for index in range(size):
        options = {"batch_size": batch_size, "seed": seed, "transform": transform}
        feed = Feed.of_data_rank(source, size=size, index=index, **options)
        feed.load_state(Position(seed, epoch, position, NUM_SAMPLES))
        found |= by_sample(feed)
    return found


EXPECTED = epoch_of(1, NUM_SAMPLES)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 5), st.integers(1, NUM_SAMPLES), st.integers(0, NUM_SAMPLES - 1), st.integers(1, 4))
def test_a_transformed_sample_is_the_same_on_any_number_of_ranks_and_threads_and_after_a_resume(
    size, batch_size, position, threads
):
    source = Transformed(SOURCE, jitter, threads=threads)
    found = epoch_of(size, batch_size, position=position, source=source, transform=None)
    assert len(found) == NUM_SAMPLES - position
    assert all(found[number] == EXPECTED[number] for number in found)


class OfSample:
    def __call__(self, sample):
        return sample[0] + torch.rand(3), sample[1]


class AnyInputs(torch.nn.Module):
    """As torchvision's v2 transforms: a sample is one input."""

    def forward(self, *inputs):
        (sample,) = inputs
        return sample[0] + torch.rand(3), sample[1]


OF_SAMPLE = {
    "an object": OfSample(),
    "a module": AnyInputs(),
    "a compiled module": torch.compile(AnyInputs(), backend="eager"),
    "a lambda with a default": lambda sample, place=0: (sample[place] + torch.rand(3), sample[1]),
    "a partial": functools.partial(lambda sample, size: (sample[0] + torch.rand(size), sample[1]), size=3),
}


def typed_jitter(sample, draws: torch.Generator | None):
    return jitter(sample, draws)


class Jitter(torch.nn.Module):
    def forward(self, sample, generator):
        return jitter(sample, generator)


OF_BOTH = {
    "by name": lambda sample, *, generator: jitter(sample, generator),
    "a default": lambda sample, generator=None: jitter(sample, generator),
    "bound": functools.partial(lambda sample, offset, generator: jitter(sample, generator), offset=3),
    "any arguments": lambda *arguments: jitter(*arguments),
    "another name": lambda sample, rng: jitter(sample, rng),
    "another name, by name": lambda sample, size=3, *, rng: jitter(sample, rng),
    "a type": typed_jitter,
    "a module": Jitter(),
    "a compiled module": torch.compile(Jitter(), backend="eager"),
}


@pytest.mark.parametrize("kind", OF_SAMPLE)
def test_a_transform_of_the_sample_alone_is_called_so_and_seeded(kind):
    whole = epoch_of(1, NUM_SAMPLES, transform=OF_SAMPLE[kind])
    assert whole == epoch_of(2, 4, transform=OF_SAMPLE[kind])
    assert whole == epoch_of(1, NUM_SAMPLES, transform=OfSample())


@pytest.mark.parametrize("kind", OF_BOTH)
def test_a_transform_that_has_a_place_for_the_generator_gets_it(kind):
    assert epoch_of(1, 7, transform=OF_BOTH[kind]) == EXPECTED


def test_functions_without_a_signature_get_the_sample():
    for function in (operator.itemgetter(slice(None)), tuple):
        assert by_sample(Feed.single_rank(SOURCE, batch_size=5, transform=function)).keys() == EXPECTED.keys()
    rows = [torch.ones(2)] * 3
    with pytest.raises(DataError, match=r"sample \d is a Tensor"):  # torch.relu, without an error of its own
        list(Feed.single_rank(rows, batch_size=3, transform=torch.relu))


@pytest.mark.parametrize(("transform", "shown"), [
    (lambda: 0, r"<lambda>\(\)"),
    (lambda sample, size, generator: 0, r"<lambda>\(sample, size, generator\)"),
    (lambda sample, *, size: 0, r"<lambda>\(sample, \*, size\)"),
    (lambda image, target: (image, target), r"<lambda>\(image, target\)"),
])  # fmt: skip
def test_a_transform_that_needs_other_arguments_is_refused_where_it_is_given(transform, shown):
    with pytest.raises(DataError, match=rf"transform = {shown} +need a function \(sample, generator\)"):
        Transformed(SOURCE, transform)


class Flip:
    """As torchvision's references for detection: the parts of a sample are arguments."""

    def __call__(self, image, target):
        return image.flip(-1), target


class OptionalFlip(torch.nn.Module):
    def forward(self, image, target=None):
        return image.flip(-1), target


def test_a_transform_of_the_parts_of_a_sample_is_named_with_a_lambda_that_takes_them_apart():
    apart = r"try lambda sample: transform\(\*sample\)"
    with pytest.raises(DataError, match=rf"transform = Flip\(image, target\) .*{apart}"):
        Transformed(SOURCE, Flip())
    with pytest.raises(DataError, match=rf"sample 0: AttributeError: 'tuple' .*{apart}"):
        Transformed(SOURCE, OptionalFlip())[0]
    assert Transformed(SOURCE, lambda sample: Flip()(*sample))[4][1] == 4


def test_epochs_seeds_and_samples_draw_different_numbers():
    by_epoch = [epoch_of(1, 5, seed=seed, epoch=epoch) for seed, epoch in ((3, 0), (3, 1), (4, 0))]
    fractions = [round(value % 1, 9) for found in by_epoch for row in found.values() for value in row]
    assert len(set(fractions)) > len(fractions) - 3


def test_a_transform_that_draws_from_the_process_is_seeded_for_each_sample_too():
    def global_jitter(sample, generator):
        inputs, number = sample
        return inputs + torch.rand(3) + random.random() + np.random.rand(), number

    whole = epoch_of(1, NUM_SAMPLES, transform=global_jitter)
    assert epoch_of(3, 7, transform=global_jitter) == whole
    assert epoch_of(2, 4, position=9, transform=global_jitter).items() <= whole.items()


def test_workers_of_a_dataloader_and_a_collate_function_draw_the_same():
    source = Transformed(SOURCE, jitter)
    for workers in (0, 1):
        loader = DataLoader(source, batch_size=5, shuffle=True, num_workers=workers)  # pyright: ignore[reportArgumentType]
        assert by_sample(Feed.single_rank(loader, seed=3)) == EXPECTED
    loader = DataLoader(source, 5, shuffle=True, collate_fn=torch.utils.data.default_collate)  # pyright: ignore[reportArgumentType]
    assert by_sample(Feed.single_rank(loader, seed=3)) == EXPECTED
    assert by_sample(Feed.single_rank(pickle.loads(pickle.dumps(source)), batch_size=5, seed=3)) == EXPECTED


def test_samples_are_transformed_at_the_same_time():
    barrier = threading.Barrier(4, timeout=20)

    def meet(sample, generator):
        barrier.wait()  # breaks unless four threads are here
        return sample

    feed = Feed.single_rank(Transformed(SOURCE[:8], meet, threads=4), batch_size=4)
    assert sum(len(targets) for _, targets in feed) == 8


def test_a_class_in_place_of_a_transform_is_answered_by_its_instance():
    class Detection:
        def __call__(self, sample): ...

    with pytest.raises(DataError, match=r"try an instance, Detection\(…\)"):
        Transformed(SOURCE, Detection)


class Later:
    def __await__(self):
        yield


def parts(sample):
    yield from sample


@pytest.mark.parametrize(
    ("transform", "returned"),
    [(lambda sample: None, "None"), (lambda sample: Later(), "a Later"), (parts, "a generator")],
)
def test_a_transform_that_returns_no_sample_is_named(transform, returned):
    with pytest.raises(DataError, match=rf"sample \d+: TypeError: it returned {returned}, not the sample"):
        list(Feed.single_rank(SOURCE, batch_size=4, transform=transform))


def test_errors_of_a_transform_name_the_sample():
    def fail(sample, generator):
        if sample[1] == 7:
            raise ValueError("no such colour")
        return sample

    with pytest.raises(DataError, match="sample 7: ValueError: no such colour"):
        list(Feed.single_rank(SOURCE, batch_size=4, transform=fail))

    def reshape(sample, generator):
        return (sample[0][: 2 if sample[1] == 7 else 3], sample[1])

    with pytest.raises(DataError, match=r"float32 \[(2|3)\] in sample \d+, float32 \[(2|3)\] in sample \d+"):
        list(Feed.single_rank(SOURCE, batch_size=NUM_SAMPLES, transform=reshape))


@pytest.mark.parametrize(
    ("source", "transform", "text"),
    [(SOURCE, 3, "transform = 3"), (iter(SOURCE), jitter, "len.source"), (DataLoader(SOURCE), jitter, "len.source")],  # pyright: ignore[reportArgumentType]
)
def test_what_cannot_be_transformed_is_refused(source, transform, text):
    with pytest.raises(DataError, match=text):
        Feed(source, batch_size=2, transform=transform)


def test_images_are_decoded_and_augmented(tmp_path):
    image = pytest.importorskip("PIL.Image")
    numbers = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(6):
            pixels = io.BytesIO()
            image.fromarray(numbers.integers(0, 256, (20, 24, 3), np.uint8)).save(pixels, "PNG")
            (tmp_path / "images" / name / f"{number}.png").write_bytes(pixels.getvalue())
    folder = ff.open_source(tmp_path / "images")
    ff.pack(folder, tmp_path / "images.pack")

    def augment(sample, generator):
        pixels, label = sample
        top, left = (int(torch.randint(5, (), generator=generator)) for _ in range(2))
        crop = pixels[:, top : top + 16, left : left + 16].float() / 255
        return crop.flip(-1) if torch.rand((), generator=generator) < 0.5 else crop, label

    found = []
    for source in (folder, ff.Pack(tmp_path / "images.pack")):
        batches = list(Feed.single_rank(source, batch_size=5, seed=1, transform=augment))
        assert [tuple(inputs.shape) for inputs, _ in batches] == [(5, 3, 16, 16), (5, 3, 16, 16), (2, 3, 16, 16)]
        found.append(torch.cat([inputs for inputs, _ in batches]))
    assert torch.equal(*found)
    windowed = Feed.single_rank(
        ff.Pack(tmp_path / "images.pack"), batch_size=12, seed=1, transform=augment, order="windowed", window=1
    )
    ((inputs, _),) = windowed  # another order of the same samples
    assert {tuple(row.flatten().tolist()) for row in inputs} == {tuple(row.flatten().tolist()) for row in found[0]}
    assert windowed.bytes_read is not None
    assert len({tuple(row.flatten().tolist()) for row in found[0]}) == 12


def test_a_file_of_a_transform_that_does_not_exist_is_said():
    with pytest.raises(DataError, match=r"transform = nowhere\.py:f: no file nowhere\.py"):
        list(ff.Feed([(torch.zeros(1), 0)], batch_size=1, transform="nowhere.py:f"))


def test_a_name_that_the_file_of_a_transform_does_not_have_is_said_where_it_is_given(tmp_path):
    (tmp_path / "mine.py").write_text("raise SystemExit('the file was run')\ndef augment(sample): ...")
    with pytest.raises(DataError, match=r"no augmnt in .*mine\.py .*try .*mine\.py:augment"):
        Transformed(SOURCE, f"{tmp_path}/mine.py:augmnt")


class Killed:
    """The worker is killed in the second epoch, as the kernel does for want of memory.

    `between`: not while it reads, but after its batches lie ready.
    """

    def __init__(self, between):
        self.between, self.pid, self.reads = between, *torch.zeros(2, 1, dtype=torch.int64).share_memory_()

    def __len__(self):
        return 20

    def __getitem__(self, index):
        self.pid[0], self.reads[0] = os.getpid(), self.reads + 1
        if self.reads == 28 and not self.between:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(2), 0


@pytest.mark.parametrize("between", [False, True])
def test_a_worker_that_is_killed_is_named_with_its_signal_in_each_epoch(between, request):
    # Once a DataLoader was read in the main thread of this process, torch raises an error of its own there.
    request.addfinalizer(
        functools.partial(signal.signal, signal.SIGCHLD, signal.signal(signal.SIGCHLD, signal.SIG_DFL))
    )
    source = Killed(between)
    loader = DataLoader(source, batch_size=5, num_workers=1, persistent_workers=True)  # pyright: ignore[reportArgumentType]
    feed = Feed.single_rank(loader, seed=3)
    assert len(list(feed)) == 4

    def second_epoch():
        for _ in feed:
            if between:
                os.kill(int(source.pid[0]), signal.SIGKILL)

    with pytest.raises(WorkerDiedError, match=r"was killed by SIGKILL .* fewer workers") as caught:
        second_epoch()
    assert caught.value.signal == signal.SIGKILL
