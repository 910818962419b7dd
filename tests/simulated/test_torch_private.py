"""Each private name of torch that Fourfold uses is there, and does what its function says.

A release of torch that drops or changes one fails the test of the function that uses it.
"""

import ast
import copy
import functools
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from fourfold.torch_kit import torch_private as private


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64))


def test_every_public_name_of_the_file_is_tested_here():
    tree = ast.parse(Path(private.__file__).read_text())
    names = set(private.__all__)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    names = {name for name in names if not name.startswith("_")} - {"Node", "StepHook"}
    source = Path(__file__).read_text()
    assert [name for name in sorted(names) if f"private.{name}" not in source] == []


# ---- autograd: the backward that runs now ----


def test_a_backward_has_an_id_and_outside_there_is_none():
    seen = []
    weight = parameter(3)
    weight.register_hook(lambda _: seen.append((private.current_backward_id(), private.is_in_backward())))
    assert private.current_backward_id() == private.NO_BACKWARD_ID
    assert not private.is_in_backward()
    for _ in range(2):
        weight.sum().backward()
    (first, inside), (second, _) = seen
    assert inside
    assert first != second
    assert private.NO_BACKWARD_ID not in (first, second)


def test_a_checkpoint_recomputes_inside_a_backward():
    seen = []

    def body(x):
        seen.append(private.is_in_backward())
        return x.sin()

    result = checkpoint(body, parameter(3), use_reentrant=False)
    assert isinstance(result, torch.Tensor)
    result.sum().backward()
    assert seen == [False, True]


def test_a_backward_says_whether_its_graph_is_kept():
    seen = []
    weight = parameter(3)
    weight.register_hook(lambda _: seen.append(private.is_graph_kept()))
    total = weight.sum()
    total.backward(retain_graph=True)
    total.backward()
    torch.autograd.grad(weight.square().sum(), weight, create_graph=True)
    assert seen == [True, False, True]


def test_a_callback_runs_when_the_backward_ends():
    weight, events = parameter(3), []
    weight.register_hook(lambda _: private.call_after_backward(lambda: events.append(weight.grad is not None)))
    weight.sum().backward()
    assert events == [True]


def test_a_backward_keeps_function_modes_active():
    class Count(torch.overrides.TorchFunctionMode):
        num_calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.num_calls += func is torch.sin
            return func(*args, **(kwargs or {}))

    weight = parameter(3)
    with Count() as mode:
        out = checkpoint(torch.sin, weight, use_reentrant=False)
        assert isinstance(out, torch.Tensor)
        assert mode.num_calls == 1
        private.run_backward_under_modes((out,), (torch.ones_like(out),))
        assert mode.num_calls == 2
    assert weight.grad is not None
    assert torch.equal(weight.grad, weight.detach().cos())


# ---- autograd: tensors ----


def test_an_in_place_write_increments_the_version():
    tensor = torch.zeros(3)
    before = private.version_of(tensor)
    tensor.add_(1.0)
    assert private.version_of(tensor) == before + 1


def test_a_view_that_autograd_tracks_is_recognized():
    tensor = parameter(4) * 1.0
    assert private.is_view(tensor[:2])
    assert not private.is_view(tensor)
    assert not private.is_view(tensor * 2.0)


def test_a_writable_result_of_an_autograd_function_may_be_written_in_place():
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, finish: Any) -> torch.Tensor:
            return finish((x * 0.5)[:2])

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return torch.nn.functional.pad(grads[0] * 0.5, (0, 2)), None

    weight = parameter(4)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        Half.apply(weight, lambda x: x).mul_(3)
    result = Half.apply(weight, private.writable_result)
    result.mul_(3).sum().backward()
    assert torch.equal(result, weight[:2] * 1.5)
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.5, 1.5, 0.0, 0.0]


def test_writes_within_preserve_versions_are_not_counted():
    weight = parameter(3)
    before = private.version_of(weight)
    with private.preserve_versions((weight,)), torch.no_grad():
        weight.add_(1)
    assert private.version_of(weight) == before


def test_hooks_of_a_tensor_are_listed():
    weight = parameter(3)
    assert private.tensor_hooks(weight) == []
    handle = weight.register_hook(torch.neg)
    assert private.tensor_hooks(weight) == [torch.neg]
    handle.remove()
    assert private.tensor_hooks(weight) == []


