"""Laws of `fourfold plan gpt`: a GPT of any size is planned by formula, for machines that are not here."""

import re
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.cli.plan.question import gpt_source
from fourfold.plan.ask import Ask
from fourfold.plan.plan import Plan
from fourfold.plan.recipes import SHIPPED_ASKS
from fourfold.planner.predict.clusters import RooflinePrices, load_cluster
from fourfold.planner.predict.gpt_facts import GptFacts
from fourfold.planner.search.answer import decide
from fourfold.words.errors import SettingError

SMALL = ("layers=4", "width=256", "heads=8", "vocabulary=512", "length=128", "batch_size=16")


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def ends(code: int, *words: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", "gpt", *words])
    assert stop.value.code == code


def test_a_gpt_is_planned_for_a_cluster_and_the_plan_is_written(capsys):
    ends(0, *SMALL, "cluster=dgx-a100", "devices=4", "html=page.html", "tp=2")
    out = capsys.readouterr().out
    assert "gpt of 4 layers, width 256" in out
    assert "4 devices of DGX A100, one host" in out
    assert re.search(r"^  2 devices +takes ", out, re.MULTILINE)  # with tp=2 as pinned; there is no baseline on one
    assert "1 device" not in out
    plan = Plan.from_toml(Path("plan.toml").read_text())
    assert (plan.mesh.size, plan.tp, plan.precision) == (4, 2, "bf16")
    assert "One step, predicted" in Path("page.html").read_text()


def test_a_row_of_a_table_is_priced_with_all_that_it_gives(capsys):
    ends(0, *SMALL, "cluster=dgx-a100", "tp=2", "pp=2", "dp=2", "cp=1", "out=none")
    plans = re.findall(r"^\d+ .* (?:pp=2 .*)$", capsys.readouterr().out, re.MULTILINE)
    assert plans
    assert all("dp=2" in plan and "tp=2" in plan for plan in plans)
    assert not Path("plan.toml").exists()


def test_several_numbers_of_devices_give_curves_of_both_kinds_of_scaling(capsys):
    ends(0, *SMALL, "cluster=dgx-a100", "devices=1,2,4", "html=page.html")
    out = capsys.readouterr().out
    strong, weak = out.split("\n\n")[1:3]
    assert strong.startswith("strong scaling, a batch of 16 samples\n")
    assert weak.startswith("weak scaling, a batch of 16 samples on 1 device\n")
    for curve in (strong, weak):
        assert [line.split()[0] for line in curve.splitlines()[2:]] == ["1", "2", "4"]
        assert "100 %" in curve.splitlines()[2]
    assert "Efficiency of a device" in Path("page.html").read_text()
    assert not Path("plan.toml").exists()


def test_a_point_where_nothing_fits_says_so(capsys):
    ends(0, *SMALL, "cluster=dgx-a100", "devices=2", "memory=1MiB,40GiB")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith(("1MiB", "40GiB"))]
    assert "need at most 1.00 MiB" in rows[0]
    assert "dp=2" in rows[1] or "tp=2" in rows[1] or "pp=2" in rows[1]


def test_everything_wrong_with_a_gpt_is_told_at_once():
    with pytest.raises(SettingError) as raised:
        gpt_source(["gpt", "layers=4", "widht=256", "heads=0"])
    text = str(raised.value)
    assert text.startswith("3 problems in fourfold plan\n")
    assert "try width=256" in text
    assert "heads = 0" in text
    assert "a gpt without width" in text
    for text in ("-24", "0", "1.5", "many", "", "1000000000"):
        with pytest.raises(
            SettingError, match=rf"layers = {text or '.*nothing.*'} +need a whole number from 1 to 1024"
        ):
            gpt_source(["gpt", f"layers={text}", "width=256", "heads=4"])
    with pytest.raises(SettingError, match="need a whole number from 1 to 16777216"):
        gpt_source(["gpt", "layers=4", "width=256", "heads=4", f"length={'9' * 5000}"])  # more digits than Python reads
    with pytest.raises(SettingError, match="a width divisible by heads"):
        gpt_source(["gpt", "layers=4", "width=256", "heads=3"])


def test_a_formula_needs_a_machine_and_cannot_run(capsys):
    ends(2, *SMALL)
    assert "gpt without a cluster" in capsys.readouterr().err
    ends(2, *SMALL, "cluster=dgx-a100", "devices=2", "confirm=2")
    assert "the plans are run here" in capsys.readouterr().err


@pytest.mark.parametrize("name", SHIPPED_ASKS.names())
def test_every_ask_that_is_shipped_has_an_answer(name):
    ask = Ask.from_toml(SHIPPED_ASKS.text(name), where=name)
    source = GptFacts(layers=24, width=1024, heads=16, length=512, batch_size=64)
    cluster = load_cluster("dgx-a100").resized(ask.devices or 16)
    decision = decide(ask, source, RooflinePrices(cluster), cluster)
    answer = decision.answer.plan
    assert {field: getattr(answer, field) for field in ask.pinned} == dict(ask.pinned)
    assert answer.mesh.size == (ask.devices or 16)
