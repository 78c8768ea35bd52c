"""Update rules as pure functions of tensors, so that a captured graph can step with any learning rate.

An optimizer's own step reads learning rate and betas as floats, which a captured graph would freeze. A :class:`Rule`
reads tensors and has two parts. ``scalars`` turns a group's settings and the step count into a few numbers, in float64
because float32 loses ``1 - beta``. ``apply`` updates elements in float32, for weights of any dtype, as the fused
kernels of ``torch.optim`` do. Choices by a device value use ``torch.where``: a graph has no branches.

To add an optimizer of ``torch.optim``, write its rule next to similar ones and add a line to ``_RULES``. For other
optimizers use :func:`register_rule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.optim.adafactor import adafactor
from lightning_zero.optim.library_rules import library_rule
from lightning_zero.optim.matrix_rules import MatrixRule, Tensors, muon
from lightning_zero.optim.reduction_rules import ReductionRule, shared_names


@dataclass(frozen=True)
class Rule:
    """The update of one optimizer.

    Attributes:
        settings: Floats of a parameter group that the rule reads, by name; ``"betas.0"`` is the first of a pair.
        state: Names of the parameter-shaped state, which is sharded. For a registered rule, checkpoints assume that all
            other state is equal on every rank.
        scalars: (settings and ``counts``, all 0-dim float64; step count after this step, 0-dim) -> 0-dim float64
            tensors, including the new ``counts``.
        apply: (parameter, gradient, state, scalars; all float32) -> (new parameter, new state).
        counts: Names of the 0-dim state other than ``step``.
        nonnegative: Names of the state that is never negative. ``state_dtype="8bit"`` needs no sign for it.
        exact: Names of the state that ``state_dtype="8bit"`` leaves as it is, because ``apply`` needs more precision.
        initial: (parameter group) -> values at which state and ``counts`` begin, by name. State that is left out begins
            at zero. ``step`` is counted if it has a value. None: the optimizer's own first step makes the state, which
            takes more memory than later steps.
    """

    settings: tuple[str, ...]
    state: tuple[str, ...]
    scalars: Callable[[Tensors, Tensor], Tensors]
    apply: Callable[[Tensor, Tensor, Tensors, Tensors], tuple[Tensor, Tensors]]
    counts: tuple[str, ...] = ()
    nonnegative: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    initial: Callable[[Mapping[str, Any]], Mapping[str, float]] | None = None


def zeros(group: Mapping[str, Any]) -> Mapping[str, float]:
    """Let all state of a rule begin at zero, and count steps: the usual :attr:`Rule.initial`."""
    return {"step": 0.0}


@dataclass(frozen=True)
class StateNames:
    """Names in an optimizer's state.

    Attributes:
        cut: State with one element per element of the parameter.
        counts: State that is equal on every rank: 0-dim, or of rows and columns.
        complete: True if all state outside ``cut`` is equal on every rank.
    """

    cut: frozenset[str]
    counts: frozenset[str]
    complete: bool

    def elementwise(self, key: str) -> bool | None:
        """Return True if this entry has one element per element of the parameter; None if unknown."""
        if key in self.cut:
            return True
        return False if self.complete or key == "step" or key in self.counts else None


class Descent(NamedTuple):
    """Options that most optimizers share: direction and weight decay."""

    maximize: bool
    decay: bool
    decoupled: bool

    @classmethod
    def from_group(cls, group: Mapping[str, Any], decoupled: bool = False) -> Descent:
        """Read the group's options; use ``decoupled`` if the group does not have it."""
        return cls(
            bool(group["maximize"]),
            bool(group.get("weight_decay")),
            bool(group.get("decoupled_weight_decay", decoupled)),
        )

    def begin(self, param: Tensor, grad: Tensor, s: Tensors) -> tuple[Tensor, Tensor]:
        """Apply direction and decay; return parameter and gradient.

        Read ``weight_decay``, or ``keep`` if decoupled.
        """
        grad = -grad if self.maximize else grad
        if self.decay and self.decoupled:
            param = param * s["keep"]
        elif self.decay:
            grad = grad + param * s["weight_decay"]
        return param, grad