def test_full_backward_hooks_of_a_module_are_listed():
    def hook(module, grad_inputs, grad_outputs):
        raise AssertionError("called")

    module = torch.nn.Linear(2, 2)
    assert private.full_backward_hooks(module) == []
    handle = module.register_full_backward_hook(hook)
    assert private.full_backward_hooks(module) == private.called_backward_hooks(module) == [hook]
    vars(module)[private.BACKWARD_HOOKS_OF_CALL] = lambda: ([], [])
    module(torch.ones(1, 2)).sum().backward()
    del vars(module)[private.BACKWARD_HOOKS_OF_CALL]
    handle.remove()
    assert private.full_backward_hooks(module) == []


def test_torch_runs_the_post_accumulate_hooks_of_the_dict_that_was_set():
    weight, calls = parameter(3), []
    assert private.post_accumulate_hooks(weight) is None
    private.set_post_accumulate_hooks(weight, OrderedDict())
    handle = weight.register_post_accumulate_grad_hook(lambda p: calls.append(p))
    hooks = private.post_accumulate_hooks(weight)
    assert hooks is not None
    assert list(hooks) == [handle.id]
    weight.sum().backward()
    assert calls[0] is weight


def test_views_share_the_key_of_their_storage():
    tensor = torch.zeros(4)
    assert private.storage_key(tensor) == private.storage_key(tensor[2:]) != private.storage_key(torch.zeros(4))


# ---- autograd: what nodes of the graph have saved ----


def test_a_mean_saves_the_size_of_its_input():
    x = parameter(3, 5)
    node = (x * 1.0).mean()
    assert private.saved_input_numel(node.grad_fn) == 15
    node = (x * 1.0).mean(dim=(0, 1))
    assert private.saved_input_numel(node.grad_fn) == 15


def test_a_loss_saves_its_reduction():
    targets = torch.tensor([0, 2, -100])
    loss = F.nll_loss(parameter(3, 4) * 1.0, targets)
    assert private.saved_reduction(loss.grad_fn) == private.REDUCTION_MEAN
    assert private.saved_class_weights(loss.grad_fn) is None
    assert private.saved_total_weight(loss.grad_fn).item() == 2
    weighted = F.nll_loss(parameter(3, 4) * 1.0, targets, weight=torch.ones(4, dtype=torch.float64))
    assert private.saved_class_weights(weighted.grad_fn) is not None
    mse = F.mse_loss(parameter(3, 4), torch.zeros(3, 4, dtype=torch.float64))
    assert private.saved_reduction(mse.grad_fn) == private.REDUCTION_MEAN
    assert private.saved_input(mse.grad_fn).numel() == 12
    total = F.mse_loss(parameter(3, 4), torch.zeros(3, 4, dtype=torch.float64), reduction="sum")
    assert private.saved_reduction(total.grad_fn) != private.REDUCTION_MEAN


# ---- function modes, tensor subclasses and transforms of torch.func ----


def test_a_transform_is_active_inside_it_unless_suspended():
    seen = []

    def body(x):
        with private.suspend_transforms():
            suspended = private.are_transforms_active()
        seen.append((private.are_transforms_active(), suspended, private.has_memory(x)))
        return x.sum()

    assert not private.are_transforms_active()
    assert private.has_memory(torch.zeros(2))
    assert private.has_memory(torch.zeros(2, device="meta"))
    assert not private.has_memory(torch.zeros(2).to_sparse())
    torch.func.grad(body)(torch.zeros(3))
    torch.func.vmap(body)(torch.zeros(2, 3))
    assert seen == [(True, False, False)] * 2


def test_hooks_of_several_gradients_are_recognized():
    one, other = parameter(2), parameter(2)
    other.register_hook(lambda gradient: gradient)
    for mode in ("all", "any"):
        torch.autograd.graph.register_multi_grad_hook([one], lambda grads: None, mode=mode)
    assert [private.is_multi_grad_hook(hook) for hook in private.tensor_hooks(one)] == [True, True]
    assert not any(map(private.is_multi_grad_hook, private.tensor_hooks(other)))


