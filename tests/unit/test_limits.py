"""How much a file, a class and a function may hold, in Python and in C++. Checked on the source, so nothing is imported.

Whoever reaches a limit has found a second idea in the room: it gets a file, or an object, of its own.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGE, NATIVE = "lightning_zero", "csrc"
SUFFIXES = {".py", ".pyi", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"}
MOST_LINES, MEDIAN_LINES = 750, 150
MOST_METHODS, MOST_ATTRIBUTES, MOST_PARAMETERS = 25, 20, 7
FEWER_LINES = {f"{PACKAGE}/engine.py": 260, f"{NATIVE}/executor.h": 250}  # they compose, and do nothing themselves
# Signatures that somebody else has set.
LIGHTNINGS = {
    "ZeroStrategy.__init__": "Lightning hands five of these over, by name",
    "ProcessStrategy.__init__": "likewise",
}

# What users choose from, each of it one attribute; the groups stand in the class.
LISTS = {"Options", "Tuning"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(root: Path) -> list[Path]:
    return sorted(p for folder in (PACKAGE, NATIVE) for p in (root / folder).rglob("*") if p.suffix in SUFFIXES)


def length(path: Path) -> int:
    return len(path.read_text().splitlines())


def check_lengths(root: Path) -> list[str]:
    found = []
    for path in sources(root):
        name, lines = str(path.relative_to(root)), length(path)
        most = FEWER_LINES.get(name, MOST_LINES)
        if lines > most:
            found.append(f"{name}: {lines} lines, at most {most}")
    return found


def functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, Function]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield inside + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{node.name}.")
        else:
            yield from functions(node, inside)


def parameters(function: Function) -> int:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def attributes(cls: ast.ClassDef) -> set[str]:
    """What the class assigns to ``self``, or declares."""
    assigned = {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    declared = {ast.unparse(node.target) for node in cls.body if isinstance(node, ast.AnnAssign)}
    return assigned | declared


def check_definitions(root: Path) -> list[str]:
    found = []
    for path in sources(root):
        if path.suffix != ".py":
            continue
        where, tree = path.relative_to(root), ast.parse(path.read_text(), str(path))
        for name, function in functions(tree):
            count = parameters(function)
            if count > MOST_PARAMETERS and name not in LIGHTNINGS:
                found.append(f"{where}:{function.lineno}: {name} takes {count} parameters, at most {MOST_PARAMETERS}")
        for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            methods = {node.name for node in cls.body if isinstance(node, Function) and not node.name.startswith("_")}
            if len(methods) > MOST_METHODS:
                found.append(
                    f"{where}:{cls.lineno}: {cls.name} has {len(methods)} public methods, at most {MOST_METHODS}"
                )
            if len(attributes(cls)) > MOST_ATTRIBUTES and cls.name not in LISTS:
                found.append(
                    f"{where}:{cls.lineno}: {cls.name} has {len(attributes(cls))} attributes, at most {MOST_ATTRIBUTES}"
                )
    return found


# -- C++, as clang-format lays it out. Only what stands in a class itself counts: bodies and nested classes are cut out.


def cpp_classes(text: str) -> Iterator[tuple[int, str, str, str]]:
    """The line, the kind (``class`` or ``struct``), the name and the inside of each class that ``text`` defines."""
    text = re.sub(r"//[^\n]*", "", text)
    for match in re.finditer(r"\b(class|struct) (\w+)(?: final)?(?: : [^;{]*)?\s*\{", text):
        if re.search(r"\benum $", text[: match.start()]):
            continue
        end, depth = match.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        yield text.count("\n", 0, match.start()) + 1, match[1], match[2], text[match.end() : end - 1]


def cpp_declarations(inside: str) -> Iterator[str]:
    """What a class declares, one after the other, without what stands in braces."""
    text, depth = "", 0
    for character in inside:
        depth -= character == "}"
        if depth == 0 and character == "}":
            # A function's body ends its declaration; a nested class and an initial value go on to a semicolon.
            if text.rstrip().endswith((")", "const", "override", "noexcept")) or re.search(r"\) : \S", text):
                yield text.strip()
                text = ""
        elif depth == 0 and character == ";":
            yield text.strip()
            text = ""
        elif depth == 0 and character != "{":
            text += character
        depth += character == "{"


def cpp_members(name: str, kind: str, inside: str) -> tuple[set[str], list[str]]:
    """Names of a class's public methods, its constructors, its destructor and operators aside, and of its data."""
    public, methods, data = kind == "struct", set(), []
    for declaration in cpp_declarations(inside):
        text = " ".join(declaration.split())
        while label := re.match(r"(public|private|protected) ?: ?", text):
            public, text = label[1] == "public", text[label.end() :]
        if not text or re.match(r"(using|friend|static_assert|enum)\b", text):
            continue
        if re.match(r"(class|struct) \w+( : .*)?$", text):
            continue  # a nested class, which is counted by itself, or one that is only named
        plain = re.sub(r"\[\[.*?\]\]", "", text)
        while (simpler := re.sub(r"<[^<>]*>", "", plain)) != plain:  # template arguments may look like functions
            plain = simpler
        if pointer := re.search(r"\(\*(\w+)\)\(", plain):
            data.append(pointer[1])
        elif function := re.search(r"(~?\w+|operator\W+) ?\(", plain.split(" = ")[0]):
            found = function[1]
            if public and found.lstrip("~") != name and not found.startswith("operator"):
                methods.add(found)
        elif not plain.startswith("static "):
            first, *others = plain.split(",")
            data += [first.split(" = ")[0].split()[-1].lstrip("*&"), *(o.split(" = ")[0].strip(" *&") for o in others)]
    return methods, data