_SETTINGS = ("lr", "betas.0", "betas.1", "eps", "weight_decay")
_STATE = ("exp_avg", "exp_avg_sq")


def _constants(setting: Tensors) -> Tensors:
    """Return the scalars that do not depend on the step count."""
    beta1, beta2 = setting["betas.0"], setting["betas.1"]
    return {
        "keep": 1 - setting["lr"] * setting["weight_decay"],
        "weight_decay": setting["weight_decay"],
        "rise1": 1 - beta1,
        "beta2": beta2,
        "rise2": 1 - beta2,
        "eps": setting["eps"],
    }


def _first(grad: Tensor, state: Tensors, s: Tensors) -> Tensor:
    return state["exp_avg"] + (grad - state["exp_avg"]) * s["rise1"]


def _second(grad: Tensor, state: Tensors, s: Tensors) -> Tensor:
    return state["exp_avg_sq"] * s["beta2"] + grad * grad * s["rise2"]


@cache
def _adam(descent: Descent, amsgrad: bool) -> Rule:
    """Adam (Kingma & Ba, 2015, algorithm 1); AdamW (Loshchilov & Hutter, 2019) if decay is decoupled."""

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        step = step.double()
        return {
            **_constants(setting),
            "size": setting["lr"] / (1 - setting["betas.0"] ** step),
            "root": (1 - setting["betas.1"] ** step).sqrt(),
        }

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        param, grad = descent.begin(param, grad, s)
        new = {"exp_avg": _first(grad, state, s), "exp_avg_sq": _second(grad, state, s)}
        second = new["exp_avg_sq"]
        if amsgrad:
            second = new["max_exp_avg_sq"] = torch.maximum(state["max_exp_avg_sq"], second)
        return param - s["size"] * new["exp_avg"] / (second.sqrt() / s["root"] + s["eps"]), new

    names = _STATE + (("max_exp_avg_sq",) if amsgrad else ())
    return Rule(_SETTINGS, names, scalars, apply, nonnegative=names[1:], initial=zeros)


def adamw(group: Mapping[str, Any]) -> Rule:
    """Return the rule of ``torch.optim.AdamW`` for a parameter group, which may lack options that are off."""
    return _adam(Descent.from_group({"maximize": False} | dict(group), decoupled=True), bool(group.get("amsgrad")))


@cache
def _adamax(descent: Descent) -> Rule:
    """AdaMax (Kingma & Ba, 2015, algorithm 2); as in ``torch.optim``, ``eps`` keeps the maximum from zero."""

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        return {**_constants(setting), "size": setting["lr"] / (1 - setting["betas.0"] ** step.double())}

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        param, grad = descent.begin(param, grad, s)
        largest = torch.maximum(state["exp_inf"] * s["beta2"], grad.abs() + s["eps"])
        new = {"exp_avg": _first(grad, state, s), "exp_inf": largest}
        return param - s["size"] * new["exp_avg"] / largest, new

    return Rule(_SETTINGS, ("exp_avg", "exp_inf"), scalars, apply, nonnegative=("exp_inf",), initial=zeros)


