"""Check the language of docstrings and comments by the rules in CONTRIBUTING.md, "Language".

The package and csrc have all checks, and the tests have those of words.

Words are counted for each package, so that one unusual sentence is possible and a habit is not.

Rule 2 ("No sentence begins with What") is about sentences. Headings and questions of the pages under examples/docs/ may
begin with What, as in "What you see" and "What can go wrong": there the word names a reader's question. Headings have
no check here.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PYTHON, CPP = (".py",), (".cpp", ".h", ".cu", ".cuh")
# Occurrences for each 1,000 words. Peers (torchtitan, DeepSpeed, Lightning) have 0 to 3.
LIMITS = {
    r"\bwhat\b": 3.0,
    r"\b(?:nobody|whoever|somebody|whatever|whichever)\b": 0.3,
    r"\b(?:lie|lies|lay|lying|comes?|came|coming|told|tells?|telling|behind|beside)\b": 1.5,
}
FEW_WORDS = 400  # fewer than these are counted with the rest of the tree: one word would exceed a limit
FORBIDDEN_START = re.compile(r"[`\"']*(?:Of|What|Whether|Where|Which|Likewise|The same)\b")
LONGEST_SUMMARY = 100  # characters of a docstring's first line
# Terms of the glossary's left column that the package used to have, as identifiers.
OLD_TERMS = re.compile(
    r"\b(?:Outline|NotOutlined|Unlike|Around|Given|Texts|Inlined|NotOutlined|Sight|SavedEvenly|Piece|PieceCache|WaitJudge"
    r"|RankBoard|RankEnd|Arrivals|HeldFolder|Halfway|PaperCompiler|StepOnPaper|plainly|takes_turns|lie_over|lie_apart"
    r"|over_copies|is_away|masters_away|bring_ahead|hand_over_gradients|why_not|compute_copy|full_precision_copy"
    r"|\w*resident_(?:weight|start|wait|gathers|host_shard)s?|\w+_resident|Resident\w+|borrow(?:ed|s)?)\b"
)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def comments(path: Path, source: str) -> Iterator[tuple[int, str]]:
    if path.suffix in PYTHON:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("# ")
    else:
        for number, line in enumerate(source.split("\n"), 1):
            found = re.search(r"//+(.*)", line)
            if found:
                yield number, found[1].strip()


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+|\n\n+", text)


def problems_of_docstrings(source: str) -> list[tuple[int, str]]:
    found = []
    for line, text in docstrings(ast.parse(source)):
        found += [(line, f"begins a sentence badly: {s[:60]!r}") for s in sentences(text) if FORBIDDEN_START.match(s)]
        if len(text.split("\n")[0]) > LONGEST_SUMMARY:
            found.append((line, f"has a first line of more than {LONGEST_SUMMARY} characters"))
    return found


def files(directory: Path, suffixes: tuple[str, ...]) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.suffix in suffixes)


def prose(path: Path) -> list[str]:
    source = path.read_text()
    texts = [text for _, text in comments(path, source)]
    return texts + ([text for _, text in docstrings(ast.parse(source))] if path.suffix in PYTHON else [])


def rates(texts: list[str]) -> tuple[int, dict[str, float]]:
    joined = "\n".join(texts)
    words = len(re.findall(r"[A-Za-z']+", joined))
    return words, {rule: 1000 * len(re.findall(rule, joined, re.I)) / max(words, 1) for rule in LIMITS}


PACKAGES = sorted(path for path in (REPO / "lightning_zero").iterdir() if path.is_dir() and any(path.rglob("*.py")))
PACKAGES += [REPO / "csrc"]


@pytest.mark.parametrize("directory", [*PACKAGES, REPO / "lightning_zero", REPO / "tests"], ids=lambda path: path.name)
def test_words_are_the_fields(directory: Path) -> None:
    words, counted = rates([text for path in files(directory, PYTHON + CPP) for text in prose(path)])
    if words >= FEW_WORDS:
        over = {rule: f"{rate:.2f} > {LIMITS[rule]}" for rule, rate in counted.items() if rate > LIMITS[rule]}
        assert not over, f"per 1,000 words of {directory.name}: {over}"


def test_docstrings_begin_with_a_verb_and_end_their_summary_in_time() -> None:
    found = [
        f"{path.relative_to(REPO)}:{line} {problem}"
        for path in files(REPO / "lightning_zero", PYTHON)
        for line, problem in problems_of_docstrings(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_comments_begin_with_their_subject() -> None:
    found = [
        f"{path.relative_to(REPO)}:{line}: {text[:60]!r}"
        for directory in (REPO / "lightning_zero", REPO / "csrc")
        for path in files(directory, PYTHON + CPP)
        for line, text in comments(path, path.read_text())
        if FORBIDDEN_START.match(text)
    ]
    assert not found, "\n".join(found)


def test_old_terms_are_gone() -> None:
    found = [
        f"{path.relative_to(REPO)}:{number}: {match[0]}"
        for directory in (REPO / "lightning_zero", REPO / "csrc", REPO / "examples")
        for path in files(directory, PYTHON + CPP)
        for number, line in enumerate(path.read_text().split("\n"), 1)
        for match in OLD_TERMS.finditer(line)
    ]
    assert not found, "\n".join(found)


def test_the_checks_find_faults() -> None:
    source = (
        '"""Of one engine."""\ndef f():\n    """Return it. What is saved stays."""\n'
        + f'def g():\n    """{"x" * 101}"""'
    )
    assert len(problems_of_docstrings(source)) == 3
    assert rates(["What lies behind what nobody told"])[1] == {
        rule: pytest.approx(1000 * count / 6) for rule, count in zip(LIMITS, (2, 1, 3), strict=True)
    }
    assert not problems_of_docstrings('"""Return the shard. The sum is exact."""')
    assert OLD_TERMS.search("x = Outline()")
    assert OLD_TERMS.search("class ResidentWeights {")
    assert not OLD_TERMS.search("outline = 1")
