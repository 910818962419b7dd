"""Codecs: the processor time to encode and decode one bucket, and the bytes that it saves.

    python -m bench.codecs [--rounds 30] [--ranks 2]

encode  from a rank's gradient to its last message, in a step of the steady state
decode  from the messages of all ranks to the sum
Law: configurations take turns in one run. Medians are of the thread's own processor time, which other processes do not
change.
"""

import argparse
import dataclasses
import statistics
import time

import torch

from bench.measurement import describe_machine, format_table
from fourfold.axes.data.rules.buckets import Bucket, Slot
from fourfold.comm.codec import registry
from fourfold.comm.codec.protocol import Codec
from fourfold.plan.codec import CodecSpec, Combine, codec_sent_bytes
from fourfold.torch_kit import memory

# A block of a small language model, in reverse order of definition: 1,050,624 elements, 4.0 MiB of float32.
SHAPES = [(256, 1024), (512,), (1024, 256), (512,), (256, 512), (512, 256), (512,), (1024, 256), (512,)]
WARM_UP = 100  # rounds until the residuals have grown and the thresholds are stable
CODEC_SPECS = {
    "bf16": CodecSpec("bf16"),
    "fp16": CodecSpec("fp16"),
    "int8": CodecSpec("int8"),
    "topk 1 %": CodecSpec("topk", density=0.01),
    "dct 1 %, refresh 100": CodecSpec("dct", density=0.01, refresh_steps=100),
    "dct 1 %, refresh 1": CodecSpec("dct", density=0.01, refresh_steps=1),
    "dct 10 %, refresh 100": CodecSpec("dct", density=0.1, refresh_steps=100),
    "powersgd, rank 2": CodecSpec("powersgd", matrix_rank=2),
    "powersgd, rank 4": CodecSpec("powersgd", matrix_rank=4),
}


@dataclasses.dataclass
class CodecTimes:
    """Processor seconds of encoding and decoding, by step."""

    encode_seconds: list[float] = dataclasses.field(default_factory=list)
    decode_seconds: list[float] = dataclasses.field(default_factory=list)


def make_bucket() -> Bucket:
    slots, start = [], 0
    for number, shape in enumerate(SHAPES):
        stop = start + torch.Size(shape).numel()
        slots.append(Slot(f"p{number}", start, stop))
        start = stop
    return Bucket(0, tuple(slots), start, "float32", 4, 0)


def time_codec(codec: Codec, flat: torch.Tensor, ranks: int, times: CodecTimes) -> None:
    """One reduction, with this rank's own message in place of every rank's."""
    encode = decode = 0.0
    begin = time.thread_time()
    reduction = codec.reduce(flat)
    message = next(reduction)
    encode += time.thread_time() - begin
    for number in range(len(codec.rounds)):
        gathered = message.combine is Combine.GATHER
        reply = [message.payload.clone() for _ in range(ranks)] if gathered else [message.payload]
        begin = time.thread_time()
        try:
            message = reduction.send(reply)
        except StopIteration:
            decode += time.thread_time() - begin
        else:
            assert number + 1 < len(codec.rounds)
            encode += time.thread_time() - begin
    times.encode_seconds.append(encode)
    times.decode_seconds.append(decode)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    memory.keep_freed_memory()  # as every training process does
    bucket, cpu = make_bucket(), torch.device("cpu")
    codecs = {name: registry.make_codec(spec, bucket, SHAPES, device=cpu) for name, spec in CODEC_SPECS.items()}
    times = {name: CodecTimes() for name in codecs}
    dense = 2 * (options.ranks - 1) / options.ranks * bucket.num_bytes
    generator = torch.Generator().manual_seed(0)
    for turn in range(WARM_UP + options.rounds):
        gradient = torch.randn(bucket.size, generator=generator) ** 3
        for name, codec in codecs.items():
            flat = gradient.clone()
            time_codec(codec, flat, options.ranks, times[name] if turn >= WARM_UP else CodecTimes())
    rows = []
    for name, codec in codecs.items():
        encode, decode = statistics.median(times[name].encode_seconds), statistics.median(times[name].decode_seconds)
        sent = codec_sent_bytes(codec.rounds, size=options.ranks)
        rows.append(
            [
                name,
                f"{1e3 * encode:.2f}",
                f"{1e3 * decode:.2f}",
                f"{bucket.num_bytes / (encode + decode) / 1e9:.1f}",
                f"{sent / 1e6:.3f}",
                f"{dense / sent:.1f}",
            ]
        )
    print(describe_machine())
    print(f"one bucket of {bucket.num_bytes / 2**20:.1f} MiB, {options.ranks} ranks, 1 thread, {options.rounds} rounds")
    print(format_table([["codec", "encode, ms", "decode, ms", "GB/s", "sent, MB", "dense / sent"], *rows]))


if __name__ == "__main__":
    main()
