"""Feed: records of a pack in random order, packing, and the orders of samples.

    PYTHONPATH=src:. python -m bench.feed records [--rounds 7] [--samples 4000] [--ranks 1]
    PYTHONPATH=src:. python -m bench.feed packing [--rounds 3] [--images 100000]
    PYTHONPATH=src:. python -m bench.feed orders [--rounds 7]
    PYTHONPATH=src:. python -m bench.feed shared [--rounds 7] [--samples 4000] [--compute-ms 5]

records: samples of 114,688 B and a label, batches of 64, all in the page cache (read once before). Every round reads
all samples five times by each kind, one kind after the other; with --ranks 2, two processes read at once, and their
rates are added.
    feed            `ff.Feed` over `ff.Pack`: random order, xxh3_64 checked, prefetched
    Pack.fetch      the same without a feed, in the calling thread
    npy, n workers  torch's DataLoader over a folder of a npy file for each sample, shuffled
    mapped npy      torch's DataLoader over one npy file, memory-mapped
    preadv + hash   one thread: preadv of each record into its row of a batch, and its xxh3_64
    one buffer      the same into one buffer of a record, which stays in the processor's cache: no batch is made
packing: a folder of files of 20 kB; `cp -r` of it, and `ff.pack` with its checksums, to the same disk. cp does not wait
for the disk, so it is timed with `sync -f` and without; the pack is on the disk when `ff.pack` returns.
orders: see `bench/feed_orders.py`. shared: see `bench/feed_shared.py`.
Law: all kinds read the same records; a ratio is a median over rounds, in which they alternate.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import xxhash
from torch.utils.data import DataLoader, Dataset

from bench.feed_orders import run_orders
from bench.feed_shared import run_shared
from bench.measurement import MB, describe_machine, format_table
from fourfold.feed.feed import Feed
from fourfold.feed.formats.open import open_source
from fourfold.feed.pack.files import LocalPlace, PackFiles
from fourfold.feed.pack.reader import Pack
from fourfold.feed.pack.writer import pack

RECORD_BYTES, BATCH = 114_688, 64
IMAGE_BYTES, NUM_CLASSES = 20_000, 100
Reader = Callable[[], Any]


class NpyFiles(Dataset[Any]):
    """A dataset as it is often written: a file per sample."""

    def __init__(self, folder: Path, num_samples: int) -> None:
        self._folder, self._num_samples = folder, num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(np.load(self._folder / f"{number}.npy")), number


class MappedNpy(Dataset[Any]):
    """One file, memory-mapped."""

    def __init__(self, path: Path) -> None:
        self._rows = np.load(path, mmap_mode="c")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(np.asarray(self._rows[number])), number


def make_records(folder: Path, num_samples: int) -> None:
    """The records in all forms, and all of them read once."""
    block = np.random.default_rng(0).integers(0, 256, (512, RECORD_BYTES), dtype=np.uint8)
    (folder / "npy").mkdir()
    rows = np.lib.format.open_memmap(folder / "rows.npy", "w+", np.uint8, (num_samples, RECORD_BYTES))
    for number in range(num_samples):
        rows[number] = block[number % len(block)]
        np.save(folder / "npy" / f"{number}.npy", rows[number])
    del rows
    pack([(block[number % len(block)], number) for number in range(num_samples)], folder / "pack")
    for path in folder.rglob("*"):
        if path.is_file():
            path.read_bytes()


def preadv_and_hash(folder: Path, *, one_buffer: bool) -> None:
    """The ceiling: what one thread reads and hashes, in random order."""
    files = PackFiles(LocalPlace(folder / "pack"))
    order = np.random.default_rng(1).permutation(files.manifest.num_records)
    memory = np.zeros(BATCH * RECORD_BYTES, dtype=np.uint8)
    rows = [memory.data[row * RECORD_BYTES : (row + 1) * RECORD_BYTES] for row in range(BATCH)]
    rows = rows[:1] * BATCH if one_buffer else rows
    for start in range(0, len(order), BATCH):
        for row, record in enumerate(files.records(order[start : start + BATCH])):
            record.file.preadv([rows[row]], record.offset)
            xxhash.xxh3_64_intdigest(rows[row])


def read_all(batches: Any) -> None:
    for _ in batches:
        pass


def fetch_all(source: Pack) -> None:
    order = np.random.default_rng(1).permutation(len(source))
    for start in range(0, len(order), BATCH):
        source.fetch(order[start : start + BATCH])  # pyright: ignore[reportArgumentType]


def record_readers(folder: Path, num_samples: int, threads: int | None) -> dict[str, Reader]:
    """By kind: a function that reads all samples."""
    source = Pack(folder / "pack", threads=threads)
    feed = Feed(source, batch_size=BATCH)
    kinds: dict[str, Reader] = {"feed": lambda: read_all(feed), "Pack.fetch": lambda: fetch_all(source)}
    for name, dataset in (
        ("npy", NpyFiles(folder / "npy", num_samples)),
        ("mapped npy", MappedNpy(folder / "rows.npy")),
    ):
        for workers in (0, 1, 2):
            options: dict[str, Any] = {"persistent_workers": True} if workers else {}
            loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, **options)
            kinds[f"{name}, {workers} workers"] = lambda loader=loader: read_all(loader)
    kinds["preadv + hash"] = lambda: preadv_and_hash(folder, one_buffer=False)
    kinds["one buffer"] = lambda: preadv_and_hash(folder, one_buffer=True)
    return kinds


def cpu_seconds() -> float:
    """Of this process and its workers."""
    own = psutil.Process()
    times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def measure_records(folder: Path, options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """By kind: seconds and processor seconds of each round. Ranks meet before each measurement."""
    torch.set_num_threads(1)
    kinds = record_readers(folder, options.samples, options.threads)
    for read in kinds.values():
        read()
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for number in range(options.rounds):
        for place, (kind, read) in enumerate(kinds.items()):
            meet(folder, f"{number}-{place}", options)
            began, cpu = time.perf_counter(), cpu_seconds()
            for _ in range(options.epochs):
                read()
            found[kind].append((time.perf_counter() - began, cpu_seconds() - cpu))
    return found


def meet(folder: Path, name: str, options: argparse.Namespace) -> None:
    """Wait until every rank is here."""
    (folder / f"{name}.{options.rank}").touch()
    while len(list(folder.glob(f"{name}.*"))) < options.ranks:
        time.sleep(0.001)


def report_records(by_rank: list[dict[str, list[tuple[float, float]]]], options: argparse.Namespace) -> None:
    num_bytes = options.epochs * options.samples * RECORD_BYTES
    rows = [["", "MB/s", "CPU s per GB", "feed's rate / this", "Pack.fetch's rate / this"]]
    rates = {
        kind: [sum(num_bytes / rank[kind][n][0] for rank in by_rank) for n in range(options.rounds)]
        for kind in by_rank[0]
    }
    for kind, each in rates.items():
        cpu = statistics.median(cpu for rank in by_rank for _, cpu in rank[kind]) / (num_bytes / 1e9)
        ratios = [
            statistics.median(a / b for a, b in zip(rates[ours], each, strict=True)) for ours in ("feed", "Pack.fetch")
        ]
        rows.append([kind, f"{statistics.median(each) / MB:.0f}", f"{cpu:.3f}", *(f"{ratio:.2f}" for ratio in ratios)])
    print(format_table(rows))


def run_records(options: argparse.Namespace) -> None:
    if options.folder is not None:  # a further rank
        print(repr(measure_records(Path(options.folder), options)))
        return
    print(describe_machine())
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        make_records(Path(name), options.samples)
        others = []
        for rank in range(1, options.ranks):
            words = [sys.executable, "-m", "bench.feed", *sys.argv[1:], "--folder", name, "--rank", str(rank)]
            others.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        by_rank = [measure_records(Path(name), options)]
        by_rank += [eval(other.communicate()[0], {"__builtins__": {}}) for other in others]  # our own process's repr
    report_records(by_rank, options)


def make_images(folder: Path, count: int) -> None:
    """Files as a folder of images has them; what is in them does not matter here."""
    content = np.random.default_rng(0).bytes(IMAGE_BYTES + count)
    for number in range(count):
        path = folder / f"{number % NUM_CLASSES:03}" / f"{number:06}.jpg"
        if number < NUM_CLASSES:
            path.parent.mkdir(parents=True)
        path.write_bytes(content[number : number + IMAGE_BYTES])


def sync(folder: Path) -> None:
    subprocess.run(["sync", "-f", str(folder)], check=True)


def run_packing(options: argparse.Namespace) -> None:
    print(describe_machine())
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        make_images(folder / "images", options.images)
        sync(folder)
        seconds: dict[str, list[float]] = {kind: [] for kind in ("cp", "cp and sync", "pack")}
        for _ in range(options.rounds):
            began = time.perf_counter()
            subprocess.run(["cp", "-r", f"{name}/images", f"{name}/copy"], check=True)
            seconds["cp"].append(time.perf_counter() - began)
            sync(folder)
            seconds["cp and sync"].append(time.perf_counter() - began)
            shutil.rmtree(folder / "copy")
            sync(folder)
            began = time.perf_counter()
            pack(open_source(folder / "images"), folder / "pack", threads=options.threads)
            seconds["pack"].append(time.perf_counter() - began)
            shutil.rmtree(folder / "pack")
            sync(folder)
    rows = [["", "s", "MB/s", "pack's time / this"]]
    for kind, each in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(seconds["pack"], each, strict=True))
        median = statistics.median(each)
        rows.append([kind, f"{median:.2f}", f"{options.images * IMAGE_BYTES / MB / median:.0f}", f"{ratio:.2f}"])
    print(format_table(rows))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["records", "packing", "orders", "shared"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5, help="in one measurement; processor time has steps of 10 ms")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--compute-ms", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--dir", default=None, help="a folder of the disk to measure")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "orders":
        run_orders(options.rounds)
    elif options.part == "shared":
        run_shared(options)
    else:
        run_records(options) if options.part == "records" else run_packing(options)


if __name__ == "__main__":
    main()