@cache
def _nadam(descent: Descent) -> Rule:
    """NAdam (Dozat, 2016): Adam with Nesterov momentum, corrected by the product of past momenta."""

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        lr, beta1, step = setting["lr"], setting["betas.0"], step.double()

        def momentum(step: Tensor) -> Tensor:
            return beta1 * (1 - 0.5 * 0.96 ** (step * setting["momentum_decay"]))

        now, then = momentum(step), momentum(step + 1)
        product = setting["mu_product"] * now
        return {
            **_constants(setting),
            "mu_product": product,
            "size_of_gradient": lr * (1 - now) / (1 - product),
            "size_of_average": lr * then / (1 - product * then),
            "root": (1 - setting["betas.1"] ** step).sqrt(),
        }

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        param, grad = descent.begin(param, grad, s)
        new = {"exp_avg": _first(grad, state, s), "exp_avg_sq": _second(grad, state, s)}
        ahead = grad * s["size_of_gradient"] + new["exp_avg"] * s["size_of_average"]
        return param - ahead / (new["exp_avg_sq"].sqrt() / s["root"] + s["eps"]), new

    settings, counts = (*_SETTINGS, "momentum_decay"), ("mu_product",)
    return Rule(
        settings,
        _STATE,
        scalars,
        apply,
        counts,
        nonnegative=_STATE[1:],
        initial=lambda group: {"step": 0.0, "mu_product": 1.0},
    )


@cache
def _radam(descent: Descent) -> Rule:
    """RAdam (Liu et al., 2020, algorithm 2): only momentum until the second moment has enough gradients."""

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        beta1, beta2, step = setting["betas.0"], setting["betas.1"], step.double()
        most = 2 / (1 - beta2) - 1
        length = most - 2 * step * beta2**step / (1 - beta2**step)
        enough = length > 5
        rectified = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length) * (1 - beta2**step)
        size = setting["lr"] / (1 - beta1**step)
        return {
            **_constants(setting),
            "enough": enough.double(),
            "size": torch.where(enough, size * rectified.sqrt(), size),
        }

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        param, grad = descent.begin(param, grad, s)
        new = {"exp_avg": _first(grad, state, s), "exp_avg_sq": _second(grad, state, s)}
        divisor = torch.where(s["enough"] > 0, new["exp_avg_sq"].sqrt() + s["eps"], 1.0)
        return param - s["size"] * new["exp_avg"] / divisor, new

    return Rule(_SETTINGS, _STATE, scalars, apply, nonnegative=_STATE[1:], initial=zeros)


@cache
def _sgd(descent: Descent, momentum: bool, nesterov: bool, dampens: bool) -> Rule:
    """SGD with momentum as in Sutskever et al. (2013), and the dampening of ``torch.optim.SGD``."""

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        return {**setting, "rise": 1 - setting["dampening"]}

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        param, grad = descent.begin(param, grad, s)
        new = {}
        if momentum:
            moved = new["momentum_buffer"] = state["momentum_buffer"] * s["momentum"] + grad * s["rise"]
            grad = grad + moved * s["momentum"] if nesterov else moved
        return param - grad * s["lr"], new

    names = ("momentum_buffer",) if momentum else ()
    # torch.optim does not dampen the first gradient.
    return Rule(
        ("lr", "momentum", "dampening", "weight_decay"),
        names,
        scalars,
        apply,
        initial=None if momentum and dampens else lambda group: {},
    )


@cache
def _asgd(descent: Descent) -> Rule:
    """Averaged SGD (Polyak & Juditsky, 1992), with the schedules of ``torch.optim.ASGD``.

    Each step uses the step size and averaging factor that the last one computed: a new learning rate has effect one
    step later.
    """

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        lr, lambd, step = setting["lr"], setting["lambd"], step.double()
        return {
            "weight_decay": setting["weight_decay"],
            "shrink": 1 - lambd * setting["eta"],
            "size": setting["eta"],
            "share": setting["mu"],
            "eta": lr / (1 + lambd * lr * step) ** setting["alpha"],
            "mu": 1 / (step - setting["t0"]).clamp(min=1),
        }

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        param, grad = descent.begin(param, grad, s)
        param = param * s["shrink"] - grad * s["size"]
        average = state["ax"] + (param - state["ax"]) * s["share"]
        return param, {"ax": torch.where(s["share"] == 1, param, average)}

    settings, counts = ("lr", "lambd", "alpha", "t0", "weight_decay"), ("eta", "mu")
    exact = ("ax",)  # averaged weights are results

    def initial(group: Mapping[str, Any]) -> Mapping[str, float]:
        return {"step": 0.0, "eta": group["lr"], "mu": 1.0}

    return Rule(settings, ("ax",), scalars, apply, counts, exact=exact, initial=initial)


