"""Batches on their way to a GPU: pinned, copied on a stream of their own, waited for by the step. The GPU is fake."""

import contextlib
import types

import numpy as np
import pytest
import torch

import fourfold as ff
from fourfold.feed import batches, feed
from fourfold.feed.batches import HOST_BATCHES, Batch, CopiedBatches, PinnedBatches

GPU = torch.device("cuda", 0)


class FakeCuda:
    """Notes what is asked of torch.cuda; "GPU" tensors are copies on the CPU."""

    def __init__(self):
        self.calls, self.on_stream = [], False

    def Stream(self, device):
        return types.SimpleNamespace(record_event=lambda: self.calls.append("event recorded") or "event")

    @contextlib.contextmanager
    def stream(self, stream):
        self.on_stream = True
        yield
        self.on_stream = False

    def current_stream(self, device):
        return types.SimpleNamespace(wait_event=lambda event: self.calls.append(f"step waits for {event}"))


@pytest.fixture
def cuda(monkeypatch):
    fake, pinned = FakeCuda(), set()

    def pin(tensor):
        fake.calls.append("pinned")
        result = tensor.clone()
        pinned.add(result.data_ptr())
        return result

    def to(tensor, device, non_blocking):
        assert device == GPU
        assert non_blocking
        assert fake.on_stream
        assert tensor.data_ptr() in pinned or not tensor.numel()
        fake.calls.append("copied")
        return tensor.clone()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: fake.calls.append("kept for the step"))
    return fake


def test_a_batch_is_pinned_copied_on_its_own_stream_and_waited_for_by_the_step(cuda):
    copies, batch = CopiedBatches(GPU, cuda=cuda), Batch(({"x": torch.ones(3), "text": ["a"]}, torch.zeros(2)))
    batch.samples, batch.bytes_read = "these", 7  # type: ignore[assignment]
    started = copies.start(batch)
    assert cuda.calls == ["pinned"] * 2 + ["copied"] * 2 + ["event recorded"]
    finished = copies.finish(started)
    assert cuda.calls[5:] == ["step waits for event"] + ["kept for the step"] * 2
    assert type(finished) is Batch
    assert (finished.samples, finished.bytes_read) == ("these", 7)
    assert torch.equal(finished[0]["x"], torch.ones(3))
    assert finished[0]["text"] == ["a"]


def test_a_feed_copies_in_the_thread_that_reads_ahead_and_keeps_what_a_batch_knows(cuda, monkeypatch):
    source = [(np.full(3, number, np.float32), number) for number in range(40)]
    expected = [(batch[0].tolist(), batch.samples) for batch in ff.Feed(source, batch_size=4)]
    monkeypatch.setattr(feed, "device_batches", lambda device, compares: CopiedBatches(device, cuda=cuda))
    read = ff.Feed(source, batch_size=4)
    read.copy_to(GPU, compares=False)
    found = [(batch[0].tolist(), batch.samples) for batch in read]
    assert [values for values, _ in found] == [values for values, _ in expected]
    assert [samples[:7] for _, samples in found] == [samples[:7] for _, samples in expected]
    first_wait = cuda.calls.index("step waits for event")
    assert cuda.calls[:first_wait].count("event recorded") >= 1
    assert cuda.calls.count("event recorded") == cuda.calls.count("step waits for event") == 10


def test_batches_that_ranks_compare_stay_on_the_host_and_are_pinned(cuda):
    chosen = batches.device_batches(GPU, compares=True)
    assert isinstance(chosen, PinnedBatches)
    assert torch.equal(chosen.finish(chosen.start((torch.ones(2), torch.zeros(1))))[0], torch.ones(2))
    assert cuda.calls == ["pinned"] * 2
    assert batches.device_batches(torch.device("cpu"), compares=False) is HOST_BATCHES


def test_a_pack_reads_into_pinned_memory_where_its_batches_go_to_a_gpu(cuda, monkeypatch, tmp_path):
    ff.pack([(np.full(5, number, np.float32), number) for number in range(20)], tmp_path / "pack")
    source, empty, asked = ff.Pack(tmp_path / "pack"), torch.empty, []

    def pinned_empty(size, *, pin_memory=False, **how):
        asked.append(pin_memory)
        return empty(size, **how)

    read = ff.Feed(source, batch_size=5, shuffle=False)
    monkeypatch.setattr(feed, "device_batches", lambda device, compares: HOST_BATCHES)
    read.copy_to(GPU, compares=False)
    monkeypatch.setattr(torch, "empty", pinned_empty)
    assert [batch[1].tolist() for batch in read] == [list(range(start, start + 5)) for start in range(0, 20, 5)]
    assert asked.count(True) == 2 * 4
