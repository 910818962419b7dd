"""`fourfold feed`: its commands and their help, declared for typer.

Law: as in `commands`: parsing runs nothing and does not import torch.
"""

import functools
from collections.abc import Callable
from typing import Annotated

import typer

Command = Callable[[], int]

feed = typer.Typer(rich_markup_mode=None, help="Measure what feeds a training with data.")


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
    origin=200MB           hold the storage to so many bytes a second, for all accelerators together
    scale=0.01             multiplies every size and origin=; times stay, so utilizations do
    checkpoint=1GB         bytes of the checkpoint phase; 0 leaves it out
    folder=feed-bench      where the data goes; seed=0
    json=FILE page=FILE    the results as JSON; the page (default: bench.html in the folder)
    """
    from fourfold.cli import feed_bench

    return functools.partial(feed_bench.run_bench, words or [])