@cache
def _rprop(descent: Descent) -> Rule:
    """Rprop (Riedmiller & Braun, 1993) as in ``torch.optim``.

    An element pauses for one step if its gradient's sign changes.

    The learning rate is only the first step's size.
    """

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        return dict(setting)

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        param, grad = descent.begin(param, grad, s)
        agreement = grad * state["prev"]
        factor = torch.where(agreement < 0, s["etas.0"], torch.where(agreement > 0, s["etas.1"], 1.0))
        size = (state["step_size"] * factor).clamp(s["step_sizes.0"], s["step_sizes.1"])
        grad = torch.where(agreement < 0, 0.0, grad)
        return param - grad.sign() * size, {"prev": grad, "step_size": size}

    settings = ("etas.0", "etas.1", "step_sizes.0", "step_sizes.1")
    names = ("prev", "step_size")
    return Rule(
        settings,
        names,
        scalars,
        apply,
        exact=names,  # a sign that rounds to zero changes the step
        initial=lambda group: {"step": 0.0, "step_size": group["lr"]},
    )


@cache
def _adadelta(descent: Descent) -> Rule:
    """Adadelta (Zeiler, 2012, algorithm 1), times the learning rate of ``torch.optim.Adadelta``."""

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        return {**setting, "rise": 1 - setting["rho"]}

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        param, grad = descent.begin(param, grad, s)
        square = state["square_avg"] * s["rho"] + grad * grad * s["rise"]
        delta = (state["acc_delta"] + s["eps"]).sqrt() / (square + s["eps"]).sqrt() * grad
        moved = state["acc_delta"] * s["rho"] + delta * delta * s["rise"]
        return param - delta * s["lr"], {"square_avg": square, "acc_delta": moved}

    names = ("square_avg", "acc_delta")
    return Rule(("lr", "rho", "eps", "weight_decay"), names, scalars, apply, nonnegative=names, initial=zeros)


@cache
def _adagrad(descent: Descent) -> Rule:
    """Adagrad (Duchi, Hazan & Singer, 2011), with the learning rate decay of ``torch.optim.Adagrad``."""

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        return {**setting, "size": setting["lr"] / (1 + (step.double() - 1) * setting["lr_decay"])}

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        param, grad = descent.begin(param, grad, s)
        total = state["sum"] + grad * grad
        return param - s["size"] * grad / (total.sqrt() + s["eps"]), {"sum": total}

    return Rule(
        ("lr", "lr_decay", "eps", "weight_decay"),
        ("sum",),
        scalars,
        apply,
        nonnegative=("sum",),
        initial=lambda group: {"step": 0.0, "sum": group.get("initial_accumulator_value", 0.0)},
    )


@cache
def _rmsprop(descent: Descent, momentum: bool, centered: bool) -> Rule:
    """RMSprop (Hinton's lecture 6, 2012); ``centered`` divides by the deviation (Graves, 2013)."""

    def scalars(setting: Tensors, step: Tensor) -> Tensors:
        return {**setting, "rise": 1 - setting["alpha"]}

    def apply(param: Tensor, grad: Tensor, state: Tensors, s: Tensors) -> tuple[Tensor, Tensors]:
        param, grad = descent.begin(param, grad, s)
        square = state["square_avg"] * s["alpha"] + grad * grad * s["rise"]
        new = {"square_avg": square}
        if centered:
            mean = new["grad_avg"] = state["grad_avg"] + (grad - state["grad_avg"]) * s["rise"]
            square = square - mean * mean
        move = grad / (square.sqrt() + s["eps"])
        if momentum:
            move = new["momentum_buffer"] = state["momentum_buffer"] * s["momentum"] + move
        return param - move * s["lr"], new

    names = ("square_avg",) + (("momentum_buffer",) if momentum else ()) + (("grad_avg",) if centered else ())
    # A deviation is the difference of two rounded numbers, and must not become negative.
    exact = ("square_avg", "grad_avg") if centered else ()
    settings = ("lr", "alpha", "eps", "momentum", "weight_decay")
    return Rule(settings, names, scalars, apply, nonnegative=("square_avg",), exact=exact, initial=zeros)


