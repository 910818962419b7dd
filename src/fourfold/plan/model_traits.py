"""Model traits: what a model has that some plans cannot be carried out with, and which plans these are.

trait   names of modules whose results depend on how a batch is split, on who writes weights, or on what code is seen
Law: a training, `fourfold show` and the planner ask the same function, so none of them accepts what another refuses.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from fourfold.plan.batch_norm import SYNC
from fourfold.plan.batch_split import BatchSplit
from fourfold.plan.decode import format_pair
from fourfold.words.error_notes import format_names
from fourfold.words.errors import Problem

TRAIT_FIELDS = ("pp", "tp", "cp", "zero", "update", "precision", "batch_norm")
FREEZE_HINT = "frozen statistics (norm.eval() after model.train())"


class ModelTraits(NamedTuple):
    """Names of modules, in the order of the model.

    batch_norms        that use the statistics of the batch
    own_group_norms    SyncBatchNorms with a process group of their own
    frequency_scaled   trained embeddings with `scale_grad_by_freq`
    renormalized       embeddings with `max_norm`
    compiled           compiled modules; compiles_norms: there is batch normalization in them
    has_own_loss       the loss is the model's own
    """

    batch_norms: tuple[str, ...] = ()
    own_group_norms: tuple[str, ...] = ()
    frequency_scaled: tuple[str, ...] = ()
    renormalized: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    compiles_norms: bool = False
    has_own_loss: bool = False


NO_TRAITS = ModelTraits()


def trait_problems(values: Mapping[str, Any], split: BatchSplit, traits: ModelTraits) -> list[Problem]:
    """Why a plan cannot be carried out with a model of these traits. `values`: its TRAIT_FIELDS."""
    problems, parts = _embedding_problems(values["precision"], split, traits), split.num_parts
    if traits.batch_norms and values["batch_norm"] == "error" and parts > 1:
        need = f"no statistics over a batch that is split into {parts} parts"
        whole = SYNC if split.num_microbatches == 1 else f"{SYNC} with microbatches = 1"
        attempt = f'{whole}, {FREEZE_HINT}, GroupNorm, or batch_norm = "local" (not the same training)'
        problems.append(Problem(f"batch normalization at {format_names(traits.batch_norms)}", need, attempt))
    if traits.own_group_norms and values["batch_norm"] == "sync":
        got = f"{SYNC} and its own process group at {format_names(traits.own_group_norms)}"
        attempt = "SyncBatchNorm(…, process_group=None)"
        problems.append(Problem(got, "statistics of all ranks, which one device has", attempt))
    problems += _compiled_problems(values, traits)
    return problems + (own_loss_problems(values["cp"]) if traits.has_own_loss else [])


def own_loss_problems(cp: int) -> list[Problem]:
    """Why the model's own loss cannot be trained: with cp > 1 a rank has only some tokens of a sample."""
    if cp == 1:
        return []
    got = f"cp = {cp} and loss = None: the model's own loss"
    need = "a loss of each token and its target: a causal model shifts labels inside, past the rank's last token"
    attempt = "loss(outputs, targets) with targets that the data has shifted, or cp = 1"
    return [Problem(got, need, attempt)]


def _embedding_problems(precision: str, split: BatchSplit, traits: ModelTraits) -> list[Problem]:
    """Embedding options that depend on all indices of the batch: a part of the batch has only its own."""
    parts, problems = split.num_parts, []
    if parts > 1 and traits.frequency_scaled:
        names = format_names(traits.frequency_scaled)
        got = f"scale_grad_by_freq at {names}, and a batch that is split into {parts} parts"
        need = "gradients that do not depend on how often an index occurs in the batch: a part counts only its own"
        problems.append(Problem(got, need, "scale_grad_by_freq=False"))
    names, attempt = format_names(traits.renormalized), "max_norm=None, and F.normalize of the vectors after the lookup"
    if names and split.num_ranks > 1:
        got = f"max_norm at {names}, and samples on {split.num_ranks} ranks"
        need = "weights that forward does not change: each rank would renormalize only the rows of its own samples"
        problems.append(Problem(got, need, attempt))
    elif names and precision != "keep":
        got = f'max_norm at {names}, and precision = "{precision}"'
        need = "weights that forward does not change: it sees rounded copies, not the weights that are updated"
        problems.append(Problem(got, need, attempt))
    return problems


def _compiled_problems(values: Mapping[str, Any], traits: ModelTraits) -> list[Problem]:
    """Fourfold sees neither which weights compiled code uses, nor its calls of attention and batch normalization."""
    if not traits.compiled:
        return []
    where = f"compiled code at {format_names(traits.compiled)}"
    sees_weights = "to see when a weight is used, which compiled code hides"
    rules = {
        "update": (("after", "in_backward"), sees_weights),
        "zero": ((2, 1, 0), sees_weights),
        "tp": ((1,), "to replace layers, which compiled code has inlined"),
        "pp": ((1,), "hooks of its own in each forward, which compiled code ignores"),
        "cp": ((1,), "to see each call of attention, which compiled code hides"),
    }
    problems = [
        Problem(f"{format_pair(field, values[field])} and {where}", need, format_pair(field, allowed[0]))
        for field, (allowed, need) in rules.items()
        if values[field] not in allowed
    ]
    if values["batch_norm"] == "sync" and traits.compiles_norms:
        need = "to see each call of batch normalization, which compiled code hides"
        problems.append(Problem(f"{SYNC} and {where}", need, "compiling parts of the model without it"))
    return problems
