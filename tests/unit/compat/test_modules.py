"""Names in ``compat/modules.py`` have the expected meaning in this torch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_zero.compat.modules import global_pre_hooks, skip_code


def test_batch_norms_are_what_torch_would_synchronise() -> None:
    layers = nn.Sequential(
        nn.BatchNorm1d(1), nn.BatchNorm2d(1), nn.BatchNorm3d(1), nn.LayerNorm(1), nn.InstanceNorm1d(1)
    )
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(layers)
    expected = [isinstance(layer, nn.SyncBatchNorm) for layer in synchronised]
    assert expected == [True, True, True, False, False]
    assert not any(isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) for layer in synchronised)


def test_what_is_registered() -> None:
    module = nn.Sequential(nn.BatchNorm1d(1, affine=False, track_running_stats=False))
    child = module[0]
    assert child._parameters == {"weight": None, "bias": None}
    assert child._buffers == {"running_mean": None, "running_var": None, "num_batches_tracked": None}
    assert module._modules == {"0": child}
    module._modules["0"] = other = nn.Linear(1, 1)
    assert module[0] is other
    other._parameters["weight"] = weight = nn.Parameter(torch.zeros(1, 1))
    assert other.weight is weight


def test_a_property_of_a_subclass_hides_what_is_registered() -> None:
    module = nn.Linear(1, 1)
    module.__class__ = type("Linear", (nn.Linear,), {"weight": property(lambda self: self._parameters["weight"] * 0)})
    with torch.no_grad():
        module.bias.zero_()  # type: ignore[union-attr]
    assert module(torch.ones(1)).item() == 0
    assert "weight" in dict(module.named_parameters())


def test_a_call_runs_the_compiled_call_instead_of_the_plain_one() -> None:
    module, ran = nn.Identity(), []
    module.register_forward_hook(lambda *_: ran.append("hook"))
    assert module._compiled_call_impl is None

    def compiled(*args: Any) -> Any:
        ran.append("compiled")
        return module._call_impl(*args)

    module._compiled_call_impl = compiled  # type: ignore[assignment]
    assert module(3) == 3
    assert ran == ["compiled", "hook"]
    module._compiled_call_impl = None
    assert module(3) == 3
    assert ran == ["compiled", "hook", "hook"]


def test_hooks_of_state_dicts_are_kept_by_the_handles_ids() -> None:
    module = nn.Linear(1, 1)
    saving = module.register_state_dict_post_hook(lambda *_: None)
    loading = module.register_load_state_dict_pre_hook(lambda *_: None)
    assert list(module._state_dict_hooks) == [saving.id]
    assert list(module._load_state_dict_pre_hooks) == [loading.id]
    module._state_dict_hooks.pop(saving.id)
    module._load_state_dict_pre_hooks.pop(loading.id)
    saving.remove()
    loading.remove()
    assert set(module.state_dict()) == {"weight", "bias"}


def test_hooks_of_calls_are_kept_by_the_handles_ids() -> None:
    module = nn.Linear(1, 1)
    kinds = ("forward", "forward_pre", "full_backward", "full_backward_pre")
    handles = [getattr(module, f"register_{kind}_hook")(lambda *_: None) for kind in kinds]
    found = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    assert [list(hooks) for hooks in found] == [[handle.id] for handle in handles]
    for handle in handles:
        handle.remove()
    assert not any(found)


def test_recurrent_modules_compute_with_their_list_of_weights() -> None:
    module = nn.LSTM(2, 3)
    assert module._flat_weights_names == [name for name, _ in module.named_parameters()]
    zeros = type("LSTM", (nn.LSTM,), {"_flat_weights": property(lambda self: [p * 0 for p in self.parameters()])})
    module.__class__ = zeros
    assert not module(torch.ones(1, 1, 2))[0].any()


def test_some_modules_reset_themselves_under_a_private_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(nn.MultiheadAttention, "reset_parameters", raising=False)  # Lightning's demos add it
    module = nn.MultiheadAttention(2, 1)
    assert not hasattr(module, "reset_parameters")
    before = module.in_proj_weight.clone()
    module._reset_parameters()
    assert not torch.equal(module.in_proj_weight, before)


def test_ours_of_an_optimizers_hooks_can_be_moved_to_the_front() -> None:
    optimizer, called = torch.optim.SGD([nn.Parameter(torch.ones(1))]), []
    optimizer.register_step_post_hook(lambda *_: called.append("user's"))
    ours = optimizer.register_step_post_hook(lambda *_: called.append("ours"))
    optimizer._optimizer_step_post_hooks.move_to_end(ours.id, last=False)  # type: ignore[attr-defined]
    optimizer.step()
    assert called == ["ours", "user's"]


def test_hooks_before_a_step_are_found() -> None:
    optimizer: Any = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    assert not optimizer._optimizer_step_pre_hooks
    assert not global_pre_hooks
    hooks = optimizer.register_step_pre_hook(print), register_optimizer_step_pre_hook(print)
    assert len(optimizer._optimizer_step_pre_hooks) == len(global_pre_hooks) == 1
    for hook in hooks:
        hook.remove()
    assert not optimizer._optimizer_step_pre_hooks
    assert not global_pre_hooks


@pytest.mark.parametrize(("gradient", "found"), [(1.0, 0), (float("inf"), 1)])
def test_a_loss_scaler_notes_overflows_by_optimizer(gradient: float, found: int) -> None:
    from torch.amp.grad_scaler import OptState

    scaler, param = torch.amp.GradScaler("cpu"), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param])
    scaler.scale(param.sum() * gradient).backward()
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    assert state["stage"] is OptState.UNSCALED
    assert sum(value.item() for value in state["found_inf_per_device"].values()) == found


def test_skipped_code_is_traced_in_traced_callers() -> None:
    def inner(x: Tensor) -> Tensor:
        traced.append(torch.compiler.is_compiling())
        return x + 1

    def outer(x: Tensor, breaks: bool) -> Tensor:
        for _ in range(2):
            if breaks:
                torch._dynamo.graph_break()
            x = inner(x)
        return x

    traced: list[bool] = []
    skip_code(inner.__code__)
    torch._dynamo.reset()  # does not undo it
    for breaks in (False, True):
        assert torch.compile(outer, backend="eager")(torch.zeros(1), breaks) == 2
    assert traced == [True] * 2 + [False] * 2
