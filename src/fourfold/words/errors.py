"""Errors for people: what was given, what is needed, what to try; all problems at once.

problem  one thing that is wrong: (got, need, attempt), printed in columns
requeue  the exit code that tells a scheduler to start the same command again
Law: an error about a user's input is a `FourfoldError`, raised before any process starts.
"""

import difflib
import errno
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from fourfold.words.terminal_text import align_columns, escape_controls

# EX_TEMPFAIL of BSD's sysexits.h, "try again later": schedulers can be configured to requeue a job that ends with it.
REQUEUE_EXIT_CODE = 75
INTERRUPT_EXIT_CODE = 130  # 128 + SIGINT, as in a shell: a person pressed Ctrl-C

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

MAX_TEXT = 3000  # characters of a part of a problem

READING = "while reading "  # begins the note of an error that names the samples which were being read

# Parts of the messages of torch and gloo that mean: the peer process is gone.
PEER_GONE_MESSAGES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "recvvalue failed",
    "socket closed",
    "remote process exited",
    "application timeout caused pair closure",
)
PEER_FAILED = "failed on its first batch"
"""In the errors of the ranks that learn in a dry run that another rank has failed: see `peer_failed`."""

_WORDS_OF_OTHERS = {
    "lr": "learning_rate learningrate base_lr max_lr peak_lr",
    "batch_size": "bs batch batchsize global_batch_size train_batch_size per_device_train_batch_size",
    "steps": "max_steps num_steps n_steps train_steps total_steps max_iters iterations train_iters max_train_steps",
    "epochs": "max_epochs num_epochs n_epochs num_train_epochs",
    "clip": "grad_clip gradient_clip gradient_clip_val gradient_clipping max_grad_norm clip_grad clip_grad_norm",
    "weight_decay": "wd",
    "warmup lr_warmup": "warmup_steps num_warmup_steps lr_warmup_steps lr_warmup_iters warmup_ratio",
    "lr_schedule": "scheduler lr_scheduler lr_scheduler_type lr_decay_style",
    "evaluate_every": "eval_every eval_steps eval_interval eval_freq val_every val_check_interval evaluation_interval",
    "checkpoint_every": "save_every save_steps save_interval save_freq ckpt_every checkpoint_interval",
    "keep": "save_total_limit save_top_k keep_last max_to_keep",
    "seed": "random_seed manual_seed random_state",
    "best_metric": "metric_for_best_model monitor",
    "init": "pretrained weights load load_from init_from model_name_or_path checkpoint ckpt",
    "name": "run_name run experiment exp_name experiment_name output_dir out_dir save_dir "
    "checkpoint_dir ckpt_dir log_dir logdir",
    "callback": "callbacks logger loggers report_to",
    "ema": "ema_decay",
    "microbatches": "grad_accum gradient_accumulation gradient_accumulation_steps accumulate_grad_batches accum_steps",
    "precision": "dtype mixed_precision torch_dtype",
    "recompute": "recompute_granularity",
    "zero": "zero_stage",
    "schedule": "pipeline_schedule pp_schedule",
    "interleave": "vpp virtual_pipeline virtual_pipeline_model_parallel_size",
    "dp": "data_parallel data_parallel_size ddp dp_size",
    "tp": "tensor_parallel tensor_parallel_size tensor_model_parallel_size tp_size",
    "pp": "pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pp_size",
    "cp": "sp context_parallel context_parallel_size cp_size sequence_parallel_size sp_size",
    "length": "seq_len seq_length sequence_length max_length max_seq_len block_size context_length",
    "width": "hidden_size d_model n_embd dim embed_dim hidden_dim",
    "layers": "num_layers n_layers n_layer depth num_hidden_layers",
    "vocabulary": "vocab_size padded_vocab_size",
    "heads": "num_heads n_heads n_head nhead num_attention_heads",
    "data": "dataset data_dir data_path dataset_path train_file",
}
OURS = {ours for words in _WORDS_OF_OTHERS for ours in words.split()} | {"order", "tensor"}  # like codec and transport
SYNONYMS = {other: ours for ours, others in _WORDS_OF_OTHERS.items() for other in others.split()}
"""By the word of another framework: ours, the likeliest first."""
_PLACES_OF_OTHERS = {
    "-n N, the number of processes": "n np gpus num_gpus n_gpus devices num_devices world_size nproc nproc_per_node "
    "num_processes processes ranks num_ranks",
    "CUDA_VISIBLE_DEVICES= to hide GPUs, which are used where there are some": "device accelerator cuda gpu use_cuda",
    "a launcher that starts processes on each node": "nodes num_nodes nnodes",
    "the optimizer of the task": "lr learning_rate weight_decay wd momentum betas beta1 beta2 eps optimizer optim "
    "adam_beta1 adam_beta2 adam_epsilon",
    "the model of the task": "dropout compile torch_compile",
    "a DataLoader(…, num_workers=N) as the task's data": "workers num_workers dataloader_num_workers",
    "a DataLoader(…, shuffle=…) as the task's data": "shuffle sampler",
    "the same command, which resumes a run": "resume resume_from resume_from_checkpoint",
    "metrics.jsonl in the run's folder, which has every step": "log_every log_interval logging_steps",
    # Theirs are switches, or sizes of another thing, so that their values would be refused here.
    "precision=bf16 or precision=fp16": "amp bf16 fp16",
    "recompute=selective or recompute=full": "gradient_checkpointing activation_checkpointing grad_checkpointing remat "
    "gradient_checkpoint activation_checkpoint",
    "zero=1, zero=2 or zero=3": "fsdp sharding_strategy deepspeed zero_optimization",
    "batch_norm=sync": "sync_batchnorm sync_bn sync_batch_norm",
    "unused=allow": "find_unused_parameters",
    "ema=0.999, its decay": "use_ema",
    "microbatches=N, the parts of a batch": "micro_batch_size",
    "callback=early_stopping": "patience early_stopping",
    "callback=NAME": "wandb tensorboard mlflow trackio",
}
PLACES = {other: place for place, others in _PLACES_OF_OTHERS.items() for other in others.split()}
"""By the word of another framework: where it is said here, if it is no setting of the task."""