def test_arguments_of_transforms_are_reported_before_they_are_wrapped():
    one, other, seen = parameter(2), torch.ones(2, 2), []
    with private.reporting_transforms(seen.append), private.reporting_transforms(seen.append):
        torch.func.vmap(lambda x, y: x + y)(one, other)
        torch.func.grad(lambda x: x.square().sum())(one)
        torch.func.functionalize(lambda x: x + 1)(other)
    torch.func.vmap(torch.square)(one)
    assert [id(each) for each in seen] == [id(each) for each in (one, other, one, other)]


def test_a_class_that_wraps_tensors_is_recognized():
    class Wrapper(torch.Tensor):
        def __tensor_flatten__(self):
            return [], None

        @staticmethod
        def __tensor_unflatten__(*_):
            raise AssertionError

    assert private.is_wrapper(torch.zeros(2).as_subclass(Wrapper))
    assert not any(map(private.is_wrapper, (torch.zeros(2), parameter(2))))


def test_torch_function_of_a_tensor_subclass_can_be_disabled():
    class CountsCalls(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.calls += 1
            return super().__torch_function__(func, types, args, kwargs)

    tensor = torch.zeros(2).as_subclass(CountsCalls)
    before = CountsCalls.calls
    with private.DisableTorchFunctionSubclass():
        tensor.add(1.0)
    assert CountsCalls.calls == before
    tensor.add(1.0)
    assert CountsCalls.calls == before + 1


def test_no_mode_and_no_subclass_sees_what_is_called_while_torch_functions_are_disabled():
    class Mode(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("a torch function of a subclass was called")

    tensor = torch.zeros(2).as_subclass(Subclass)
    with Mode() as mode:
        with private.DisableTorchFunction():
            assert tensor.dtype == torch.float32
            assert tensor.add(1.0).numel() == 2
        assert mode.calls == 0
        torch.zeros(2).add(1.0)
        assert mode.calls == 2


def test_an_operator_names_the_arguments_that_it_writes():
    add, packet = torch.ops.aten.add_.Tensor, torch.ops.aten.add_
    assert private.is_operator(add)
    assert private.is_operator(packet)
    assert not private.is_operator(torch.add)
    assert private.written_arguments(add) == private.written_arguments(packet) == [(0, "self")]
    assert private.written_arguments(torch.ops.aten.add) == []  # without the out overload
    assert private.written_arguments(torch.ops.aten.add.out) == [(3, "out")]


def test_a_tensor_without_memory_has_a_shape_and_no_address():
    class Lazy(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    tensor = private.tensor_without_memory(Lazy, (2, 3), device=torch.device("cpu"), dtype=torch.float64)
    assert type(tensor) is Lazy
    assert (tensor.shape, tensor.dtype) == ((2, 3), torch.float64)
    assert not private.has_memory(tensor)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        tensor.data_ptr()


def test_grouped_matrix_products_are_functions_of_torch():
    assert all(map(callable, private.GROUPED_MM_OPS))
    assert len(private.GROUPED_MM_OPS) >= 1


def test_a_dispatch_mode_sees_operators():
    class See(private.TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    with See() as mode:
        torch.zeros(2).sin()
    assert torch.ops.aten.sin.default in mode.seen


def test_trees_of_tensors_are_walked():
    tree = {"a": [torch.zeros(1), 2], "b": (torch.ones(1),)}
    assert len(private.tree_leaves(tree)) == 3
    leaves, spec = private.tree_flatten(tree)
    assert private.tree_unflatten(leaves, spec) == tree
    mapped = private.tree_map_only(torch.Tensor, lambda t: t.item(), tree)
    assert mapped == {"a": [0.0, 2], "b": (1.0,)}


def test_samples_are_collated_by_type():
    handlers = private.default_collate_fn_map
    batch: Any = private.collate([{"x": torch.zeros(2)}, {"x": torch.ones(2)}], collate_fn_map=handlers)
    assert batch["x"].shape == (2, 2)


# ---- modules ----


def test_base_classes_of_norms_and_dropouts():
    norms = nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2), nn.LazyBatchNorm2d()
    assert all(isinstance(norm, private.BatchNormBase) for norm in norms)
    assert not isinstance(nn.LayerNorm(2), private.BatchNormBase)
    x = torch.randn(3, 2, 2, 2)
    assert all(type(norm).forward is private.base_batch_norm_forward for norm in norms[:2])
    torch.testing.assert_close(private.base_batch_norm_forward(nn.SyncBatchNorm(2), x), nn.BatchNorm2d(2)(x))
    assert all(isinstance(each(), private.DropoutBase) for each in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout))


def test_a_module_has_dicts_of_its_own_parameters_buffers_and_children():
    norm = nn.BatchNorm1d(2)
    model = nn.Sequential(norm)
    assert private.own_parameters(norm) == {"weight": norm.weight, "bias": norm.bias}
    assert private.own_buffers(norm)["running_mean"] is norm.running_mean
    assert private.own_children(model) == {"0": norm}
    assert not private.own_parameters(model)
    private.own_buffers(norm)["running_mean"] = changed = torch.ones(2)
    assert norm.running_mean is changed


def test_forward_pre_hooks_are_listed_in_order():
    module = nn.Linear(2, 2)
    first, second = (lambda *_: None), (lambda *_: None)
    module.register_forward_pre_hook(first)
    module.register_forward_pre_hook(second, with_kwargs=True)
    assert private.forward_pre_hooks(module) == [first, second]


def test_a_module_computes_with_a_swapped_state_and_tied_weights_follow():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    model, x = Tied(), torch.ones(1, 2)
    weight = model.a.weight
    with private.swapped_state(model, {"a.weight": torch.eye(2) * 3.0}):
        assert torch.equal(model(x), 9.0 * x)
    assert model.a.weight is weight is model.b.weight


def test_compiled_code_is_recognized():
    model = nn.Linear(2, 2)
    in_place = copy.deepcopy(model)
    in_place.compile(backend="eager")
    assert not private.is_compiled(model)
    assert not private.is_compiled_function(F.mse_loss)
    assert isinstance(whole := torch.compile(model, backend="eager"), nn.Module)
    assert private.is_compiled(whole)
    assert private.uncompiled(whole) is model
    assert private.uncompiled(in_place) is in_place
    assert private.is_compiled(in_place)
    assert private.is_compiled(torch.jit.script(model))
    assert private.is_compiled_function(torch.compile(lambda a, b: (a - b).sum(), backend="eager"))


# ---- optimizers ----


def test_hooks_of_an_optimizer_are_listed_in_the_order_in_which_torch_calls_them():
    calls: list[str] = []

    def hook(name, *_):
        calls.append(name)

    optimizer = SGD([parameter(2)], lr=0.1)
    assert private.takes_step_hooks(optimizer)
    assert not private.has_any_hook(optimizer)
    assert not private.has_step_hooks(optimizer)
    own_pre = optimizer.register_step_pre_hook(functools.partial(hook, "own pre"))
    own_post = optimizer.register_step_post_hook(functools.partial(hook, "own post"))
    assert private.has_step_hooks(optimizer)
    assert private.has_any_hook(optimizer)
    every = [
        register_optimizer_step_pre_hook(functools.partial(hook, "every pre")),
        register_optimizer_step_post_hook(functools.partial(hook, "every post")),
    ]
    try:
        optimizer.step()
        expected, calls[:] = list(calls), []
        for each in [*private.step_pre_hooks(optimizer), *private.step_post_hooks(optimizer)]:
            each(optimizer, (), {})
        assert calls == expected == ["every pre", "own pre", "own post", "every post"]
        own_pre.remove()
        own_post.remove()
        assert private.has_any_hook(optimizer)
        assert not private.has_step_hooks(optimizer)
    finally:
        for handle in every:
            handle.remove()
    assert not private.has_any_hook(optimizer)


@pytest.mark.parametrize("kind", ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"])
def test_hooks_of_a_state_dict_are_listed(kind):
    optimizer = SGD([parameter(2)], lr=0.1)
    assert private.state_dict_hooks(optimizer) == []

    def hook(*_):
        return None

    getattr(optimizer, f"register_{kind}_hook")(hook)
    assert private.state_dict_hooks(optimizer) == [hook]
    assert private.has_any_hook(optimizer)


def test_a_scheduler_does_not_warn_about_a_marked_optimizer(recwarn):
    optimizer = SGD([parameter(2)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    private.mark_step_called(optimizer)
    scheduler.step()
    assert not [each for each in recwarn if "lr_scheduler" in str(each.message)]


def test_a_step_without_wrappers_changes_weights_and_calls_no_hook():
    weight = parameter(2)
    optimizer, calls = SGD([weight], lr=1.0), []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    before, weight.grad = weight.detach().clone(), torch.ones_like(weight)
    with torch.no_grad():
        private.step_without_wrappers(optimizer)
    assert torch.equal(weight.detach(), before - 1.0)
    assert not calls


def test_an_optimizer_is_made_without_importing_torch_dynamo():
    script = (
        "import sys, torch; from fourfold.torch_kit import torch_private as private; private.avoid_dynamo_import();"
        "p = torch.nn.Parameter(torch.ones(2)); p.grad = torch.ones(2); o = torch.optim.SGD([p], lr=1.0);"
        "torch.no_grad()(private.step_without_wrappers)(o); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


# ---- kernels of attention ----


@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_flash_attention_on_a_cpu_is_attention(is_causal, is_strided):
    # Heads of 2 that torch.cat makes of rotated halves have another stride than 1 in their last dim.
    strides = (96, 48, 1, 6) if is_strided else (96, 48, 8, 1)
    inputs = [torch.empty_strided((1, 2, 6, 8), strides, dtype=torch.float64).normal_() for _ in range(3)]
    q, k, v = (tensor.requires_grad_().detach() for tensor in inputs)
    options = {"is_causal": is_causal, "scale": None}
    out, lse = private.cpu_flash_attention(q, k, v, mask=None, **options)
    expected = F.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], is_causal=is_causal)
    torch.testing.assert_close(out, expected)
    assert lse.shape == q.shape[:-1]
    grad_out = torch.randn_like(out)
    gradients = private.cpu_flash_attention_backward(grad_out, (q, k, v), out, lse, mask=None, **options)
    torch.testing.assert_close(tuple(gradients), torch.autograd.grad(expected, inputs, grad_out))


def test_flash_attention_on_a_cpu_gives_0_for_a_fully_masked_row():
    q, k, v = (torch.randn(1, 1, 2, 8) for _ in range(3))
    mask = torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]]).expand(1, 1, 2, 2)
    _, lse = private.cpu_flash_attention(q, k, v, is_causal=False, mask=mask, scale=None)
    assert lse[0, 0, 1] == 0.0


def test_flash_attention_on_a_gpu_takes_these_arguments():
    # Without a GPU, only the operators' signatures; their results are tested on a GPU (test_attention).
    if torch.cuda.is_available():
        q, k, v = (torch.randn(1, 2, 16, 8, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        out, lse = private.cuda_flash_attention(q, k, v, is_causal=True, scale=None)
        grads = private.cuda_flash_attention_backward(out, (q, k, v), out, lse, is_causal=True, scale=None)
        assert [grad.shape for grad in grads] == [q.shape] * 3
        return
    forward = torch.ops.aten._scaled_dot_product_flash_attention.default._schema.arguments
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default._schema.arguments
    assert [a.name for a in forward] == [
        "query",
        "key",
        "value",
        "dropout_p",
        "is_causal",
        "return_debug_mask",
        "scale",
    ]
    names = "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed"
    assert [a.name for a in backward] == [*names.split(), "philox_offset", "scale"]


# ---- data ----


def test_a_wrapped_error_is_raised_again_with_its_text():
    loader = torch.utils.data.DataLoader([0], num_workers=1)  # pyright: ignore[reportArgumentType]
    batches = iter(loader)
    assert [process.is_alive() for process in private.worker_processes(batches)] == [True]
    wrapped = private.ExceptionWrapper((ValueError, ValueError("label"), None), "in worker 0")
    with pytest.raises(ValueError, match=r"Caught ValueError in worker 0(.|\n)*label"):
        wrapped.reraise()


# ---- process groups ----


def test_all_process_groups_are_listed(tmp_path):
    import torch.distributed as dist

    found = []

    def run():  # in a thread: no other test of this process has joined a group
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            group = dist.new_group([0])
            found.append(set(private.all_process_groups(dist)) == {dist.group.WORLD, group})
        finally:
            dist.destroy_process_group()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60.0)
    assert found == [True]
