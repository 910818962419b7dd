"""A byte-level language model: a small Transformer that predicts the next byte of a text.

tokens     bytes, 0 to 255
positions  the index of each token in its sample; an input of the model, so tokens may be split among ranks
Law: a logit depends only on tokens at its own and earlier positions, and only on differences of positions.

B batch · L sequence length · D width · H heads · G heads of keys and values · K head size · V 256 bytes
"""

import functools
import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.attention import DocumentMask
from fourfold.feed.corpus import open_text
from fourfold.feed.text_path import resolve_text_path
from fourfold.losses import cross_entropy
from fourfold.tasks import text
from fourfold.words.errors import Problem, SettingError
from fourfold.words.task import Data, Task

NUM_BYTES = 256
LAYERS = 4  # unless others are asked for
MAX_LAYERS = 100_000
ROTARY_BASE = 10_000.0


def task(
    *,
    data: str | None = None,
    width: int = 128,
    layers: int = LAYERS,
    heads: int = 4,
    kv_heads: int | None = None,
    dropout: float = 0.0,
    length: int = 128,
    steps: int = 800,
    batch_size: int = text.TUNED_BATCH_SIZE,
    lr: float = 4e-3,
    warmup: float = 0.05,
    weight_decay: float = 0.1,
    clip: float | None = 1.0,
    valid_bytes: int = 32_768,
    prompt: str = "def ",
    temperature: float = 0.7,
) -> Task:
    """The task with these settings. Without `data`, the text is the source code of Python's standard library.

    kv_heads     heads of keys and values, shared by groups of query heads (GQA, arXiv 2305.13245); None: as `heads`
    dropout      the probability in attention, of the embeddings, and of what each layer adds to them
    length       tokens of one sample
    batch_size   samples of one step, over all processes
    warmup       fraction of the steps in which the learning rate grows
    valid_bytes  bytes for the validation loss, in samples spread over the validation text
    Raises SettingError for sizes that do not fit each other, DataError if there is nothing at `data`.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    counts = {"length": length, "steps": steps, "batch_size": batch_size, "valid_bytes": valid_bytes}
    problems = [
        *_shape_problems(width=width, layers=layers, heads=heads, kv_heads=kv_heads),
        *text.count_problems(**counts),
        *([] if 0 <= dropout < 1 else [Problem(f"dropout = {dropout}", "a probability: 0 or more, less than 1")]),
        *text.rate_problems(lr=lr, warmup=warmup, weight_decay=weight_decay, clip=clip, temperature=temperature),
    ]
    if problems:
        raise SettingError(problems, where="the settings of lm")
    if data is not None:
        resolve_text_path(data)
    sizes = {"width": width, "layers": layers, "heads": heads, "kv_heads": kv_heads}
    return Task(
        model=functools.partial(LanguageModel, **sizes, dropout=dropout),
        tensor=TENSOR_RULES,
        loss=loss,
        data=functools.partial(open_data, data, length=length, valid_bytes=valid_bytes),
        optimizer=functools.partial(text.optimizer, lr=lr, weight_decay=weight_decay),
        evaluate=evaluate,
        sample=functools.partial(generate, prompt=prompt, length=length, temperature=temperature),
        schedule=functools.partial(text.schedule, warmup=warmup),
        unit="tokens",
        steps=steps,
        batch_size=batch_size,
        clip=clip,
        tuned_for=text.TUNED_BATCH_SIZE,
    )


def _shape_problems(*, width: int, layers: int, heads: int, kv_heads: int) -> Iterable[Problem]:
    sizes = {"width": width, "layers": layers, "heads": heads, "kv_heads": kv_heads}
    too_small = [Problem(f"{name} = {size}", "1 or more") for name, size in sizes.items() if size < 1]
    if layers > MAX_LAYERS:  # Python would make modules for minutes before any other check could fail.
        yield Problem(f"layers = {layers}", f"at most {MAX_LAYERS}")
    yield from too_small
    if too_small:
        return
    if width % (2 * heads):
        fitting = max(width // (2 * heads), 1) * 2 * heads
        yield Problem(f"width = {width}, heads = {heads}", "width divisible by 2 × heads", f"width={fitting}")
    if heads % kv_heads:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        yield Problem(
            f"heads = {heads}, kv_heads = {kv_heads}", "heads divisible by kv_heads", f"kv_heads of {fitting}"
        )


TENSOR_RULES = {
    "embedding": "vocab:tp, model",
    "blocks.*.attention.qkv": "heads(heads, kv_heads, kv_heads):tp, model",
    "blocks.*.attention.out": "model, heads:tp",
    "blocks.*.mlp.gate_up": "mlp(2):tp, model",
    "blocks.*.mlp.down": "model, mlp:tp",
    "head": "vocab:tp, model",
}
"""The dims of the weights, and which of them the tensor axis splits; see `docs/tensor-axis.md`."""


class Attention(nn.Module):
    """Causal attention; query heads may share keys and values."""

    def __init__(self, width: int, *, heads: int, kv_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size, self.dropout = heads, kv_heads, width // heads, dropout
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BLD: Tensor, cos_BL1K: Tensor, sin_BL1K: Tensor, starts_BL: Tensor | None = None) -> Tensor:
        heads, kv_heads = self.heads, self.kv_heads
        qkv = self.qkv(x_BLD).unflatten(-1, (heads + 2 * kv_heads, self.head_size))
        qk, v = qkv.split((heads + kv_heads, kv_heads), dim=2)
        q, k = apply_rotary(qk, cos_BL1K, sin_BL1K).split((heads, kv_heads), dim=2)
        q_BHLK, k_BGLK, v_BGLK = (each.transpose(1, 2) for each in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        mask = None if starts_BL is None else DocumentMask(starts_BL)
        out_BHLK = F.scaled_dot_product_attention(
            q_BHLK, k_BGLK, v_BGLK, mask, dropout_p=dropout, is_causal=True, enable_gqa=heads != kv_heads
        )
        return self.out(out_BHLK.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """SwiGLU (arXiv 2002.05202): down(silu(gate(x)) · up(x))."""

    def __init__(self, width: int, *, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        gate, up = self.gate_up(x_BLD).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Attention, then the gated MLP, each with a norm before it and a residual around it."""

    def __init__(self, width: int, *, heads: int, kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.attention = Attention(width, heads=heads, kv_heads=kv_heads, dropout=dropout)
        # 8/3 · width keeps the weights of an ungated MLP of 4 · width; multiples of 32 suit every vector unit.
        self.norm2, self.mlp = nn.RMSNorm(width), GatedMLP(width, hidden=-(-8 * width // 96) * 32)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BLD: Tensor, cos_BL1K: Tensor, sin_BL1K: Tensor, starts_BL: Tensor | None = None) -> Tensor:
        x_BLD = x_BLD + self.dropout(self.attention(self.norm1(x_BLD), cos_BL1K, sin_BL1K, starts_BL))
        return x_BLD + self.dropout(self.mlp(self.norm2(x_BLD)))


class LanguageModel(nn.Module):
    """tokens int64 [B, L] and positions int64 [B, L] -> logits [B, L, V]. `document_starts` [B, L]: of packed rows."""

    def __init__(self, *, width: int, layers: int, heads: int, kv_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_size = width // heads
        self.embedding = nn.Embedding(NUM_BYTES, width)
        self.dropout = nn.Dropout(dropout)
        options = {"heads": heads, "kv_heads": kv_heads}
        self.blocks = nn.ModuleList(Block(width, **options, dropout=dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Weights that preserve variance; those that add to the residual stream smaller by √(2 · layers) (GPT-2)."""
        for name, weight in self.named_parameters():
            if weight.ndim == 1:
                nn.init.ones_(weight)
                continue
            writes = name.endswith(("out.weight", "down.weight"))
            scale = (2 * len(self.blocks)) ** -0.5 if writes else 1.0
            nn.init.normal_(weight, std=scale * (1.0 if name == "embedding.weight" else weight.shape[1] ** -0.5))

    def forward(self, tokens: Tensor, positions: Tensor, document_starts: Tensor | None = None) -> Tensor:
        x_BLD = self.dropout(self.embedding(tokens))
        cos, sin = rotary_cos_sin(positions, self.head_size, dtype=x_BLD.dtype)
        for block in self.blocks:
            x_BLD = block(x_BLD, cos, sin, document_starts)
        return self.head(self.norm(x_BLD))


def rotary_cos_sin(positions_BL: Tensor, head_size: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of the rotary angles (RoFormer, arXiv 2104.09864): each [B, L, 1, K]."""
    # The angles of large positions need more digits than half precision has.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, head_size, 2, dtype=wide, device=positions_BL.device) / head_size
    angles = positions_BL[:, :, None, None].to(wide) * ROTARY_BASE**-exponents
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rotary(x_BLHK: Tensor, cos_BL1K: Tensor, sin_BL1K: Tensor) -> Tensor:
    """Each pair (x[k], x[k + K/2]) rotated by its angle."""
    # Full rows, not half rows: two thirds of the time on a CPU, and bitwise the same.
    return x_BLHK * cos_BL1K + x_BLHK.roll(x_BLHK.shape[-1] // 2, dims=-1) * sin_BL1K


def loss(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """Cross entropy of every token, in nats: [B, L]."""
    return cross_entropy(logits_BLV, targets_BL)


def evaluate(logits_BLV: Tensor, targets_BL: Tensor) -> dict[str, tuple[Tensor, int]]:
    """Bits per byte, as (sum, count)."""
    return {"bits per byte": (loss(logits_BLV, targets_BL).sum() / math.log(2), targets_BL.numel())}


def open_data(path: str | None, *, length: int, valid_bytes: int) -> Data:
    """The sources. Raises DataError if the text is missing, empty or shorter than a sample."""
    split = open_text(path)
    train, valid = text.make_sources(split.train, split.valid, path, length=length, valid_tokens=valid_bytes)
    return Data(train=train, valid=valid)


def generate(
    model: nn.Module, *, prompt: str, length: int, temperature: float, num_bytes: int = 300, seed: int = 0
) -> str:
    """The prompt and the model's continuation; bytes that are not printable text show as `·`."""

    def logits(window: Tensor, positions: Tensor) -> Tensor:
        return model(tokens=window, positions=positions)

    begin, sizes = list(prompt.encode() or b"\n"), {"length": length, "num_tokens": num_bytes}
    return text.bytes_text(text.continue_tokens(model, logits, begin, temperature, seed=seed, **sizes))
