"""Laws of `fourfold plan` and of `plan=auto`: what is written, what is kept, what is refused. Decisions are literal."""

import dataclasses
import types
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli import launch, main, run_commands
from fourfold.cli.launch import Ended
from fourfold.cli.plan import auto as plan_auto
from fourfold.cli.plan import question as plan_question
from fourfold.cli.plan.arguments import PlanArguments
from fourfold.cli.plan.command import candidates_of
from fourfold.cli.plan.machine import Machine
from fourfold.cli.plan.question import Question, Questions
from fourfold.cli.run import Run, resolve
from fourfold.cli.run_commands import train
from fourfold.plan.ask import Ask
from fourfold.plan.plan import Plan
from fourfold.planner.predict.calibration import calibration_path, decode_calibration, task_key, write_calibration
from fourfold.planner.predict.gpt_facts import GptFacts
from fourfold.words.errors import PlanError
from tests.calibration_cases import calibration, pretend_measured
from tests.decision_cases import BEST, DECISION, EQUAL, PLAIN, SLOW, prediction
from tests.jobs import parse_job

GPT = GptFacts(layers=2, width=64, heads=4, vocabulary=96, length=32, batch_size=8)
HERE: Any = Machine(None, None, "4 ranks of this machine, as measured", is_here=True)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Decided(Question):
    """A question whose answer is known."""

    def decide(self) -> Any:
        return DECISION

    @property
    def workload(self) -> Any:
        from tests.decision_cases import WORKLOAD

        return WORKLOAD


@pytest.fixture(autouse=True)
def _answers(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Questions, "make", lambda self, changes=None: Decided("lm", True, GPT, HERE, Ask(devices=4)))


def ends(code: int, *words: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert stop.value.code == code


def test_the_first_plan_is_written_with_what_it_was_predicted_to_take(capsys):
    ends(0, "plan", "lm", "devices=4")
    text = Path("plan.toml").read_text()
    assert Plan.from_toml(text) == BEST.plan
    head = "# fourfold plan: lm, 4 ranks of this machine, as measured\n# predicted: 41.0 ms a step, 1.20 GiB a rank\n"
    assert text.startswith(head)
    out = capsys.readouterr().out
    assert "why the first" in out
    assert out.endswith("plan   plan.toml, for fourfold train lm plan.toml\n")


def test_a_plan_that_is_there_is_not_overwritten_unless_told(capsys):
    Path("plan.toml").write_text("mine")
    ends(2, "plan", "lm")
    printed = capsys.readouterr()
    assert "why the first" in printed.out  # the answer is worth reading all the same
    assert "plan.toml is there already" in printed.err
    assert Path("plan.toml").read_text() == "mine"
    ends(0, "plan", "lm", "out=none")
    assert Path("plan.toml").read_text() == "mine"
    ends(0, "plan", "lm", "overwrite=true")
    assert Plan.from_toml(Path("plan.toml").read_text()) == BEST.plan
    capsys.readouterr()
    ends(2, "plan", "lm", "out=plan.toml")
    assert capsys.readouterr().out == ""  # a file that was named is looked at first


def test_the_page_is_written_where_told_and_a_place_that_cannot_be_is_an_error(capsys):
    ends(0, "plan", "lm", "html=page.html", "out=none")
    assert "Why the first" in Path("page.html").read_text()
    assert capsys.readouterr().out.endswith("page   page.html\n")
    ends(2, "plan", "lm", "html=no/such/folder/page.html", "out=none")
    assert "need a folder that exists and can be written to" in capsys.readouterr().err


def test_confirm_runs_the_first_plans_and_the_best_baseline_and_the_measured_order_decides(monkeypatch, capsys):
    ran = []

    def measure(program, run, *, plans):
        ran.append((program, [Plan.from_toml(text) for text in plans], run.words))
        return Ended(0, [0.050, 0.030])

    monkeypatch.setattr(launch, "launch_ranks", measure)
    ends(0, "plan", "lm", "confirm=2", "length=64", "zero=1")
    assert ran == [("time", [BEST.plan, EQUAL.plan], ["lm", "length=64"])]
    assert Plan.from_toml(Path("plan.toml").read_text()) == EQUAL.plan
    assert "# measured: 30.0 ms a step\n" in Path("plan.toml").read_text()
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index("running 2 plans here, in turns") + 2 :]
    assert [line.split("  ")[-1] for line in table[1:3]] == ["dp=2 tp=2", "dp=4 zero=1"]
    assert "+40.0 %" in table[1]


def test_the_best_baseline_is_confirmed_too():
    fast = prediction(Plan(dp=4, zero=2), compute=20.0)
    decision = dataclasses.replace(DECISION, baselines={"a": PLAIN, "b": fast})
    assert candidates_of(decision, 2) == [BEST, EQUAL, fast]
    assert candidates_of(DECISION, 3) == [BEST, EQUAL, SLOW]


def test_ranks_that_fail_while_plans_are_confirmed_leave_no_plan(monkeypatch):
    monkeypatch.setattr(launch, "launch_ranks", lambda *_, **__: Ended(1))
    ends(1, "plan", "lm", "confirm=2")
    assert not Path("plan.toml").exists()


def test_a_training_gets_every_field_of_the_plan_that_was_decided(capsys):
    run = plan_auto.with_plan(resolve(["digits", "plan=auto", "steps=3"]), num_processes=4, world=None)
    assert run == Run("digits", texts={"steps": "3"}, decided=BEST.plan)
    out = capsys.readouterr().out
    assert out.startswith("plan   dp=4 zero=1: 41.0 ms a step, 1.20 GiB a rank, the best of 312 plans")
    assert "\nwhy    against data parallel, zero 1: it is the best baseline\n" in out


