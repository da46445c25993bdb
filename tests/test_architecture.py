"""Holds the shape of the source tree: who may import whom, how files are named, and how long they get.

Only the syntax tree is read; nothing is imported. The packages depend on each other in one direction,
fusion → codegen → lowering, so that each can be understood without those above it. All are imported below `fusion`,
where the other two are links.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"fusion": "fusion", "codegen": "fusion.codegen", "lowering": "fusion.lowering"}
"""Folder → the name below which its modules are imported."""

MAX_LINES = 450
MAX_METHODS = 20
MAX_UNTYPED = 20
LAUNCHES = "codegen/triton/launch/"
"""The modules that handle objects of Triton, which has no annotations."""

OPTIONAL = ("rich", "transformers", "triton")
"""Libraries that some programs or machines do without: functions may import them."""

DEFERRED = {
    "codegen/targets.py": "fusion.codegen.triton",  # without Triton, as outside Linux, the C target remains
    "fusion/cli/commands.py": "fusion.cli.demo",  # the demonstration needs transformers
    "fusion/graph_cache/carried.py": "fusion.codegen.triton.launch.carried",  # likewise needs Triton
}
"""File → the module of ours that its functions import at their call."""

SHARED_NAMES = {
    "Code": "the text of an expression with its precedence, in the emitters for C and for Triton, which never meet",
}
"""The name of a class that is defined more than once → why one name is right."""

DATA_SUFFIXES = (".c", ".css", ".h", ".html", ".js", ".txt")
NAMES_THAT_SAY_NOTHING = {"utils", "util", "common", "helpers", "helper"}

# folder → the only own names that its modules may reach, each name with everything below it
ALLOWED = {
    "lowering": ("fusion.lowering",),
    "codegen": ("fusion.codegen", "fusion.lowering"),
    "fusion": ("fusion",),
}

# folder → the names that no module in it may reach, each name with everything below it
FORBIDDEN = {
    "lowering": (
        *("networkx", "triton"),
        # lowering reads an fx graph; capturing one and splicing into one belong to fusion
        *("torch._dynamo", "torch._functorch", "torch._inductor"),
        *("torch.fx.passes", "torch.fx.subgraph_rewriter", "torch.fx.replace_pattern"),
        *("torch.fx.Transformer", "torch.fx.Tracer", "torch.fx.symbolic_trace"),
    ),
    "codegen": ("networkx", "torch.fx", "torch._dynamo", "torch._functorch", "torch._inductor"),
}

# library → path prefixes, below the root, that alone may import it
ONLY_IN = {
    "networkx": ("fusion/", "tests/fusion/"),
    "triton": (
        *("codegen/triton/", "tests/codegen/triton/"),
        *("tests/interpreter/", "tests/gpu/"),
    ),
}


def modules_of(folder: str) -> list[Path]:
    """Return all Python files below `folder`, not following links.

    An empty answer is a failure, so that no check passes on nothing.
    """
    result = sorted(path for path in (ROOT / folder).rglob("*.py") if path == path.resolve())
    assert result, f"no Python files in {ROOT / folder}: the checks here would say nothing"
    return result


def all_package_modules() -> list[Path]:
    return [path for package in PACKAGES for path in modules_of(package)]


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def names_reached(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of each import of a module.

    Counts imports at any depth (in functions, under TYPE_CHECKING), relative ones (`package` is the dotted
    package of the module), `import_module("...")` with a literal, and attributes of imported names:
    after `import torch`, the expression `torch.fx.Node` reaches `torch.fx.Node`.
    """
    bound: dict[str, str] = {}  # local name → the imported name
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                bound[alias.asname or top] = alias.name if alias.asname else top
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{source}.{alias.name}"
                yield node.lineno, f"{source}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            called = written(node.func).rpartition(".")[2]
            name = node.args[0]
            is_literal = isinstance(name, ast.Constant) and isinstance(name.value, str)
            if called in ("import_module", "__import__") and is_literal:
                yield node.lineno, name.value
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, _, rest = written(node).partition(".")
            if head in bound:
                yield node.lineno, f"{bound[head]}.{rest}"


def written(node: ast.expr) -> str:
    """Return a dotted name as it is written; empty for any other expression.  (`ast.unparse` takes seconds for all.)"""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def dotted(path: Path) -> str:
    """The name that a file is imported by, with `__init__` where it is that of a package."""
    folder, *inside = path.relative_to(ROOT).with_suffix("").parts
    return ".".join((PACKAGES.get(folder, folder), *inside))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def reached_by(path: Path) -> list[tuple[int, str]]:
    return list(names_reached(tree_of(path), dotted(path).rpartition(".")[0]))


