"""Laws of `fourfold checkpoint export`: others load what it writes, with their own functions. Nothing is downloaded."""

import functools
import gc
import json
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load

from fourfold.checkpoint import export, pretrained_files
from fourfold.checkpoint.checkpoints import Checkpoints
from fourfold.checkpoint.restore import StoredTensor
from fourfold.checkpoint.store import CheckpointStore
from fourfold.cli import main
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.trainer.train import train
from fourfold.words.errors import SettingError, TaskError
from fourfold.words.task import Data, Task
from tests import cases
from tests.cases import Case
from tests.checkpoint_runs import ThreadRun

pytestmark = pytest.mark.usefixtures("without_dry_run")

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TOKENS = torch.randint(0, 50, (8, 6), generator=torch.Generator().manual_seed(2))
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 50}


def gpt2() -> Any:
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=16, vocab_size=50, **dropouts)
    return transformers.GPT2LMHeadModel(config)


MODELS: dict[str, Any] = {
    "gpt2": gpt2,  # its two embeddings are one weight
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=True, **SMALL)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(num_key_value_heads=2, num_local_experts=2, **SMALL)
    ),  # whose files have other names than its parameters
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SMALL)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, vocab_size=50, decoder_start_token_id=0,
            dropout_rate=0.0,
        )
    ),
}  # fmt: skip
AUTO = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}


def tokenizer() -> Any:
    vocabulary = {"[UNK]": 0, "four": 1, "fold": 2}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")


def run_of(kind: str, folder: Path, *, plan: Plan | None = None, **options: Any) -> Path:
    """A run of two steps."""
    task = Task(
        model=MODELS[kind],
        loss=None,
        data=lambda: Data(train=[{"input_ids": row, "labels": row} for row in TOKENS]),
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
        tokenizer=tokenizer(),
    )
    settings: dict[str, Any] = {"steps": 2, "batch_size": 4, "checkpoint_every": 1, **options}
    result = train(task, plan or Plan(dp=1), name=kind, folder=str(folder), **settings)
    assert result.folder is not None
    return result.folder


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    transformers.utils.logging.disable_progress_bar()


def export_run(*words: str) -> int:
    """`fourfold checkpoint export …`; returns the exit code."""
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "export", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def outputs(model: Any) -> Tensor:
    more = {"labels": TOKENS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS, **more).logits


