"""Laws of DLIO's workloads: the shipped ones have its values, and a YAML file says nothing that is ignored silently."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.words.errors import DataError, SettingError
from fourfold_bench import dlio_yaml
from fourfold_bench.dlio_yaml import MAX_FILE_BYTES, read_dlio_yaml
from fourfold_bench.workload import DISTRIBUTIONS, Experiment, Seconds, Workload, open_recipe, recipe_names

UNET3D = """
model: {name: unet3d, model_size_bytes: 499153191}
framework: pytorch
workflow: {generate_data: False, train: True, checkpoint: True}
dataset:
  data_folder: data/unet3d/
  format: npz
  num_files_train: 168
  num_samples_per_file: 1
  record_length_bytes: 146600628
  record_length_bytes_stdev: 68341808
  record_length_bytes_resize: 2097152
reader: {data_loader: pytorch, batch_size: 7, read_threads: 4, file_shuffle: seed, sample_shuffle: seed}
train: {epochs: 5, computation_time: 0.636}
checkpoint: {checkpoint_folder: checkpoints/unet3d, checkpoint_after_epoch: 5, epochs_between_checkpoints: 2}
metric: {au: 0.90}
"""


@pytest.fixture
def read(tmp_path):
    def read_text(text: str) -> Workload:
        path = tmp_path / "workload.yaml"
        path.write_text(text)
        return read_dlio_yaml(path)

    return read_text


def problems_of(read, text: str) -> list[tuple[str, str]]:
    with pytest.raises(SettingError) as caught:
        read(text)
    return [(problem.got, problem.attempt) for problem in caught.value.problems]


@pytest.mark.parametrize(("name", "accelerator", "need", "threshold"), [
    ("unet3d", "a100", 1.61e9, 0.90),
    ("unet3d", "h100", 3.18e9, 0.90),
    ("unet3d", "v100", 0.43e9, 0.90),
    ("resnet50", "a100", 105e6, 0.90),
    ("resnet50", "h100", 205e6, 0.90),
    ("cosmoflow", "a100", 513e6, 0.70),
    ("cosmoflow", "h100", 808e6, 0.70),
    ("bert", "v100", 0.12e6, None),
])  # fmt: skip
def test_a_workload_has_the_values_of_dlio(name, accelerator, need, threshold):
    workload = open_recipe(name, accelerator)
    assert isinstance(workload, Workload)
    assert workload.bytes_per_second == pytest.approx(need, rel=0.04)
    assert workload.threshold == threshold


def test_every_recipe_opens_and_experiments_name_workloads():
    for name in recipe_names():
        opened = open_recipe(name)
        if isinstance(opened, Experiment):
            assert {type(open_recipe(each)) for each in opened.workloads} == {Workload}


def test_an_unknown_workload_or_accelerator_names_the_nearest():
    for arguments, attempt in ((("unet3",), "unet3d"), (("bert", "v10"), "accelerator=v100")):
        with pytest.raises(SettingError) as caught:
            open_recipe(*arguments)
        assert caught.value.problems[0].attempt == attempt


def test_dlios_own_file_is_the_workload_that_is_shipped(read):
    shipped, own = open_recipe("unet3d", "a100"), read(UNET3D)
    for name in (set(Workload.__dataclass_fields__)) - {"accelerator"}:
        assert getattr(own, name) == getattr(shipped, name), name


@pytest.mark.parametrize(("before", "after", "got", "attempt"), [
    ("record_length_bytes:", "record_length:", "the key dataset.record_length", "dataset.record_length_bytes"),
    ("batch_size:", "batchsize:", "the key reader.batchsize", "reader.batch_size"),
    ("checkpoint: {", "checkpoint: {model_size: 5, ", "the key checkpoint.model_size", "model.model_size_bytes"),
    ("metric: {au", "metrics: {au", "the key metrics.au", "metric.au"),
    ("framework:", "frame_work:", "the key frame_work", "framework"),
    ("0.636}", "{mean: 1, stdev: 0.1, kind: x}}", "train.computation_time.kind", ""),
    ("0.636}", "{type: norml, mean: 1}}", "train.computation_time.type: norml", "normal"),
    ("0.636}", "{type: gamma, shape: 1}}", "train.computation_time.scale: None", ""),
    ("0.636", "0", "train.computation_time: 0", ""),
    ("0.636", "fast", "train.computation_time: 'fast'", ""),
    ("0.636", "'${time}'", "train.computation_time: ${time}", ""),
    ("batch_size: 7", "batch_size: 0", "reader.batch_size: 0", ""),
    ("epochs: 5, ", "epochs: 5, epochs: 6, ", "train.epochs, twice", ""),
    ("format: npz", "format: npz\n  compression: gzip", "dataset.compression: 'gzip'", "without dataset.compression"),
    ("train: True", "train: False", "workflow.train: false", "workflow: {train: true}"),
    ("num_files_train: 168", "file_prefix: x", "no dataset.num_files_train", ""),
    ("framework: pytorch", "framework: &a pytorch\noutput: {folder: *a}", "an alias (*name)", ""),
    ("model:", f"deep: {'[' * 300}{']' * 300}\nmodel:", "values nested more than 100 deep", ""),
    ("framework: pytorch", "framework: !!python/object/apply:os.getcwd []", None, ""),
    ("model:", "model: [", None, ""),
])  # fmt: skip
def test_what_would_be_ignored_is_an_error(read, before, after, got, attempt):
    assert UNET3D.count(before) == 1
    (problem,) = problems_of(read, UNET3D.replace(before, after))
    assert problem[0] == got if got else "line" in problem[0]
    assert problem[1] == attempt


def test_all_problems_are_reported_at_once(read):
    text = UNET3D.replace("batch_size:", "batchsize:").replace("epochs:", "epoch:").replace("0.636", "fast")
    assert len(problems_of(read, text)) == 3


@settings(max_examples=20)
@given(key=st.sampled_from(sorted(key for key in dlio_yaml.EVERY_KEY if "." in key)), at=st.integers(0, 60))
def test_a_key_that_lacks_a_letter_is_never_accepted(tmp_path_factory, key, at):
    section, _, name = key.rpartition(".")
    wrong = name[: at % len(name)] + name[at % len(name) + 1 :]
    if not wrong or f"{section}.{wrong}" in {*dlio_yaml.EVERY_KEY, *dlio_yaml.SECTIONS} or wrong.isdigit():
        return
    path = tmp_path_factory.mktemp("dlio") / "workload.yaml"
    lines, indent = [], 0
    for part in section.split("."):
        lines.append(f"{' ' * indent}{part}:")
        indent += 1
    lines.append(f"{' ' * indent}{wrong}: 1")
    path.write_text("\n".join(lines))
    with pytest.raises(SettingError) as caught:
        read_dlio_yaml(path)
    assert f"the key {section}.{wrong}" in {problem.got for problem in caught.value.problems}


def test_a_key_of_dlio_is_in_one_table():
    tables = [set(dlio_yaml.USED), dlio_yaml.NEUTRAL, set(dlio_yaml.LEFT_OUT)]
    assert sum(map(len, tables)) == len(dlio_yaml.EVERY_KEY)
    assert set(dlio_yaml.RENAMED).isdisjoint(dlio_yaml.EVERY_KEY)
    assert set(dlio_yaml.RENAMED.values()) | set(dlio_yaml.NOTED) <= dlio_yaml.EVERY_KEY


def test_an_evaluation_is_left_out_and_said(read):
    assert read(UNET3D.replace("train: True", "train: True, evaluation: True")).notes == ("evaluations are left out",)


def test_a_file_that_is_missing_or_too_large_is_an_error(tmp_path, read):
    with pytest.raises(DataError):
        read_dlio_yaml(tmp_path / "none.yaml")
    with pytest.raises(SettingError):
        read("#" * (MAX_FILE_BYTES + 1))


@pytest.mark.parametrize(("kind", "numbers"), [
    ("", (0.5,)),
    ("normal", (0.5, 0.01)),
    ("uniform", (0.1, 0.7)),
    ("gamma", (2.0, 0.25)),
    ("exponential", (0.25,)),
    ("poisson", (3.0,)),
])  # fmt: skip
def test_a_times_mean_is_that_of_what_is_drawn(kind, numbers):
    rng, seconds = np.random.default_rng(0), Seconds(numbers, kind)
    drawn = [seconds.draw(rng) for _ in range(4000)]
    assert sum(drawn) / len(drawn) == pytest.approx(seconds.mean, rel=0.05)
    assert min(drawn) >= 0
    assert {"", *DISTRIBUTIONS} >= {kind}


@pytest.mark.parametrize(("samples", "files", "per_file"), [(1, 1, 1), (1251, 1, 1251), (3000, 3, 1000)])
def test_fewer_samples_are_fewer_files(samples, files, per_file):
    workload = open_recipe("resnet50")
    assert isinstance(workload, Workload)
    small = workload.with_samples(samples)
    assert (small.num_files, small.samples_per_file) == (files, per_file)
    assert samples <= small.num_samples
