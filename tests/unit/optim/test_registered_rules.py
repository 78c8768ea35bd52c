"""Test that users' optimizers step by captured graphs once their rules are registered."""

from typing import Any

import pytest
import torch

from lightning_zero import Rule, register_rule
from lightning_zero.optim.step_kernel import StepKernel
from lightning_zero.optim.update_rules import rule_for
from lightning_zero.step.runners import reason_not_captured
from tests.helpers.lion import Lion, lion, make_lion


def of(cls: Any) -> torch.optim.Optimizer:
    return cls([torch.zeros(3, requires_grad=True)])


def rule_of(cls: Any) -> Rule | None:
    optimizer = of(cls)
    return rule_for(optimizer, optimizer.param_groups[0])


def test_an_optimizer_has_the_rule_that_was_registered_and_is_covered() -> None:
    assert rule_of(Lion) is lion()
    optimizer = of(Lion)
    assert StepKernel.supports(optimizer, optimizer.param_groups)


def test_a_users_rule_does_not_cover_complex_parameters() -> None:
    for cls, covered in ((Lion, False), (torch.optim.AdamW, True)):
        optimizer: Any = cls([torch.zeros(3, dtype=torch.complex64, requires_grad=True)])
        assert StepKernel.supports(optimizer, optimizer.param_groups) is covered
        assert covered or "complex64" in str(reason_not_captured(optimizer, torch.device("cpu"), True, emulate=True))


def test_a_subclass_may_do_anything_and_has_a_rule_of_its_own() -> None:
    class Mine(Lion):
        pass

    assert rule_of(Mine) is None
    other = Rule((), (), lambda setting, step: {}, lambda param, grad, state, s: (param, {}))
    register_rule(Mine, lambda group: other)
    assert rule_of(Mine) is other
    assert rule_of(Lion) is lion()


def test_the_same_rule_again_is_nothing_new_and_another_one_is_refused() -> None:
    register_rule(Lion, make_lion)
    with pytest.raises(ValueError, match="Lion has another rule already .*Register yours for a subclass of it"):
        register_rule(Lion, lambda group: lion())
    with pytest.raises(ValueError, match="AdamW has another rule already"):
        register_rule(torch.optim.AdamW, make_lion)
    assert rule_of(Lion) is lion()


@pytest.mark.parametrize("what", [of(Lion), torch.nn.Linear, "Lion"])
def test_what_is_no_class_of_optimizers_is_refused(what: Any) -> None:
    with pytest.raises(ValueError, match="is no class of optimizers. Pass the class"):
        register_rule(what, make_lion)