@cache
def all_names() -> dict[str, Path]:
    """The modules of all packages by dotted name, a package under its own."""
    return {dotted(path).removesuffix(".__init__"): path for path in all_package_modules()}


def needed_by(nodes: Iterable[ast.AST]) -> set[str]:
    """The modules of ours that the imports among `nodes` name."""
    known = all_names().keys()
    return {
        full if full in known else node.module
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module
        for full in (f"{node.module}.{alias.name}" for alias in node.names)
    } & known


def circles(needs: Mapping[str, set[str]]) -> list[str]:
    """Return the first circle of modules that need each other, in words; empty if there is none."""
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return [f"a circle: {' → '.join(reversed(error.args[1]))}"]
    return []


def is_below(name: str, top: str) -> bool:
    return name == top or name.startswith(top + ".")


def complain(violations: list[str]) -> None:
    assert not violations, "\n  " + "\n  ".join(dict.fromkeys(violations))


def test_the_reader_sees_every_kind_of_import():
    source = """
import torch
import networkx as nx
from . import sibling
from ..schedule import graph
def late():
    from triton.language import load
    importlib.import_module("fusion.codegen.c")
    return torch.fx.passes.split_module
"""
    names = {name for _, name in names_reached(ast.parse(source), "fusion.inspect")}
    assert names >= {
        *("torch", "networkx", "triton.language.load", "fusion.codegen.c", "torch.fx.passes.split_module"),
        *("fusion.inspect.sibling", "fusion.schedule.graph"),
    }


def test_the_packages_are_links_within_one():
    for folder in ("codegen", "lowering"):
        assert os.readlink(ROOT / "fusion" / folder) == f"../{folder}"
    modules = all_package_modules()
    assert len(modules) == len({path.resolve() for path in modules}) == len(all_names())


def test_packages_are_complete():
    missing = {shown(path.parent) for path in all_package_modules() if not (path.parent / "__init__.py").exists()}
    complain([f"{folder}/ has modules but no __init__.py" for folder in sorted(missing)])


def test_imports_go_one_way():
    complain(
        [
            f"{shown(path)}:{line}: {folder} must not reach {name}"
            for folder, allowed in ALLOWED.items()
            for path in modules_of(folder)
            for line, name in reached_by(path)
            if any(is_below(name, top) for top in FORBIDDEN.get(folder, ()))
            or (is_below(name, "fusion") and not any(is_below(name, top) for top in allowed))
        ]
    )


def test_everything_of_ours_is_imported_below_one_name():
    """A program's own `codegen` or `lowering` is never taken for ours.

    Parsing takes seconds: a file in which neither name begins a dotted one is left out.
    """
    begins = re.compile(r"(?<![.\w])(codegen|lowering)\b")
    folders = (*PACKAGES, "tests", "benchmarks", "examples")
    complain(
        [
            f"{shown(path)}:{line}: {name} is imported as fusion.{name}"
            for path in [path for folder in folders for path in modules_of(folder)]
            if begins.search(path.read_text(encoding="utf-8"))
            for line, name in reached_by(path)
            if name.partition(".")[0] in ("codegen", "lowering")
        ]
    )


def test_no_module_needs_itself():
    """Within a package too imports run one way, so that a module can be understood without those above it."""
    needs = {name: needed_by(tree_of(path).body) for name, path in all_names().items()}
    complain(circles(needs))


def test_no_folder_needs_itself():
    """In each folder, files and folders import one way, with all modules in them and wherever the import is.

    A folder needs the modules that its `__init__` needs.
    """
    folders: dict[str, dict[str, set[str]]] = {}
    for name, path in all_names().items():
        for needed in needed_by(ast.walk(tree_of(path))):
            ours, theirs = name.split("."), needed.split(".")
            shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))))
            if 0 < shared < min(len(ours), len(theirs)):  # else one of them holds the other
                inside = folders.setdefault(".".join(ours[:shared]), {})
                inside.setdefault(ours[shared], set()).add(theirs[shared])
    seen = ("", ".codegen.c", ".codegen.triton", ".schedule", ".lowering.rules")
    assert folders.keys() >= {f"fusion{folder}" for folder in seen}
    complain([f"{folder}: {circle}" for folder, needs in folders.items() for circle in circles(needs)])


def test_libraries_stay_where_they_belong():
    """A file that does not name a library is not parsed."""
    complain(
        [
            f"{shown(path)}:{line}: {library} may be imported only in {', '.join(homes)}"
            for library, homes in ONLY_IN.items()
            for path in [*all_package_modules(), *modules_of("tests")]
            if not shown(path).startswith(homes) and library in path.read_text(encoding="utf-8")
            for line, name in reached_by(path)
            if is_below(name, library)
        ]
    )


