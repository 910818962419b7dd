"""Laws of `hf:CONFIG.json`: a config file of transformers is data, and its model trains as on one device."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fourfold.axes.tensor.work.layers import local_part
from fourfold.checkpoint import initial_weights
from fourfold.checkpoint.checkpoints import Checkpoints
from fourfold.checkpoint.export import export_pretrained
from fourfold.checkpoint.initial_weights import check_weights, initial_model_of_files, load_weights
from fourfold.checkpoint.store import CheckpointStore
from fourfold.cli.job import run_prefix
from fourfold.cli.settings_file import read_settings_file
from fourfold.cli.task_loader import find_task, make_task, task_arguments
from fourfold.feed.source import fetch
from fourfold.plan.plan import Plan
from fourfold.proof.float64_mode import Float64Mode
from fourfold.step.train_step import TrainStep
from fourfold.tasks import hf
from fourfold.testing import oracle, threads
from fourfold.torch_kit import deferred_init
from fourfold.trainer.train import train
from fourfold.words.errors import CheckpointError, FourfoldError, TaskError
from fourfold.words.task import Task
from tests import cases
from tests.cases import SEED_LOCK
from tests.jobs import parse_job

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TOLERANCE = 1e-9
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0, "dtype": "bfloat16",
    "max_position_embeddings": 32,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 256, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 32,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
TIED = {**LLAMA, "tie_word_embeddings": True}
TEXT = "the quick brown fox jumps over the lazy dog · " * 60


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    transformers.utils.logging.disable_progress_bar()
    Path("text.txt").write_text(TEXT)
    for name, config in (("llama", LLAMA), ("gpt2", GPT2), ("tied", TIED)):
        Path(f"{name}.json").write_text(json.dumps(config))


def task_of(name: str, **settings: Any) -> Task:
    return hf.task(f"{name}.json", **{"data": "text.txt", "length": 16, "steps": 2, "batch_size": 4, **settings})


def model_of(task: Task) -> Any:
    with SEED_LOCK:
        torch.manual_seed(5)
        return task.model()


@pytest.mark.covering
@pytest.mark.parametrize("fields", [{"tp": 2}, {"cp": 2}, {"dp": 2}, {"dp": 2, "tp": 2, "zero": 3}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_of_a_config_trains_as_on_one_device(name, fields, without_dry_run):
    task, plan = task_of(name), Plan(**fields)
    data = task.data().train
    batches = [fetch(data, range(4 * number, 4 * number + 4)) for number in range(2)]
    assert set(batches[0][0]) == {"input_ids", "position_ids"}
    assert task.loss is not None
    with Float64Mode():
        expected = oracle.train(model_of(task).double(), task.loss, task.optimizer, batches, clip=0.5)

    def body(comm):
        model = model_of(task).double()
        step = TrainStep(model, task.loss, task.optimizer, plan=plan, communicator=comm, clip=0.5)
        with Float64Mode():
            losses = [step(cases.local_batch(batch, plan.dp, step.dp_index)).loss for batch in batches]
            step.flush()
        assert losses == pytest.approx(expected.losses, abs=TOLERANCE)
        shards = step.tensor_shards
        for weight_name, weight in step.named_weights():
            whole = expected.weights[weight_name]
            same = whole if weight.shape == whole.shape else local_part(whole, shards[weight_name])
            torch.testing.assert_close(weight, same, rtol=0, atol=TOLERANCE)

    threads.run(plan.mesh.size, body)


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no JSON": ("{", {}, "no JSON"),
    "too deep": ("[" * 100_000, {}, "no JSON"),
    "a list": ([1], {}, "no JSON object"),
    "no model": ({"vocab_size": 3}, {}, "no model_type"),
    "unknown": ({"model_type": "lama", "auto_map": {"AutoConfig": "evil.Config"}}, {}, '"model_type": "llama"'),
    "no language model": ({"model_type": "vit"}, {}, "vit, which has no causal language model"),
    "an encoder": ({"model_type": "bert", "vocab_size": 256}, {}, '"is_decoder": true'),
    "a small vocabulary": (LLAMA | {"vocab_size": 255}, {}, "vocab_size = 255   need 256 or more, for bytes as tokens"),
    "too long": (LLAMA, {"length": 33}, "length = 33   need at most 32"),
    "quantized": (LLAMA | {"quantization_config": {"bits": 4}}, {}, "a quantization_config"),
    "a wrong type": (LLAMA | {"hidden_size": "x"}, {}, "hidden_size"),
    "sizes": (GPT2 | {"n_embd": 18}, {}, "sizes that make a gpt2 model"),
    "a wrong setting": (LLAMA, {"lr": -1.0}, "lr = -1.0"),
    "no tokenizer": (LLAMA, {"tokenizer": "nowhere.json"}, "tokenizer = nowhere.json"),
    "a wrong tokenizer": (LLAMA, {"tokenizer": "llama.json"}, "a tokenizer.json"),
}


@pytest.mark.parametrize("kind", BAD)
def test_wrong_configs_raise_before_anything_starts(kind):
    config, settings, message = BAD[kind]
    Path("bad.json").write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(FourfoldError) as error:
        task_of("bad", **settings).model()
    assert message in str(error.value)
    assert "Traceback" not in str(error.value)


def test_nothing_that_a_config_names_is_run(monkeypatch):
    """Neither the author's code nor a kernel from the hub, also where a config is inside another."""
    names = {"auto_map": {"AutoModelForCausalLM": "evil.Model"}, "attn_implementation": "someone/kernel"}
    Path("evil.py").write_text("raise SystemExit('run')")
    Path("named.json").write_text(json.dumps({**LLAMA, **names, "rope_parameters": {**names, "rope_type": "default"}}))
    fields = hf.read_config(Path("named.json"))
    assert not {"auto_map", "attn_implementation"} & {*fields, *fields["rope_parameters"]}
    model = task_of("named").model()
    assert type(model) is transformers.LlamaForCausalLM
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_without_transformers_the_error_has_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(TaskError, match=r"try pip install 'fourfold\[hf\]'"):
        task_of("llama")


