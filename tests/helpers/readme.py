"""Read the README and all pages under examples/docs/: their tables of options, their code blocks and their links.

``python -m tests.helpers.readme`` writes the tables, and a test compares them. Tests run the blocks of Python and check
those of the shell.
"""

import ast
import importlib.util
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

from lightning_zero.config import Options, Tuning
from lightning_zero.config.options import GROUPS
from lightning_zero.config.text import options_table

REPO = Path(__file__).parents[2]
README = REPO / "README.md"
DOCS = REPO / "examples" / "docs"
TABLES = {"options": options_table(Options), "tuning": options_table(Tuning, GROUPS)}


def pages() -> list[Path]:
    """Return the README and all pages below examples/docs/."""
    return [README, *sorted(DOCS.rglob("*.md"))]


def page_name(page: Path) -> str:
    """Return the path below examples/docs/, or the name of a page elsewhere."""
    return page.relative_to(DOCS).as_posix() if page.is_relative_to(DOCS) else page.name


def written() -> dict[Path, str]:
    """Return the texts of all pages, with their tables as they should be."""
    texts = {page: page.read_text() for page in pages()}
    for name, rows in TABLES.items():
        found = [page for page, text in texts.items() if f"<!-- {name}: " in text]
        assert len(found) == 1, f"there are {len(found)} pages with a table of {name}"
        parts = re.split(f"(?s)(<!-- {name}: [^\n]*-->\n).*?(\n<!-- end -->)", texts[found[0]])
        assert len(parts) == 4, f"{found[0].name} has {len(parts) // 3} tables of {name}"
        texts[found[0]] = parts[0] + parts[1] + rows + parts[2] + parts[3]
    return texts


# -- blocks

FENCE = re.compile(r"(?ms)^( *)```(\w*)\n(.*?)^\1```$")
NAMED = re.compile("(?s)<!-- snippet: ([a-z]+) -->\n```python\n(.*?)```")


def blocks(text: str, *languages: str) -> list[str]:
    """Return the fenced blocks in one of the languages, in order, without those that have a name."""
    found = FENCE.findall(NAMED.sub("", text))
    return [textwrap.dedent(code) for _, language, code in found if language in languages]


def files_of(text: str) -> dict[str, str]:
    """Return the files that a page shows, by name: blocks of YAML after a line that ends with ``FILE``:."""
    found = re.findall(r"(?ms)`([\w/.-]+\.ya?ml)`:\n\n```yaml\n(.*?)^```$", text)
    return dict(found)


def snippet(name: str) -> str:
    """Return the Python after the line ``<!-- snippet: name -->``, which tests/fabric/test_examples.py runs."""
    return {found: code for page in pages() for found, code in NAMED.findall(page.read_text())}[name]


# Packages that a block may import and that the extra `test` does not install.
OPTIONAL = ("hydra", "omegaconf", "peft", "transformers", "wandb")
# Lightning imports these when the class is used.
IMPORTED_BY = {"TensorBoardLogger": ("tensorboard", "tensorboardX"), "WandbLogger": ("wandb",)}


def missing_package(code: str) -> str | None:
    """Return the first optional package that the block needs and this environment lacks."""
    for name in imported(code):
        if name in OPTIONAL and importlib.util.find_spec(name) is None:
            return name
    for word, names in IMPORTED_BY.items():
        if re.search(rf"\b{word}\b", code) and not any(importlib.util.find_spec(name) for name in names):
            return names[0]
    return None


def imported(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


# -- the shell

CALL = re.compile(r"(?:-m lightning_zero|\blightning-zero) +(.*)")


def shell_lines(text: str) -> Iterator[str]:
    """Yield the commands of all shell blocks: continued lines joined, without prompts and comments."""
    for code in blocks(text, "bash", "sh", "shell"):
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield shlex.join(words)


def own_command(line: str) -> list[str] | None:
    """Return the arguments of ``python -m lightning_zero`` in a command, or None if it does not call that."""
    found = CALL.search(line)
    if found is None:
        return None
    words = shlex.split(found[1])
    for number, word in enumerate(words):
        if word in ("&&", "||", "|", ";", ">", "2>"):
            return words[:number]
    return words


def files_in_shell(line: str) -> list[str]:
    """Return the paths in a command that name files of this repository."""
    return re.findall(r"(?<![\w/.-])((?:examples|tests|csrc|lightning_zero|\.ci)/[\w/.-]+)", line)


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text)
