"""Commands: their arguments and their help, declared for typer.

Law: parsing the command line runs nothing and does not import torch; it returns the command as a function.
"""

import contextlib
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from fourfold.cli.output import print_text
from fourfold.words.errors import Problem, SettingError, closest_match, place_of_setting

Command = Callable[[], int]

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # the plain help is twice as fast
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

COMMANDS = (*("train", "run", "show", "plan", "verify", "checkpoint", "feed", "report", "watch", "doctor", "new"),)
WITH_SETTINGS = ("fourfold train", "fourfold show", "fourfold plan", "fourfold verify")
OPTIONS, RUN_OPTIONS = "[-n N]", "[-n N] [--restarts K]"
SHOW_RANKS = "fourfold show lm dp=2"
SETTINGS_PLACE = "{settings}"  # in the docstring of `train`, replaced by the table of settings
FIELDS_PLACE = "{fields}"  # in that of `show`, by the table of the plan's fields


def _offered_words(incomplete: str) -> list[str]:
    """What completion offers for a word of a training."""
    from fourfold.cli.arguments import SETTINGS
    from fourfold.cli.task_loader import BUILT_IN
    from fourfold.plan.plan_fields import PLAN_FIELDS
    from fourfold.plan.recipes import RECIPE_PREFIX, SHIPPED_PLANS

    fields = {**SETTINGS, **PLAN_FIELDS}
    values = [f"{name}={value}" for name, each in fields.items() for value in each.offered or ("",)]
    keys = [f"{name}=" for name in fields]
    found = (
        values
        if "=" in incomplete
        else [*keys, *BUILT_IN, *(f"{RECIPE_PREFIX}{name}" for name in SHIPPED_PLANS.names())]
    )
    return [word for word in found if word.startswith(incomplete)]


def _offered_runs(incomplete: str) -> list[str]:
    from fourfold.words.run_files import RUNS_DIR

    return [path.name for path in Path(RUNS_DIR).glob("*/") if path.name.startswith(incomplete)]


def _words(metavar: str, offered: Callable[[str], list[str]]) -> Any:
    return typer.Argument(metavar=metavar, hidden=True, autocompletion=offered)


TrainWords = Annotated[list[str] | None, _words("TASK FILE.toml KEY=VALUE", _offered_words)]
PlanWords = Annotated[list[str] | None, _words("TASK ASK.toml KEY=VALUE", _offered_words)]
Runs = Annotated[list[str] | None, _words("RUN [RUN…]", _offered_runs)]
OneRun = Annotated[list[str] | None, _words("[RUN]", _offered_runs)]
NumProcesses = Annotated[
    str | None,
    typer.Option("-n", metavar="N", help="Number of processes. Default: one per GPU, else min(cores, 4)."),
]


def parse_command(arguments: list[str]) -> Command | None:
    """The command of a command line; None if the help has been printed. Raises SettingError."""
    word = next((word for word in arguments if not word.startswith("-")), None)
    if word is not None and word not in COMMANDS:
        raise SettingError(
            Problem(f"the command {word or '(nothing)'}", f"one of {', '.join(COMMANDS)}", _suggestion(word)),
            where="fourfold",
        )
    help_text = io.StringIO()
    try:
        with contextlib.redirect_stdout(help_text):
            command: Any = app(arguments, prog_name="fourfold", standalone_mode=False)
    except SystemExit:  # completion ends itself, and has written what it offers
        print_text(help_text.getvalue().removesuffix("\n"))
        raise
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        raise _usage_error(error, f"fourfold {word}" if word else "fourfold") from None
    if help_text.getvalue():
        print_text(help_text.getvalue().removesuffix("\n"))
    return command if isinstance(command, functools.partial) else None


def _suggestion(word: str) -> str:
    close = closest_match(word, (*COMMANDS, "--version"))
    if close is None and word.partition(":")[0].endswith(".py"):
        close = f"train {word}, or fourfold run {word}"
    if close is None and word.endswith(".toml"):
        close = f"train {word}, or fourfold show {word}"
    return f"fourfold {close or '--help'}"