def saved_weights(run: Path, step: int, *, ema: bool = False) -> dict[str, Tensor]:
    export.export_weights(CheckpointStore(run).step_dir(step), run / "weights", ema=ema)
    with safe_open(run / "weights", framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    (run / "weights").unlink()
    return weights


@pytest.mark.parametrize("kind", MODELS)
def test_from_pretrained_loads_what_was_trained_with_equal_outputs(kind, tmp_path, capsys):
    torch.manual_seed(3)
    run = run_of(kind, tmp_path / "runs")
    assert export_run(kind, "new/folder", "--format", "hf") == 0
    auto = getattr(transformers, AUTO.get(kind, "AutoModelForCausalLM"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded, info = auto.from_pretrained("new/folder", output_loading_info=True)
    assert not any(info.values()), info
    expected = MODELS[kind]()
    expected.load_state_dict(saved_weights(run, 2))
    assert type(loaded) is type(expected)
    assert f"transformers.{type(expected).__name__}.from_pretrained('new/folder') loads it" in capsys.readouterr().out
    assert torch.equal(outputs(loaded), outputs(expected))
    again = transformers.AutoTokenizer.from_pretrained("new/folder")
    assert again("four fold five").input_ids == [1, 2, 0]
    with safe_open("new/folder/model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        aliases = len(list(expected.state_dict())) - len({id(v) for v in expected.state_dict(keep_vars=True).values()})
        assert len(file.keys()) == len(expected.state_dict()) - aliases
    assert (kind in ("gpt2", "llama", "bert", "t5")) == (aliases > 0)


def test_an_exported_model_is_that_of_the_step_asked_for_or_its_average_in_the_dtype_of_its_weights(tmp_path):
    run = run_of("gpt2", tmp_path / "runs", plan=Plan(dp=1, precision="bf16"), ema=0.5)
    for step, ema in ((1, False), (2, False), (2, True)):
        options = ["--step", str(step), *(["--ema"] if ema else [])]
        assert export_run("gpt2", *options, "--format", "hf") == 0
        folder = Path(f"gpt2-{step:08d}{'-ema' if ema else ''}-hf")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
        expected = saved_weights(run, step, ema=ema)
        assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
        assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    one, two, ema = (saved_weights(run, *args) if isinstance(args, tuple) else saved_weights(run, 2, ema=True)
                     for args in ((1,), (2,), "ema"))  # fmt: skip
    name = "transformer.h.0.mlp.c_fc.weight"
    assert not torch.equal(one[name], two[name])
    assert not torch.equal(ema[name], two[name])


def test_a_loop_of_ones_own_exports_too(tmp_path):
    def body(comm):
        model = gpt2()
        adam = functools.partial(torch.optim.AdamW, lr=1e-2)
        step = TrainStep(model, None, adam, plan=Plan(dp=2, zero=2), communicator=comm, clip=None)
        own = TOKENS[4 * comm.rank :][:4]
        step({"input_ids": own, "labels": own})
        Checkpoints(tmp_path / "own", step, tokenizer=tokenizer()).save()
        return {name: weight.clone() for name, weight in step.named_weights()}

    torch.manual_seed(3)
    weights = threads.run(2, body)[0]
    assert export_run("own", "folder", "--format", "hf") == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained("folder").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())
    assert transformers.AutoTokenizer.from_pretrained("folder")("fold").input_ids == [2]


def save_tied(folder: Path) -> Mapping[str, Tensor]:
    """Saves one step of a model with tied weights, by three ranks, and its average; returns the weights."""

    def body(comm):
        run = ThreadRun(Case(model="tied", zero=2), comm, folder, ema=0.5)
        run.run_steps(0, 3, save_at=(2, 3))
        return {name: value.clone() for name, value in run.step.model.state_dict().items()}

    return threads.run(3, body)[0]


def load_dcp(folder: Path) -> nn.Module:
    """What others do with it: torch's own load, in a single process without a launcher."""
    model = cases.model("tied")
    for parameter in model.parameters():
        parameter.data.zero_()
    state = model.state_dict()
    load(state, checkpoint_id=str(folder), no_dist=True)
    model.load_state_dict(state)
    return model


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("options", [(), ("--ema",), ("--step", "2")])
def test_torch_distributed_checkpoint_loads_an_export(options, tmp_path, capsys):
    weights = save_tied(tmp_path / "run")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert export_run("run", "new/folder", "--format", "dcp", *options) == 0
    assert [str(each.message) for each in warned] == []
    assert "a pickle" in capsys.readouterr().out
    loaded = load_dcp(tmp_path / "new" / "folder").state_dict()
    step = 2 if "--step" in options else 3
    expected = saved_weights(tmp_path / "run", step, ema="--ema" in options)
    assert loaded.keys() == expected.keys() == weights.keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    assert all(torch.equal(expected[name], value) for name, value in weights.items()) == (not options)


@pytest.mark.parametrize("form", ["safetensors", "dcp", "hf"])
def test_no_export_has_the_model_in_memory_twice_and_our_own_have_one_tensor(form, tmp_path, monkeypatch):
    if form == "hf":
        run_of("gpt2", tmp_path)
        (tmp_path / "gpt2").rename(tmp_path / "run")
    else:
        save_tied(tmp_path / "run")
    alive: list[weakref.ref[Any]] = []
    most = 0

    def read_all(self, real=StoredTensor.read_all):
        nonlocal most
        memory = real(self).clone().numpy()  # lives as long as any view of it
        alive.append(weakref.ref(memory))
        most = max(most, sum(each() is not None for each in alive))
        return torch.from_numpy(memory)

    monkeypatch.setattr(StoredTensor, "read_all", read_all)
    gc.disable()
    try:
        assert export_run("run", "out", "--format", form) == 0
    finally:
        gc.enable()
    assert len(alive) > 5
    if form == "dcp":  # torch may keep what it has written: at most the model
        names = {*cases.model("tied").state_dict()}
        assert len(alive) == len(names)
    else:
        assert most <= 2  # the one that is written, and the next


def test_what_cannot_be_exported_so_is_refused(tmp_path, capsys):
    save_tied(tmp_path / "run")
    refusals = {
        ("--format", "onnx"): r"--format onnx   need one of safetensors, hf, dcp",
        ("--format", "hf"): "no run/pretrained/config.json   need a run whose model is a transformers.PreTrainedModel",
        (
            "out.safetensors",
            "--format",
            "dcp",
        ): "out.safetensors with --format dcp   need the name of a folder",
        ("full", "--format", "dcp"): "full exists already   need a new folder, or an empty one",
        ("run/checkpoints", "--format", "safetensors"): "run/checkpoints exists already   need a new file",
        ("file/out", "--format", "dcp"): "file/out could not be written",
    }
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    for words, message in refusals.items():
        assert export_run("run", *words) == 2
        assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "empty").mkdir()
    assert export_run("run", "empty", "--format", "dcp") == 0
    assert (tmp_path / "empty" / ".metadata").exists()


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch, capsys):
    save_tied(tmp_path / "run")

    def fail(self, real=StoredTensor.read_all):
        if fail_at.pop():
            raise OSError("no room here")
        return real(self)

    for form in ("safetensors", "dcp"):
        fail_at = [True, False, False]
        monkeypatch.setattr(StoredTensor, "read_all", fail)
        assert export_run("run", "out", "--format", form) == 2
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
        assert "out could not be written: no room here" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_config_that_cannot_be_saved_is_a_warning_and_training_goes_on(tmp_path, monkeypatch):
    def fail(self, folder):
        raise ValueError("contradicting generation options")

    messages: list[str] = []

    class Display:
        def __getattr__(self, name):
            return lambda text: messages.append(str(text))

    monkeypatch.setattr(transformers.GPT2Config, "save_pretrained", fail)
    run = run_of("gpt2", tmp_path / "runs", report=Display())
    assert CheckpointStore(run).steps() == [1, 2]
    assert any("pretrained could not be written: contradicting generation options" in text for text in messages)
    assert not (run / "pretrained").exists()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    (run / "pretrained").mkdir()
    (run / "pretrained" / "old").touch()
    assert pretrained_files.save_pretrained_files(run, gpt2()) == ""
    assert sorted(path.name for path in (run / "pretrained").iterdir()) == ["config.json", "generation_config.json"]
    assert not [path.name for path in run.iterdir() if path.name.startswith(".")]


def test_a_tokenizer_is_an_object_that_can_save_itself():
    with pytest.raises(TaskError, match=r"tokenizer = 'gpt2'\s+need an object with save_pretrained\(folder\)"):
        Task(model=gpt2, loss=None, data=lambda: Data(train=[]), optimizer=torch.optim.SGD, tokenizer="gpt2")
    with pytest.raises(SettingError, match="tokenizer = 3"):
        Checkpoints("x", object(), tokenizer=3)  # type: ignore[arg-type]
