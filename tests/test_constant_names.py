"""A public constant has a name of its own in all packages, so that a search finds what is meant."""

from __future__ import annotations

import ast

from tests.test_architecture import all_package_modules, complain, shown, tree_of

# fmt: off
SHARED_CONSTANTS = {
    "AGAIN", "AHEAD", "AIRY_NEAR", "ALIGNED", "ATOM", "BORDER", "BYTES", "CALLED", "CALLS", "COMPARE",
    "COMPARISONS", "COMPUTED", "CPU", "CUBIC_A", "DTYPES", "ENOUGH", "EXTREMES", "FEWER_POINTS", "FEWEST_ROWS",
    "FOLDER", "FOOTPRINT", "FORMS", "FUNCTIONS", "GENERATED", "KEPT", "KINDS", "LARGE", "LAUNCHES", "LEVELS",
    "LIBRARY", "LOADER", "LONG", "LONGEST_ROW", "MAKERS", "MANY_PROGRAMS", "MARKS", "MAX_NESTED", "MEAN", "MOST",
    "MOST_CACHED", "MOST_NODES", "MOST_TESTED", "NARROW", "NEVER", "NONE", "ONE", "OPERATIONS", "OPTIONS", "OWN",
    "PADDING", "PRODUCT", "PROGRAM", "RUN", "SHORTEST_GROUP", "SHORTEST_PART", "STEP", "SUM", "SUMS", "TARGETS",
    "TIME_LIMIT", "UNARY", "UNKNOWN", "UNROLLED", "UNWRITTEN", "VERSION", "WEIGHTS", "WHOLE", "WIDE", "WIDEST",
    "WIDTHS", "WINDOW",
}
# fmt: on
"""Public constants that had one name in several modules when the rule came: no more are added."""


def test_a_public_constant_has_a_name_of_its_own() -> None:
    homes: dict[str, set[str]] = {}
    for path in all_package_modules():
        for node in tree_of(path).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(each, ast.Name) and each.id.isupper() and len(each.id) > 1 and each.id[0] != "_":
                        homes.setdefault(each.id, set()).add(shown(path))
    twice = {name: sorted(places) for name, places in homes.items() if len(places) > 1}
    assert twice.keys() >= SHARED_CONSTANTS, "a name that is defined once is not shared"
    complain([f"{name}: {', '.join(places)}" for name, places in twice.items() if name not in SHARED_CONSTANTS])
