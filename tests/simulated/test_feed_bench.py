"""Laws of `fourfold feed bench`: exact on a simulated clock, and true to the bytes on a real one."""

import dataclasses
import functools
import itertools
import json
import math
import os
import threading
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fourfold.cli.feed_bench import parse_words, run_bench
from fourfold.feed.batches import Batch
from fourfold.feed.feed import Feed
from fourfold.feed.position import Position
from fourfold.trace.utilization import Window, epoch_window
from fourfold.words.errors import DataError, SettingError
from fourfold_bench.disk import cached_fraction, direct_problem, drop_from_page_cache, measure_checkpoint
from fourfold_bench.page import describe_feed_bench
from fourfold_bench.ranks import Accelerator, Training, run_ranks, train_rank
from fourfold_bench.result import format_result, format_sweep, histogram, make_epochs
from fourfold_bench.run import Options, fit_workload, run_workload
from fourfold_bench.source import DESCRIPTION_FILE, DataShape, FileSource, Reads, generate, record_number
from fourfold_bench.staged_files import StagedFiles, ThrottledOrigin, TokenBucket, list_shards
from fourfold_bench.workload import Seconds, Workload, open_recipe
from tests.report_data import visible_text

SHAPE = DataShape(format="npy", num_files=12, samples_per_file=1, record_bytes=5000, record_bytes_stdev=900)
EIGHTHS = st.integers(0, 24).map(lambda number: number / 8)