MakeRule = Callable[[Mapping[str, Any]], Rule]
AnyRule = Rule | MatrixRule | ReductionRule
MakeMatrixRule = Callable[[Mapping[str, Any]], AnyRule]

_ATTRIBUTE = "_zero_rule"  # attribute of an optimizer class
_RULES: Mapping[type[torch.optim.Optimizer], MakeMatrixRule] = {
    torch.optim.Adafactor: lambda group: adafactor(group["eps"][0], group["maximize"]),
    torch.optim.Adadelta: lambda group: _adadelta(Descent.from_group(group)),
    torch.optim.Adagrad: lambda group: _adagrad(Descent.from_group(group)),
    torch.optim.Adam: lambda group: _adam(Descent.from_group(group), group["amsgrad"]),
    torch.optim.AdamW: adamw,
    torch.optim.Adamax: lambda group: _adamax(Descent.from_group(group)),
    torch.optim.ASGD: lambda group: _asgd(Descent.from_group(group)),
    torch.optim.Muon: muon,
    torch.optim.NAdam: lambda group: _nadam(Descent.from_group(group)),
    torch.optim.RAdam: lambda group: _radam(Descent.from_group(group)),
    torch.optim.RMSprop: lambda group: _rmsprop(
        Descent.from_group(group), group["momentum"] > 0, bool(group["centered"])
    ),
    torch.optim.Rprop: lambda group: _rprop(Descent.from_group(group)),
    torch.optim.SGD: lambda group: _sgd(
        Descent.from_group(group), bool(group["momentum"]), group["nesterov"], bool(group["dampening"])
    ),
}