class Problem(NamedTuple):
    """One thing that is wrong. `attempt` is what the user might try (`try` is a keyword of Python)."""

    got: str
    need: str = ""
    attempt: str = ""


class FourfoldError(Exception):
    """The base class of all errors meant for people; `exit_code` is the exit code of the command line."""

    exit_code = 2

    def __init__(self, problems: str | Problem | Sequence[Problem], *, where: str = "") -> None:
        if isinstance(problems, str):
            problems = Problem(problems)
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        self.where = where
        super().__init__(self.problems, where)

    def __reduce__(self) -> tuple[Any, ...]:  # workers send errors to their rank
        return functools.partial(type(self), where=self.where), (self.problems,), vars(self)

    def __str__(self) -> str:
        return format_problems(self.problems, where=self.where)

    def full_message(self, width: int | None = None) -> str:
        """The message with the class of the error in front, as at the end of a traceback; see `format_problems`."""
        return f"{type(self).__name__}: {format_problems(self.problems, where=self.where, width=width)}"


class PlanError(FourfoldError):
    """A plan that cannot be carried out."""


class TaskError(FourfoldError):
    """A task that cannot be read, or that breaks its contract."""


class DataError(FourfoldError):
    """A data source that is missing, empty or too small."""


class DamagedSample(DataError):  # named for what it says of the data, as `KeyError` is for the key
    """A sample that cannot be read. A source raises it; a run leaves the sample out if `bad_samples` allows it.

    key     names the sample for people, such as its file and record
    reason  why it cannot be read
    """

    def __init__(self, key: str, reason: str = "", *, where: str = "the source") -> None:
        self.key, self.reason = str(key), str(reason)
        got = f"sample {self.key} cannot be read" + (f": {self.reason}" if self.reason else "")
        attempt = "the data from its origin again, or bad_samples=1 to leave out as many such samples"
        super().__init__(Problem(got, "a sample that is whole", attempt), where=where)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), where=self.where), (self.key, self.reason)


class SettingError(FourfoldError):
    """A setting that is unknown or has an impossible value."""


class OptimizerError(FourfoldError):
    """An optimizer whose update cannot run on flat buffers."""


class CheckpointError(FourfoldError):
    """A checkpoint that is damaged, missing, or belongs to another training."""


class UnreadableCheckpointError(CheckpointError):
    """A checkpoint that may be valid but cannot be read here: another version wrote it, or access to it is denied."""


class TrainingError(FourfoldError):
    """Training cannot continue, for instance because a parameter has no gradient."""

    exit_code = 1


class WorkerDiedError(TrainingError):
    """A worker process of a DataLoader has ended; its rank is healthy, so a restart may succeed.

    `signal` is the number of the signal that killed it; None if it ended by itself.
    """

    signal: int | None = None


class LaunchError(FourfoldError):
    """The processes of a job cannot find each other, or the variables of a launcher contradict each other."""


class PeerError(FourfoldError):
    """Another rank died or does not answer. This rank is healthy, so a restart may succeed."""

    exit_code = REQUEUE_EXIT_CODE


