"""The formats' own libraries: they write the files of `bench/feed_formats.py`, and read them, in their environment.

Law: what is timed is one epoch to batches of 64 as the library's documentation has it, after one that is not.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import json
import sys
import tarfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

RECORD_BYTES, BATCH, PER_FILE = 114_688, 64, 100


def make(folder: Path, count: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from streaming import MDSWriter
    from tfrecord.writer import TFRecordWriter

    rows = np.random.default_rng(0).integers(0, 256, (count, RECORD_BYTES), dtype=np.uint8)
    for name in ("mds", "tar", "tfrecord", "parquet"):
        (folder / name).mkdir()
    with MDSWriter(
        out=str(folder / "mds"), columns={"x": "bytes", "n": "int"}, size_limit=PER_FILE * RECORD_BYTES
    ) as writer:
        for number, row in enumerate(rows):
            writer.write({"x": row.tobytes(), "n": number})
    for start in range(0, count, PER_FILE):
        part, name = rows[start : start + PER_FILE], f"{start:06}"
        table = pa.table({"x": [row.tobytes() for row in part], "n": list(range(start, start + len(part)))})
        pq.write_table(table, folder / "parquet" / f"{name}.parquet", compression="none", use_dictionary=False)
        records = TFRecordWriter(str(folder / "tfrecord" / f"{name}.tfrecord"))
        with tarfile.open(folder / "tar" / f"{name}.tar", "w") as archive:
            for number, row in enumerate(part, start):
                records.write({"x": (row.tobytes(), "byte"), "n": (number, "int")})
                for field, content in (("bin", row.tobytes()), ("cls", b"%d" % number)):
                    info = tarfile.TarInfo(f"{number:06}.{field}")
                    info.size = len(content)
                    archive.addfile(info, BytesIO(content))
        records.close()


def loader(kind: str, folder: Path) -> Any:
    """What gives batches, once for each epoch."""
    from torch.utils.data import DataLoader

    paths = [str(path) for path in sorted(folder.iterdir())]
    if kind == "mds":
        from streaming import StreamingDataset

        data: Any = StreamingDataset(local=str(folder), shuffle=True, shuffle_algo="py1s", batch_size=BATCH)
        return lambda: DataLoader(data, BATCH, collate_fn=list)
    if kind == "tar":
        import webdataset

        shards = webdataset.WebDataset(paths, shardshuffle=len(paths)).shuffle(100).decode()
        return lambda: shards.batched(BATCH, collation_fn=list)
    if kind == "tfrecord":
        from tfrecord import reader

        read = reader.multi_tfrecord_loader
        pattern = str(folder / "{}.tfrecord")
        splits = {Path(path).stem: 1 / len(paths) for path in paths}
        description = {"x": "byte", "n": "int"}
        return lambda: ([each] for each in read(pattern, None, splits, description, infinite=False))
    import pyarrow.dataset

    return lambda: (batch.to_pylist() for batch in pyarrow.dataset.dataset(paths).to_batches(batch_size=BATCH))


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    if kind == "make":
        make(folder, int(sys.argv[3]))
        return
    batches, count, seconds = loader(kind, folder), 0, 0.0
    for _ in range(2):
        began, count = time.perf_counter(), 0
        for batch in batches():
            count += len(batch)
        seconds = time.perf_counter() - began
    if not count:
        raise SystemExit("no samples")
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
