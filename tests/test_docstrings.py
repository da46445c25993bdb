"""Checks how docstrings begin: with a verb, from a fixed list, so that the first word already names an effect.

Modules state it in the third person ("Generates kernels …"), functions in the imperative ("Return the …").  Classes and
properties may be noun phrases, which say what an instance or a value is.  The rules in `lowering/rules/` may begin with
the formula of their result.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.test_architecture import all_package_modules, complain, shown, tree_of

LISTED = """
Accept Accumulate Adapt Add Adjust Align Allocate Allow Apply Assert Assign Autotune Begin Bind Bound Broadcast Build
Cache Call Capture Cast Certify Chain Check Choose Classify Close Collapse Collect Combine Compare Compile Complete
Compose Compute Convert Copy Correct Count Create Credit Cut Decide Declare Decode Decompose Decorate Define
Demonstrate Derive Describe Deserialise Determine Divide Do Draw Drop Duplicate Emit Encode End Evaluate Examine
Expand Explain Export Express Extend Fetch Fill Find Fix Flatten Fold Forget Format Free Gather Generate Give Group
Grow Guard Hand Hash Have Hide Hoist Hold Hook Implement Import Impose Inline Insert Intern Invert Iterate Join Keep
Launch Lay Leave Let Limit List Load Locate Log Look Lower Make Map Mark Match Measure Merge Move Multiply Name Narrow
Negate Note Number Open Order Pack Pad Pair Parse Partition Pass Patch Pick Pickle Place Plan Predict Prepare Price
Print Produce Project Provide Put Quantise Raise Read Realise Rebuild Recognise Recombine Record Redirect Reduce
Refuse Register Relate Release Remember Remove Rename Renumber Repeat Replace Replay Report Represent Require Reserve
Reshape Restore Restrict Return Reuse Rewrite Route Run Save Scan Scatter Schedule Search See Select Separate
Serialise Serve Set Share Show Simplify Solve Sort Specialise Split Spread Start Store Substitute Suggest Sum Take
Time Trace Track Transform Translate Transpose Traverse Trust Turn Undo Unify Unpack Unroll Use Verify View Wait Warn
Widen Wrap Write Yield
"""
"""The verbs in use, in the imperative.  A new verb is added here; an article, a noun or a preposition is not."""

VERBS = frozenset(LISTED.split())

RULES = "lowering/rules/"
"""Its docstrings may be formulas."""


def third_person(verb: str) -> str:
    if verb.endswith(("s", "sh", "ch", "x", "o")):
        return verb + "es"
    return verb[:-1] + "ies" if re.search(r"[^aeiou]y$", verb) else verb + "s"


def begins_with_a_verb(docstring: str, *, third: bool) -> bool:
    """A colon after the first word of a module makes it a noun ("Maps: kernels that …"), as do words like "of"."""
    module = r"(\w+)(?:,| (?!(?:of|that|under|without) ))"
    first = re.match(module if third else r"(\w+)[,:.]? ", " ".join([*docstring.split(), ""]))
    verbs = {third_person(verb) for verb in VERBS} if third else VERBS
    return first is not None and first[1] in verbs


def functions_in(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions and methods that have a docstring, except properties."""
    for node in ast.walk(tree):
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node)
        if is_function and not any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
            yield node


def test_a_verb_is_distinguished_from_a_noun():
    assert begins_with_a_verb("Maps the axes of a kernel.", third=True)
    assert begins_with_a_verb("Yield, in order, all nodes.", third=False)
    assert begins_with_a_verb("Refuses", third=True)
    nouns = (
        "Maps: kernels that fold nothing.",
        "Sums of columns.",
        "Rows of a matrix.",
        "The target.",
        "Return a row.",
    )
    for noun in nouns:
        assert not begins_with_a_verb(noun, third=True)
    for noun in ("Whether it is.", "The node.", "`value`, if it is.", "Returns the node."):
        assert not begins_with_a_verb(noun, third=False)


def test_modules_begin_with_a_verb():
    assert len(all_package_modules()) > 500
    complain(
        [
            f"{shown(path)}: begin with a verb in the third person: {docstring.splitlines()[0]}"
            for path in all_package_modules()
            for docstring in [ast.get_docstring(tree_of(path)) or ""]
            if not begins_with_a_verb(docstring, third=True)
        ]
    )


def test_functions_begin_with_a_verb():
    functions = [
        (path, function)
        for path in all_package_modules()
        if not shown(path).startswith(RULES)
        for function in functions_in(tree_of(path))
    ]
    assert len(functions) > 3000
    complain(
        [
            f"{shown(path)}:{function.lineno}: begin with a verb in the imperative: {docstring.splitlines()[0]}"
            for path, function in functions
            for docstring in [ast.get_docstring(function) or ""]
            if not begins_with_a_verb(docstring, third=False)
        ]
    )
