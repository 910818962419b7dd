"""Laws of attention over the context axis on real processes: messages over gloo, and shared memory."""

import pytest

from tests.attention_oracle import TOLERANCE


@pytest.mark.parametrize(("size", "choice", "host"), [(2, "gloo", None), (2, "shared", None), (4, "auto", "two")])
def test_attention_over_processes_equals_one_process(world, size, choice, host):
    results = world(size).run("tests.spawned.rank_functions:attentions", choice=choice, host=host)
    worst = {name: max(rank["deviations"][name] for rank in results) for name in results[0]["deviations"]}
    assert {name: far for name, far in worst.items() if far > TOLERANCE} == {}
    # gloo between hosts; with two ranks per host, heads are exchanged in shared memory inside a host.
    expected = {"gloo": {"gloo"}, "shared": {"shared memory"}, "auto": {"gloo", "shared memory"}}
    assert {name for rank in results for name in rank["links"]} == expected[choice]
    for rank in results:
        assert all((sent > 0) == (choice != "shared") for sent in rank["sent_bytes"].values())
