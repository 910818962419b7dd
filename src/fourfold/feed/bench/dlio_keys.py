"""DLIO's keys: what its YAML files may say, and what the emulator makes of it.

used     the key becomes a field of the workload
neutral  it names something that does not change what is read or how long is computed: a path, a log, another loader
left out it would change the training, and the emulator does not do it: allowed only with a value that asks for nothing
Law: every key of DLIO is in exactly one of these tables. (argonne-lcf/dlio_benchmark, utils/config.py, `LoadConfig`.)
"""

from typing import Any

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
