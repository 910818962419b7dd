"""Transform processes: a transform that is mostly Python, in processes of its own.

spec     FILE.py:name, a function of (sample, generator) or of the sample
slot     growing memory that this process and one of its workers map; a sample goes there and comes back as raw bytes
message  a line of JSON on a socket: how the sample in the slot is laid out, and the seed of its generator
Law: nothing is pickled, and a sample is what the function would make of it in this process. A worker ends when its
socket closes, so none outlives this process.
"""

import os
import queue
import socket
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from fourfold.feed.pack.schema import Schema
from fourfold.feed.pack.values import Encoder, decode, schema_of
from fourfold.feed.transform_signature import NEED, WHERE
from fourfold.torch_kit import memory
from fourfold.words.errors import DataError, Problem

SLOT_BYTES = 2**34  # of addresses, not of memory
EXIT_SECONDS = 5.0


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sample in the slot, or an error of the transform. `seed`: of its generator."""

    num_bytes: int = 0
    schema: Schema | None = None
    seed: int = 0
    error: str = ""


class TransformError(Exception):
    """The transform has failed in its process; the text says how."""


class Slot:
    """One end of a socket with the memory that both ends map. `handle` is closed."""

    def __init__(self, connection: socket.socket, handle: int) -> None:
        self._lines, self._connection = connection.makefile("rb"), connection
        self._handle, self._reserved = os.dup(handle), 0
        self._content = np.frombuffer(memory.map_shared(handle), dtype=np.uint8)

    def send(self, sample: Any, seed: int = 0) -> None:
        """Write a sample. Raises DataError for what is no sample."""
        schema = schema_of(sample, "the sample")
        parts = [np.frombuffer(part, dtype=np.uint8) for part in Encoder(schema).encode(sample, "the sample")]
        num_bytes = sum(part.size for part in parts)
        if num_bytes > self._reserved:
            memory.grow(self._handle, 0, num_bytes)
            self._reserved = num_bytes
        np.concatenate(parts, out=self._content[:num_bytes])
        self.reply(Message(num_bytes, schema, seed))

    def reply(self, message: Message) -> None:
        """Send a message alone."""
        self._connection.sendall(msgspec.json.encode(message) + b"\n")

    def receive(self) -> Message | None:
        """The next message; None if the other end is gone."""
        line = self._lines.readline()
        return msgspec.json.decode(line, type=Message) if line.endswith(b"\n") else None

    def sample(self, message: Message) -> Any:
        """The sample that a message is about, in memory of its own."""
        assert message.schema is not None
        return decode(message.schema, self._content[: message.num_bytes].copy(), images=False)

    def close(self) -> None:
        """Close this end; then the other end's `receive` returns None."""
        self._lines.close()
        self._connection.close()
        os.close(self._handle)


class _Worker:
    """A process, and the slot that it shares with this one."""

    def __init__(self, spec: str) -> None:
        ours, theirs = socket.socketpair()
        handle = memory.create_growing(SLOT_BYTES)
        passed = (theirs.fileno(), handle)
        command = [sys.executable, "-m", "fourfold.feed.transform_worker", spec, *map(str, passed)]
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL)
        self.slot = Slot(ours, handle)
        self.close = weakref.finalize(self, _end, self.process, self.slot)

    def call(self, sample: Any, seed: int) -> Any:
        """The transformed sample. Raises TransformError."""
        try:
            self.slot.send(sample, seed)
            message = self.slot.receive()
        except OSError:  # the worker is gone
            message = None
        if message is None:
            code = self.process.wait(EXIT_SECONDS)
            raise TransformError(f"its worker process ended with code {code}")
        if message.error:
            raise TransformError(message.error)
        return self.slot.sample(message)


def _end(process: "subprocess.Popen[bytes]", slot: Slot) -> None:
    slot.close()
    try:
        process.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:  # it is in the middle of a sample
        process.kill()
        process.wait()


class ProcessTransform:
    """The transform FILE.py:name in up to `count` processes, as a function that threads may call.

    Raises DataError if there is no such file.
    """

    def __init__(self, spec: str, count: int) -> None:
        file, _, name = spec.partition(":")
        if not file.endswith(".py") or not name.isidentifier() or not Path(file).is_file():
            need = f"FILE.py:name, in a Python file {NEED}"
            is_missing = file.endswith(".py") and not Path(file).is_file()
            got = f"transform = {spec}{f': no file {file}' if is_missing else ''}"
            raise DataError(Problem(got, need, "transform='augment.py:augment'"), where=WHERE)
        self.spec, self.count = f"{Path(file).resolve()}:{name}", count
        self._process = 0
        self._start()

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcessTransform, (self.spec, self.count)

    def _start(self) -> None:
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(self.count):
            self._idle.put(None)  # started when it is needed
        self._process = os.getpid()

    def __call__(self, sample: Any, generator: torch.Generator) -> Any:
        if self._process != os.getpid():  # workers belong to the process that has started them
            self._start()
        worker = self._idle.get()
        try:
            worker = _Worker(self.spec) if worker is None else worker
            result = worker.call(sample, generator.initial_seed())
        except BaseException:
            if worker is not None:
                worker.close()
            self._idle.put(None)
            raise
        self._idle.put(worker)
        return result