class SimulatedClock:
    """A clock that only moves when it is moved."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def sleep_until(self, deadline: float) -> None:
        self.time = max(self.time, deadline)

    def advance(self, seconds: float) -> None:
        self.time += seconds


class SimulatedFeed:
    """Batches of three samples, each after a wait on the clock."""

    def __init__(self, waits: list[float], clock: SimulatedClock) -> None:
        self.state, self.num_samples = Position(0, 0, 0, 99), 99
        self._waits, self._clock = waits, clock

    def load_state(self, state: Position) -> None:
        self.state = state

    def __iter__(self) -> Any:
        for wait in self._waits:
            self._clock.advance(wait)
            batch = Batch(([0] * 3, [0] * 3))
            batch.bytes_read = 1000
            yield batch


@given(steps=st.lists(st.tuples(EIGHTHS, EIGHTHS), min_size=2, max_size=8), compute=EIGHTHS)
def test_utilization_is_exact_on_a_simulated_clock(steps, compute):
    """Each step: how long its batch is waited for, and how long the others come after at its barrier."""
    waits, lates = map(list, zip(*steps, strict=True))
    clock = SimulatedClock()
    barriers = iter([0.0, *lates])
    feed: Any = SimulatedFeed(waits, clock)
    rng = np.random.default_rng(0)
    accelerator = Accelerator(feed, Seconds((compute,)), rng, lambda: clock.advance(next(barriers)), clock)
    timed = accelerator.epoch(0)
    assert [step.data_seconds for step in timed] == waits
    window = epoch_window(timed)
    counted = len(waits) - 1
    running = sum(waits[1:]) + sum(lates[1:]) + counted * compute
    assert window == Window(counted, 3 * counted, counted * compute, running, 1000 * counted)
    assert window.utilization == (counted * compute / running if running else None)


def test_an_epoch_ends_after_so_many_steps_and_the_next_begins_at_its_beginning():
    clock = SimulatedClock()
    feed: Any = SimulatedFeed([0.0] * 9, clock)
    rng = np.random.default_rng(0)
    accelerator = Accelerator(feed, Seconds((1.0,)), rng, lambda: None, clock, steps=4)
    assert [len(accelerator.epoch(number)) for number in range(2)] == [4, 4]
    assert feed.state == Position(0, 1, 0, 99)


@given(
    reads=st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 3)), min_size=1, max_size=20),
    rate=st.floats(10, 10_000),
)
def test_an_origin_delivers_no_more_than_its_rate(reads, rate):
    bucket = TokenBucket(rate, types.SimpleNamespace(value=0.0, get_lock=nullcontext))  # type: ignore[arg-type]
    now, done = 0.0, []
    for num_bytes, pause in reads:
        now += pause
        done.append((now, bucket.reserve(num_bytes, now), num_bytes))
    for first in range(len(done)):
        for last in range(first, len(done)):
            delivered = sum(num_bytes for _, _, num_bytes in done[first : last + 1])
            assert delivered <= rate * (done[last][1] - done[first][0]) * (1 + 1e-9) + 1e-6
    assert all(ready >= asked for asked, ready, _ in done)


@pytest.mark.parametrize("form", ["npy", "npz"])
@pytest.mark.parametrize("per_file", [1, 5])
@pytest.mark.parametrize("direct", [False, True])
def test_every_sample_is_its_record_and_every_byte_is_counted(tmp_path, form, per_file, direct):
    spread = 900 if per_file == 1 else 0
    shape = dataclasses.replace(SHAPE, format=form, num_files=4, samples_per_file=per_file, record_bytes_stdev=spread)
    assert generate(shape, tmp_path)
    assert not generate(shape, tmp_path)  # they are there
    paths = shape.paths(tmp_path)
    if direct and direct_problem(paths[0]):
        pytest.skip(direct_problem(paths[0]))
    source = FileSource(shape, tmp_path, Reads(9000, threads=2, direct=direct))
    inputs, targets = source.fetch(range(len(shape)))
    assert targets.tolist() == [record_number(row) for row in inputs.numpy()] == list(range(len(shape)))
    for index, row in enumerate(inputs.numpy()):
        length = shape.record_length(index)
        assert (row[length:] == row[: 9000 - length]).all()  # a short record is repeated
    least = sum(shape.record_length(index) for index in range(len(shape)))
    size = sum(path.stat().st_size for path in paths)
    if form == "npy" and per_file == 1:
        assert source.bytes_read == size
    else:  # headers again, whole blocks, or all of a zip file for each of its records
        assert least < source.bytes_read <= per_file * size + 8192 * len(shape)
    assert source.sample_key(per_file) == f"{paths[1]}, record 0"


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-500])


def _pickle(path: Path) -> None:
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)


def _other_shape(path: Path) -> None:
    np.save(path, np.zeros((3, 4, 5), dtype=np.uint8))


def _floats(path: Path) -> None:
    np.save(path, np.zeros(5000))


@pytest.mark.parametrize(
    "damage", [_truncate, _pickle, _other_shape, _floats, Path.unlink, lambda p: p.write_bytes(b"")]
)
@pytest.mark.parametrize("direct", [False, True])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, damage, direct):
    generate(SHAPE, tmp_path)
    path = SHAPE.paths(tmp_path)[5]
    if direct and direct_problem(path):
        pytest.skip(direct_problem(path))
    damage(path)
    source = FileSource(SHAPE, tmp_path, Reads(6000, direct=direct))
    with pytest.raises(DataError, match=str(path)):
        source.fetch([4, 5])


def test_a_damaged_npz_file_is_an_error_that_names_it(tmp_path):
    shape = dataclasses.replace(SHAPE, format="npz")
    generate(shape, tmp_path)
    path = shape.paths(tmp_path)[5]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=str(path)):
        FileSource(shape, tmp_path, Reads(6000)).fetch([5])


def test_data_that_a_killed_run_has_left_is_completed(tmp_path):
    generate(SHAPE, tmp_path)
    kept, lost = SHAPE.paths(tmp_path)[:2]
    before = kept.stat().st_mtime_ns, lost.read_bytes()
    lost.rename(lost.with_name(lost.name + ".part"))
    (tmp_path / DESCRIPTION_FILE).unlink()
    assert generate(SHAPE, tmp_path)
    assert (kept.stat().st_mtime_ns, lost.read_bytes()) == before


def training(folder: Path, **fields: Any) -> Training:
    generate(SHAPE, folder)
    values = {"compute": Seconds((0.002,)), "size": 2, "batch_size": 2, "epochs": 2, "steps": 3, **fields}
    return Training(shape=SHAPE, folder=folder, reads=Reads(6000), **values)


def test_accelerators_share_an_epochs_samples_and_meet_after_each_step(tmp_path):
    barrier = threading.Barrier(2)
    found: dict[int, Any] = {}
    free_at: Any = types.SimpleNamespace(value=0.0, get_lock=nullcontext)

    given = training(tmp_path)

    def body(index: int) -> None:
        try:
            found[index] = train_rank(given, index, functools.partial(barrier.wait, 60), free_at)
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=body, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = sum(step.bytes_read for index in range(2) for step in found[index][0].steps)
    assert total == sum(path.stat().st_size for path in SHAPE.paths(tmp_path))  # each file once in an epoch
    for number in range(2):
        ends = [[step.ended for step in found[index][number].steps] for index in range(2)]
        assert [len(each) for each in ends] == [3, 3]
        assert all(abs(one - other) < 0.05 for one, other in zip(*ends, strict=True))
        for index in range(2):
            steps = found[index][number].steps
            assert all(after.asked == before.ended for before, after in itertools.pairwise(steps))
    first, second = make_epochs([found[0], found[1]])
    assert first.window.num_samples == second.window.num_samples == 8
    assert len(first.waits) == 2 * 2


def test_accelerators_are_processes_and_the_error_of_one_ends_all(tmp_path):
    by_rank = run_ranks(training(tmp_path))
    assert [[len(epoch.steps) for epoch in epochs] for epochs in by_rank] == [[3, 3], [3, 3]]
    lost = SHAPE.paths(tmp_path)[7]
    lost.unlink()
    with pytest.raises(DataError, match=str(lost)):
        run_ranks(training(tmp_path, epochs=1))


def test_a_process_that_dies_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("fourfold_bench.ranks.train_rank", lambda *_: os._exit(3))
    with pytest.raises(DataError, match=r"accelerator [01] died"):
        run_ranks(training(tmp_path, epochs=1))


@pytest.mark.parametrize("name", ["unet3d", "resnet50", "cosmoflow", "bert"])
def test_a_workload_runs_for_a_few_steps(tmp_path, name):
    workload = open_recipe(name)
    assert isinstance(workload, Workload)
    workload = dataclasses.replace(workload, compute=Seconds((0.002,)))
    options = Options(
        folder=tmp_path, steps=3, epochs=2, scale=0.0005, batch_size=8, checkpoint=100_000, ceiling_seconds=0.02
    )
    result = run_workload(workload, options)
    assert [epoch.window.num_steps for epoch in result.epochs] == [2, 2]
    assert result.total.num_samples == 2 * 2 * 8
    record = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert record["total"]["utilization"] == result.total.utilization
    assert 0 < record["total"]["utilization"] < 1
    assert record["checkpoint"]["num_bytes"] == 100_000
    assert sum(record["total"]["waits"]["histogram"].values()) == 2 * 2
    assert record["passes"] in ((None,) if name == "bert" else (True, False))
    text, page = format_result(result), visible_text(describe_feed_bench([result]))
    for needed in ("Window: from the end of an epoch's first step", "steps an epoch 3 instead of", name, "100 KB"):
        needed = needed.replace("100 KB", "97.7 KiB")
        assert needed in " ".join(text.split())
        assert needed in page
    if name != "unet3d":
        assert "format npy instead of tfrecord" in page


def test_a_slow_origin_starves_unet3d_and_not_bert(tmp_path):
    """The lecture's experiment, in small."""
    found = {}
    for name, seconds in (("unet3d", 0.02), ("bert", 0.5)):
        workload = open_recipe(name)
        assert isinstance(workload, Workload)
        workload = dataclasses.replace(workload, compute=Seconds((seconds,)), batch_size=2)
        options = Options(
            folder=tmp_path,
            steps=3,
            epochs=1,
            origin=4e9,
            scale=0.001,
            accelerators=2,
            checkpoint=0,
            ceiling_seconds=0.02,
        )
        result = run_workload(workload, options)
        found[name] = result.total.utilization
        assert result.origin == 4e6
        assert result.ceiling <= 4e6
        assert (result.total.bytes_per_second or 0) <= 6e6  # of both accelerators, over a short window
    assert found["unet3d"] < 0.9
    assert found["bert"] > 0.9  # 0.99 where nothing else runs: each step ends some milliseconds late here


