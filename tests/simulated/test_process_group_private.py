"""Each private name of torch.distributed by which a process group is made is there, and does what we rely on.

`_world` lists groups by backend and store, and their ranks; `_new_process_group_helper` makes a group of the ranks that
it is given, and registers it; `_get_default_timeout` is how long `new_group` waits.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fourfold.comm.process_group_lifecycle import make_process_group

c10d: Any = distributed_c10d


def the_world() -> Any:
    return dist.group.WORLD


@pytest.fixture
def in_a_world(tmp_path: Path) -> Callable[[Callable[[], Any]], Any]:
    """Calls a function in a world of one rank, in a thread: no other test of this process has joined a group."""

    def call(body: Callable[[], Any]) -> Any:
        results: list[Any] = []

        def run() -> None:
            dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
            try:
                results.append(body())
            finally:
                dist.destroy_process_group()

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(60.0)
        assert results, "the function has failed, see above"
        return results[0]

    return call


def test_a_group_has_the_name_and_does_the_collectives_of_one_that_torch_makes(in_a_world):
    def body():
        group: Any = make_process_group([0], "a name of our choice")
        expected: Any = dist.new_group([0])
        total = torch.ones(2)
        dist.all_reduce(total, group=group)
        dist.broadcast(total, src=0, group=group)
        public = [
            [dist.get_backend(each), dist.get_process_group_ranks(each), dist.get_rank(each), dist.get_world_size(each)]
            for each in (group, expected)
        ]
        name, is_registered = group.group_name, group in c10d._world.pg_map
        dist.destroy_process_group(group)
        return name, total.tolist(), public[0] == public[1], is_registered, group in c10d._world.pg_map

    assert in_a_world(body) == ("a name of our choice", [1.0, 1.0], True, True, False)


def test_a_name_that_exists_is_refused(in_a_world):
    def body():
        make_process_group([0], "once")
        with pytest.raises(ValueError, match="already been created"):
            make_process_group([0], "once")
        return True

    assert in_a_world(body)


def test_members_meet_in_the_worlds_store_for_as_long_as_torch_would_wait(in_a_world):
    def body():
        _, store = c10d._world.pg_map[the_world()]
        with mock.patch.object(c10d, "_new_process_group_helper", return_value=("group", None)) as helper:
            assert make_process_group([0], "name") == "group"
        assert c10d._world.pg_group_ranks.pop("group") == {0: 0}
        (size, rank, members, backend, given_store, name), options = helper.call_args
        assert given_store is store
        assert options == {"timeout": c10d._get_default_timeout(c10d.Backend("gloo"))}
        assert isinstance(options["timeout"], timedelta)
        return size, rank, members, backend, name

    assert in_a_world(body) == (1, 0, [0], "gloo", "name")


def test_the_worlds_communicator_is_not_split_where_a_device_is_bound(in_a_world):
    """NCCL splits it among all ranks of the world, and others than the members never come."""
    made_with = []
    make = c10d._new_process_group_helper

    def helper(*args: Any, **kwargs: Any) -> Any:
        made_with.append(the_world().bound_device_id)
        return make(*args, **kwargs)

    def body():
        the_world().bound_device_id = torch.device("cuda", 0)
        with mock.patch.object(c10d, "_new_process_group_helper", helper):
            make_process_group([0], "name")
        return the_world().bound_device_id

    assert in_a_world(body) == torch.device("cuda", 0)
    assert made_with == [None]
