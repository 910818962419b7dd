"""State dicts of a feed: where it is, and in which order, as JSON values.

Law: a state continues only in the order that it was saved in; less than 1 kB, whatever the source.
"""

from collections.abc import Mapping
from typing import Any

from fourfold.plan.sample_order import UNSHUFFLED, SampleOrder
from fourfold.words.errors import Problem

VERSION = 1
MAX_DESCRIPTION = 300  # letters; a mixture names its sources
STREAM = "stream"
POSITION_KEYS = ("seed", "epoch", "position", "num_samples")
ORDER_KEYS = ("order", "order_version", "order_digest")


def describe_order(order: SampleOrder | None) -> dict[str, Any]:
    """What a state says of its order; None: of a stream."""
    if order is None:
        return dict(zip(ORDER_KEYS, (STREAM, UNSHUFFLED, ""), strict=True))
    text = order.description()
    shown = text if len(text) <= MAX_DESCRIPTION else f"{text[:MAX_DESCRIPTION]}…"
    return dict(zip(ORDER_KEYS, (shown, order.version, order.digest()), strict=True))


def make_state_dict(position: Mapping[str, Any], order: SampleOrder | None) -> dict[str, Any]:
    """The state of a feed at a position."""
    return {"version": VERSION, **position, **describe_order(order)}


def state_dict_problems(state: Any, order: SampleOrder | None) -> list[Problem]:
    """Why a feed with this order cannot continue from a state; its position is not looked at."""
    keys = {"version", *POSITION_KEYS, *ORDER_KEYS}
    if not isinstance(state, Mapping) or set(state) != keys:
        got = f"a state with {', '.join(map(str, state)) or 'nothing'}" if isinstance(state, Mapping) else repr(state)
        return [Problem(got, "the state_dict() of a feed")]
    if state["version"] != VERSION:
        return [Problem(f"a state of version {state['version']}", f"version {VERSION}", "the Fourfold that saved it")]
    saved, now = {key: state[key] for key in ORDER_KEYS}, describe_order(order)
    # Between epochs the source may have grown; the order is still the same if only that has changed.
    is_same_but_for_length = saved["order"] == now["order"] and saved["order_version"] == now["order_version"]
    if saved == now or (is_same_but_for_length and state["position"] == 0 and not _spans_epochs(order)):
        return []
    is_other_length = order is not None and state["num_samples"] != order.num_positions
    if is_same_but_for_length and is_other_length and state["position"]:
        return []  # `load_state` says so, with the numbers
    return [order_problem(saved, now)]


def order_problem(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Problem:
    """The problem of samples that came in another order when a state was saved."""
    got = f"samples saved in the order: {saved['order']}; now: {now['order']}"
    if saved["order"] == now["order"]:
        got = (
            f"the order {now['order']}, version {saved['order_version']} when it was saved, now {now['order_version']}"
        )
        if saved["order_version"] == now["order_version"]:
            got = f"the order {now['order']}, of other shards, sources or weights than when it was saved"
    return Problem(got, "the same order, so that no sample is left out or comes twice", "the order it was saved with")


def _spans_epochs(order: SampleOrder | None) -> bool:
    """Whether an epoch goes on where the one before has ended: a mixture's sources do."""
    return order is not None and order.kind == "mixed"
