"""Each private name of torch that `torch_kit/torch_dispatch.py` uses is there, and does what its function says.

They are torch.utils._python_dispatch, _should_skip_dynamo, _make_wrapper_subclass, torch._C._DisableTorchDispatch,
_SetExcludeDispatchKeyGuard, _backward_hooks and _post_accumulate_grad_hooks of a tensor, the operation _unsafe_view,
the _schema of an operation, and the compilation callbacks of torch._dynamo.
"""

import subprocess
import sys
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.torch_kit import torch_dispatch as private

aten = torch.ops.aten


class Wrapper(Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} of a wrapper")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == private.SET_DATA:
            raise ZeroDivisionError
        return super().__torch_function__(func, types, args, kwargs or {})


def wrapper(like: Tensor) -> Tensor:
    return private.make_wrapper_subclass(Wrapper, like, device=torch.device("cpu"))


def test_a_wrapper_has_the_shape_of_a_tensor_and_the_device_that_is_given():
    meta = torch.empty(3, 4, dtype=torch.float16, device="meta").t()
    made = wrapper(meta)
    assert (made.shape, made.stride(), made.dtype) == (meta.shape, meta.stride(), meta.dtype)
    assert made.device.type == "cpu"
    assert isinstance(made, Wrapper)


def test_the_shape_of_a_wrapper_is_changed_without_running_anything():
    made = wrapper(torch.empty(3, 4, device="meta"))
    private.change_wrapper_shape(aten.t_.default, (made,), {})
    assert (tuple(made.shape), made.stride()) == ((4, 3), (1, 4))


def test_setting_data_is_told_from_other_calls():
    parameter = nn.Parameter(torch.ones(2))
    private.SET_DATA.__call__(parameter, torch.zeros(2))
    assert parameter.sum() == 0
    try:
        wrapper(torch.empty(2, device="meta")).data = torch.ones(2)
    except ZeroDivisionError:
        return
    raise AssertionError("not seen")


def test_hooks_of_a_swapped_tensor_run_when_they_are_attached_again():
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    called: list[Tensor] = []
    weight.register_hook(torch.neg)
    weight.register_post_accumulate_grad_hook(called.append)
    torch.utils.swap_tensors(weight, other)
    private.attach_hooks_again(weight)
    weight.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [-1, -1]
    assert len(called) == 1


def test_a_schema_says_what_an_operation_writes():
    arguments = private.schema_arguments(aten.copy_.default)
    assert [(each.name, bool(each.alias_info and each.alias_info.is_write)) for each in arguments] == [
        ("self", True), ("src", False), ("non_blocking", False),
    ]  # fmt: skip


def test_a_schema_says_which_argument_an_operation_returns():
    draws_twice = aten.rrelu_with_noise_.default
    self, noise = private.schema_arguments(draws_twice)[:2]
    (result,) = private.schema_returns(draws_twice)
    assert private.alias_names(result) == private.alias_names(self) != private.alias_names(noise)
    assert [private.alias_names(each) for each in private.schema_returns(aten.rrelu_with_noise.default)] == [set()]


def test_a_dispatch_mode_does_not_import_dynamo():
    code = """if 1:
        import sys, torch
        from fourfold.torch_kit.torch_dispatch import EagerDispatchMode
        seen = []
        class Mode(EagerDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(func)
                return func(*args, **(kwargs or {}))
        with Mode():
            torch.ones(2).normal_()
        assert len(seen) == 2
        assert "torch._dynamo" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_kept_alias_has_the_version_of_the_result_and_not_its_graph():
    # _SetExcludeDispatchKeyGuard
    class Keeper(private.EagerDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is aten.mm.default:
                aliases.append(private.kept_alias(result))
            return result

    aliases: list[Tensor] = []
    weight = torch.ones(2, 2, requires_grad=True)
    with Keeper():
        product = weight @ weight
        (alias,) = aliases
        assert (alias.grad_fn, alias.data_ptr(), alias._version) == (None, product.data_ptr(), product._version)
        product += 1
    assert alias._version == product._version == 1


def test_products_and_attention_are_what_a_transformer_block_calls_below_autograd():
    # _grouped_mm, _scaled_dot_product_flash_attention_for_cpu
    class Recorder(private.EagerDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: set[Any] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.add(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(1, 2, 4, 8, requires_grad=True)
    with Recorder() as recorder:
        torch.nn.Linear(8, 8)(x)
        torch.nn.Linear(8, 8, bias=False)(x)
        torch.nn.Conv1d(4, 4, 3)(x[0])
        torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        torch.softmax(x @ x.mT, -1)
    names = {func.overloadpacket.__name__ for func in recorder.seen & private.PRODUCTS_AND_ATTENTION}
    assert names == {"addmm", "mm", "convolution", "_scaled_dot_product_flash_attention_for_cpu"}


def test_the_results_of_uncounted_views_are_memory_of_their_argument_with_a_version_of_its_own():
    x = torch.ones(2, 4)
    shapes = {
        aten._unsafe_view.default: [2, 2, 2], aten.unsafe_split.Tensor: 1, aten.unsafe_split_with_sizes.default: [1, 1],
    }  # fmt: skip
    assert shapes.keys() == private.UNCOUNTED_VIEWS
    for number, (function, shape) in enumerate(shapes.items()):
        view = function(x, shape)
        (view if isinstance(view, Tensor) else view[0]).add_(1)
        assert (x[0, 0].item(), x._version) == (number + 2, 0)


def test_compilations_are_noted_from_their_beginning_to_their_end():
    found = []
    compiled = torch.compile(lambda x: x + 1, backend=lambda graph, _: found.append("compiles") or graph.forward)
    with private.compilations_noted(lambda: found.append("begin"), lambda: found.append("end")):
        compiled(torch.ones(2))
        compiled(torch.ones(2))
    assert found == ["begin", "compiles", "end"]