def test_files_that_are_staged_are_copied_once_and_feed_the_second_epoch(tmp_path):
    workload = open_recipe("unet3d")
    assert isinstance(workload, Workload)
    workload = dataclasses.replace(workload, compute=Seconds((0.05,)), batch_size=2)
    options = Options(
        folder=tmp_path, steps=4, epochs=2, origin=1.5e9, scale=0.0005, accelerators=2, checkpoint=0,
        ceiling_seconds=0.02, staged=True,
    )  # fmt: skip
    result = run_workload(workload, options)
    cold, warm = (epoch.window.utilization or 0.0 for epoch in result.epochs)
    assert cold < 0.7  # the origin delivers an eighth of what two accelerators need
    assert warm > 0.8  # 0.99 where nothing else runs
    assert warm == result.utilization
    assert result.label == "unet3d, staged"
    assert [path.name for path in tmp_path.iterdir() if "staged" in path.name] == []
    assert "copied to this disk in the first epoch" in format_result(result)
    assert "unet3d, staged" in format_sweep([result, result])


def test_a_staged_sample_is_its_record_and_each_file_passes_the_origin_once(tmp_path):
    shape = DataShape(format="npy", num_files=6, samples_per_file=3, record_bytes=500)
    generate(shape, tmp_path / "data")
    free_at = types.SimpleNamespace(value=0.0, get_lock=threading.Lock)
    bucket, read = TokenBucket(1e12, free_at), []  # type: ignore[arg-type]
    reserve = bucket.reserve
    bucket.reserve = lambda num_bytes, now: (read.append(num_bytes), reserve(num_bytes, now))[1]
    origin = ThrottledOrigin(shape, tmp_path / "data", bucket)
    shards = list_shards(shape, tmp_path / "data")
    sources = [StagedFiles(origin, shards, tmp_path / "copies", (shape, Reads(500))) for _ in range(2)]
    feeds = [Feed.of_data_rank(each, size=2, index=index, batch_size=6) for index, each in enumerate(sources)]
    plain = FileSource(shape, tmp_path / "data", Reads(500))
    for _ in range(2):
        found = [row for feed in feeds for batch in feed for row in zip(*batch, strict=True)]
        assert sorted(int(number) for _, number in found) == list(range(18))
        assert all(torch.equal(row, plain[int(number)][0]) for row, number in found)
    copied = [each.stat().st_size for each in (tmp_path / "copies").iterdir() if each.name.startswith("file-0")]
    num_bytes, before = sum(shard.num_bytes for shard in shards), sum(read)
    assert sum(copied) == num_bytes <= before
    for feed in feeds:  # all copies are there: the origin is not read any more
        list(feed)
    assert sum(read) == before


