"""`fourfold feed`: its commands and their help, declared for typer.

Law: as in `commands`: parsing runs nothing and does not import torch.
"""

import functools
from collections.abc import Callable
from typing import Annotated

import typer

Command = Callable[[], int]

feed = typer.Typer(rich_markup_mode=None, help="Pack data, and measure what feeds a training with it.")


@feed.callback(invoke_without_command=True)
def feed_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@feed.command(options_metavar="[-h]", short_help="Emulate a training's accelerators, and measure how they are fed.")
def bench(
    words: Annotated[list[str] | None, typer.Argument(metavar="WORKLOAD|FILE.yaml KEY=VALUE", hidden=True)] = None,
) -> Command:
    """Emulate training as DLIO does: real files, the real feed, and accelerators that only wait. Prints how much of
    their time they compute (utilization), next to what this disk delivers.

    WORKLOAD is unet3d, resnet50, cosmoflow, bert or lecture; FILE.yaml is a workload of DLIO (pip install
    'fourfold[dlio]'). The files are generated in folder= and stay there. Sizes are scaled to what a laptop can do.

    \b
    accelerator=h100       whose time a step takes: a100, h100 or v100; compute=0.2 sets it in seconds, and
                           compute=RUN takes the median step of a run of fourfold train
    accelerators=1,2,4,8   how many train together; several numbers, one training each
    samples=1000           of the data set; steps=20 of an epoch; epochs=2; batch_size=8 of one accelerator
    format=npy             npy or npz; read_threads=4 of each accelerator
    cache=drop             drop the files from the page cache before each epoch; keep leaves them there
    direct=true            read past the page cache
    origin=200MB/s         hold the storage to this rate, for all accelerators together
    staged=true            copy the files to another folder ahead of need, as packs with a cache are
    scale=0.01             multiplies every size and origin=; times stay, so utilizations do
    checkpoint=1GB         bytes of the checkpoint phase; 0 leaves it out
    folder=feed-bench      where the data goes; seed=0
    json=FILE page=FILE    the results as JSON; the page (default: bench.html in the folder)
    """
    from fourfold.cli import feed_bench

    return functools.partial(feed_bench.run_bench, words or [])


Words = Annotated[list[str] | None, typer.Argument(metavar="SOURCE DEST KEY=VALUE", hidden=True)]
PackPath = Annotated[str, typer.Argument(metavar="PACK", help="The folder of a pack.", show_default=False)]
Threads = Annotated[int | None, typer.Option("--threads", metavar="N", help="That read. Default: one for each core.")]


@feed.command(options_metavar="[-h]", short_help="Write samples into a pack: large files with an index and checksums.")
def pack(words: Words = None) -> Command:
    """Write the samples of SOURCE into a new pack, the folder DEST. If it is cut off, the same command goes on.

    SOURCE is a file, or a folder of files of one kind, or FILE.py:NAME.

    \b
    images       a file per sample; folders below SOURCE are classes. Stored as they are, decoded when read
    .npy .npz    one file: a sample per row; a folder: a sample per file. No pickles
    .txt         a sample per line
    .jsonl       a sample per line, an object
    .csv .tsv    a sample per row; the first row names the columns
    .parquet .arrow, folders of `datasets`, .tar (WebDataset), MDS, .tfrecord, .h5, Megatron's .bin and .idx
    FILE.py:NAME a source, an iterable, or a function that makes one

    \b
    columns=x,y          the fields of a sample; default: all
    target=label         a field: samples are pairs (the others, it)
    dtype=float32        of all numbers but the target's; default: as in the files
    rows=true            of a folder of .npy or .npz: a sample per row of each file

    \b
    shard_bytes=256MiB   the size of a file of the pack
    threads=8            that read and write; default: one for each core
    compression=zstd     of each record (pip install 'fourfold[zstd]'); default: none
    variable=pixels,mask arrays whose shapes differ, if the first samples do not show it
    row_tokens=1024      pack token sequences into rows of 1024 tokens; text is its bytes
    """
    from fourfold.cli import feed_pack

    return functools.partial(feed_pack.run_pack, words or [])


@feed.command("verify")
def verify_pack(path: PackPath, threads: Threads = None) -> Command:
    """Check every byte of a pack. Names damaged records; then the exit code is 1."""
    from fourfold.cli import feed_pack

    return functools.partial(feed_pack.run_verify, path, threads)


@feed.command("show")
def show_pack(path: PackPath) -> Command:
    """Print a pack's fields, its first samples, sizes and class balance."""
    from fourfold.cli import feed_pack

    return functools.partial(feed_pack.run_show, path)
