"""A training loop without a framework: mixed precision, parameter groups, gradient clipping, a one-cycle schedule."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    inputs = torch.rand(1536, 16) * 2 - 1
    targets = (inputs.square().mean(1) > 1 / 3).long()
    loader = DataLoader(TensorDataset(inputs[:1024], targets[:1024]), batch_size=64)

    model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 2)).to(device)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=4 * len(loader))

    for epoch in range(4):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        with torch.no_grad():
            loss = F.cross_entropy(model(inputs[1024:].to(device)), targets[1024:].to(device))
        print(f"epoch {epoch}: validation loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