def test_a_threshold_and_the_accelerators_that_can_be_fed_follow_from_the_figures(tmp_path):
    workload = open_recipe("cosmoflow")
    assert isinstance(workload, Workload)
    options = Options(folder=tmp_path, steps=3, epochs=1, scale=0.001, origin=3e9, checkpoint=0, ceiling_seconds=0.02)
    result = run_workload(workload, options)
    for utilization in (0.69, 0.7):
        window = Window(10, 10, utilization, 1.0, 100)
        judged = dataclasses.replace(result, epochs=(dataclasses.replace(result.epochs[0], window=window),))
        assert judged.passes is (utilization >= 0.7)
    assert result.fed_accelerators == math.floor(result.ceiling / (0.7 * result.need))


@given(waits=st.lists(st.floats(0, 100), max_size=30))
def test_every_wait_is_in_one_bar_of_the_histogram(waits):
    assert sum(count for _, count in histogram(waits)) == len(waits)


def test_dropped_files_are_not_in_the_page_cache(tmp_path):
    generate(SHAPE, tmp_path)
    paths = SHAPE.paths(tmp_path)
    if direct_problem(paths[0]):
        pytest.skip("a file system in memory")
    for path in paths:
        path.read_bytes()
    assert cached_fraction(paths) == 1.0
    drop_from_page_cache(paths)
    assert cached_fraction(paths) == 0.0
    paths[0].read_bytes()
    assert 0 < (cached_fraction(paths) or 0) < 0.5


