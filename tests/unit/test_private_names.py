"""Private names of torch and Lightning stand in ``lightning_zero/compat`` and nowhere else.

Checked on the source.
"""

from pathlib import Path

import pytest

from tests.helpers.private_names import Entry, check_package, entries

PACKAGE = "lightning_zero"
REPO = Path(__file__).resolve().parents[2]
LISTED = [
    Entry("modules", None, "torch.nn.Module._listed", "", 1),
    Entry("ops", "to_copy", "torch._C._copy", "", 1),
    Entry("graphs", "SIDE", "torch.fx.Node.meta.partitioner_tag", "", 1),
]


def test_private_names_stand_in_compat() -> None:
    package = REPO / PACKAGE
    listed = entries(package)
    assert listed, "nothing to check with"
    found = check_package(package, listed)
    assert not found, "\n".join(found)


def check(root: Path, source: str, path: str = "optim/x.py", **others: str) -> list[str]:
    for name, text in {path: source, **{f"optim/{name}.py": text for name, text in others.items()}}.items():
        target = root / PACKAGE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return check_package(root / PACKAGE, LISTED)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import torch._dynamo", ":1: imports torch._dynamo"),
        ("import torch.distributed._symmetric_memory as symmetric", "imports torch.distributed._symmetric_memory"),
        ("def f():\n    from torch import _C", ":2: imports torch._C"),
        ("from torch._inductor import config", "imports torch._inductor.config"),
        ("from torch.fx.graph import CodeGen, _BoxedCodeGen", "imports torch.fx.graph._BoxedCodeGen"),
        ("if TYPE_CHECKING:\n    from lightning.fabric.utilities.types import _PATH", ":2: imports lightning.fabric"),
        ("from torchmetrics.metric import _x", "imports torchmetrics.metric._x"),
        ("import torch\ntorch._ops", ":2: uses torch._ops"),
        (
            "import torch.distributed as dist\ndist.distributed_c10d._store()",
            "uses torch.distributed.distributed_c10d._",
        ),
        ("from torch import nn\nnn.modules.batchnorm._BatchNorm", "uses torch.nn.modules.batchnorm._BatchNorm"),
        ("import torch\ndef _ops(): torch._ops", "uses torch._ops"),  # the same name is ours
        ("import torch\naten = torch.ops.aten\naten._to_copy", ":3: uses aten._to_copy"),
        ("import torch\ntorch.optim.x(torch.zeros(1)._base)", "uses torch.zeros(1)._base"),
        ("module._parameters", "uses module._parameters"),
        ("module._parameters = {}", "uses module._parameters"),
        ("def f(other):\n    other._elsewhere", "uses other._elsewhere"),
        ("class A(B):\n    def f(self):\n        self._inherited", "uses self._inherited"),
        ("class A(B):\n    def f(self):\n        super()._inherited()", "uses super()._inherited"),
        ("class A(B):\n    @override\n    def _hook(self): ...", "overrides _hook"),
        ("getattr(module, '_parameters')", "says '_parameters'"),
        ("module.__dict__['_parameters']", "says '_parameters'"),
        ("NAME = '_orig_mod.'", "says '_orig_mod.'"),
        ("state.update(_optimizers=[])", "says _optimizers="),
        ("node.meta['partitioner_tag'] = 1", "says 'partitioner_tag'"),
    ],
)
def test_checker_catches(tmp_path: Path, source: str, words: str) -> None:
    [complaint] = check(tmp_path, source, other="def _elsewhere(): ...")
    assert words in complaint
    assert complaint.startswith(f"{PACKAGE}/optim/x.py")


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.ops.aten.add.Tensor.__name__",
        "import os, sys\nfrom torch import Tensor\nos._exit(1)\nsys._getframe(1)",
        "from lightning_zero.compat.tensors import to_copy\nfrom lightning_zero.optim.y import _ours\nfrom ._z import a",
        "module._listed\nmodule._listed = 1\nself._listed\ngetattr(module, '_listed')\nf(_listed=1)",
        "class A(B):\n    @override\n    def _listed(self):\n        super()._listed()",
        "class A(B):\n    @override\n    def _elsewhere(self): ...",  # of a class in another module
        "class A(B):\n    def f(self):\n        self._elsewhere()\n        super()._elsewhere()\n        cls._elsewhere",
        "class A:\n    def __init__(self):\n        self._mine = 1\n    def f(self, other):\n        return other._mine",
        "def _here(): ...\nclass A:\n    _field: int\n    def f(self, x):\n        x._here, x._field",
        "type(module)._zero_cache\nmodule.__dict__['_zero_spec']\nf(_zero_unsharded_cache={})",
        "node.meta['val']\n'the partitioner_tag'\nf'partitioner_tag{a}'",
        "f'{a}_norm_{b}'\n_, *_ = x\nname.endswith('_')\n'_'",
        "'''_text'''\n'a _text'\n'__deepcopy__'\n'_with space'",
    ],
)
def test_checker_lets_pass(tmp_path: Path, source: str) -> None:
    assert check(tmp_path, source, other="def _elsewhere(): ...\n_text = 1") == []


def test_checker_leaves_compat_alone(tmp_path: Path) -> None:
    assert check(tmp_path, "import torch\nx = torch._C._x", "compat/tensors.py") == []
