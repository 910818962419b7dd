"""Laws of transforms in processes of their own."""

import os

import pytest
import torch

from fourfold.feed.feed import Feed
from fourfold.feed.transform import Transformed
from fourfold.words.errors import DataError

NUM_SAMPLES = 12
SOURCE = [(torch.full((3,), float(number)), number) for number in range(NUM_SAMPLES)]


def jitter(sample, generator):
    inputs, number = sample
    return inputs + torch.rand(3, generator=generator), number


def batches(transform, threads):
    return list(Feed.single_rank(Transformed(SOURCE, transform, threads=threads), batch_size=5, seed=3))


WORKER_FILE = """
import os, random, signal, torch

def jitter(sample, generator):
    inputs, number = sample
    os.kill(os.getpid(), signal.SIGTERM)  # as all processes of a job often get it when they shall stop
    assert os.getpid() != %d
    return inputs + torch.rand(3, generator=generator), number

def fail(sample):
    if sample[1] == 7:
        raise ValueError("no such colour")
    return sample

def die(sample, generator):
    os._exit(9)

def forget(sample):
    inputs, number = sample
"""


def test_a_transform_in_processes_gives_what_it_gives_in_threads_and_its_failures_name_the_sample(tmp_path):
    file = tmp_path / "augment.py"
    file.write_text(WORKER_FILE % os.getpid())
    for found, expected in zip(batches(f"{file}:jitter", 2), batches(jitter, 2), strict=True):
        assert all(map(torch.equal, found, expected))
    for name, text in (
        ("fail", "sample 7: ValueError: no such colour"),
        ("die", r"sample \d+: its worker process ended with code 9"),
        ("forget", r"sample \d+: TypeError: it returned None, not the sample"),
        ("nothing", r"no nothing in .*augment.py"),
    ):
        with pytest.raises(DataError, match=text):
            batches(f"{file}:{name}", 1)
    with pytest.raises(DataError, match=r"FILE\.py:name"):
        Transformed(SOURCE, f"{file}")
