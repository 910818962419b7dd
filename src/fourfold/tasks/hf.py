"""A causal language model of transformers, made from a config file, that learns to predict the next token of a text.

config     a JSON file as `save_pretrained` writes it; its `model_type` names the model
tokens     bytes, 0 to 255, or what a `tokenizer` file makes of the text
positions  the index of each token in its sample; an input of the model where it takes one, so tokens may be split
Law: a config is data, and so is a tokenizer's file. No code that it names is imported or downloaded:
`auto_map` and the names of kernels are ignored.

B batch · L sequence length · V vocabulary
"""

import copy
import functools
import inspect
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fourfold.feed.corpus import Corpus, CorpusSplit, FileRange, open_text
from fourfold.feed.source import TokenRow, TokenSource
from fourfold.feed.text_path import resolve_text_path
from fourfold.losses import cross_entropy
from fourfold.tasks import text
from fourfold.words.errors import Problem, SettingError, TaskError, closest_match, os_error_text
from fourfold.words.task import Data, Task

# ---- tokenizer ------------------------------------------------------------------------------------------------------


CHUNK_BYTES = 2**20  # of text that is encoded at once; cut at the ends of lines


class TokenCorpus:
    """Tokens in memory, as one row."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """Rows of `length` tokens from each of B starts: int32 [B, length]."""
        offsets = np.asarray(starts, dtype=np.int64)
        return self.tokens[offsets[:, None] + np.arange(length)]


class Tokenizer:
    """What makes tokens of text. `size`: one more than its largest token."""

    def __init__(self, tokenizer: Any, file: str) -> None:
        self._tokenizer, self.file = tokenizer, file
        self.size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def encode_corpus(self, corpus: Corpus) -> TokenCorpus:
        """The tokens of a whole corpus, each file by itself."""
        parts = [np.asarray(self.encode(text), dtype=np.int32) for text in _texts(corpus.file_ranges)]
        return TokenCorpus(np.concatenate([np.empty(0, dtype=np.int32), *parts]))

    def pretrained(self) -> Any:
        """As transformers has it, with `save_pretrained`."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_object=self._tokenizer)


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a file. Raises TaskError if there is none."""
    need, attempt = "a tokenizer.json of the tokenizers library", "no tokenizer=, for bytes as tokens"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TaskError(Problem(f"tokenizer = {path} ({os_error_text(error)})", need, attempt)) from None
    except UnicodeDecodeError:
        raise TaskError(Problem(f"tokenizer = {path}, which is not a text file", need, attempt)) from None
    try:
        import tokenizers
    except ImportError:
        got = "tokenizers does not import"
        raise TaskError(Problem(got, "tokenizers, for tokenizer=", "pip install 'fourfold[hf]'")) from None
    try:
        return Tokenizer(tokenizers.Tokenizer.from_str(text), str(path))
    except Exception as error:  # the library raises a plain Exception
        raise TaskError(Problem(f"tokenizer = {path}: {str(error)[:100]}", need, attempt)) from None


def _texts(file_ranges: Sequence[FileRange]) -> Iterator[str]:
    for path, start, stop in file_ranges:
        with path.open("rb") as file:
            file.seek(start)
            while (place := file.tell()) < stop:
                chunk = file.read(min(CHUNK_BYTES, stop - place))
                if not chunk:
                    break
                if place + len(chunk) < stop:
                    chunk += file.readline()[: stop - place - len(chunk)]
                yield chunk.decode("utf-8", errors="replace")


# ---- the task -------------------------------------------------------------------------------------------------------


INSTALL = "pip install 'fourfold[hf]'"
MAX_CONFIG_BYTES = 2**26
IGNORED = {
    "auto_map",  # names code of the config's author
    "attn_implementation", "_attn_implementation", "_attn_implementation_internal",  # may name a kernel to download
    "experts_implementation", "_experts_implementation", "_experts_implementation_internal",
    "dtype", "torch_dtype",  # weights are made in float32; `precision` is the plan's
    "return_dict", "output_attentions", "output_hidden_states",
    "_name_or_path",
}  # fmt: skip
"""Fields of a config, and of the configs inside it, that do not count here."""
MODEL_ERRORS = (ValueError, TypeError, KeyError, AttributeError, AssertionError, ZeroDivisionError)
"""What transformers raises for sizes that do not fit each other."""


def task(
    config: str | os.PathLike[str],
    /,
    *,
    data: str | None = None,
    tokenizer: str | None = None,
    length: int = 128,
    steps: int = 800,
    batch_size: int = text.TUNED_BATCH_SIZE,
    lr: float = 1e-3,
    warmup: float = 0.05,
    weight_decay: float = 0.1,
    clip: float | None = 1.0,
    valid_bytes: int = 32_768,
    prompt: str = "def ",
    temperature: float = 0.7,
) -> Task:
    """The task of training the model of a config file. Without `data`, the text is Python's standard library.

    tokenizer    a tokenizer.json; None: each byte is a token
    length       tokens of one sample
    batch_size   samples of one step, over all processes
    warmup       fraction of the steps in which the learning rate grows
    valid_bytes  tokens for the validation loss, in samples spread over the validation text
    Raises SettingError for settings, and TaskError for configs, that do not fit; DataError if there is nothing at
    `data`.
    """
    counts = {"length": length, "steps": steps, "batch_size": batch_size, "valid_bytes": valid_bytes}
    problems = [
        *text.count_problems(**counts),
        *text.rate_problems(lr=lr, warmup=warmup, weight_decay=weight_decay, clip=clip, temperature=temperature),
    ]
    if problems:
        raise SettingError(problems, where=f"the settings of hf:{config}")
    fields = read_config(Path(config))
    encoder = None if tokenizer is None else read_tokenizer(Path(tokenizer))
    takes_positions = _check_config(fields, str(config), encoder, length=length)
    if data is not None:
        resolve_text_path(data)
    return Task(
        model=functools.partial(make_model, fields, where=str(config)),
        loss=loss,
        data=functools.partial(
            open_data, data, encoder, length=length, valid_tokens=valid_bytes, takes_positions=takes_positions
        ),
        optimizer=functools.partial(text.optimizer, lr=lr, weight_decay=weight_decay),
        evaluate=functools.partial(evaluate, name="bits per byte" if encoder is None else "bits per token"),
        sample=functools.partial(
            generate,
            tokenizer=encoder,
            takes_positions=takes_positions,
            length=length,
            prompt=prompt,
            temperature=temperature,
        ),
        schedule=functools.partial(text.schedule, warmup=warmup),
        unit="tokens",
        steps=steps,
        batch_size=batch_size,
        clip=clip,
        tuned_for=text.TUNED_BATCH_SIZE,
        tokenizer=None if encoder is None else encoder.pretrained(),
    )


# ---- the config ------------------------------------------------------------------------------------


def read_config(path: Path) -> dict[str, Any]:
    """The fields of a config file that count here. Raises TaskError if it is missing, or is no config of a model."""
    where, need = str(path), "a config file of transformers"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
        fields = json.loads(content) if len(content) <= MAX_CONFIG_BYTES else None
    except OSError as error:
        raise TaskError(
            Problem(f"{path} ({os_error_text(error)})", "a config file of transformers"), where=where
        ) from None
    except (ValueError, RecursionError) as error:
        raise TaskError(Problem(f"no JSON: {str(error)[:80]}", need), where=where) from None
    if not isinstance(fields, dict):
        raise TaskError(Problem("no JSON object of at most 64 MiB", need), where=where)
    if not isinstance(fields.get("model_type"), str):
        raise TaskError(Problem("no model_type", "the config of a model", '"model_type": "llama"'), where=where)
    if fields.get("quantization_config"):
        got = "a quantization_config: such weights cannot be trained"
        raise TaskError(Problem(got, "weights of float numbers", "a config without it"), where=where)
    return _without_ignored(fields)


def _without_ignored(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_ignored(each) for name, each in value.items() if name not in IGNORED}
    return [_without_ignored(each) for each in value] if isinstance(value, list) else value


def _transformers(where: str) -> Any:
    """The package. Raises TaskError with the line that installs it."""
    try:
        import transformers
    except ImportError as error:
        got = f"transformers does not import: {str(error).splitlines()[0]}"
        raise TaskError(Problem(got, "transformers 5 or later, for hf: tasks", INSTALL), where=where) from None
    return transformers


def make_config(fields: Mapping[str, Any], *, where: str) -> Any:
    """The config as an object of transformers, for one model. Raises TaskError."""
    transformers = _transformers(where)
    kind = fields["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        close = closest_match(kind, list(transformers.CONFIG_MAPPING.keys()))
        attempt = f'"model_type": "{close}"' if close else ""
        need = f"one that transformers {transformers.__version__} has: code of a config's author is never run"
        raise TaskError(Problem(f"model_type = {kind!r}", need, attempt), where=where)
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(copy.deepcopy(dict(fields)))
    except Exception as error:  # its own classes too, for a field of the wrong type
        raise TaskError(Problem(_first_line(error), f"the config of a {kind} model"), where=where) from None
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        got = f"{kind}, which has no causal language model"
        raise TaskError(Problem(got, "a model that predicts the next token", "a model_type such as llama"), where=where)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a cache copies all keys and values, and a training step does not need one
    return config


def make_model(fields: Mapping[str, Any], *, where: str) -> nn.Module:
    """The model of a config, with random weights in float32. Raises TaskError for sizes that do not fit each other."""
    config = make_config(fields, where=where)
    try:
        return _transformers(where).AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
    except MODEL_ERRORS as error:
        got = f"{type(error).__name__}: {_first_line(error)}"
        raise TaskError(Problem(got, f"sizes that make a {config.model_type} model"), where=where) from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:200] if lines else type(error).__name__


def _check_config(fields: Mapping[str, Any], where: str, tokenizer: Tokenizer | None, *, length: int) -> bool:
    """Whether the model takes positions. Raises TaskError with what does not fit."""
    config = make_config(fields, where=where)
    of_text, problems = config.get_text_config(), []
    # BERT and its like attend to later tokens too, unless the config says that they decode.
    if hasattr(config, "add_cross_attention") and not (
        config.is_encoder_decoder or getattr(config, "is_decoder", True)
    ):
        got = f"{config.model_type} as an encoder, which sees the token that it predicts"
        problems.append(Problem(got, "a causal model", '"is_decoder": true'))
    needed, size = 256 if tokenizer is None else tokenizer.size, getattr(of_text, "vocab_size", None)
    if isinstance(size, int) and size < needed:
        what = "for bytes as tokens" if tokenizer is None else f"as {tokenizer.file} has"
        attempt = f'"vocab_size": {needed}' + (", or tokenizer=FILE" if tokenizer is None else "")
        problems.append(Problem(f"vocab_size = {size}", f"{needed} or more, {what}", attempt))
    longest = getattr(of_text, "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < length:
        need = f"at most {longest}, the model's max_position_embeddings"
        problems.append(Problem(f"length = {length}", need, f"length={longest}"))
    if problems:
        raise TaskError(problems, where=where)
    model = _transformers(where).MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return "position_ids" in inspect.signature(model.forward).parameters


# ---- the loss, the data, the sample ----------------------------------------------------------------


def loss(outputs: Any, targets_BL: Tensor) -> Tensor:
    """Cross entropy of every token, in nats: [B, L]."""
    return cross_entropy(outputs.logits, targets_BL)


def evaluate(outputs: Any, targets_BL: Tensor, *, name: str) -> dict[str, tuple[Tensor, int]]:
    """Bits per token, as (sum, count)."""
    return {name: (loss(outputs, targets_BL).sum() / math.log(2), targets_BL.numel())}


class ModelInputs:
    """A source of tokens under the names that models of transformers have for their inputs."""

    def __init__(self, source: TokenSource, *, takes_positions: bool) -> None:
        self.source, self.takes_positions = source, takes_positions

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int, /) -> tuple[dict[str, Tensor], Tensor]:
        inputs, targets = self.source[index]
        return self._named(inputs), targets

    def fetch(self, indices: Sequence[int], /) -> tuple[dict[str, Tensor], Tensor]:
        inputs, targets = self.source.fetch(indices)
        return self._named(inputs), targets

    def _named(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return model_inputs(inputs["tokens"], inputs["positions"], takes_positions=self.takes_positions)


def model_inputs(tokens: Tensor, positions: Tensor, *, takes_positions: bool) -> dict[str, Tensor]:
    """The inputs of a model of transformers."""
    return {"input_ids": tokens, "position_ids": positions} if takes_positions else {"input_ids": tokens}


def open_data(
    path: str | None, tokenizer: Tokenizer | None, *, length: int, valid_tokens: int, takes_positions: bool
) -> Data:
    """The sources. Raises DataError if the text is missing, empty or shorter than a sample."""
    train, valid = text.make_sources(
        *_token_rows(open_text(path), tokenizer),
        path,
        length=length,
        valid_tokens=valid_tokens,
        unit="bytes" if tokenizer is None else "tokens",
    )
    inputs = functools.partial(ModelInputs, takes_positions=takes_positions)
    return Data(train=inputs(train), valid=inputs(valid))


def _token_rows(split: CorpusSplit, tokenizer: Tokenizer | None) -> tuple[TokenRow, TokenRow]:
    if tokenizer is None:
        return split.train, split.valid
    return tokenizer.encode_corpus(split.train), tokenizer.encode_corpus(split.valid)


def generate(
    model: nn.Module,
    *,
    tokenizer: Tokenizer | None,
    takes_positions: bool,
    prompt: str,
    length: int,
    temperature: float,
    num_tokens: int = 300,
    seed: int = 0,
) -> str:
    """The prompt and the model's continuation; what is not printable shows as `·`."""
    size = 256 if tokenizer is None else tokenizer.size  # a vocabulary may be larger than what is there to learn

    def logits(window: Tensor, positions: Tensor) -> Tensor:
        return model(**model_inputs(window, positions, takes_positions=takes_positions)).logits[..., :size]

    begin = list(prompt.encode() or b"\n") if tokenizer is None else tokenizer.encode(prompt) or [0]
    sizes = {"length": length, "num_tokens": num_tokens}
    tokens = text.continue_tokens(model, logits, begin, temperature, seed=seed, **sizes)
    return text.bytes_text(tokens) if tokenizer is None else text.printable(tokenizer.decode(tokens))
