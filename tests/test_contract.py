"""What must hold for the package as a whole; whatever is listed twice is compared here."""

from __future__ import annotations

import ast
import enum
import graphlib
import importlib
import importlib.util
import inspect
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import fragdoctor
from fragdoctor.model.diagnosis import SCHEMA_VERSION, Cause, Status
from fragdoctor.model.finding import Confidence, Severity
from fragdoctor.report.words import CAUSE_TITLES, CHECK_TITLES

PACKAGE = Path(fragdoctor.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
# Each layer imports what is listed for it, all of that, and itself; a layer stands below those that
# import it.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "lazy": set(),
    "units": {"errors", "lazy"},
    "opening": {"errors"},
    "limits": {"units"},
    "installed": set(),
    "_native": {"errors"},
    "model": {"errors", "lazy", "units"},
    "inputs": {"errors", "lazy", "opening", "limits", "units", "model", "_native"},
    "trace": {"errors", "lazy", "units", "model", "_native"},
    "future": {"errors", "units", "model", "trace", "_native"},
    "analysis": {"units", "model", "trace", "future"},
    "story": {"units", "model"},
    "rules": {"lazy", "units", "model", "trace", "future", "analysis"},
    "gate": {"errors", "opening", "units", "model", "future", "rules"},
    "diagnosis": {
        "errors",
        "lazy",
        "units",
        "model",
        "trace",
        "future",
        "analysis",
        "story",
        "rules",
    },
    "report": {
        "__version__",
        "errors",
        "lazy",
        "units",
        "model",
        "trace",
        "future",
        "analysis",
        "rules",
        "gate",
    },
    "estimation": {
        "errors",
        "opening",
        "units",
        "model",
        "inputs",
        "trace",
        "future",
        "analysis",
    },
    "comparison": {
        "errors",
        "units",
        "model",
        "trace",
        "future",
        "analysis",
        "diagnosis",
    },
    "fleet": {"errors", "installed", "units", "model", "inputs", "diagnosis"},
    "export": {"units", "model", "trace", "report"},
    "recording": set(),
    "capture": {"errors", "units", "model", "recording", "rehearsal"},
    "integrations": {"errors", "capture", "recording", "tracking"},
    "tracking": {"errors", "api", "report"},
    "rehearsal": {
        "errors",
        "units",
        "model",
        "inputs",
        "trace",
        "future",
        "analysis",
        "diagnosis",
        "recording",
        "_native",
    },
}
# Capture runs inside the user's program and traces the user's model: torch is there.
MAY_IMPORT_TORCH = {"capture", "rehearsal"}
# They speak from inside the user's program, where no command line stands above them.
MAY_PRINT = {"cli", "capture", "magics", "rehearsal", "tracking"}
FORBIDDEN = {"eval", "exec", "compile", "__import__"} | {
    "pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "torch",
}  # fmt: skip
ANYTHING = {"cli", "api", "api_check", "api_rehearse", "magics", "__init__", "__main__"}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imports(path: Path) -> Iterator[str]:
    """Yield the fragdoctor modules that a module imports, wherever in it."""
    for node in statements(path):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("fragdoctor"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fragdoctor"):
            module = node.module or ""
            if module == "fragdoctor":
                yield from (f"fragdoctor.{a.name}" for a in node.names)
            else:
                yield module


def modules_used(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules of the package that a module imports; a folder's face is none of them."""
    for node in statements(path):
        if isinstance(node, ast.ImportFrom) and node.module in known:
            yield node.module
        elif isinstance(node, ast.ImportFrom):
            yield from (n for a in node.names if (n := f"{node.module}.{a.name}") in known)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in known)


def libraries(path: Path) -> set[str]:
    """Return the packages that a module imports, wherever in it."""
    found = (
        [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        for node in statements(path)
        if not isinstance(node, ast.Call)
    )
    return {name.split(".")[0] for names in found for name in names}


@cache
def parsed(path: Path) -> ast.Module:
    text = path.read_text(encoding="utf-8")
    try:
        return ast.parse(text)
    except SystemError:
        # Python 3.11 keeps one recursion counter for all threads: a thread that another test
        # left behind, run by a collection in the middle of this tree, makes the count differ.
        return ast.parse(text)


@cache
def statements(path: Path) -> tuple[ast.Import | ast.ImportFrom | ast.Call, ...]:
    """Return the imports and calls of a module, wherever in it."""
    walked = ast.walk(parsed(path))
    return tuple(n for n in walked if isinstance(n, ast.Import | ast.ImportFrom | ast.Call))


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_layers_import_exactly_what_is_listed_for_them() -> None:
    used: dict[str, set[str]] = {layer: set() for layer in MAY_IMPORT}
    for path in MODULES:
        layer = name_of(path)
        if layer not in ANYTHING:
            names = {name.split(".")[1] for name in imports(path) if "." in name}
            used[layer] |= names - {layer}

    assert used == MAY_IMPORT


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    known = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): p for p in MODULES}
    graph = {
        module: {used for used in modules_used(path, known) if used != module}
        for module, path in known.items()
    }
    sorter = graphlib.TopologicalSorter(graph)

    sorter.prepare()  # raises CycleError, which names the circle