def make_tokenizer(file: str, vocabulary: int = 300) -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT], tokenizers.trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    )
    made.save(file)
    return made


def test_tokens_are_those_of_a_tokenizer_file():
    made = make_tokenizer("tokenizer.json")
    with pytest.raises(TaskError, match=r"vocab_size = 256   need 2\d\d or more, as tokenizer.json has"):
        task_of("llama", tokenizer="tokenizer.json")
    Path("large.json").write_text(json.dumps(LLAMA | {"vocab_size": 320}))
    task = task_of("large", tokenizer="tokenizer.json", prompt="the lazy")
    inputs, targets = fetch(task.data().train, range(len(task.data().train)))
    assert torch.equal(inputs["input_ids"][0, 1:], targets[0, :-1])
    assert TEXT.startswith(made.decode(inputs["input_ids"].flatten().tolist()))
    model = model_of(task)
    assert task.evaluate is not None
    assert task.sample is not None
    assert set(task.evaluate(model(**inputs), targets)) == {"bits per token"}
    state = torch.get_rng_state()
    assert task.sample(model).startswith("the lazy")
    assert torch.equal(torch.get_rng_state(), state)
    task.tokenizer.save_pretrained("saved")
    assert (
        transformers.AutoTokenizer.from_pretrained("saved")("the lazy dog").input_ids == made.encode("the lazy dog").ids
    )


def test_the_tokens_of_a_text_do_not_depend_on_where_it_is_cut(monkeypatch):
    make_tokenizer("tokenizer.json")
    Path("lines.txt").write_text("the lazy dog\n" * 80)
    Path("large.json").write_text(json.dumps(LLAMA | {"vocab_size": 320}))
    tokens = []
    for size in (2**20, 50):
        monkeypatch.setattr("fourfold.tasks.hf.CHUNK_BYTES", size)
        tokens.append(task_of("large", tokenizer="tokenizer.json", data="lines.txt").data().train.source.corpus.tokens)
    assert torch.equal(*map(torch.from_numpy, tokens))


# ---- the command line ------------------------------------------------------------------------------