def check_cpp(root: Path) -> list[str]:
    found = []
    for path in sources(root):
        if path.suffix not in (".h", ".cpp"):
            continue
        for line, kind, name, inside in cpp_classes(path.read_text()):
            methods, data = cpp_members(name, kind, inside)
            for what, count, most in (
                ("public methods", len(methods), MOST_METHODS),
                ("data members", len(data), MOST_ATTRIBUTES),
            ):
                if count > most:
                    found.append(f"{path.relative_to(root)}:{line}: {name} has {count} {what}, at most {most}")
    return found


def test_files_are_short() -> None:
    assert {path.suffix for path in sources(REPO)} >= {".py", ".cpp", ".h"}, "nothing to check"
    found = check_lengths(REPO)
    assert not found, "\n".join(found)
    assert median(map(length, sources(REPO))) <= MEDIAN_LINES


def test_classes_and_functions_are_small() -> None:
    found = check_definitions(REPO)
    assert not found, "\n".join(found)


def test_cpp_classes_are_small() -> None:
    found = check_cpp(REPO)
    assert not found, "\n".join(found)


def test_the_cpp_counter_sees_what_there_is() -> None:
    """Counted by hand, in a header that has some of everything."""
    counts = {}
    for path in sources(REPO):
        if path.suffix == ".h":
            for _, kind, name, inside in cpp_classes(path.read_text()):
                methods, data = cpp_members(name, kind, inside)
                counts[name] = (len(methods), data)
    assert counts["ReduceBucket"][0] == 20
    assert " ".join(counts["ReduceBucket"][1]) == (
        "own_send_buffers deferred scale poison dtype_ ranks_ hosts_ segment_ chunk_ sent_ read_ scale_ slots_ state_ buffer_"
    )
    assert counts["Turns"] == (6, ["number_", "readable_"])
    assert counts["CudaDriver"] == (4, ["load", "find", "launch_kernel"])
    assert counts["Fence"] == (3, ["event_"])


def plant(root: Path, path: str, source: str) -> Path:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(source)
    return root


def methods(count: int) -> str:
    return "class A:\n" + "".join(f"    def m{i}(self): pass\n" for i in range(count))


