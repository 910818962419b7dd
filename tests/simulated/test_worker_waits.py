"""What a worker of a DataLoader waits for stands in the heartbeat of its rank, however the worker was started."""

import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import fourfold as ff
from fourfold.environment import known_waits
from fourfold.environment.known_waits import SLOT_WORDS, waiting_for
from fourfold.launcher.hang_detector import HeartbeatFile
from fourfold.trainer import heartbeat
from fourfold.trainer.heartbeat import HEARTBEAT_VARIABLE

SECONDS = 60.0


class Waiting(Dataset[tuple[torch.Tensor, int]]):
    """Samples for which a worker waits until a file is there; they are 1 if it came."""

    def __init__(self, seen: Path) -> None:
        self._seen = seen

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        deadline = time.monotonic() + SECONDS
        with waiting_for("a slow disk"):
            while not self._seen.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        return torch.tensor(float(self._seen.exists())), index


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_launcher_reads_what_a_worker_waits_for(method: str, tmp_path: Path) -> None:
    heartbeats, seen, ended = HeartbeatFile(tmp_path, 2), tmp_path / "seen", threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            if heartbeats.read()[1].wait.what == "a slow disk":
                seen.touch()

    loader = DataLoader(Waiting(seen), batch_size=4, num_workers=1, multiprocessing_context=method)
    feed = ff.Feed(loader)  # made before the rank has its heartbeat, as in `train`
    heartbeat.from_environment({HEARTBEAT_VARIABLE: str(heartbeats.path), "LOCAL_RANK": "1"})
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert [inputs.tolist() for inputs, _ in feed] == [[1.0] * 4]
    finally:
        ended.set()
        watcher.join()
        known_waits.write_to(memoryview(bytearray(8 * SLOT_WORDS)).cast("q"))
