"""Optimizers that return their state from state_dict() in another form than they keep it in, as libraries' do."""

from collections.abc import Callable
from typing import Any

import torch

from tests.helpers.lion import Lion

__all__ = ["Counting", "Renaming", "Stacking", "Wrapping"]


class Wrapping(Lion):
    """Wrap kept values in dicts, as bitsandbytes does."""

    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        state = {n: {"seen": 1, "wrapped": {"more": dict(entries)}} for n, entries in packed["state"].items()}
        return packed | {"state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = {n: entries["wrapped"]["more"] for n, entries in state_dict["state"].items()}
        super().load_state_dict(state_dict | {"state": state})


class Renaming(Lion):
    """Saves its average under another name, and a version of the format."""

    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        state = {n: {"momentum": entries["exp_avg"]} for n, entries in packed["state"].items()}
        return packed | {"state": state, "version": 2}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["version"] == 2
        state = {n: {"exp_avg": entries["momentum"]} for n, entries in state_dict["state"].items()}
        super().load_state_dict({"state": state, "param_groups": state_dict["param_groups"]})


class Counting(Lion):
    """Counts steps once for all parameters, as MADGRAD does; its rate depends on the count."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        seen = self.state.setdefault("seen", torch.zeros(1))  # type: ignore[call-overload]
        seen += 1
        for group in self.param_groups:
            group["lr"] = 0.02 / float(seen)
        return super().step(closure)


class Stacking(Lion):
    """Saves two tensors of a parameter as one."""

    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        state = {n: {"both": torch.stack([e["exp_avg"], e["exp_avg"]])} for n, e in packed["state"].items()}
        return packed | {"state": state}
