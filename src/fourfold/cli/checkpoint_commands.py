"""`fourfold checkpoint`: its commands and their help, declared for typer.

Law: as in `commands`: parsing runs nothing and does not import torch.
"""

import functools
from collections.abc import Callable
from typing import Annotated

import typer

Command = Callable[[], int]

checkpoints = typer.Typer(rich_markup_mode=None, help="List, verify and export checkpoints.")


@checkpoints.callback(invoke_without_command=True)
def checkpoint_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder, or its name in runs/.", show_default=False)]
Step = Annotated[
    int | None,
    typer.Option("--step", metavar="STEP", help="The checkpoint of this step. Default: the newest valid one."),
]


@checkpoints.command("list")
def list_checkpoints(run: Run) -> Command:
    """List a run's checkpoints: step, size, age, validation loss."""
    from fourfold.cli import checkpoint

    return functools.partial(checkpoint.list_checkpoints, run)


@checkpoints.command("verify")
def verify_checkpoints(run: Run) -> Command:
    """Check size and checksum of every file. Names damaged files; then the exit code is 1."""
    from fourfold.cli import checkpoint

    return functools.partial(checkpoint.verify_checkpoints, run)


@checkpoints.command("export", short_help="Write the weights for other libraries: safetensors, transformers, DCP.")
def export_checkpoint(
    run: Run,
    path: Annotated[
        str | None, typer.Argument(metavar="[PATH]", help="Default: NAME-STEP.safetensors, -hf or -dcp, here.")
    ] = None,
    form: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="safetensors, hf or dcp.", show_default="safetensors")
    ] = "safetensors",
    step: Step = None,
    ema: Annotated[bool, typer.Option("--ema", help="Export the averaged weights.")] = False,
) -> Command:
    """Write the weights of a checkpoint for others to read. PATH and its folders are made.

    \b
    safetensors  one plain file of the weights under the model's own names, which init=FILE reads too
    hf           a folder for from_pretrained(PATH) of transformers: weights, config, and the tokenizer if the task
                 has one. The model must be one of transformers; its config was saved when training began
    dcp          a folder for torch.distributed.checkpoint.load. Torch writes it, and its .metadata is a pickle,
                 which Fourfold itself never reads
    """
    from fourfold.cli import checkpoint

    return functools.partial(checkpoint.export_checkpoint, run, path, form=form, step=step, ema=ema)
