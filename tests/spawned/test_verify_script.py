"""`fourfold verify SCRIPT.py` as a command; its laws are in tests/simulated/test_verify_script.py."""

import subprocess
import sys

SECONDS = 180
SCRIPT = """
import sys
import torch, torch.nn.functional as F
import fourfold as ff
from fourfold.comm.reduce import host

if sys.argv[1:] == ["broken"]:
    whole = host.sum_in_order
    host.sum_in_order = lambda addends, out: whole(addends[:-1], out=out)
torch.manual_seed(0)
model = torch.nn.Linear(8, 3)
step = ff.parallelize(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), ff.Plan(dp=2))
generator = torch.Generator().manual_seed(step.rank)
while True:
    x = torch.randn(6, 8, generator=generator)
    step((x, (x.sum(1) > 0).long()))
"""


def test_a_script_is_verified_on_processes_with_the_exit_code(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "fourfold", "verify", "script.py", "-n", "2", "steps=3"]
    good, bad = (
        subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False)
        for words in ([], ["--", "broken"])
    )
    assert good.returncode == 0, good.stderr
    assert "script.py on dp 2, compared with one device: 3 steps in float32, against float64" in good.stdout
    assert good.stdout.endswith("the plan trains as one device does\n")
    assert bad.returncode == 1
    assert "the weight of weight deviates by" in bad.stderr
    assert "at step 1, the first" in " ".join(bad.stderr.split())
