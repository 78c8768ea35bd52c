"""Read the README and examples/docs/: tables of options and snippets.

``python -m tests.helpers.readme`` writes the tables, and a test compares them. Tests run the snippets.
"""

import re
from pathlib import Path

from lightning_zero.config import Options, Tuning
from lightning_zero.config.options import GROUPS
from lightning_zero.config.text import options_table

REPO = Path(__file__).parents[2]
README = REPO / "README.md"
TABLES = {"options": options_table(Options), "tuning": options_table(Tuning, GROUPS)}


def pages() -> list[Path]:
    """The README first, from which the others' snippets have their names."""
    return [README, *sorted((REPO / "examples" / "docs").glob("*.md"))]


def written() -> dict[Path, str]:
    """The texts of all pages, with their tables as they should be."""
    texts = {page: page.read_text() for page in pages()}
    for name, rows in TABLES.items():
        found = [page for page, text in texts.items() if f"<!-- {name}: " in text]
        assert len(found) == 1, f"there are {len(found)} pages with a table of {name}"
        parts = re.split(f"(?s)(<!-- {name}: [^\n]*-->\n).*?(\n<!-- end -->)", texts[found[0]])
        assert len(parts) == 4, f"{found[0].name} has {len(parts) // 3} tables of {name}"
        texts[found[0]] = parts[0] + parts[1] + rows + parts[2] + parts[3]
    return texts


NAMED = re.compile("(?s)<!-- snippet: ([a-z]+) -->\n```python\n(.*?)```")


def snippet(name: str) -> str:
    """The Python below the line ``<!-- snippet: name -->``, which needs other things than the others do."""
    return {found: code for page in pages() for found, code in NAMED.findall(page.read_text())}[name]


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text)
