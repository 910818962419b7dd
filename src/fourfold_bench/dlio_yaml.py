"""DLIO's YAML: a workload of a file as DLIO reads it.

used     the key becomes a field of the workload
neutral  it names something that does not change what is read or how long is computed: a path, a log, another loader
left out it would change the training, and the emulator does not do it: allowed only with a value that asks for nothing
Law: every key of DLIO is in exactly one of these tables. (argonne-lcf/dlio_benchmark, utils/config.py, `LoadConfig`.)
A key that DLIO does not have is an error that names the nearest one; DLIO ignores it silently. So is a value that asks
for something that is not emulated. All problems at once. Nothing in the file is executed.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fourfold.words.errors import DataError, Problem, SettingError, closest_match, os_error_text
from fourfold_bench.workload import DISTRIBUTIONS, Seconds, Workload

# ---- keys ------------------------------------------------------------------------------------------------------------


# Dotted key -> types of its value.
USED: dict[str, tuple[type, ...]] = {
    "model": (str, dict),
    "model.name": (str,),
    "model.model_size_bytes": (int, float),
    "workflow.train": (bool,),
    "workflow.checkpoint": (bool,),
    "dataset.format": (str,),
    "dataset.num_files_train": (int,),
    "dataset.num_samples_per_file": (int,),
    "dataset.record_length_bytes": (int, float),
    "dataset.record_length_bytes_stdev": (int, float),
    "dataset.record_length_bytes_resize": (int, float),
    "reader.batch_size": (int,),
    "reader.read_threads": (int,),
    "reader.preprocess_time": (int, float, dict),
    "reader.preprocess_time_stdev": (int, float),
    "train.epochs": (int,),
    "train.computation_time": (int, float, dict),
    "train.computation_time_stdev": (int, float),
    "train.total_training_steps": (int,),
    "metric.au": (int, float),
}

_NEUTRAL = {
    "": "framework",
    "workflow": "generate_data profiling debug",
    "storage": "storage_type storage_root storage_options",
    "dataset": "data_folder file_prefix keep_files generation_buffer_size num_subfolders_train num_subfolders_eval "
    "num_files_eval record_element_bytes record_element_type",
    "reader": "data_loader multiprocessing_context computation_threads prefetch_size shuffle_size file_access "
    "transfer_size pin_memory dont_use_mmap read_type file_shuffle sample_shuffle batch_size_eval odirect",
    "train": "seed seed_change_epoch",
    "evaluation": "eval_time eval_time_stdev eval_after_epoch epochs_between_evals",
    "checkpoint": "checkpoint_folder fsync type randomize_tensor ksm checkpoint_after_epoch epochs_between_checkpoints "
    "steps_between_checkpoints time_between_checkpoints num_checkpoints_write num_checkpoints_read rank_sync "
    "recovery_rank_shift mode",
    "model": "type num_layers model_datatype optimizer_datatype optimization_groups layer_parameters",
    "output": "folder log_file",
    "profiling": "profiler iostat_devices",
}
NEUTRAL = {
    *(f"{section}.{name}".lstrip(".") for section, names in _NEUTRAL.items() for name in names.split()),
    *(f"model.parallelism.{name}" for name in ("tensor", "pipeline", "data", "zero_stage")),
    *(
        f"model.transformer.{name}"
        for name in ("hidden_size", "ffn_hidden_size", "vocab_size", "num_attention_heads", "num_kv_heads")
    ),
    *(f"checkpoint.ksm.{name}" for name in ("madv_mergeable_id", "high_ram_trigger", "low_ram_exit", "await_time")),
}

# Dotted key -> the values that ask for nothing, and what is emulated in any case.
LEFT_OUT: dict[str, tuple[tuple[Any, ...], str]] = {
    "dataset.compression": (("none", "NONE", None), "files without compression"),
    "dataset.compression_level": ((4,), "files without compression"),
    "dataset.enable_chunking": ((False,), "files without chunks"),
    "dataset.chunk_size": ((0,), "files without chunks"),
    "dataset.record_dims": (([],), "records of record_length_bytes"),
    "dataset.hdf5.chunk_dims": (([],), "files of npy or npz"),
    "dataset.hdf5.max_shape": (([],), "files of npy or npz"),
    "dataset.hdf5.num_dset_per_record": ((1,), "files of npy or npz"),
    "reader.transformed_record_dims": (([],), "samples of record_length_bytes_resize"),
    "reader.transformed_record_element_type": (("uint8",), "samples of bytes"),
    "reader.reader_classname": ((None,), "Fourfold's feed"),
    "reader.data_loader_classname": ((None,), "Fourfold's feed"),
    "reader.data_loader_sampler": ((None, "iter", "index"), "Fourfold's feed"),
    "checkpoint.checkpoint_mechanism_classname": ((None,), "one file, written and fsynced"),
    "workflow.evaluation": ((False,), "training without evaluations"),
    "output.metric.exclude_start_steps": ((1,), "a window that begins after the first step"),
    "output.metric.exclude_end_steps": ((0,), "a window that ends with the last step"),
}
NOTED = {"workflow.evaluation": "evaluations are left out"}  # allowed with any value: what the result then says

RENAMED = {
    "checkpoint.model_size": "model.model_size_bytes",
    "model.model_size": "model.model_size_bytes",
    "dataset.record_length": "dataset.record_length_bytes",
    "dataset.record_length_stdev": "dataset.record_length_bytes_stdev",
    "dataset.record_length_resize": "dataset.record_length_bytes_resize",
}
"""Keys of older versions, which newer ones of DLIO accept silently and ignore."""
SECTION_ALIASES = {"data_reader": "reader"}
EVERY_KEY = {*USED, *NEUTRAL, *LEFT_OUT}
SECTIONS = {key.rpartition(".")[0] for key in EVERY_KEY if "." in key}


# ---- files -----------------------------------------------------------------------------------------------------------


MAX_FILE_BYTES = 2**20
MAX_DEPTH = 8
MAX_NESTED = 100  # PyYAML's time grows with the square of the depth: 20,000 brackets took a minute
DEFAULT_RECORD_BYTES, DEFAULT_MODEL_BYTES = 65536, 10240  # DLIO's
INSTALL_LINE = "pip install 'fourfold[dlio]'"


def read_dlio_yaml(path: Path) -> Workload:
    """The workload in a file. Raises SettingError with all problems of its keys and values, and DataError."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            got = f"a file of {path.stat().st_size:,} bytes"
            raise SettingError(Problem(got, f"at most {MAX_FILE_BYTES:,}, a workload of DLIO"), where=str(path))
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(Problem(f"{path}: {os_error_text(error)}", "a YAML file of DLIO"), where=str(path)) from None
    except UnicodeDecodeError as error:
        raise SettingError(Problem(str(error), "text in UTF-8"), where=str(path)) from None
    values, problems = parse_dlio(text, where=str(path))
    problems += [problem for key, value in values.items() for problem in _key_problems(key, value)]
    if not problems:
        problems = _missing_problems(values)
    if problems:
        raise SettingError(problems, where=str(path))
    return _make_workload(values, path.stem)


