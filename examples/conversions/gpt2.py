"""A GPT-2 of Hugging Face, fine-tuned on a data set of theirs. Nothing is downloaded: model and text are made here."""

from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

LENGTH = 64


def tokenize(row: dict[str, str]) -> dict[str, list[int]]:
    tokens = list(row["text"].encode().ljust(LENGTH)[:LENGTH])
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    texts = [f"{a} plus {b} is {a + b}, and {a} times {b} is {a * b}." for a in range(20) for b in range(20)]
    dataset: Any = Dataset.from_dict({"text": texts}).map(tokenize, remove_columns="text").with_format("torch")
    loader = DataLoader(dataset, batch_size=16, drop_last=True)

    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0)
    model: Any = GPT2LMHeadModel(config)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)

    for epoch in range(2):
        for batch in loader:
            batch = {name: values.to(device) for name, values in batch.items()}
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            scheduler.step()
        with torch.no_grad():
            batch = {name: values.to(device) for name, values in dataset[300:].items()}
            loss = model(**batch).loss
        print(f"epoch {epoch}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
