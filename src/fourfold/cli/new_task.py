"""`fourfold new`: writes a task file to begin with.

Law: the file trains as it is, and a file that exists is never overwritten.
"""

from pathlib import Path

from fourfold.cli.output import print_text
from fourfold.words.errors import Problem, SettingError, os_error_text

TEMPLATE = '''"""A training task: what is learned, for one device. Nothing in this file mentions ranks.

fourfold train {file}                        train it, with the defaults below
fourfold train {file} -n 2 width=128         on two processes, with another argument
fourfold verify {file} dp=2 zero=1           check that a plan trains as one device does
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fourfold as ff


class Data:
    """A source of samples: it has a length, and sample i is (inputs, targets). A torch Dataset is one too.

    This one is made up: which of three points is the nearest? Read your own data here.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(num_samples, 2, generator=random)
        points = torch.tensor([[0.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
        self.targets = torch.cdist(self.inputs, points).argmin(1)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def data() -> ff.Data:
    return ff.Data(train=Data(4096, seed=0), valid=Data(512, seed=1))


def model(width: int) -> nn.Module:
    """The model, for one device. Every process builds the same one."""
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 3))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """One value for each sample: the mean is taken over the whole batch, on however many processes."""
    return F.cross_entropy(outputs, targets, reduction="none")


def evaluate(outputs: Tensor, targets: Tensor) -> dict[str, tuple[int, int]]:
    """Metrics of a validation batch, each as (sum, count)."""
    return {{"accuracy": (int((outputs.argmax(1) == targets).sum()), len(targets))}}


def task(width: int = 64, lr: float = 1e-2) -> ff.Task:
    """What `fourfold train` calls. Its arguments can be given on the command line, such as lr=3e-3."""
    return ff.Task(
        model=functools.partial(model, width),
        loss=loss,
        data=data,
        optimizer=functools.partial(torch.optim.AdamW, lr=lr),
        evaluate=evaluate,
        steps=200,
        batch_size=64,  # over all processes together
    )
'''


def write_task(file: str) -> int:
    """Write the file and print what to do with it; returns the exit code. Raises SettingError."""
    path = Path(file)
    if path.suffix != ".py":
        problem = Problem(file or "(nothing)", "a file FILE.py", f"{path.stem or 'task'}.py")
        raise SettingError(problem, where="fourfold new")
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(TEMPLATE.format(file=file))
    except OSError as error:
        raise SettingError(_write_problem(path, file, error), where="fourfold new") from None
    print_text(f"{file} is a task that trains: fourfold train {file} -n 2")
    return 0


def _write_problem(path: Path, file: str, error: OSError) -> Problem:
    if isinstance(error, FileExistsError):
        return Problem(f"{file} exists", "a file that does not", f"{path.with_stem(f'{path.stem}_2')}")
    if isinstance(error, FileNotFoundError):
        return Problem(f"{file} (no folder {path.parent})", "an existing folder", f"mkdir -p {path.parent}")
    return Problem(f"{file} ({os_error_text(error)})", "a place to write")
