"""Cluster descriptions: units, sources, problems, and how ranks are placed on hosts."""

import copy
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.planner.predict.clusters import (
    CLUSTERS,
    FIELDS,
    SOURCES,
    TEXTS,
    cluster_names,
    load_cluster,
    read_cluster,
    read_table,
    topology_of,
)
from fourfold.words.errors import PlanError, Problem
from fourfold.words.units import UNITS, Dimension, read_quantity


def table() -> dict:
    return copy.deepcopy(read_table("dgx-a100"))


def problems(values: dict) -> list[Problem]:
    with pytest.raises(PlanError) as caught:
        read_cluster(values)
    return list(caught.value.problems)


# ---- unequal hosts ---------------------------------------------------------------------------------


def test_hosts_may_differ_in_speed():
    cluster = read_cluster({**table(), "hosts": 3, "host_speeds": [1, 0.5, 0.5]})
    assert cluster.host_speeds == (1.0, 0.5, 0.5)
    assert cluster.resized(16).host_speeds == (1.0, 0.5)
    with pytest.raises(PlanError, match="the speed of each host"):
        cluster.resized(32)


WRONG_SPEEDS = [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, "fast"], 2.0, [1.0, True], [1.0, float("inf")]]


@pytest.mark.parametrize("speeds", WRONG_SPEEDS)
def test_speeds_that_are_no_speeds_are_refused(speeds):
    assert len(problems({**table(), "hosts": 2, "host_speeds": speeds})) == 1


# ---- quantities ------------------------------------------------------------------------------------


@given(st.sampled_from(list(Dimension)), st.data(), st.floats(1e-3, 1e6))
def test_a_quantity_is_its_number_times_its_unit(dimension, data, number):
    unit, factor = data.draw(st.sampled_from(list(UNITS[dimension].items())))
    for text in (f"{number!r} {unit}", f"  {number!r}{unit} "):
        assert read_quantity("rate", text, dimension) == number * factor


@pytest.mark.parametrize(
    ("text", "base"),
    [("80 GiB", 80 * 2**30), ("312 TFLOP/s", 312e12), ("25 GB/s", 25e9), ("200 Gbit/s", 25e9), ("5 us", 5e-6)],
)
def test_examples_of_quantities(text, base):
    found = [read_quantity("x", text, each) for each in Dimension]
    assert [each for each in found if isinstance(each, float)] == pytest.approx([base])  # of one dimension only


@pytest.mark.parametrize("value", [80, 80.0, None, True, "80", "GiB", "", "8x GiB", "1.2.3 GiB", "nan GiB", "80 GiB/s"])
def test_a_number_without_its_unit_is_refused(value):
    assert isinstance(read_quantity("memory", value, Dimension.BYTES), Problem)


@pytest.mark.parametrize("text", ["0 GB/s", "-1 GB/s", "1e999 GB/s", "0e5 bit/s"])
def test_a_rate_of_zero_is_refused(text):
    assert isinstance(read_quantity("bandwidth", text, Dimension.BYTES_PER_SECOND), Problem)
    assert read_quantity("latency", "0 us", Dimension.SECONDS, allows_zero=True) == 0.0


@pytest.mark.parametrize(
    ("text", "dimension", "meant"),
    [
        ("200 Gb/s", Dimension.BYTES_PER_SECOND, "200 Gbit/s"),
        ("200MB", Dimension.BYTES_PER_SECOND, "200 MB/s"),
        ("200 Gbps", Dimension.BYTES_PER_SECOND, "200 Gbit/s"),
        ("312 TFLOPS", Dimension.OPERATIONS_PER_SECOND, "312 TFLOP/s"),
        ("80 gib", Dimension.BYTES, "80 GiB"),
    ],
)
def test_the_unit_that_was_meant_is_offered(text, dimension, meant):
    problem = read_quantity("x", text, dimension)
    assert isinstance(problem, Problem)
    assert problem.attempt == f'x = "{meant}"'


# ---- files -----------------------------------------------------------------------------------------


def test_descriptions_that_come_with_fourfold():
    assert cluster_names() == ["dgx-a100", "dgx-h100", "dgx-h200", "p100", "v100"]
    for name in cluster_names():
        cluster = load_cluster(name)
        assert cluster.device == "cuda"
        assert cluster.network is not None
        assert 0 < cluster.network.bandwidth < cluster.host.bandwidth < cluster.memory_bandwidth


@pytest.mark.parametrize("name", cluster_names())
def test_every_number_has_a_source_and_a_unit(name):
    values = tomllib.loads((CLUSTERS / f"{name}.toml").read_text())
    sources = values.pop(SOURCES)
    numbers = set()
    for key, value in values.items():
        numbers |= {f"{key}.{inner}" for inner in value} if isinstance(value, dict) else {key}
    assert set(sources) == numbers - set(TEXTS)
    assert all(len(text.split()) >= 2 for text in sources.values())