def test_a_task_of_ones_own_is_planned_as_it_trains(monkeypatch, tmp_path):
    (tmp_path / "mine.py").write_text("from fourfold.tasks import digits\n\ndef task():\n    return digits.task()\n")
    runs: list[Any] = []
    monkeypatch.setattr(run_commands, "becomes_forking_launcher", lambda num_processes: False)
    monkeypatch.setattr(run_commands, "_launch_run", lambda run, _: runs.append(run) or Ended(0))
    assert run_commands.train(["mine.py", "plan=auto", "tp=auto", "steps=3"], "4") == 0
    assert runs == [Run("mine.py", texts={"steps": "3"}, decided=BEST.plan)]


def kept_run(*words: str) -> Path:
    """The folder of a run of digits that began with these words."""
    folder = parse_job(["digits", *words]).run_dir
    folder.mkdir(parents=True)
    (folder / "plan.toml").write_text(Plan(dp=2, tp=2).to_toml())
    return folder


def test_a_run_that_resumes_keeps_its_plan(monkeypatch, capsys):
    folder = kept_run("steps=3")
    words, kept = ["digits", "plan=auto", "steps=3"], Plan(dp=2, tp=2)

    def decided(*more: str, num_processes: int | None) -> Plan | None:
        return plan_auto.with_plan(resolve([*words, *more]), num_processes=num_processes, world=None).decided

    assert decided(num_processes=4) == decided(num_processes=None) == kept
    assert f"plan   dp=2 tp=2, kept from {folder}\n" in capsys.readouterr().out
    # On another number of ranks, with a field that it does not have, or if it starts over, the run is planned again.
    with pytest.raises(PlanError, match="need the number of ranks, 8"):  # the answer here is always for four
        decided(num_processes=8)
    assert decided("zero=1", num_processes=4) == BEST.plan
    assert decided("fresh=true", num_processes=4) == BEST.plan


def test_another_launcher_is_told_to_plan_first(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["train", "digits", "plan=auto"])
    assert "plan=auto, under another launcher" in capsys.readouterr().err


def test_the_words_of_the_planner_are_no_unknown_settings_of_a_training(monkeypatch):
    monkeypatch.setattr(plan_auto, "with_plan", lambda run, **_: pytest.exit(" ".join(run.words)))
    words = ["digits", "ask:dapple", "plan=auto", "zero=auto", "seed=3"]
    with pytest.raises(pytest.exit.Exception, match=" ".join(words)):
        train(words, "4")


def test_pinned_fields_come_from_the_words_the_file_and_the_ask(tmp_path):
    Path("ask.toml").write_text('version = 1\ndevices = 8\ntp = 2\nzero = 1\nprecision = "auto"\n')
    run = resolve(["digits", "ask.toml", "zero=3", "batch_size=64"])
    ask = plan_question.read_ask(PlanArguments(run), devices=None)
    assert dict(ask.pinned) == {"tp": 2, "zero": 3}
    assert (ask.devices, ask.requested) == (8, ("precision",))
    assert run.without_plan.words == ["digits", "batch_size=64"]
    settings = Path("run.toml")
    settings.write_text('[task]\nname = "digits"\n[plan]\ndp = 2\n')
    arguments = PlanArguments(resolve(["run.toml", "zero=auto"]))
    ask = plan_question.read_ask(arguments, devices=4)
    assert dict(ask.pinned) == {"dp": 2}
    assert ask.is_open("zero")
    kept = dataclasses.replace(arguments, kept={"codec": "topk"})
    assert dict(plan_question.read_ask(kept, devices=4).pinned) == {"codec": "topk"}


def test_a_measured_machine_with_gpus_has_the_memory_of_the_smallest(tmp_path, monkeypatch):
    import torch

    from fourfold.cli.plan import machine as plan_machine

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes = [80 * 2**30, 40 * 2**30]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(total_memory=sizes[index])
    )
    path = pretend_measured(GPT, 2)
    assert decode_calibration(path.read_bytes(), where="").machine.processor == "a GPU"
    machine = plan_machine.calibrated_machine(GPT, 2)
    assert machine is not None
    assert (machine.cluster.device, machine.cluster.memory_bytes) == ("cuda", 40 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert plan_machine.calibrated_machine(GPT, 2) is None  # what a GPU takes is not used for the processor


def test_measurements_under_other_conditions_are_named_and_not_used(tmp_path, monkeypatch):
    from fourfold.cli.plan import machine as plan_machine

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    key, words = task_key(GPT), ["gpt"]
    assert plan_machine.calibrated_machine(GPT, 2) is None
    assert plan_machine.why_measured(words, key, 2).count("\n") == 0
    path = pretend_measured(GPT, 2)
    machine = plan_machine.calibrated_machine(GPT, 2)
    assert machine is not None
    assert machine.text == "2 ranks of this machine, as measured"
    wider = dataclasses.replace(GPT, width=128)
    assert plan_machine.calibrated_machine(wider, 2) is None
    assert plan_machine.calibrated_machine(dataclasses.replace(GPT, layers=4, batch_size=2), 2) is None
    same = dataclasses.replace(GPT, batch_size=2)
    assert plan_machine.calibrated_machine(same, 2) is not None
    old = calibration(decode_calibration(path.read_bytes(), where="").machine._replace(torch="1.0", threads=7))
    path.unlink()
    write_calibration(calibration_path(old.machine, key), old)
    assert plan_machine.calibrated_machine(GPT, 2) is None
    said = plan_machine.why_measured(words, key, 2).splitlines()[1]
    assert said == "what was measured with torch 1.0, threads 7 does not hold here"