def test_the_task_is_named_by_the_path_of_its_config(tmp_path):
    factory = find_task("hf:llama.json")
    types = task_arguments(factory)
    assert (types["data"].type, types["length"].type, types["clip"].type) == (str, int, float)
    assert isinstance(make_task(factory, {"length": 8}, spec="hf:llama.json"), Task)
    assert [run_prefix(spec) for spec in ("hf:llama.json", "hf:small/config.json")] == ["hf-llama", "hf-small"]
    with pytest.raises(TaskError, match=r"try hf:llama\.json"):
        find_task("hf:lama.json")
    text = parse_job(["hf:./llama.json", "data=text.txt", "length=16", "name=first", "dp=1"]).settings["config_text"]
    assert str(tmp_path) not in text
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(text)
    again = read_settings_file("runs/first/config.toml")
    assert again is not None
    assert again.task == "hf:llama.json"


# ---- weights to begin with -------------------------------------------------------------------------


def save_folder(model: Any, folder: str, *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The weights of a model in two files with an index; returns them."""
    weights = {name: value.to(dtype).clone() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight")
    Path(folder).mkdir()
    places = {name: f"model-{1 + number % 2}.safetensors" for number, name in enumerate(weights)}
    for file in set(places.values()):
        save_file({name: weights[name] for name in weights if places[name] == file}, f"{folder}/{file}")
    Path(folder, "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return weights


@pytest.mark.parametrize(("name", "tp"), [("llama", 2), ("llama", 4), ("tied", 2), ("gpt2", 4)])
def test_a_rank_reads_its_shards_of_split_weights_and_the_others_one_at_a_time(name, tp, monkeypatch, without_dry_run):
    monkeypatch.setattr(deferred_init, "MIN_ELEMENTS", 64)
    task, of_shards, of_whole = task_of(name), list[int](), list[int]()
    read, read_into = initial_weights.WeightFiles.read, initial_weights._read_into
    with SEED_LOCK:
        torch.manual_seed(9)
        other = task.model()
    whole = {key: value.to(torch.bfloat16).float() for key, value in save_folder(other, "other").items()}
    save_folder(other, "half", dtype=torch.bfloat16)

    def counted(files, tensor):
        found = read(files, tensor)
        of_whole.append(found.nbytes)
        return found

    def counted_bytes(buffer, *place):
        of_shards.append(len(buffer))
        read_into(buffer, *place)

    monkeypatch.setattr(initial_weights.WeightFiles, "read", counted)
    monkeypatch.setattr(initial_weights, "_read_into", counted_bytes)

    def body(comm):
        with SEED_LOCK:
            initial = initial_model_of_files(task.model, Path("half"), comm.device, defers=True, is_log_rank=True)
        assert initial.weights.are_deferred
        largest = max(p.numel() for p in initial.model.parameters())
        stored = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in initial.model.parameters()}
        assert sum(stored.values()) < 4 * largest  # nothing is read yet, and only small weights have memory
        step = TrainStep(
            initial.model, task.loss, task.optimizer,
            plan=Plan(tp=tp), communicator=comm, initial_weights=initial.weights,
        )  # fmt: skip
        shards = step.tensor_shards
        for key, weight in initial.model.named_parameters():
            assert torch.equal(weight, local_part(whole[key], shards[key])), key
        return {key: shards[key] for key in whole if key in shards}  # of tied ones the first

    by_rank = threads.run(tp, body)
    size = torch.bfloat16.itemsize
    split = [shard.num_elements * size for shards in by_rank for shard in shards.values() if not shard.is_whole]
    assert sum(of_shards) == sum(split)
    expected = [whole[key].numel() * size for shards in by_rank for key, shard in shards.items() if shard.is_whole]
    assert sorted(of_whole) == sorted(expected)  # each weight once on each rank
    fresh = task.model()
    load_weights(fresh, Path("half"))
    assert all(torch.equal(fresh.state_dict()[key], value) for key, value in whole.items())


def test_weights_of_a_model_without_its_head_and_masks_that_are_not_saved_are_read():
    """As the first files of GPT-2 were written."""
    task = task_of("gpt2")
    model = model_of(task)
    weights = {key.removeprefix("transformer."): value.clone() for key, value in model.state_dict().items()}
    weights.pop("lm_head.weight")
    masks = {"h.0.attn.bias": torch.ones(1, 1, 32, 32), "h.0.rotary_emb.inv_freq": torch.ones(4)}
    save_file(weights | masks, "old.safetensors")
    fresh = task.model()
    load_weights(fresh, Path("old.safetensors"))
    assert all(torch.equal(fresh.state_dict()[key], value) for key, value in model.state_dict().items())


def index(weight_map: Any) -> None:
    Path("folder").mkdir(exist_ok=True)
    Path("folder/model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_all_problems_of_weight_files_are_reported_at_once():
    meta = task_of("tied").model()
    weights = {key: value.clone() for key, value in meta.state_dict().items()}
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    save_file(weights, "two.safetensors")
    with pytest.raises(CheckpointError, match=r"model.embed_tokens.weight and lm_head.weight with different values"):
        check_weights(meta, Path("two.safetensors"))
    for key in ("model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"):
        weights.pop(key)
    weights["model.layers.0.mlp.up_proj.weight"] = torch.ones(3, 3)
    save_file(weights | {"more": torch.ones(1)}, "wrong.safetensors")
    with pytest.raises(CheckpointError) as error:
        check_weights(meta, Path("wrong.safetensors"))
    message = str(error.value)
    assert "4 problems" in message
    for part in ("no model.norm.weight", "no model.embed_tokens.weight", "up_proj.weight of shape [3, 3]", "more "):
        assert part in message


def test_a_folder_is_read_as_its_index_says_and_nothing_outside_it():
    meta = task_of("tied").model()
    Path("folder").mkdir()
    Path("folder/pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(CheckpointError, match=r"but pytorch_model\.bin: a pickle, which is never read"):
        check_weights(meta, Path("folder"))
    save_file({"a": torch.ones(1)}, "outside.safetensors")
    index({"a": "../outside.safetensors", "b": "/etc/passwd", "c": "gone.safetensors", "d": "pytorch_model.bin"})
    with pytest.raises(CheckpointError, match=r"4 problems[^~]*'\.\./outside\.safetensors' in weight_map"):
        check_weights(meta, Path("folder"))
    for wrong in ([1], {}, {"a": 1}):
        index(wrong)
        with pytest.raises(CheckpointError, match="no weight_map"):
            check_weights(meta, Path("folder"))
    save_file({"b": torch.ones(1)}, "folder/model.safetensors")
    index({"a": "model.safetensors"})
    with pytest.raises(CheckpointError, match=r"no a in model\.safetensors"):
        check_weights(meta, Path("folder"))


# ---- export ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tied", "gpt2"])
def test_from_pretrained_loads_what_tensor_ranks_trained(name, tmp_path, without_dry_run):
    task = task_of(name)
    batch = fetch(task.data().train, range(4))

    def body(comm):
        step = TrainStep(model_of(task), task.loss, task.optimizer, plan=Plan(tp=2), communicator=comm, clip=None)
        step(batch)
        Checkpoints(tmp_path / "own", step, tokenizer=task.tokenizer).save()

    threads.run(2, body)
    export_pretrained(CheckpointStore(tmp_path / "own").step_dir(1), Path("exported"))
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained("exported", output_loading_info=True)
    assert not any(info.values()), info
    assert not torch.equal(loaded.state_dict()["lm_head.weight"], model_of(task).state_dict()["lm_head.weight"])
    assert loaded.generate(batch[0]["input_ids"][:1], max_new_tokens=3, do_sample=False).shape == (1, 19)
    fresh = task.model()
    load_weights(fresh, Path("exported"))
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in fresh.state_dict().items())


def test_a_run_begins_with_the_weights_of_a_folder_and_samples(tmp_path):
    task = task_of("tied", lr=1e-9, valid_bytes=64)
    save_folder(model_of(task), "begin")
    settings: dict[str, Any] = {"folder": str(tmp_path / "runs"), "checkpoint_every": 0, "seed": 3, "quiet": True}
    first, other = (train(task, Plan(), name=f"n{init}", init=init, **settings) for init in ("begin", None))
    assert first.sample is not None
    assert first.sample.startswith("def ")
    assert first.valid["bits per byte"] != other.valid["bits per byte"]
    assert first.valid["bits per byte"] == pytest.approx(first.valid["loss"] / 0.6931471805599453, rel=1e-6)
