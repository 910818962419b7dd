"""Laws of attention over the sequence axis on real processes: messages over gloo, and shared memory."""

import pytest

from tests.attention_oracle import TOLERANCE


@pytest.mark.parametrize(("size", "choice", "host"), [(2, "gloo", None), (2, "shared", None), (4, "by-host", "two")])
def test_processes_compute_what_one_process_does(world, size, choice, host):
    told = world(size).run("tests.spawned.rank_functions:attentions", choice=choice, host=host)
    worst = {name: max(rank["deviations"][name] for rank in told) for name in told[0]["deviations"]}
    assert {name: far for name, far in worst.items() if far > TOLERANCE} == {}
    # gloo between hosts; with two ranks per host, heads are exchanged in shared memory inside a host.
    expected = {"gloo": {"gloo"}, "shared": {"shared memory"}, "by-host": {"gloo", "shared memory"}}
    assert {name for rank in told for name in rank["links"]} == expected[choice]
    for rank in told:
        assert all((sent > 0) == (choice != "shared") for sent in rank["sent_bytes"].values())