def rule_for(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> AnyRule | None:
    """Return the rule by which this optimizer steps this group; None if unknown, as for subclasses."""
    make = _RULES.get(type(optimizer)) or type(optimizer).__dict__.get(_ATTRIBUTE)
    if make is None and (of_library := library_rule(type(optimizer))) is not None:
        return of_library(optimizer, group)
    return None if make is None or group.get("differentiable") else make(group)


def needs_matrices(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a group has a rule that needs values of other ranks. Such a rule makes all steps."""
    return any(needs_ranks(rule_for(optimizer, group)) for group in optimizer.param_groups)


def needs_ranks(rule: AnyRule | None) -> bool:
    """Return True if the rule needs full matrices, or sums over parameters."""
    return isinstance(rule, MatrixRule | ReductionRule)


def begins_by_rule(rule: AnyRule | None) -> bool:
    """Return True if the rule makes the first step, too: it tells how state begins."""
    return needs_ranks(rule) or (isinstance(rule, Rule) and rule.initial is not None)


def has_rules(optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]) -> bool:
    return all(rule_for(optimizer, group) is not None for group in groups)


def state_names(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> StateNames:
    """Return the names in this optimizer's state for the parameters of this group, as far as known."""
    if library_rule(type(optimizer)) is not None and (rule := rule_for(optimizer, group)) is not None:
        return _names_of(rule, complete=False)
    for cls in type(optimizer).__mro__:
        ours, registered = _RULES.get(cls), cls.__dict__.get(_ATTRIBUTE)
        make = ours or registered
        if make is None:
            continue
        if cls is type(optimizer):
            # A registered rule names all elementwise state. For torch's optimizers, users' hooks may add state, and
            # settings that have changed may have left state that the rule does not read.
            return _names_of(make(group), complete=ours is None)
        try:
            return StateNames(frozenset(), frozenset(make(group).counts), complete=False)
        except KeyError:  # a subclass with other settings
            break
    return StateNames(frozenset(), frozenset(), complete=False)


def _names_of(rule: AnyRule, complete: bool) -> StateNames:
    return StateNames(frozenset(rule.state), frozenset(rule.counts) | shared_names(rule), complete)


def register_rule(optimizer: type[torch.optim.Optimizer], make: MakeRule) -> None:
    """Register the update rule of an elementwise optimizer, so that its step can be captured.

    The optimizer's ``step`` makes the first step, and with it the state, unless the rule has :attr:`Rule.initial`. The
    rule computes later steps, and ``step`` is then called without parameters. Call this before training, on every rank.
    Subclasses need rules of their own.

    Args:
        optimizer: The class itself.
        make: Returns the :class:`Rule` for a parameter group. The rule may depend on non-numeric settings and on which
            settings are zero. Return one object for all groups that agree in these, so that they share compiled code.
            Checkpoints depend on the names in it, see :class:`Rule`.

    Raises:
        ValueError: ``optimizer`` is no optimizer class, or has another rule already.

    Examples:
        For an optimizer ``Lion``::

            @functools.cache
            def lion():
                def scalars(setting, step):
                    return {**setting, "rise": 1 - setting["betas.0"], "rise2": 1 - setting["betas.1"]}

                def apply(param, grad, state, s):
                    average = state["exp_avg"]
                    way = (average + (grad - average) * s["rise"]).sign()
                    new = {"exp_avg": average + (grad - average) * s["rise2"]}
                    return param * (1 - s["lr"] * s["weight_decay"]) - way * s["lr"], new

                return Rule(("lr", "betas.0", "betas.1", "weight_decay"), ("exp_avg",), scalars, apply)


            lightning_zero.register_rule(Lion, lambda group: lion())
    """
    _register(optimizer, make)


def register_matrix_rule(optimizer: type[torch.optim.Optimizer], make: MakeMatrixRule) -> None:
    """Register the update rule of an optimizer that needs full matrices, or sums over full parameters.

    All steps are computed by the rule, the first one, too: the optimizer's ``step`` is called without parameters. State
    begins as zeros. Call this before training, on every rank. Subclasses need rules of their own.

    Args:
        optimizer: The class itself.
        make: Returns the :class:`~lightning_zero.MatrixRule` for a parameter group, or the
            :class:`~lightning_zero.ReductionRule` if sums are enough, or an elementwise
            :class:`~lightning_zero.Rule` for the groups of other parameters. Return one object for groups that agree in
            their non-numeric settings.

    Raises:
        ValueError: ``optimizer`` is no optimizer class, or has another rule already.

    Examples:
        >>> import lightning_zero
        >>> import torch
        >>> from lightning_zero.optim.matrix_rules import muon
        >>> class MyMuon(torch.optim.Muon): ...
        >>> lightning_zero.register_matrix_rule(MyMuon, muon)

        A class whose groups say which rule they use::

            from lightning_zero.optim.update_rules import adamw

            lightning_zero.register_matrix_rule(
                MuonWithAdam, lambda group: muon(group) if group["use_muon"] else adamw(group)
            )
    """
    _register(optimizer, make)


def _register(optimizer: type[torch.optim.Optimizer], make: MakeMatrixRule) -> None:
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise ValueError(f"{optimizer!r} is no class of optimizers. Pass the class, such as Lion, and not an object.")
    known = _RULES.get(optimizer) or library_rule(optimizer) or optimizer.__dict__.get(_ATTRIBUTE)
    if known is not None and known is not make:
        raise ValueError(
            f"{optimizer.__name__} has another rule already ({known!r}). Register yours for a subclass of it."
        )
    setattr(optimizer, _ATTRIBUTE, make)