def test_a_checkpoint_is_read_back_as_it_was_written(tmp_path, monkeypatch):
    times = measure_checkpoint(tmp_path, 20_000_001)
    assert times.num_bytes == 20_000_001
    assert min(times.write_seconds, times.read_seconds) > 0
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("fourfold_bench.disk.drop_from_page_cache", lambda paths: _truncate(paths[0]))
    with pytest.raises(DataError, match="reads back otherwise"):
        measure_checkpoint(tmp_path, 20_000_001)


def test_too_few_samples_are_an_error_before_anything_is_written(tmp_path):
    workload = open_recipe("unet3d")
    assert isinstance(workload, Workload)
    given: list[dict[str, Any]] = [{"samples": 20}, {"steps": 2}]
    for fields in given:
        with pytest.raises(SettingError):
            fit_workload(workload, Options(folder=tmp_path / "new", **fields))  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("words", "gots"), [
    (["unet3d", "acelerator=h100"], ["acelerator=h100"]),
    (["unet3d", "steps=0", "cache=x", "origin=-1", "accelerators=1,0"], [
        "steps = 0",
        "cache = x",
        'origin = "-1"',
        "accelerators = 0",
    ]),
    ([], ["no workload"]),
    (["unet3d", "bert"], ["unet3d and bert"]),
    (["unet3d", "seed=1", "seed=2"], ["seed, twice"]),
    (["unet3d", "scale=nan", "checkpoint=big", "direct=maybe"], [
        "scale = nan",
        'checkpoint = "big"',
        "direct = maybe",
    ]),
])  # fmt: skip
def test_words_that_are_wrong_are_all_reported(words, gots):
    with pytest.raises(SettingError) as caught:
        parse_words(words)
    assert [problem.got for problem in caught.value.problems] == gots


def test_the_command_writes_the_page_and_the_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fourfold_bench.run.measure_ceiling", functools.partial(_quick_ceiling))
    folder, record = tmp_path / "data", tmp_path / "out" / "bench.json"
    words = ["unet3d", "compute=0.001", "scale=0.0005", "batch_size=2", "steps=3", "epochs=1", "checkpoint=0"]
    code = run_bench([*words, "accelerators=1,2", f"folder={folder}", f"json={record}"])
    results = json.loads(record.read_text())
    assert code == (1 if any(each["passes"] is False for each in results) else 0)
    assert [each["accelerators"] for each in results] == [1, 2]
    assert "Utilization by number of accelerators" in (folder / "bench.html").read_text()
    assert "unet3d on 2 × own, 0.001 s a step" in capsys.readouterr().out


def _quick_ceiling(paths: Any, **sizes: Any) -> Any:
    from fourfold_bench.disk import measure_ceiling

    return measure_ceiling(paths, **{**sizes, "seconds": 0.02})


def test_a_run_says_how_long_its_steps_take(tmp_path):
    from fourfold.cli.feed_bench import _compute_seconds

    log = tmp_path / "run" / "metrics.jsonl"
    log.parent.mkdir()
    times, counts = [9.0, 0.2, 0.4, 0.3], {"loss": 1.0, "samples": 1, "units": 1, "unit": "samples"}
    lines = [
        {"step": number, "seconds": seconds, "elapsed_seconds": 1.0 * number, "waiting_seconds": 0.0, **counts}
        for number, seconds in enumerate(times, 1)
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert _compute_seconds(str(log.parent)) == (Seconds((0.3,)), "rank of run")
    with pytest.raises(SettingError):
        _compute_seconds("no such run")
