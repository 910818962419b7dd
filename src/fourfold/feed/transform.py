"""Transforms: what a user's function makes of each sample, such as an augmented image.

transform  (sample, generator) -> sample, which draws from the torch.Generator that it is given; or (sample) -> sample
view       a transformed source in one epoch
Law: the numbers that the generator gives are a function of (seed, epoch, sample). So augmented samples are the same on
any number of ranks and threads, and after a resume.

Transforms run in threads. One that draws from torch's, Python's or NumPy's own generators is called for one sample at a
time, as `sample_rng` does with such samples: the first batch shows it.

Law: a signature is read once, where the transform is given; what can be called in neither way is refused there.
spec     FILE.py:name, a function of (sample, generator) or of the sample
slot     growing memory that this process and one of its workers map; a sample goes there and comes back as raw bytes
message  a line of JSON on a socket: how the sample in the slot is laid out, and the seed of its generator
Law: nothing is pickled, and a sample is what the function would make of it in this process. A worker ends when its
socket closes, so none outlives this process.
"""

import functools
import hashlib
import inspect
import os
import queue
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from inspect import Parameter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset

from fourfold.environment.python_source import closest_if_missing
from fourfold.feed.pack.schema import Schema
from fourfold.feed.pack.values import Encoder, decode, schema_of
from fourfold.feed.source import CollatedSource, read_samples, source_attribute
from fourfold.feed.stretches import StretchThreads
from fourfold.torch_kit import memory
from fourfold.torch_kit.torch_private import uncompiled
from fourfold.words import argument_checks
from fourfold.words.error_notes import error_line
from fourfold.words.errors import DataError, FourfoldError, Problem
from fourfold.words.task import Source

# What a source may have besides its samples. Transforms change none of it.
PASSED_ON = ("bytes_read", "expect_batches", "sample_key", "sample_order", "shard_sizes")
SampleTransform = Callable[..., Any] | str


