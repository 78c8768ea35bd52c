"""Models that commands take by name."""

from pathlib import Path

import pytest

from lightning_zero.cli.models import model_class


def test_a_class_is_found_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("import lightning as L\nclass Mine(L.LightningModule): pass\nclass Other: pass\n")
    assert model_class(f"{file}:Mine").__name__ == "Mine"
    for name in ("Other", "Missing"):
        with pytest.raises(ValueError, match=f"has no LightningModule called '{name}'"):
            model_class(f"{file}:{name}")
    for wrong in ("7t", f"{file}", f"{tmp_path}/no.py:Mine"):
        with pytest.raises(ValueError, match="is none of tiny, "):
            model_class(wrong)