def test_a_user_s_file_needs_no_sources(tmp_path):
    path = tmp_path / "mine.toml"
    text = (CLUSTERS / "dgx-a100.toml").read_text().partition("[sources]")[0]
    path.write_text(text.replace("DGX A100", "mine"))
    assert load_cluster(path).name == "mine"
    assert load_cluster(str(path)).products == load_cluster("dgx-a100").products


def test_an_unknown_name_is_answered_with_the_closest_one(tmp_path):
    for name in ("dgx-a10", "../dgx-a100", "", str(tmp_path)):
        with pytest.raises(PlanError) as caught:
            load_cluster(name)
        assert caught.value.problems[0].attempt in cluster_names()
    with pytest.raises(PlanError, match="dgx-h100"):
        load_cluster("dgx-h10")


def test_a_file_that_is_no_toml_is_refused(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("memory = ")
    with pytest.raises(PlanError, match="valid TOML"):
        load_cluster(path)


def test_all_problems_of_a_description_are_told_at_once():
    values = table()
    values["memory"] = 80
    values["flops"]["bfloat16"] = "0 TFLOP/s"
    values["memory_bandwith"] = values.pop("memory_bandwidth")
    values["products"]["highest"] = 1.5
    values["overlap_slowdown"] = 0.5
    values["devices_per_host"] = 0
    values["host"]["bandwidth"] = "300 Gb/s"
    values["network"].pop("latency")
    values["sources"]["speed"] = "a guess"
    values["sources"]["memory"] = ""
    values["name"], values["device"] = "", "tpu"
    got = " | ".join(problem.got for problem in problems(values))
    for part in (
        "memory = 80",
        'flops.bfloat16 = "0 TFLOP/s"',
        "memory_bandwith",
        "no memory_bandwidth",
        "products.highest = 1.5",
        "overlap_slowdown = 0.5",
        "devices_per_host = 0",
        'host.bandwidth = "300 Gb/s"',
        "no network.latency",
        "sources: speed",
        "sources: memory = ''",
        "name = ''",
        "device = 'tpu'",
    ):
        assert part in got
    assert len(problems(values)) == 13


@given(st.sampled_from(["memory_bandwidth", "host.bandwidth", "network.bandwidth", "flops.float16", "memory"]))
def test_no_rate_is_zero(name):
    values = table()
    place, _, key = name.rpartition(".")
    inner = values[place] if place else values
    inner[key] = "0 " + inner[key].split()[1]
    assert [problem.need for problem in problems(values)] == ["more than 0"]


def test_several_hosts_need_a_network():
    values = table()
    del values["network"]
    values[SOURCES] = {}
    assert read_cluster(values).network is None
    values["hosts"] = 2
    assert [problem.got for problem in problems(values)] == ["no network.latency", "no network.bandwidth"]


def test_a_device_without_any_peak_is_refused():
    values = table()
    values["flops"], values[SOURCES] = {}, {}
    assert [problem.got for problem in problems(values)] == ["no flops"]


def test_cpus_have_no_memory_to_offload_to():
    values = table()
    values["device"], values[SOURCES] = "cpu", {}
    del values["offload_bandwidth"]
    assert read_cluster(values).offload_bandwidth == float("inf")
    values["device"] = "cuda"
    assert [problem.got for problem in problems(values)] == ["no offload_bandwidth"]


def test_the_page_has_a_file_that_can_be_read_and_every_field():
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert read_cluster(tomllib.loads(example)).num_devices == 4
    table = page.partition("| field |")[2].partition("## ")[0]
    assert {name for name in (*FIELDS, *TEXTS, SOURCES) if f"`{name}`" not in table} == set()


# ---- ranks on hosts --------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 5))
def test_devices_fill_hosts_one_after_the_other(devices, hosts):
    cluster = load_cluster("dgx-a100")
    assert cluster.resized(devices).num_devices == devices
    resized = cluster.resized(8 * hosts)
    assert (resized.hosts, resized.num_devices) == (hosts, 8 * hosts)
    topology = topology_of(resized, 8 * hosts)
    assert topology.hosts_of(range(8 * hosts)) == tuple(tuple(range(8 * h, 8 * h + 8)) for h in range(hosts))
    assert topology.device == "cuda"
    assert not topology.has_shared_memory


def test_a_cluster_cannot_be_resized_to_parts_of_several_hosts():
    cluster = load_cluster("dgx-a100")
    for wrong in (0, 12):
        with pytest.raises(PlanError) as caught:
            cluster.resized(wrong)
        assert caught.value.problems[0].attempt == {0: "devices=8", 12: "devices=8 or 16"}[wrong]
    with pytest.raises(PlanError, match="a device for each rank"):
        topology_of(cluster.resized(8), 9)
    values = table()
    del values["network"]
    values[SOURCES] = {}
    with pytest.raises(PlanError, match="a network between its hosts"):
        read_cluster(values).resized(16)