class Transformed:
    """A source whose samples pass a transform: `transform(source[i], generator)`.

    transform  a function of (sample, generator), or of the sample alone, as torchvision's are; it runs in threads. Or
               "FILE.py:name", which runs in processes of its own
    threads    or processes, that transform the samples of a batch; None: one for each core, at most 16
    Sources are read by one thread, unless they have an attribute `thread_safe` that is true, as `ff.Pack` has.
    Raises DataError for a source without numbered samples; and with the sample for a transform that raises.
    """

    def __init__(self, source: Source, transform: SampleTransform, *, threads: int | None = None) -> None:
        problems = argument_checks.int_problems("threads", threads, minimum=1, optional=True)
        has_samples = hasattr(source, "__getitem__") and hasattr(source, "__len__")
        if not has_samples or isinstance(source, IterableDataset):
            got = argument_checks.format_argument("source", source)
            problems.append(Problem(got, "numbered samples, len(source) and source[i]", "the transform in its dataset"))
        if problems:
            raise DataError(problems, where=WHERE)
        num_threads = threads or min(16, os.cpu_count() or 1)
        self._threads = StretchThreads(num_threads, "fourfold transform")
        self.source = source
        self.transform = ProcessTransform(transform, num_threads) if isinstance(transform, str) else transform
        self.call = with_generator(self.transform)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int, /) -> Any:
        return self.in_epoch(0, 0)[index]

    def __reduce__(self) -> tuple[Any, ...]:  # to a worker process of a DataLoader
        remake = functools.partial(Transformed, threads=self._threads.num_threads)
        return remake, (self.source, self.transform)

    def __getattr__(self, name: str) -> Any:
        if name in PASSED_ON:
            return source_attribute(self.source, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def in_epoch(self, seed: int, epoch: int) -> "_EpochView":
        """The samples as they are in this epoch."""
        return _EpochView(self, seed, epoch)

    def map(self, function: Callable[[int], Any], count: int) -> list[Any]:
        """`function(0)` to `function(count - 1)`, in threads."""
        values: list[Any] = [None] * count

        def work(start: int, stop: int) -> None:
            values[start:stop] = [function(index) for index in range(start, stop)]

        self._threads.run(count, max(1, min(self._threads.num_threads, count)), work)
        return values


class _EpochView:
    """The samples of a transformed source in one epoch."""

    def __init__(self, transformed: Transformed, seed: int, epoch: int) -> None:
        self._transformed, self._seed, self._epoch = transformed, seed, epoch

    def __len__(self) -> int:
        return len(self._transformed)

    def __getitem__(self, index: int, /) -> Any:
        return self._transform(index, read_samples(self._transformed.source, [index])[0])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """These samples, transformed in threads."""
        transformed, source = self._transformed, self._transformed.source
        if getattr(source, "thread_safe", False):
            return transformed.map(lambda row: self[indices[row]], len(indices))
        samples = read_samples(source, indices)
        return transformed.map(lambda row: self._transform(indices[row], samples[row]), len(indices))

    def _transform(self, index: int, sample: Any) -> Any:
        generator = torch.Generator().manual_seed(sample_seed(self._seed, self._epoch, index))
        try:
            return self._transformed.call(sample, generator)
        except FourfoldError:
            raise
        except TransformError as error:
            got = f"{sample_name(self._transformed.source, index)}: {error}"
            raise DataError(Problem(got, "a transform that takes every sample"), where=WHERE) from None
        except Exception as error:
            got = f"{sample_name(self._transformed.source, index)}: {error_line(error)}"
            attempt = APART if _takes_apart(self._transformed.transform, sample) else ""
            raise DataError(Problem(got, "a transform that takes every sample", attempt), where=WHERE) from error


def sample_seed(seed: int, epoch: int, number: int) -> int:
    """What seeds the generator of a sample's transform."""
    # Not the seed of `sample_rng`: what a sample draws and what its transform draws must differ.
    text = f"fourfold transform {seed} {epoch} {number}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % 2**63


def sample_name(source: Any, index: int) -> str:
    """The number of a sample, and its key if the source has keys."""
    key = source_attribute(source, "sample_key")
    return f"sample {index}" if key is None else f"sample {index} ({key(index)})"


def transformed(source: Any, transform: SampleTransform | None) -> Any:
    """The source with this transform, if there is one."""
    return source if transform is None else Transformed(source, transform)


def in_epoch(source: Any, seed: int, epoch: int) -> Any:
    """The source in an epoch: with transforms that draw its numbers, if it has transforms."""
    if isinstance(source, Transformed):
        return source.in_epoch(seed, epoch)
    if isinstance(source, CollatedSource) and isinstance(source.dataset, Transformed):
        return CollatedSource(source.dataset.in_epoch(seed, epoch), source.collate_fn)
    return source


# ---- Transform signature: whether a transform takes (sample, generator), or the sample alone, as torchvision's do ---

WHERE = "the transform"
NEED = "a function (sample, generator) -> sample, or (sample) -> sample"
APART = "lambda sample: transform(*sample)"
GENERATOR_NAMES = ("generator", "rng", "gen")
POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


Call = Callable[[Any, torch.Generator], Any]


def with_generator(transform: Any) -> Call:
    """The transform as a function of (sample, generator), which raises TypeError where the transform returns no sample.

    Raises DataError if it needs other arguments.
    """
    adapted = _with_generator(transform)

    def call(sample: Any, generator: torch.Generator) -> Any:
        result = adapted(sample, generator)
        if result is None or inspect.isawaitable(result) or inspect.isgenerator(result):
            raise TypeError(f"it returned {'None' if result is None else f'a {type(result).__name__}'}, not the sample")
        return result

    return call


def _with_generator(transform: Any) -> Call:
    """The transform is given the generator if a parameter has one of its names, or its type, or if a function takes any
    number of arguments. A module that takes any number, as torchvision's v2 transforms do, is given the sample alone,
    and so is what has no signature, such as a function written in C.
    """
    if problems := argument_checks.callable_problems("transform", transform, need=f"{NEED}, or FILE.py:name"):
        raise DataError(problems, where=WHERE)
    signature = _signature(transform)
    if signature is None:
        return _alone(transform)
    parameters = list(signature.parameters.values())
    positional = [each for each in parameters if each.kind in POSITIONAL]
    any_kinds = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
    takes_any = not isinstance(transform, nn.Module) and any(each.kind is any_kinds[0] for each in parameters)
    place = next((each for each in parameters[1:] if _is_generator(each) and each.kind not in any_kinds), None)
    if place is None:
        adapt = _both if takes_any and len(positional) < 2 else _alone
    else:
        adapt = _both if place in positional[1:2] else functools.partial(_by_name, name=place.name)
    try:
        adapt(signature.bind)(None, torch.default_generator)
    except TypeError as error:
        name = getattr(transform, "__name__", type(transform).__name__)
        is_class = isinstance(transform, type)
        is_apart = place is None and sum(each.default is Parameter.empty for each in positional) > 1
        attempt = f"{f'{APART}, or ' * is_apart}functools.partial, which binds other arguments"
        attempt = f"an instance, {name}(…)" if is_class else attempt
        raise DataError(Problem(f"transform = {name}{signature}", NEED, attempt), where=WHERE) from error
    return adapt(transform)


def _signature(transform: Any) -> inspect.Signature | None:
    """None: it has none."""
    try:
        return inspect.signature(uncompiled(transform).forward if isinstance(transform, nn.Module) else transform)
    except (TypeError, ValueError):
        return None


def _is_generator(parameter: Parameter) -> bool:
    kind = str(parameter.annotation)
    return parameter.name in GENERATOR_NAMES or ("torch" in kind and "Generator" in kind)


def _takes_apart(transform: Any, sample: Any) -> bool:
    """Whether a transform that is given the sample alone has a parameter for each of its parts."""
    signature = _signature(transform)
    parameters = [] if signature is None else list(signature.parameters.values())
    count = 0 if any(map(_is_generator, parameters)) else sum(each.kind in POSITIONAL for each in parameters)
    return isinstance(sample, tuple) and 1 < len(sample) <= count


def _both(function: Any) -> Call:
    return function


def _by_name(function: Any, *, name: str) -> Call:
    return lambda sample, generator: function(sample, **{name: generator})


def _alone(function: Any) -> Call:
    return lambda sample, generator: function(sample)


# ---- Transform processes: a transform that is mostly Python, in processes of its own --------------------------------

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
        if (close := closest_if_missing(Path(file), name)) is not None:
            got = f"transform = {spec}: no {name} in {file}"
            raise DataError(Problem(got, "a function in the file", close and f"{file}:{close}"), where=WHERE)
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