def test_a_rehearsed_program_needs_none_of_our_libraries() -> None:
    # Only the package itself is put into the Python of the program: see rehearsal/start.py.
    known = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): p for p in MODULES}
    new = {name for name in known if name.startswith("fragdoctor.rehearsal.engine.")}
    loaded: set[str] = set()
    while new:
        loaded |= new
        new = {used for name in new for used in modules_used(known[name], known)} - loaded
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    ours = {re.split(r"[<>=;\[ ]", one)[0].split(".")[0] for one in project["dependencies"]}

    used = {name: libraries(known[name]) & ours for name in loaded}

    assert {name: found for name, found in used.items() if found} == {}


def test_each_layer_is_known() -> None:
    assert {name_of(path) for path in MODULES} <= set(MAY_IMPORT) | ANYTHING


def only_writes(node: ast.ImportFrom) -> bool:
    return node.module == "pickle" and [name.name for name in node.names] == ["dump"]


def test_no_module_unpickles_or_evaluates() -> None:
    wrong = []
    for path in MODULES:
        for node in statements(path):
            used: list[str] = []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                used = [node.func.id]
            elif isinstance(node, ast.Import):
                used = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not only_writes(node):
                used = [(node.module or "").split(".")[0]]
            allowed = {"torch"} if name_of(path) in MAY_IMPORT_TORCH else set()
            wrong += [(relative(path), name) for name in used if name in FORBIDDEN - allowed]

    assert wrong == []


def test_only_the_rehearsed_process_has_torch_and_the_engine() -> None:
    """The program's Python has PyTorch; the one that fragdoctor runs on may have none."""
    wrong = []
    for path in MODULES:
        name = relative(path)
        if "rehearsal/" not in name or "rehearsal/engine/" in name or name.endswith("/start.py"):
            continue
        used = [n.module or "" for n in statements(path) if isinstance(n, ast.ImportFrom)]
        used += [a.name for n in statements(path) if isinstance(n, ast.Import) for a in n.names]
        wrong += [(name, one) for one in used if re.match(r"torch\b|.*rehearsal\.engine\b", one)]

    assert wrong == []


def test_only_the_command_line_and_capture_print_or_exit() -> None:
    wrong = []
    for path in MODULES:
        if name_of(path) in MAY_PRINT:
            continue
        calls = {ast.unparse(n.func) for n in statements(path) if isinstance(n, ast.Call)}
        wrong += [(relative(path), c) for c in calls & {"print", "input", "exit", "sys.exit"}]
        text = path.read_text(encoding="utf-8")
        wrong += [(relative(path), s) for s in ("sys.stdout", "sys.stderr") if s in text]

    assert wrong == []


def test_modules_have_a_docstring() -> None:
    assert [relative(path) for path in MODULES if not ast.get_docstring(parsed(path))] == []


