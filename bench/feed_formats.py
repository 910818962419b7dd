"""Feed, foreign formats: `ff.open_source` against the formats' own readers, which are in an environment of their own.

    python3 -m venv PEERS && PEERS/bin/pip install torch mosaicml-streaming webdataset tfrecord pyarrow
    PYTHONPATH=src:. python -m bench.feed_formats --peers PEERS/bin/python [--rounds 5] [--samples 1000]

Samples of 114,688 B and a number, in files of 100, written by the peers' libraries and read once before, so that all
are in the page cache. Batches of 64; one process, no workers of a DataLoader. Ours are read by `ff.Feed`, in the global
order and in windows of one file. Of the peers, MDS shuffles all (py1s) and WebDataset in a buffer of 100; those of
TFRecord and Parquet do not shuffle, and that of TFRecord checks no checksum.
Law: in each round each reader reads all samples once, after a first time that is not counted; rates are medians.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.measurement import MB, describe_machine, format_table
from fourfold.feed.feed import Feed
from fourfold.feed.formats.open import open_source

RECORD_BYTES, BATCH = 114_688, 64
KINDS = {"MDS": "mds", "WebDataset": "tar", "TFRecord": "tfrecord", "Parquet": "parquet"}
PEER = Path(__file__).with_name("feed_formats_peer.py")


def read_ours(folder: Path, order: dict[str, Any]) -> float:
    """The seconds of one epoch."""
    feed = Feed(open_source(folder), batch_size=BATCH, **order)
    for _ in feed:  # threads, files and pages are there afterwards
        pass
    began = time.perf_counter()
    num_samples = sum(len(next(iter(inputs.values()))) for inputs in feed)
    seconds = time.perf_counter() - began
    assert num_samples == feed.num_samples
    return seconds


def read_peer(python: str, kind: str, folder: Path) -> float:
    return json.loads(subprocess.run([python, PEER, kind, folder], check=True, capture_output=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", required=True, help="Python of the peers' environment")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--dir", default=None, help="a folder of the disk to measure")
    options = parser.parse_args()
    print(describe_machine())
    orders: dict[str, dict[str, Any]] = {"global": {}, "windowed": {"order": "windowed", "window": 1}}
    seconds: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        subprocess.run([options.peers, PEER, "make", name, str(options.samples)], check=True)
        for _ in range(options.rounds):
            for kind, folder in KINDS.items():
                for reader, order in orders.items():
                    seconds.setdefault((kind, reader), []).append(read_ours(Path(name, folder), order))
                own = read_peer(options.peers, folder, Path(name, folder))
                seconds.setdefault((kind, "its own reader"), []).append(own)
    rows = [["", "reader", "MB/s"]]
    num_bytes = options.samples * RECORD_BYTES
    rows += [
        [kind, reader, f"{num_bytes / MB / statistics.median(each):.0f}"] for (kind, reader), each in seconds.items()
    ]
    print(format_table(rows))


if __name__ == "__main__":
    main()
