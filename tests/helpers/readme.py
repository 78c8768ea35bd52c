"""The README's tables of options: ``python -m tests.helpers.readme`` writes them; a test compares them. And its
snippets that have a name, which tests run."""

import re
from pathlib import Path

from lightning_zero.config import Options, Tuning
from lightning_zero.config.options import GROUPS
from lightning_zero.config.text import table

README = Path(__file__).parents[2] / "README.md"
TABLES = {"options": table(Options), "tuning": table(Tuning, GROUPS)}


def written(text: str) -> str:
    """The text with its tables as they should be."""
    for name, rows in TABLES.items():
        parts = re.split(f"(?s)(<!-- {name}: [^\n]*-->\n).*?(\n<!-- end -->)", text)
        assert len(parts) == 4, f"{README.name} has {len(parts) // 3} tables of {name}"
        text = parts[0] + parts[1] + rows + parts[2] + parts[3]
    return text


NAMED = re.compile("(?s)<!-- snippet: ([a-z]+) -->\n```python\n(.*?)```")


def snippet(name: str) -> str:
    """The Python below the line ``<!-- snippet: name -->``, which needs other things than the others do."""
    return dict(NAMED.findall(README.read_text()))[name]


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