def test_public_items_have_docstrings() -> None:
    """An inherited docstring counts: it says what the base class promises."""
    missing = []
    for path in MODULES:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if parts[-1] in {"__main__", "__init__"}:
            continue
        if "engine" in parts and importlib.util.find_spec("torch") is None:
            continue  # these need torch to be imported
        module = importlib.import_module(".".join(parts))
        for name, item in vars(module).items():
            if name.startswith("_") or getattr(item, "__module__", "") != module.__name__:
                continue
            if inspect.isfunction(item) or inspect.isclass(item):
                missing += [] if inspect.getdoc(item) else [f"{relative(path)}:{name}"]
            if inspect.isclass(item):
                missing += [
                    f"{relative(path)}:{name}.{method}"
                    for method, value in vars(item).items()
                    if not method.startswith("_")
                    and inspect.isfunction(value)
                    and not inspect.getdoc(getattr(item, method))
                ]

    assert missing == []


@pytest.mark.parametrize("name", fragdoctor.__all__)
def test_public_name_loads_and_is_documented(name: str) -> None:
    value = getattr(fragdoctor, name)

    if callable(value):
        assert inspect.getdoc(value)


def test_public_names_agree_with_their_types() -> None:
    """What type checkers see under TYPE_CHECKING is what ``__getattr__`` loads."""
    tree = parsed(PACKAGE / "__init__.py")
    block = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    typed = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert typed == fragdoctor._HOMES
    assert sorted(["__version__", *typed]) == sorted(fragdoctor.__all__)
    assert sorted(fragdoctor.__all__) == dir(fragdoctor)


def test_public_names_are_not_hidden_by_folders() -> None:
    """Importing ``fragdoctor.compare.x`` would set ``fragdoctor.compare``, whatever it was."""
    modules = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in MODULES}

    assert set(fragdoctor.__all__).isdisjoint(modules)


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = fragdoctor.nonsense


def test_version_agrees_with_the_project(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert project["version"] == fragdoctor.__version__


def test_every_cause_has_a_title() -> None:
    assert set(Cause) == set(CAUSE_TITLES)


def schema(name: str) -> dict[str, object]:
    path = PACKAGE / "report" / "schema" / f"{name}-1.0.schema.json"
    loaded: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize(
    ("values", "path"),
    [
        (Cause, ("verdict", "cause")),
        (Confidence, ("verdict", "confidence")),
        (Status, ("checklist_item", "status")),
    ],
)
def test_schema_lists_each_value(values: type[enum.StrEnum], path: tuple[str, str]) -> None:
    definitions = schema("types")["$defs"]
    assert isinstance(definitions, dict)

    assert [v.value for v in values] == definitions[path[0]]["properties"][path[1]]["enum"]


def test_schema_lists_each_severity() -> None:
    definitions = schema("types")["$defs"]
    assert isinstance(definitions, dict)
    listed = definitions["finding"]["properties"]["severity"]["enum"]

    assert [s.name.lower() for s in Severity] == listed


def test_schema_pattern_fits_the_version() -> None:
    properties = schema("diagnosis")["properties"]
    assert isinstance(properties, dict)

    assert re.fullmatch(properties["schema_version"]["pattern"], SCHEMA_VERSION)


def test_rules_have_sorted_codes_distinct_names_and_the_headings() -> None:
    from fragdoctor.rules.registry import RULES
    from fragdoctor.rules.rule import HEADINGS

    codes = [rule.code for rule in RULES]
    assert codes
    assert sorted(set(codes)) == codes
    assert len(codes) == len({rule.name for rule in RULES})
    for rule in RULES:
        places = [rule.text.find(f"\n\n{heading}") for heading in HEADINGS]
        assert -1 not in places, rule.code
        assert sorted(places) == places, rule.code


def test_checklist_titles_are_those_of_the_contract() -> None:
    assert list(CHECK_TITLES) == [
        "capacity",
        "gap",
        "retries",
        "largest_free_block",
        "fragmentation_ratio",
        "outside_pytorch",
        "growth",
        "size_diversity",
        "capture_quality",
        "settings",
    ]


@pytest.mark.parametrize("path", sorted((PACKAGE / "model").glob("*.py")), ids=relative)
def test_model_classes_are_frozen(path: Path) -> None:
    for node in parsed(path).body:
        if isinstance(node, ast.ClassDef):
            made = [*node.decorator_list, *node.keywords]
            bases = {ast.unparse(base) for base in node.bases}
            if made or "Struct" in bases:
                assert "frozen=True" in " ".join(map(ast.unparse, made)), node.name