def assigned(count: int) -> str:
    return "class A:\n    def __init__(self):\n" + "".join(f"        self.a{i}: int = {i}\n" for i in range(count))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(a, b, c, d, e, f, *, g, h): pass", ":1: f takes 8 parameters"),
        ("class A:\n    def f(self, a, b, c, d, e, f, g, h): pass", ":2: A.f takes 8 parameters"),
        ("class A:\n    def f(self):\n        def g(a, b, c, d, e, f, g, h): pass", ":3: A.g takes 8 parameters"),
        (methods(26), ":1: A has 26 public methods"),
        (assigned(21), ":1: A has 21 attributes"),
        ("class A:\n" + "".join(f"    a{i}: int\n" for i in range(21)), ":1: A has 21 attributes"),
    ],
)
def test_checker_catches(tmp_path: Path, source: str, words: str) -> None:
    [complaint] = check_definitions(plant(tmp_path, f"{PACKAGE}/x/y.py", source))
    assert complaint.startswith(f"{PACKAGE}/x/y.py{words}")


@pytest.mark.parametrize(
    "source",
    [
        "def f(a, b, c, d, e, f, *args, g, **kwargs): pass",
        "class A:\n    def f(self, a, b, c, d, e, f, g): pass",
        methods(25) + "    def _hidden(self): pass\n",
        assigned(20),
        "class ZeroStrategy:\n    def __init__(self, a, b, c, d, e, f, g, h): pass",
    ],
)
def test_checker_lets_pass(tmp_path: Path, source: str) -> None:
    assert check_definitions(plant(tmp_path, f"{PACKAGE}/x/y.py", source)) == []


CPP_METHODS = "".join(f"  Held<int(long)> m{i}(const A& a = {{}}) const {{ return {{i, f()}}; }}\n" for i in range(26))
CPP_DATA = (
    "".join(f"  std::array<std::function<void(int)>, 2> a{i}_{{}};\n" for i in range(19)) + "  int x_ = 0, *y_;\n"
)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("class A : public B {\n public:\n" + CPP_METHODS + "};\n", ":1: A has 26 public methods"),
        ("struct A {\n" + CPP_METHODS.replace(" const {", " {") + "};\n", ":1: A has 26 public methods"),
        ("\nclass A {\n public:\n  A() {}\n private:\n" + CPP_DATA + "};\n", ":2: A has 21 data members"),
        ("class B {\n  struct A {\n" + CPP_DATA + "  };\n  A a_;\n};\n", ":2: A has 21 data members"),
    ],
)
def test_checker_catches_in_cpp(tmp_path: Path, source: str, words: str) -> None:
    [complaint] = check_cpp(plant(tmp_path, f"{NATIVE}/x/y.h", source))
    assert complaint.startswith(f"{NATIVE}/x/y.h{words}")


@pytest.mark.parametrize(
    "source",
    [
        "class A {\n" + CPP_METHODS + "};\n",  # private
        "class A {\n public:\n  A(int x) : x_(x) {}\n  ~A();\n  bool operator()(int x) const;\n"
        + CPP_METHODS.split("\n", 1)[1]
        + "};\n",
        "struct A {\n" + CPP_DATA.split("\n", 1)[1] + "  using B = int;\n  // int c;\n  static int d;\n};\n",
        "class A {\n  class B;\n  struct C {\n    int c;\n  };\n" + CPP_DATA.split("\n", 1)[1] + "};\n",
        "enum class A : int { B, C };\n",
    ],
)
def test_checker_lets_pass_in_cpp(tmp_path: Path, source: str) -> None:
    assert check_cpp(plant(tmp_path, f"{NATIVE}/x/y.h", source)) == []


@pytest.mark.parametrize(
    ("path", "most"), [(f"{PACKAGE}/x.py", 750), (f"{PACKAGE}/engine.py", 260), (f"{NATIVE}/a/x.cpp", 750)]
)
def test_checker_catches_long_files(tmp_path: Path, path: str, most: int) -> None:
    assert check_lengths(plant(tmp_path, path, "#\n" * most)) == []
    assert check_lengths(plant(tmp_path, path, "#\n" * (most + 1))) == [f"{path}: {most + 1} lines, at most {most}"]
