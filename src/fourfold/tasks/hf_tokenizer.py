"""Tokenizer: a tokenizer.json of the tokenizers library, which comes with transformers.

Law: the file is data; nothing in it is run.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.feed.corpus import Corpus, FileRange
from fourfold.words.errors import Problem, TaskError, os_error_text

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
