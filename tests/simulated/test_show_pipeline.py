"""`fourfold show` of the pipeline axis: the stages, the timeline as text and as a page, and what each place stores."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.plan.plan import Plan
from fourfold.report.plan_pages import describe_plan
from fourfold.show.describe import show
from fourfold.tasks import lm
from fourfold.words.task import Task
from tests.report_data import parts

EXPECTED = """
pipeline   interleaved, 4 microbatches; bubble 12%
  stage  ranks  blocks    parameters  weights  in flight
      0  pp 0   blocks.0      8.22 k  32.1 KiB          4
      1  pp 1   blocks.1      4.13 k  16.1 KiB          3
      2  pp 0   blocks.2      4.13 k  16.1 KiB          2
      3  pp 1   blocks.3      8.24 k  32.2 KiB          1

  0  F0.0 F0.1 F2.0 F2.1 F0.2 ·    B2.0 ──── F0.3 B2.1 ──── F2.2 B0.0 ──── F2.3 B0.1 ──── ·    B2.2 ──── ·    …
  1  ·    F1.0 F1.1 F3.0 B3.0 ──── F3.1 B3.1 ──── F1.2 B1.0 ──── F1.3 B1.1 ──── F3.2 B3.2 ──── F3.3 B3.3 ──── …
"""
INTERLEAVED = {"pp": 2, "microbatches": 4, "schedule": "interleaved", "interleave": 2}
H2 = {"pp": 4, "microbatches": 8, "schedule": "zero-bubble", "max_in_flight": 7}


def small(layers: int = 4) -> Task:
    return dataclasses.replace(lm.task(width=16, layers=layers, heads=2, length=16), clip=None)


def test_the_stages_and_the_timeline_are_shown():
    got = [line.split() for line in show(Plan(**INTERLEAVED), small()).splitlines()]
    for line in EXPECTED.strip().splitlines():
        assert line.split() in got


@pytest.mark.parametrize("fields", [INTERLEAVED, H2, {"pp": 2, "microbatches": 3}, {"pp": 3, "schedule": "pipedream"}])
def test_the_page_draws_the_actions_of_all_places_and_the_text(fields):
    plan = Plan(**fields)
    text = "plan   <b>&\n" * 2
    drawn, note, printed = parts(describe_plan(plan, text))
    found = [[name for name, *_ in blocks] for _, blocks in drawn["lanes"]]
    assert found == [[str(action) for action in each] for each in plan.undrained_lists]
    assert printed["text"] == text
    assert ("backward of weights" in dict(note["keys"])) == plan.divides_backward


def test_a_sum_before_the_updates_is_priced_for_zero_bubble():
    assert "bubble 0%" in show(Plan(**H2), small())
    assert "all stages would wait for one sum before their updates: bubble 12%" in show(Plan(**H2), small())
    for text in (
        show(Plan(**H2, precision="fp16"), small()),
        show(Plan(**H2), dataclasses.replace(small(), clip=1.0)),
    ):
        assert "zero-bubble, 8 microbatches; bubble 12%" in text
        assert "without it the bubble is 0%" in text


def test_each_place_has_its_own_memory():
    lines = [line for line in show(Plan(pp=4), small()).splitlines() if line.endswith("on a network of 4")]
    assert [re.findall(r"pp \d(?: to \d)?", line) for line in lines] == [["pp 0"], ["pp 1 to 2"], ["pp 3"]]
    block = 4 * (4 * 16 * 16 + 3 * 64 * 16 + 2 * 16)
    sizes = [block + 4 * 256 * 16, block, block + 4 * 256 * 16 + 4 * 16]  # and an embedding; and a norm and a head
    assert [line.split()[0] for line in lines] == [f"{size / 1024:.1f}" for size in sizes]


def test_without_a_task_there_is_a_layer_for_each_stage(monkeypatch, capsys, tmp_path: Path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    command = ["show", "pp=4", "microbatches=8", "schedule=interleaved", "interleave=2"]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(command)
    assert "7  pp 3   blocks.7" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*command, "--html", str(tmp_path / "plan.html")])
    assert capsys.readouterr().out == f"{tmp_path / 'plan.html'}\n"
    assert "F7.7" in (tmp_path / "plan.html").read_text()
    for words, got in (
        (["layers=4"], "8 stages and a chain of 4 blocks"),
        (["lm"], "8 stages and a chain of 4 blocks"),
        (["--html", str(tmp_path / "plan.html" / "plan.html")], "could not be written"),
    ):
        with pytest.raises(SystemExit, match=r"^2$"):
            main([*command, *words])
        assert got in capsys.readouterr().err