def test_files_are_not_named_for_kinds():
    complain(
        [
            f"{shown(path)}: name the decision the file makes"
            for path in all_package_modules()
            if NAMES_THAT_SAY_NOTHING & {path.stem, path.parent.name}
        ]
    )


def test_a_public_class_has_a_name_of_its_own():
    """One name has one meaning in all packages, so that a search finds what is meant."""
    homes: dict[str, list[str]] = {}
    for path in all_package_modules():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(shown(path))
    twice = {name: places for name, places in homes.items() if len(places) > 1}
    assert twice.keys() >= SHARED_NAMES.keys(), "a name that is defined once needs no reason"
    complain([f"{name}: {', '.join(places)}" for name, places in twice.items() if name not in SHARED_NAMES])


def test_every_module_has_a_docstring():
    complain(
        [
            f"{shown(path)}: say what enters, what leaves, what is refused"
            for path in all_package_modules()
            if not ast.get_docstring(tree_of(path))
        ]
    )


def test_public_names_have_docstrings():
    """Functions, classes and their methods, except methods that another class of the file describes."""
    wordless: list[str] = []
    for path in all_package_modules():
        body = tree_of(path).body
        classes = [node for node in body if isinstance(node, ast.ClassDef)]
        methods = [node for each in classes for node in each.body if isinstance(node, ast.FunctionDef)]
        described = {node.name for node in methods if ast.get_docstring(node)}
        public = [node for each in classes if not each.name.startswith("_") for node in each.body]
        wordless += [
            f"{shown(path)}:{node.lineno}: say what {node.name} gives"
            for node in [*body, *public]
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            if not ast.get_docstring(node) and not (node in public and node.name in described)
            if "overload" not in map(ast.unparse, node.decorator_list)
        ]
    complain(wordless)


def test_private_names_stay_in_their_file():
    """A name with an underscore is read in its own module alone."""
    complain(
        [
            f"{shown(path)}:{line}: {name} is private"
            for path in all_package_modules()
            for line, name in reached_by(path)
            if is_below(name, "fusion") and any(part.startswith("_") for part in name.split("."))
            if not name.rpartition(".")[2].startswith("__")
        ]
    )


def test_few_values_are_untyped():
    """`Any` turns the type checker off: it stands where PyTorch's own types are missing, and hardly anywhere else."""
    untyped = [
        f"{shown(path)}:{number}: {line.strip()}"
        for path in all_package_modules()
        if not shown(path).startswith(LAUNCHES)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"\bAny\b", line)
    ]
    assert untyped, "no line says Any: the pattern is wrong, or the limit can be 0"
    complain([f"{len(untyped)} lines, more than {MAX_UNTYPED}:", *untyped] if len(untyped) > MAX_UNTYPED else [])


def test_functions_import_only_what_may_be_absent():
    """An import in a function hides a dependence, and fails late."""
    complain(
        [
            f"{shown(path)}:{line}: import {name} at the top of the file"
            for path in all_package_modules()
            for function in ast.walk(tree_of(path))
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
            for line, name in imported_in(function)
            if not any(is_below(name, library) for library in (*OPTIONAL, DEFERRED.get(shown(path), "none")))
        ]
    )


def imported_in(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted module) of each import statement in a function."""
    for node in ast.walk(function):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or "."


def test_whatever_a_checker_ignores_has_a_code_and_a_reason():
    """The reason is on the line, or in a comment on the line before."""
    unexplained: list[str] = []
    for path in all_package_modules():
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, (before, line) in enumerate(zip(["", *lines], lines, strict=False), 1):
            for ignored in re.finditer(r"# (type: ignore|noqa)(\[[a-z, -]+\]|: [A-Z0-9, ]+)?(.*)", line):
                reason = re.search(r"# (?!type: ignore|noqa)\S", ignored[3]) or before.lstrip().startswith("# ")
                if not (ignored[2] and reason):
                    unexplained.append(f"{shown(path)}:{number}: {ignored[0]}")
    complain(unexplained)


def test_classes_decide_one_thing():
    complain(
        [
            f"{shown(path)}:{node.lineno}: {node.name} has {len(methods)} methods, more than {MAX_METHODS}: split it"
            for path in all_package_modules()
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.ClassDef)
            if len(methods := [each for each in node.body if isinstance(each, ast.FunctionDef)]) > MAX_METHODS
        ]
    )


def test_files_can_be_read_in_one_sitting():
    data = [
        path
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*"))
        if path.suffix in DATA_SUFFIXES and path.is_file()
    ]
    modules = [*all_package_modules(), *modules_of("tests"), *modules_of("benchmarks")]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in [*modules, *data]}
    complain(
        [
            f"{shown(path)}: {length} lines, more than {MAX_LINES}: a decision is hiding inside"
            for path, length in lengths.items()
            if length > MAX_LINES
        ]
    )
