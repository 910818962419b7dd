"""`ff.launch` from a notebook: ranks are forks of the kernel, and none is left."""

import os
from pathlib import Path

import nbclient
import nbformat
import psutil
import pytest

from tests.spawned import SOURCE

SET_UP = """
import os, time
import torch, torch.distributed as dist
import fourfold as ff
torch.ones(512, 512) @ torch.ones(512, 512)  # a kernel that has computed has threads, which forks do not have
lr = 0.1
data = [(torch.full((4,), 0.01 * i), torch.tensor([0.02 * i])) for i in range(64)]


def train(dp, steps):
    torch.manual_seed(0)
    plan = ff.Plan(dp=dp)
    model, loss = torch.nn.Linear(4, 1), lambda outputs, targets: (outputs - targets) ** 2
    step = ff.parallelize(model, loss, lambda params: torch.optim.SGD(params, lr=lr), plan)
    for number, batch in zip(range(steps), ff.Feed(data, plan, batch_size=8, seed=0)):
        result = step(batch).loss
        print(f"step {number} on {ff.world().rank} of {ff.world().size}")
    return {"loss": result, "rank": ff.world().rank, "threads": torch.get_num_threads()}
"""
TWICE = """
two, one = ff.launch(train, 2, steps=5, n=2), ff.launch(train, 1, 5, n=1)
assert two.pop("rank") == 0 and abs(two["loss"] - one["loss"]) < 1e-6 and two["threads"] == 1
print("same", two["loss"] < 1, "RANK" in os.environ, dist.is_initialized())
"""
FAIL = """
def fail():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError(f"bad {lr}")
    dist.barrier()

try:
    ff.launch(fail, n=2)
except ff.FourfoldError as error:
    print(error)
"""
DIE = """
from fourfold.words.errors import PeerError

def die():
    if os.environ["RANK"] == "0":
        os._exit(3)
    time.sleep(100)

def die_slowly():
    if os.environ["RANK"] == "0":
        raise PeerError("rank 1 died")
    time.sleep(2)  # as a process does whose memory the kernel has to free
    os.kill(os.getpid(), 9)

for function, n in ((die, 2), (die_slowly, 2), (lambda: torch.ones(2), 2), (lambda: ff.launch(print), 1)):
    try:
        ff.launch(function, n=n)
    except ff.FourfoldError as error:
        print(error)
"""
REFUSED = """
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
is_initialized, torch.cuda.is_initialized = torch.cuda.is_initialized, lambda: True
try:
    ff.launch(train, 2, 5, n=0)
except ff.FourfoldError as error:
    print(error)
torch.cuda.is_initialized = is_initialized
dist.destroy_process_group()
"""
INTERRUPT = """
import signal
kernel = os.getpid()

def wait():
    print(os.getpid(), flush=True)
    if os.environ["RANK"] == "0":
        time.sleep(2)  # until the kernel has read it
        os.kill(kernel, signal.SIGINT)  # as "interrupt kernel" does it
    time.sleep(100)

begin = time.monotonic()
try:
    ff.launch(wait, n=2)
except KeyboardInterrupt:
    print("interrupted", time.monotonic() - begin < 50)
import psutil
from fourfold.launcher import notebook
own_fork = notebook.fork

def interrupted_fork(*args, **kwargs):
    rank = own_fork(*args, **kwargs)
    os.kill(kernel, signal.SIGINT)  # before `launch` knows the rank
    time.sleep(0.2)  # another thread of the kernel may get it
    return rank

notebook.fork = interrupted_fork
try:
    ff.launch(lambda: time.sleep(100), n=2)
except KeyboardInterrupt:
    print("interrupted while ranks start")
notebook.fork = own_fork
print([child.name() for child in psutil.Process().children() if child.name().startswith("fourfold")])
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The output of each cell."""
    folder = tmp_path_factory.mktemp("notebook")
    cells = [nbformat.v4.new_code_cell(source) for source in (SET_UP, TWICE, FAIL, DIE, REFUSED, INTERRUPT)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    environ = {name: value for name, value in os.environ.items() if name not in foreign}
    environ |= {"PYTHONPATH": str(SOURCE), "IPYTHONDIR": str(folder), "JUPYTER_RUNTIME_DIR": str(folder)}
    here = {"metadata": {"path": folder}}
    client = nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3", resources=here)
    client.execute(env=environ)
    return ["".join(each.get("text", "") for each in cell.outputs) for cell in notebook.cells]


def test_a_function_of_a_notebook_trains_on_ranks_as_on_one_and_rank_0_prints_into_the_cell(outputs: list[str]):
    steps = [f"step {number} on 0 of {size}" for size in (2, 1) for number in range(5)]
    assert [line for line in outputs[1].splitlines() if line.startswith("step ")] == steps
    assert outputs[1].splitlines()[-1] == "same True False False"


def test_the_first_error_is_raised_with_its_rank_and_the_lines_of_the_cell(outputs: list[str]):
    assert "rank 1 of 2 failed\nTraceback" in outputs[2]  # gloo may log a line before it
    assert '    raise ValueError(f"bad {lr}")\n' in outputs[2]
    assert outputs[2].endswith("ValueError: bad 0.1\n\n") or outputs[2].endswith("ValueError: bad 0.1\n")
    assert "rank 0 of 2" not in outputs[2]


def test_a_dead_rank_a_result_that_is_not_json_and_a_launch_inside_a_rank_are_reported(outputs: list[str]):
    assert "rank 0 of 2 ended with exit code 3" in outputs[3]
    assert "rank 1 of 2 was killed by SIGKILL" in outputs[3]
    assert "rank 1 died" not in outputs[3], "the echo is not the cause"
    assert "rank 0 returned a Tensor" in outputs[3]
    assert "need a JSON value   try .tolist(), or save it to a file" in outputs[3]
    assert "need a process that no launcher has started" in outputs[3]


def test_all_reasons_against_a_fork_are_given_at_once(outputs: list[str]):
    assert "LaunchError" in outputs[4] or "3 problems in ff.launch" in outputs[4]
    for reason in ("n = 0", "CUDA has started in this process", "a process group in this process"):
        assert reason in outputs[4]


def test_an_interrupt_ends_the_ranks(outputs: list[str]):
    pid, *rest = outputs[5].splitlines()
    assert rest == ["interrupted True", "interrupted while ranks start", "[]"]
    assert not psutil.pid_exists(int(pid))
    assert not list(Path("/dev/shm").glob(f"*{pid}*"))