class StoppedError(FourfoldError):
    """Training stopped on request (SIGTERM, Ctrl-C), at a step that all ranks agreed on.

    `exit_code` is INTERRUPT_EXIT_CODE after a Ctrl-C.
    """

    exit_code = REQUEUE_EXIT_CODE


class DivergenceError(FourfoldError):
    """Ranks are in different calls, their optimizers have different options, or replicas of the weights differ."""

    exit_code = 1


def format_problems(problems: Sequence[Problem], *, where: str = "", width: int | None = None) -> str:
    """The text of an error: a heading, then one row per problem with aligned columns. Safe to print.

    If a row is longer than `width`, got, need and try stand below one another. `str` of an error gives none: logs and
    notebooks have the same text on every machine; who prints for a terminal gives its width.
    """
    problems = [Problem(*map(escape_controls, map(shortened, problem))) for problem in problems]
    if len(problems) == 1 and not where and not problems[0].need and not problems[0].attempt:
        return problems[0].got
    head = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
    location = f" in {escape_controls(shortened(where))}" if where else ""
    rows = [(p.got, f"need {p.need}" if p.need else "", f"try {p.attempt}" if p.attempt else "") for p in problems]
    lines = align_columns(rows, "<<<", gap="   ")
    if width is not None and max(map(len, lines)) + 2 > width:
        lines = list(_stacked_lines(problems))
    return "\n".join([f"{head}{location}", *("  " + line for line in lines)])


def shortened(text: str, limit: int = MAX_TEXT) -> str:
    """The text, or of one that is very long, such as a name in a forged file, its beginning and its end."""
    left_out = len(text) - limit
    if left_out <= 0:
        return text
    return f"{text[: limit // 2]} … {left_out:,} characters left out … {text[-limit // 2 :]}"


def _stacked_lines(problems: Sequence[Problem]) -> Iterator[str]:
    """Each problem's got, need and try below one another; what several in a row need is said once."""
    for (need, attempt), group in itertools.groupby(problems, key=lambda problem: problem[1:]):
        yield from (problem.got for problem in group)
        yield from (f"  {label} {text}" for label, text in (("need", need), ("try", attempt)) if text)


def os_error_text(error: OSError) -> str:
    """The message of the operating system in lower case: "no space left on device"."""
    return (error.strerror or str(error)).lower()


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class."""
    return (str(error).splitlines() or [""])[0][:300] or type(error).__name__


def closest_match(word: str, choices: Iterable[str]) -> str | None:
    """The choice that a mistyped word, in any letter case, or another framework's word most likely means, or None."""
    by_plain = {choice.lower().replace("-", "_"): choice for choice in choices}
    ours = {
        other: next((each for each in words.split() if each in by_plain), None) for other, words in SYNONYMS.items()
    }
    known = {other: by_plain[each] for other, each in ours.items() if each} | by_plain
    plain = word.lower().replace("-", "_")
    longer = [each for each in by_plain if each.endswith(f"_{plain}")]  # h100: dgx-h100, and not v100
    near = functools.partial(difflib.get_close_matches, plain, n=1)
    # Of the words of others only what is very near: batchsize is like tp_size.
    close = [plain] if plain in known else longer or near(list(known), cutoff=0.8)
    if not close and plain not in SYNONYMS:  # else its meaning is known, and vocab_size is like batch_size
        # A letter or two are wrong, or the word is cut off: force is not order, and vocab is vocabulary.
        more, cutoff = (2, 0.75) if len(plain) > 3 else (1, 0.6)
        close = near([each for each in by_plain if abs(len(each) - len(plain)) <= more], cutoff=cutoff)
        close += [each for each in by_plain if len(plain) > 2 and (each.startswith(plain) or each.endswith(plain))]
    return known[close[0]] if close else None


def place_of_setting(word: str, settings: Iterable[str]) -> str | None:
    """Where another framework's word is said here, or None: it is unknown, or one of the settings has its meaning."""
    plain = word.lower().replace("-", "_")
    is_known = {*SYNONYMS.get(plain, "").split()} & {*settings}
    return None if is_known or plain not in PLACES else PLACES[plain].replace("NAME", plain)


def setting_elsewhere(word: str, settings: Iterable[str]) -> str | None:
    """Where a word is said, ours or another framework's, that means none of the settings, or None: it is unknown."""
    if (place := place_of_setting(word, settings)) is not None:
        return place
    plain = word.lower().replace("-", "_")
    meant = SYNONYMS.get(plain, plain).split()
    is_elsewhere = OURS.issuperset(meant) and not {*meant} & {*settings}
    return f"{meant[0]}, a setting of the run or the task" if is_elsewhere else None
