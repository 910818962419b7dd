"""Laws of sources: what a sample covers, what a batch is, and which bytes are held out."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fourfold.feed.corpus import Corpus, FileRange, is_validation_file, open_text, standard_library
from fourfold.feed.feed import Feed
from fourfold.feed.mixed import Mixed, Weighted
from fourfold.feed.source import TensorSource, TokenSource, fetch
from fourfold.feed.transform import Transformed
from fourfold.launcher.traceback_text import format_error
from fourfold.plan.plan import Plan
from fourfold.words.errors import DataError


def write(folder: Path, texts: dict[str, bytes]) -> Path:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return folder


def pages(count: int) -> dict[str, bytes]:
    return {f"part{i % 3}/page{i:02}.txt": f"page {i}\n".encode() * (i + 1) for i in range(count)}


def all_bytes(corpus: Corpus) -> bytes:
    return corpus.read([0], len(corpus)).tobytes()


class Counted(Dataset):
    """Samples of numbers, dicts and tensors, without a `fetch` of their own."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[dict[str, object], int]:
        return {"image": torch.full((2, 3), float(index)), "age": index}, -index


class Failing(Dataset):
    """Samples of which number 3 cannot be made, by an error of the program."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([1.0 / (index - 3)]), index

    def sample_key(self, index: int) -> str:
        return f"row-{index}"


class FailingTogether(Failing):
    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        return [self[index] for index in indices]


class FailingBatch(Failing):
    def fetch(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([self[index][0] for index in indices]), torch.tensor(indices)


class FailingStream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        yield from (Failing()[index] for index in range(8))


def divide(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([1.0 / (index + 2) for _, index in samples]), torch.tensor([1.0 for _ in samples])


@pytest.mark.parametrize(("source", "note"), [
    (Failing(), "sample 3 (row-3) of Failing"),
    (FailingTogether(), "sample 3 (row-3) of FailingTogether"),
    (FailingBatch(), "sample 3 (row-3) of FailingBatch"),
    (Transformed(Failing(), lambda sample: sample), "sample 3 (row-3) of Failing"),
    (Mixed({"one": Weighted(Failing(), 1.0)}), "sample 3 (one: row-3) of Mixed"),
    (DataLoader(Failing(), batch_size=4), "sample 3 (row-3) of Failing"),
    (DataLoader(Counted(), batch_size=4, collate_fn=divide), "samples 0, 1, 2, 3 of Counted"),
    (DataLoader(Failing(), batch_size=4, num_workers=1), "sample 3 (row-3) of Failing"),
    (FailingStream(), "sample 3 of FailingStream"),
])  # fmt: skip
def test_an_error_of_a_dataset_names_the_sample_and_the_source(source, note):
    with pytest.raises(ZeroDivisionError) as caught:
        list(Feed.single_rank(source, batch_size=4))
    assert f"while reading {note}" in format_error(caught.value)


def test_a_corpus_is_the_concatenation_of_its_file_ranges(tmp_path: Path):
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 256, size, dtype=np.uint8).tobytes() for size in (7, 1, 30, 2, 2, 64)]
    write(tmp_path, {f"{i}": text for i, text in enumerate(texts)})
    ranges = [(0, 7), (0, 1), (5, 25), (1, 1), (0, 2), (3, 64)]
    corpus = Corpus(FileRange(tmp_path / f"{i}", start, stop) for i, (start, stop) in enumerate(ranges))
    joined = b"".join(text[start:stop] for text, (start, stop) in zip(texts, ranges, strict=True))

    assert all_bytes(corpus) == joined
    for length in (1, 2, 9, 40):
        starts = range(len(joined) - length + 1)
        assert [row.tobytes() for row in corpus.read(starts, length)] == [joined[i : i + length] for i in starts]


def test_a_corpus_ends_where_its_last_file_range_ends(tmp_path: Path):
    corpus = Corpus([FileRange(write(tmp_path, {"a": b"abcdef"}) / "a", 0, 4)])
    assert len(corpus) == 4
    for start, length in ((-1, 2), (3, 2)):
        with pytest.raises(IndexError):
            corpus.read([start], length)


def test_the_validation_split_depends_only_on_paths_relative_to_the_root(tmp_path: Path):
    first_root, second_root = write(tmp_path / "here", pages(60)), write(tmp_path / "there/below", pages(60))
    # Additional files must not change the split of the others.
    write(second_root, {"part0/aaa.txt": b"new\n", "zzz.txt": b"new\n"})

    def names(corpus: Corpus, root: Path) -> list[str]:
        return [each.path.relative_to(root).as_posix() for each in corpus.file_ranges]

    first, second = open_text(first_root), open_text(second_root)
    assert names(first.valid, first_root) == sorted(name for name in pages(60) if is_validation_file(name)) != []
    for one, other in zip(first, second, strict=True):
        assert names(one, first_root) == [name for name in names(other, second_root) if name in pages(60)]


def test_the_rule_of_the_validation_split_is_frozen():
    held_out = [i for i in range(100) if is_validation_file(f"asyncio/page{i}.py")]
    assert held_out == [9, 18, 33, 54, 65, 70]


def test_train_and_validation_partition_the_text(tmp_path: Path):
    texts = pages(60)
    split = open_text(write(tmp_path, texts))
    lines = all_bytes(split.train).splitlines() + all_bytes(split.valid).splitlines()
    assert sorted(lines) == sorted(line for text in texts.values() for line in text.splitlines())
    assert not {p.path for p in split.train.file_ranges} & {p.path for p in split.valid.file_ranges}


def test_the_last_tenth_of_each_file_is_held_out_if_files_cannot_be_split(tmp_path: Path):
    text = bytes(range(1, 101))
    split = open_text(write(tmp_path, {"book.txt": text}) / "book.txt")
    assert (all_bytes(split.train), all_bytes(split.valid)) == (text[:90], text[90:])
    assert [all_bytes(side) for side in open_text(tmp_path)] == [text[:90], text[90:]]
    write(tmp_path, {"more.txt": text})
    assert not is_validation_file("book.txt")
    assert not is_validation_file("more.txt")
    assert [all_bytes(side) for side in open_text(tmp_path)] == [text[:90] * 2, text[90:] * 2]


def test_only_text_is_read_from_a_folder(tmp_path: Path):
    extra = {"image.bin": b"a\0b", ".git/config": b"hidden", "__pycache__/x.txt": b"cache", "empty.txt": b""}
    split = open_text(write(tmp_path, {**pages(40), **extra}))
    names = {each.path.relative_to(tmp_path).as_posix() for side in split for each in side.file_ranges}
    assert names == set(pages(40))


def test_about_a_twentieth_of_the_standard_library_is_held_out():
    split = standard_library()
    assert all(each.path.suffix == ".py" for side in split for each in side.file_ranges)
    assert not any("site-packages" in each.path.parts for side in split for each in side.file_ranges)
    assert 0.02 < len(split.valid) / len(split.train) < 0.15
    assert len(split.train) > 5_000_000


def test_targets_are_the_tokens_shifted_by_one(tmp_path: Path):
    text = bytes(range(100, 200))
    tokens = TokenSource(Corpus([FileRange(write(tmp_path, {"a": text}) / "a", 0, 100)]), length=9)
    assert len(tokens) == 11  # 11 × 9 tokens, and a last target
    for i in range(len(tokens)):
        inputs, targets = tokens[i]
        assert bytes(inputs["tokens"].tolist()) == text[9 * i : 9 * i + 9]
        assert bytes(targets.tolist()) == text[9 * i + 1 : 9 * i + 10]
        assert inputs["positions"].tolist() == list(range(9))
        assert {inputs["tokens"].dtype, inputs["positions"].dtype, targets.dtype} == {torch.int64}


def test_fewer_samples_are_spread_over_the_corpus(tmp_path: Path):
    corpus = Corpus([FileRange(write(tmp_path, {"a": bytes(range(101))}) / "a", 0, 101)])
    starts = TokenSource(corpus, length=10, num_samples=4).sample_starts(range(4)).tolist()
    assert starts == [0, 20, 50, 70]
    assert len(TokenSource(corpus, length=10, num_samples=1000)) == 10


@pytest.mark.parametrize("indices", [[3, 0, 3, 4], [2], []])
@pytest.mark.parametrize("kind", ["tokens", "tensors", "counted"])
def test_fetching_equals_stacking(kind: str, indices: list[int], tmp_path: Path):
    corpus = Corpus([FileRange(write(tmp_path, {"a": bytes(range(60))}) / "a", 0, 60)])
    images = torch.arange(30.0).view(5, 2, 3)
    source = {
        "tokens": TokenSource(corpus, length=10),
        "tensors": TensorSource(images, torch.arange(5)),
        "counted": Counted(),
    }[kind]

    inputs, targets = fetch(source, indices)
    inputs = inputs if isinstance(inputs, dict) else {"": inputs}
    assert len(targets) == len(indices)
    for row, index in enumerate(indices):
        sample, target = source[index]
        sample = sample if isinstance(sample, dict) else {"": sample}
        assert targets[row].tolist() == torch.as_tensor(target).tolist()
        assert {name: values[row].tolist() for name, values in inputs.items()} == {
            name: torch.as_tensor(value).tolist() for name, value in sample.items()
        }
    full, _ = fetch(source, [0])
    full = full if isinstance(full, dict) else {"": full}
    assert {k: (v.dtype, v.shape[1:]) for k, v in inputs.items()} == {
        k: (v.dtype, v.shape[1:]) for k, v in full.items()
    }


def test_samples_beyond_the_last_are_refused(tmp_path: Path):
    corpus = Corpus([FileRange(write(tmp_path, {"a": bytes(60)}) / "a", 0, 60)])
    for num_samples, count in ((None, 5), (3, 3)):
        tokens = TokenSource(corpus, length=10, num_samples=num_samples)
        for index in (-1, count):
            with pytest.raises(IndexError, match=f"asked of {count}"):
                tokens[index]
        assert len(list(iter(tokens))) == count


@pytest.mark.parametrize(
    ("texts", "path", "got", "attempt"),
    [
        ({"novel.txt": b"a"}, "novle.txt", "nothing at", "novel.txt"),
        ({"a.bin": b"\0"}, "", "no text in", "another folder"),
        ({}, "", "no text in", "another folder"),
    ],
)
def test_missing_text_is_refused_with_a_suggestion(
    texts: dict[str, bytes], path: str, got: str, attempt: str, tmp_path: Path
):
    with pytest.raises(DataError) as caught:
        open_text(write(tmp_path, texts) / path)
    (problem,) = caught.value.problems
    assert got in problem.got
    assert problem.need
    assert attempt in problem.attempt


def test_a_corpus_shorter_than_a_sample_is_refused_and_a_valid_length_suggested(tmp_path: Path):
    corpus = Corpus([FileRange(write(tmp_path, {"a": b"12345"}) / "a", 0, 5)])
    with pytest.raises(DataError) as caught:
        TokenSource(corpus, length=5)
    assert caught.value.problems[0].attempt.startswith("length=4")
    assert len(TokenSource(corpus, length=4)) == 1


def test_a_file_that_shrank_is_reported_by_name(tmp_path: Path):
    path = write(tmp_path, {"a": b"123"}) / "a"
    with pytest.raises(DataError, match="a cannot be mapped"):
        Corpus([FileRange(path, 0, 5000)]).read([0], 10)


def test_a_corpus_larger_than_the_memory_is_mapped(tmp_path: Path) -> None:
    num_bytes = 2 * psutil.virtual_memory().total
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        file.write(b"begin")
        try:
            file.truncate(num_bytes)  # a sparse file takes no disk
        except OSError as error:
            pytest.skip(f"no files of {num_bytes} bytes here: {error}")
        file.seek(-3, 2)
        file.write(b"end")
    corpus = Corpus([FileRange(path, 0, num_bytes)])
    first, last = corpus.read([0, num_bytes - 5], 5)
    assert (bytes(first), bytes(last)) == (b"begin", b"\0\0end")


class WrongCount(Counted):
    """A `fetch` that returns the wrong number of samples."""

    def fetch(self, indices, /):
        return {"image": torch.zeros(3, 2)}, torch.zeros(3)


def test_a_fetch_with_the_wrong_number_of_samples_is_refused():
    assert len(fetch(WrongCount(), range(3))[1]) == 3
    for indices in ([], [0], range(4)):
        with pytest.raises(DataError, match=f"fetch of {len(indices)} indices returned a tensor of \\[3"):
            fetch(WrongCount(), indices)


@pytest.mark.parametrize("odd", [torch.ones(4).to_sparse(), np.array("a"), np.array([None])])
def test_samples_that_cannot_be_stacked_are_refused(odd):
    with pytest.raises(DataError, match="cannot be stacked"):
        fetch([(odd, 1.0)] * 2, [0, 1])


@pytest.mark.parametrize("wrap", [lambda inputs: inputs, lambda inputs: (inputs, 1), lambda inputs: ({"x": inputs}, 1)])
@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_key_missing_from_some_samples_is_refused_in_any_order(wrap, order):
    """torch takes the keys of the first sample: whether others are lost would depend on how ranks divide a batch."""
    samples = [wrap({"a": 1.0}), wrap({"a": 1.0, "mask": 0.0})]
    with pytest.raises(DataError, match=r"\['mask'\]: .*missing in sample .* the same keys in every sample"):
        fetch(samples, order)
    assert fetch([samples[1]] * 2, [0, 1])


def test_dicts_with_the_same_keys_are_stacked_whatever_their_order():
    inputs, targets = fetch([({"a": 1.0, "b": 2.0}, 0), ({"b": 3.0, "a": 4.0}, 1)], [0, 1])
    assert {name: values.tolist() for name, values in inputs.items()} == {"a": [1.0, 4.0], "b": [2.0, 3.0]}
    assert targets.tolist() == [0, 1]


@pytest.mark.parametrize(("first", "second", "message"), [
    (np.int64(1), np.float64(1.5), r"int64 \[\] in sample 0, float64 \[\] in sample 1"),
    (np.float32(1), np.float64(1.5), r"float32 \[\] in sample 0, float64 \[\] in sample 1"),
    (torch.ones(2), np.ones(2, dtype=np.float32), "tensors and arrays in one place"),
])  # fmt: skip
def test_samples_of_mixed_types_are_refused(first, second, message):
    with pytest.raises(DataError, match=message):
        fetch([(torch.ones(1), first), (torch.ones(1), second)], [0, 1])


def test_numpy_strings_in_a_sample_are_refused():
    with pytest.raises(DataError, match="sample 0 has a str_ as 'name'"):
        fetch([{"x": 1.0, "name": np.str_("a")}], [0])


class Exhausted(Counted):
    """Reads from an iterator that ends too early."""

    def __getitem__(self, index: int) -> tuple[dict[str, object], int]:
        if index == 3:
            next(iter(()))
        return super().__getitem__(index)


class ExhaustedBatches(Exhausted):
    def fetch(self, indices: list[int], /) -> tuple[dict[str, object], int]:
        rows = [self[index] for index in indices]
        return rows[0]


@pytest.mark.parametrize("kind", [Exhausted, ExhaustedBatches])
def test_a_stop_iteration_in_a_source_is_reported_with_its_line(kind: type[Counted]):
    message = r"StopIteration in test_source.py, line \d+   need a sample for every number below len\(source\)"
    with pytest.raises(DataError, match=message):
        fetch(kind(), [2, 3])


def test_a_stop_iteration_in_a_source_is_reported_by_a_feed_too():
    with pytest.raises(DataError, match="StopIteration in test_source"):
        list(Feed(Exhausted(), Plan(), batch_size=1))