def parse_dlio(text: str, *, where: str) -> tuple[dict[str, Any], list[Problem]]:
    """The values of a text, by dotted key, and the keys that are there twice. Raises SettingError."""
    try:
        import yaml
    except ImportError:
        raise SettingError(Problem("no pyyaml", "it, to read a YAML file", INSTALL_LINE), where=where) from None
    try:
        # Nodes, not values: a mapping of Python keeps the last of two equal keys, and an alias may make a file endless.
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise SettingError(Problem("an alias (*name)", "each value where it is used"), where=where)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_NESTED:
                raise SettingError(Problem(f"values nested more than {MAX_NESTED} deep", "sections"), where=where)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        document = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise SettingError(Problem(" ".join(str(error).split()), "YAML"), where=where) from None
    if not isinstance(document, dict):
        raise SettingError(Problem(f"a {type(document).__name__}", "sections such as dataset:"), where=where)
    names = [name for name, _ in _node_keys(node, ())]
    twice = sorted({name for name in names if names.count(name) > 1})
    return dict(_flatten(document, ())), [Problem(f"{name}, twice", "each key once") for name in twice]


def _node_keys(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for key, value in node.value if isinstance(node.value, list) and node.id == "mapping" else ():
        inner = (*path, str(key.value))
        yield ".".join(inner), value
        yield from _node_keys(value, inner)


def _flatten(values: Mapping[Any, Any], path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """The values by dotted key; a distribution of a time is one value."""
    for name, value in values.items():
        inner = (*path, SECTION_ALIASES.get(str(name), str(name)) if not path else str(name))
        key = ".".join(inner)
        is_section = key in SECTIONS or key not in EVERY_KEY
        if isinstance(value, dict) and is_section and len(inner) < MAX_DEPTH:
            yield from _flatten(value, inner)
        elif value is not None or key not in SECTIONS:  # an empty section
            yield key, value


def _key_problems(key: str, value: Any) -> list[Problem]:
    if isinstance(value, str) and value.startswith("${"):
        return [Problem(f"{key}: {value}", "a value: references are not resolved")]
    if key in USED:
        is_right = isinstance(value, USED[key]) and (not isinstance(value, bool) or bool in USED[key])
        names = " or ".join(kind.__name__ for kind in USED[key])
        return [] if is_right else [Problem(f"{key}: {value!r}", names)]
    if key in LEFT_OUT:
        neutral, instead = LEFT_OUT[key]
        return [] if key in NOTED or value in neutral else [Problem(f"{key}: {value!r}", instead, f"without {key}")]
    if key in NEUTRAL:
        return []
    close = RENAMED.get(key) or _closest(key)
    return [Problem(f"the key {key}", "one of DLIO's keys", close or "dataset, reader, train, model or metric")]


def _closest(key: str) -> str | None:
    """The key that was most likely meant: first by its last name, for sections are rarely mistyped."""
    section, _, name = key.rpartition(".")
    here = [each for each in EVERY_KEY if each.rpartition(".")[0] == section]
    by_name = {each.rpartition(".")[2]: each for each in here}
    close = closest_match(name, sorted(by_name))
    return by_name[close] if close else closest_match(key, sorted(EVERY_KEY))


def _missing_problems(values: Mapping[str, Any]) -> list[Problem]:
    problems = []
    if not values.get("workflow.train", True):
        problems.append(Problem("workflow.train: false", "a training to emulate", "workflow: {train: true}"))
    for key in ("dataset.num_files_train", "train.computation_time"):
        if key not in values:
            problems.append(Problem(f"no {key}", "a value"))
    for key in ("num_files_train", "num_samples_per_file", "record_length_bytes"):
        if (value := values.get(f"dataset.{key}", 1)) < 1:
            problems.append(Problem(f"dataset.{key}: {value}", "at least 1"))
    for key in ("reader.batch_size", "reader.read_threads", "train.epochs"):
        if (value := values.get(key, 1)) < 1:
            problems.append(Problem(f"{key}: {value}", "at least 1"))
    for key in ("train.computation_time", "reader.preprocess_time"):
        problems += _time_problems(key, values.get(key, 0))
    if _time(values, "train.computation_time").mean <= 0 and not problems:
        problems.append(Problem("train.computation_time: 0", "a time above 0"))
    return problems


def _time_problems(key: str, value: Any) -> list[Problem]:
    """What is wrong with a distribution, as numpy's generators take it."""
    if not isinstance(value, dict):
        return [] if value >= 0 else [Problem(f"{key}: {value}", "at least 0")]
    kind = value.get("type", "normal" if "stdev" in value else "")
    if kind and kind not in DISTRIBUTIONS:
        close = closest_match(str(kind), DISTRIBUTIONS) or ""
        return [Problem(f"{key}.type: {kind}", f"one of {', '.join(DISTRIBUTIONS)}", close)]
    needs = DISTRIBUTIONS.get(kind, ("mean",))
    problems = [
        Problem(f"{key}.{name}", f"a key of the distribution: {', '.join(needs)}")
        for name in value
        if name not in (*needs, "type")
    ]
    for name in needs:
        if not isinstance(number := value.get(name), int | float) or isinstance(number, bool) or number < 0:
            problems.append(Problem(f"{key}.{name}: {number}", "a number of at least 0"))
    return problems


def _time(values: Mapping[str, Any], key: str) -> Seconds:
    value, stdev = values.get(key, 0.0), values.get(f"{key}_stdev")
    if not isinstance(value, dict):
        return Seconds((float(value),)) if not stdev else Seconds((float(value), float(stdev)), "normal")
    kind = value.get("type", "normal" if "stdev" in value else "")
    try:
        return Seconds(tuple(float(value[name]) for name in DISTRIBUTIONS.get(kind, ("mean",))), kind)
    except (KeyError, TypeError, ValueError):  # reported already
        return Seconds((0.0,))


def _make_workload(values: Mapping[str, Any], name: str) -> Workload:
    def get(key: str, default: Any, convert: Callable[[Any], Any] = round) -> Any:
        return convert(values[key]) if key in values else default

    record_bytes = get("dataset.record_length_bytes", DEFAULT_RECORD_BYTES)
    steps = values.get("train.total_training_steps", -1)
    model = values.get("model.name", values.get("model", name))
    notes = NOTED | ({"train.total_training_steps": f"at most {steps:,} steps in each epoch"} if steps > 0 else {})
    is_saved = values.get("workflow.checkpoint", False)
    return Workload(
        name=str(model),
        accelerator="the accelerator of the file",
        format=values.get("dataset.format", "tfrecord"),
        num_files=values["dataset.num_files_train"],
        samples_per_file=values.get("dataset.num_samples_per_file", 1),
        record_bytes=record_bytes,
        record_bytes_stdev=get("dataset.record_length_bytes_stdev", 0),
        sample_bytes=get("dataset.record_length_bytes_resize", 0) or record_bytes,
        batch_size=values.get("reader.batch_size", 1),
        compute=_time(values, "train.computation_time"),
        read_threads=values.get("reader.read_threads", 1),
        epochs=values.get("train.epochs", 1),
        steps=steps if steps > 0 else None,
        threshold=get("metric.au", None, float),
        checkpoint_bytes=get("model.model_size_bytes", DEFAULT_MODEL_BYTES) if is_saved else 0,
        preprocess=_time(values, "reader.preprocess_time"),
        notes=tuple(text for key, text in notes.items() if values.get(key)),
    )