def _usage_error(error: Any, command: str) -> SettingError:
    """An error of the option parser, as a SettingError. Its class depends on the version of typer."""
    command = error.ctx.command_path if getattr(error, "ctx", None) else command
    name = getattr(error, "option_name", "")
    if name:
        return SettingError(_option_problem(name, getattr(error, "possibilities", None), command), where=command)
    return SettingError(Problem(error.format_message().rstrip("."), attempt=f"{command} --help"), where=command)


def _option_problem(name: str, known: list[str] | None, command: str) -> Problem:
    """An unknown option; `known` are similar ones, or None if the option is known and only its value is missing."""
    if command == "fourfold show" and name == "-n":
        return Problem("the option -n", "no number of processes: show starts none", SHOW_RANKS)
    if known is None:
        return Problem(f"the option {name} without a value", "a value after it", f"{command} --help")
    if command in WITH_SETTINGS and set(known) <= {"--help"}:
        setting = name.lstrip("-").replace("-", "_")
        attempt = place_of_setting(setting, ())
        if attempt is None or attempt.startswith("the "):  # the task may have it as an argument
            attempt = f"{setting}=…, or {command} --help"
        return Problem(f"the option {name}", "settings as KEY=VALUE", attempt)
    return Problem(f"the option {name}", "an option of this command", " or ".join(known) or f"{command} --help")


@app.callback(invoke_without_command=True)
def fourfold(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the versions of fourfold and torch.")] = False,
) -> None:
    """Write a training task once, for one device; a plan says how it runs on many.

    \b
    fourfold train                        train a language model on this machine, in about two minutes
    fourfold train lm data=PATH           the same, on your own text
    fourfold train task.py:task -n 4      your own task, on 4 processes
    fourfold run -n 4 script.py           your own script, on 4 processes
    fourfold show plan.toml               print what each rank will do and send
    fourfold plan lm devices=4            find the fastest plan, and say why and what it takes
    fourfold verify lm plan.toml          check that a plan, or your own script, trains as one device does
    fourfold checkpoint list runs/NAME    list a run's checkpoints
    fourfold feed bench unet3d            measure how well this machine's storage feeds accelerators
    fourfold report first second          write a page that shows a run, or compares several
    fourfold watch NAME                   serve a page that shows a run while it trains
    fourfold doctor                       check this machine, and say what to fix
    fourfold new task.py                  write a task file to begin with
    fourfold --install-completion         make Tab complete these words
    """
    if version:
        print(versions())
    elif context.invoked_subcommand is None:
        print(context.get_help())


class _WithTable(TyperCommand):
    """Inserts a table when the help is printed, and not before: importing the settings takes 50 ms."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        from fourfold.cli.arguments import help_table, plan_help_table

        for place, table in ((SETTINGS_PLACE, help_table), (FIELDS_PLACE, plan_help_table)):
            if place in (self.help or ""):
                self.help = (self.help or "").replace(place, table())
        super().format_help_text(ctx, formatter)


@app.command(options_metavar=OPTIONS, cls=_WithTable)
def train(
    words: TrainWords = None,
    processes: NumProcesses = None,
) -> Command:
    """Train a task.

    \b
    TASK       lm (a language model, the default), digits, or path/to/file.py:name
    FILE.toml  a plan: how the task is divided among processes; without it, they divide the batch
               or a settings file: [task], [plan] and [run], such as the config.toml of an earlier run
               recipe:zero3 is the plan of a named system; fourfold show recipe: lists them
    KEY=VALUE  takes precedence over the file:
               a field of the plan, such as dp=2 microbatches=4
               an argument of the task, such as data=PATH length=256 lr=1e-3
               a setting of the run, such as steps=500 seed=1; in brackets its default:
    {settings}

    A key with several values, such as lr=1e-3,3e-4 seed=0,1, trains once with each combination, one run after the
    other, and compares them at the end.

    The run's folder is runs/NAME, with config.toml, metrics.jsonl, checkpoints, trace.json and report.html. The
    same command again resumes from the newest checkpoint, on any number of processes.

    If a rank dies, or finishes no step for hang_seconds and for 5 times the median step, all ranks restart from the
    newest checkpoint: any number of times with progress in between, restarts= times without. SIGTERM and Ctrl-C save a
    checkpoint after the current step and end with exit code 75 (start the same command again) or 130; a second one
    ends at once.
    """
    from fourfold.cli import run_commands

    return functools.partial(run_commands.train, words or [], processes)


@app.command(
    options_metavar=RUN_OPTIONS, context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True}
)
def run(
    command: Annotated[list[str] | None, typer.Argument(metavar="SCRIPT.py ARGUMENT", hidden=True)] = None,
    processes: NumProcesses = None,
    restarts: Annotated[
        str, typer.Option("--restarts", metavar="K", help="How many times to restart all processes when one fails.")
    ] = "0",
) -> Command:
    """Run a script in N processes that can communicate.

    Each process finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment, as under torchrun.
    Everything after the script is passed on to it.
    """
    from fourfold.cli import run_commands

    return functools.partial(run_commands.run, command or [], processes, restarts)


@app.command(
    options_metavar="[--html PAGE]",
    short_help="Print a plan: each rank's program, the bytes it sends.",
    cls=_WithTable,
)
def show(
    words: TrainWords = None,
    page: Annotated[
        str | None, typer.Option("--html", metavar="PAGE", help="Write an HTML page, with a drawing of the timeline.")
    ] = None,
) -> Command:
    """Print a plan: its mesh, each rank's program, the bytes it sends and, with pp above 1, the timeline of a step.

    TASK gives the model; without it, lm with a layer for each stage at least. FILE.toml: a plan or a settings file.
    KEY=VALUE: an argument of the task, or a field of the plan; in brackets its default:

    \b
    {fields}
    """
    from fourfold.cli import run_commands

    return functools.partial(run_commands.show, words or [], page)


@app.command(options_metavar="[-n N]", short_help="Find the fastest plan, say why, and what it takes.")
def plan(
    words: PlanWords = None,
    processes: Annotated[str | None, typer.Option("-n", metavar="N", help="As devices=N.")] = None,
) -> Command:
    """Find the fastest plan that fits, say why it is that, and what a step and a rank take. Starts no training.

    \b
    TASK       as for fourfold train; the name of a run: what other plans it could have had
               gpt: a GPT by formula: layers= width= heads= vocabulary= length= batch_size=
               calibrate: measure this machine, in a minute; without cluster=, plans are priced with that
    ASK.toml   what is pinned and what is open ("auto"); ask:NAME is the question of a named system
    KEY=VALUE  pins a field of the plan (tp=8 zero=1), or is an argument of the task

    \b
    devices=64           how many there are; with several, such as 8,16,32: curves of strong and weak scaling
    memory=80GiB         of a device
    cluster=dgx-a100     a cluster that comes with Fourfold, or a TOML file; without it: this machine
    network=25GB/s       what a rank sends to other hosts, in place of the cluster's
    html=FILE            a page with the same, the time-memory front and the predicted step
    out=plan.toml        where the first plan goes; out=none: nowhere
    overwrite=true       replace the file that is there
    force=true           measure this machine although others use it
    search_seconds=15    when the search ends with what it has found; none: when it has looked at everything
    confirm=3            run the first three here for a few steps, beside the best baseline; the measured order decides

    A word with several values, such as batch_size=32,64 length=128,256, asks what if: it gives the best plan of each.
    """
    from fourfold.cli.plan import command as plan

    return functools.partial(plan.plan, words or [], processes)


@app.command(options_metavar=OPTIONS, short_help="Train with a plan and on one device, and compare.")
def verify(
    words: TrainWords = None,
    processes: NumProcesses = None,
) -> Command:
    """Train a few steps on a mesh and on one device; compare losses, gradients, weights, buffers and optimizer states.

    \b
    TASK       as for fourfold train
    FILE.toml  the plan, or a settings file; or fields of the plan as KEY=VALUE: dp=2 cp=2 zero=1
    KEY=VALUE  steps=3 batch_size=8 seed=1, and arguments of the task
    SCRIPT.py  in place of a task: a script that trains with ff.parallelize or ff.DistributedOptimizer.
               It runs as it is, on N processes, for steps=10 steps; what follows -- is passed on to it

    A task trains in float64, and may deviate by 1e-9 · max(1, |b|). In another precision (precision=bf16, a codec, a
    script in float32) the bound is four times what this precision does to one device; it is printed.
    The exit code is 1 if a number deviates by more. Writes no files, except those that a script writes.
    """
    from fourfold.cli import run_commands, verify
    from fourfold.cli.task_loader import is_script

    command = verify.run_script if words and is_script(words[0]) else run_commands.verify
    return functools.partial(command, words or [], processes)


@app.command(options_metavar="[--json]", short_help="Check this machine and say what to fix.")
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False) -> Command:
    """Check this machine and say what to fix: cores, memory, GPUs, disk, versions, launchers. Takes seconds.

    The exit code is 1 if a check fails, 0 if there are only warnings.
    """
    from fourfold.cli.run_commands import run_doctor

    return functools.partial(run_doctor, as_json=as_json)


@app.command(options_metavar="[-h]", short_help="Write a page that shows a run, or compares several.")
def report(
    runs: Runs = None,
) -> Command:
    """Write an HTML page that shows a run, or compares several.

    RUN is the folder of a run, or its name in runs/. The page of one run is report.html in its folder; that of several
    is next to the folder of the first.
    """
    from fourfold.cli import run_commands

    return functools.partial(run_commands.report, runs or [])


@app.command(options_metavar="[--port N]", short_help="Serve a page that shows a run while it trains.")
def watch(
    runs: OneRun = None,
    port: Annotated[
        str, typer.Option("--port", metavar="N", help="The port. Default: any free port.", show_default=False)
    ] = "0",
) -> Command:
    """Serve a page that shows a run while it trains: progress, curves, memory, checkpoints, faults.

    RUN is the folder of a run, or its name in runs/; it may begin later. Without it: the run whose log grew last. The
    page is served to this machine only, at an address with a random token, until Ctrl-C. Nothing is written.
    """
    from fourfold.cli.watch import watch_run

    return functools.partial(watch_run, runs or [], port)


@app.command(options_metavar="[-h]", short_help="Write a template task file.")
def new(file: Annotated[str, typer.Argument(metavar="FILE.py", help="A file that does not exist yet.")]) -> Command:
    """Write a template task file. It trains as it is: fourfold train FILE.py"""
    from fourfold.cli.new_task import write_task

    return functools.partial(write_task, file)


def versions() -> str:
    """The versions installed, as `fourfold 0.1.0 (torch 2.13.0, Python 3.11.2)`; without importing torch."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from fourfold.words.version import VERSION

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    return f"fourfold {VERSION} (torch {torch}, Python {platform.python_version()})"


# ---- groups of commands ---------------------------------------------------------------------------------------------


def _group(name: str, help_text: str) -> typer.Typer:
    """A command that has commands of its own; without one it prints its help."""
    group = typer.Typer(rich_markup_mode=None, help=help_text)

    @group.callback(invoke_without_command=True)
    def print_help(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            print(context.get_help())

    app.add_typer(group, name=name)
    return group


checkpoints = _group("checkpoint", "List, verify and export checkpoints.")


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


feed = _group("feed", "Pack data, and measure what feeds a training with it.")


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
