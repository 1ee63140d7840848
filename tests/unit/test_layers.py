"""Who may import whom: the flows run one way, and each heavy library has its one door."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import energylens

PACKAGE = Path(energylens.__file__).parent

OPEN = {"errors", "units"}
"""Open to all."""

INTERNAL: dict[str, set[str]] = {
    "__init__": {"api"},
    "__main__": {"cli"},
    "errors": set(),
    "units": set(),
    "files": set(),
    "spec": set(),
    "results": {"spec"},
    "anchors": {"results", "files"},
    "graph": {"spec", "results"},
    "lower": {"spec", "graph", "results"},
    "cost": {"spec", "graph", "results", "anchors"},
    "schedule": {"spec", "graph", "results"},
    "pipeline": {"schedule", "results"},
    "machine": {"spec", "graph", "lower", "cost", "schedule", "pipeline", "results"},
    "predict": {"spec", "graph", "lower", "cost", "schedule", "pipeline", "machine", "results"},
    "explore": {"spec", "lower", "cost", "schedule", "machine", "predict", "serving", "results"},
    "serving": {"spec", "lower", "cost", "machine", "predict", "results"},
    "truth": {"spec", "results", "anchors", "measured"},
    "validate": {"results"},
    "api": {
        "spec",
        "cost",
        "results",
        "anchors",
        "predict",
        "explore",
        "serving",
        "truth",
        "validate",
        "profiler",
    },
    "baseline": {"results"},
    "sweep": {"spec", "results", "files", "api", "predict", "explore", "serving"},
    "report": {"spec", "results", "anchors", "validate", "baseline"},
    "report/page": {"explore"},
    "meter": set(),
    "store": {"spec", "graph", "meter", "results", "anchors", "files"},
    "bench": {"spec", "graph", "lower", "meter", "store", "results", "anchors", "files"},
    "bench/calibrate": {"fit", "cost"},
    # The laws' constants are fitted with the laws themselves, so that both cannot drift apart.
    "fit": {"spec", "graph", "results", "store", "cost", "schedule", "files"},
    "measured": {"spec", "results", "anchors"},
    "profiler": {
        *("spec", "lower", "meter", "store", "bench"),
        *("results", "measured", "anchors", "files"),
    },
    "cli": set(),  # all, inside the verb's function; checked apart
}
"""Package or module -> what it may import beside itself and `OPEN`."""

THIRD_PARTY: dict[str, set[str]] = {
    "spec": {"yaml"},
    "results": {"numpy"},
    "graph": {"opt_einsum"},
    "lower": {"numpy"},
    "cost": {"numpy", "scipy"},
    "schedule": {"numpy"},
    "pipeline": {"numpy"},
    "machine": {"numpy"},
    "predict": {"numpy"},
    "api": {"threadpoolctl"},
    "explore": {"numpy"},
    "serving": {"numpy"},
    "validate": {"numpy"},
    "report": {"rich", "matplotlib"},
    "meter/nvml": {"pynvml"},
    "meter/tegra": {"jtop"},
    "store": {"pandas"},
    "bench": {"torch", "transformers", "vllm", "yaml", "rich", "numpy"},
    "fit": {"numpy", "scipy", "sklearn", "pandas"},
    "profiler": {"torch", "transformers", "vllm", "numpy", "scipy", "rich"},
    "sweep": {"joblib", "distributed", "ray"},
    "cli": {"typer", "rich"},
}
"""Package, module or ``package/module`` -> third-party libraries that it may import."""

CLI_EAGER = {"spec"}
"""What cli may import before a verb is chosen: the words of its options."""

HEAVY = (
    "joblib",
    "distributed",
    "ray",
    "torch",
    "transformers",
    "vllm",
    "sklearn",
    "pandas",
    "pynvml",
    "jtop",
    "matplotlib",
)


def sources() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if "_data" not in p.parts)


def imports(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Dotted names that are imported anywhere in ``node``, with their lines."""
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: imports are absolute"
            module = child.module or ""
            if module == "energylens":
                yield from ((f"energylens.{alias.name}", child.lineno) for alias in child.names)
            else:
                yield module, child.lineno


def eager_imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Imports that run with the module: not inside functions, not for type checkers only."""
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        yield from imports(statement)


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def third_party(path: Path) -> set[str]:
    return THIRD_PARTY.get(layer(path), set()) | THIRD_PARTY.get(module(path), set())


@pytest.mark.parametrize("path", sources(), ids=module)
def test_a_module_imports_only_what_the_table_allows(path: Path) -> None:
    own = layer(path)
    assert own in INTERNAL, f"{module(path)}: a new layer needs a row in INTERNAL"
    found = []
    for name, line in imports(ast.parse(path.read_text(encoding="utf-8"))):
        top, *rest = name.split(".")
        if top == "energylens":
            target = rest[0] if rest else "__init__"
            internal = INTERNAL[own] | INTERNAL.get(module(path), set())
            allowed = own == "cli" or target in internal | OPEN | {own, "__version__"}
        else:
            allowed = top in sys.stdlib_module_names or top in third_party(path)
        if not allowed:
            found.append(f"{module(path)}:{line} imports {name}")
    assert not found, found


@pytest.mark.parametrize("path", sources(), ids=module)
def test_heavy_libraries_are_imported_inside_functions(path: Path) -> None:
    names = eager_imports(ast.parse(path.read_text(encoding="utf-8")))
    found = [f"line {line}: {name}" for name, line in names if name.split(".")[0] in HEAVY]
    assert not found, found


def test_the_command_line_imports_layers_inside_verbs() -> None:
    eager = {
        name.split(".")[1]
        for path in (PACKAGE / "cli").glob("*.py")
        for name, _ in eager_imports(ast.parse(path.read_text(encoding="utf-8")))
        if name.startswith("energylens.")
    }
    assert eager <= CLI_EAGER | OPEN | {"__version__", "cli"}


@pytest.mark.parametrize(
    "statement",
    [
        "import energylens",
        "from energylens.cli import main; assert main([*MODEL, '--json']) == 0",
        "from energylens.cli import main; assert main(MODEL) == 0",
        "from energylens.cli import main; "
        "assert main(['explore', *MODEL[1:], '--gpus', '1', '--batch', '1,8']) == 0",
    ],
)
def test_prediction_leaves_heavy_libraries_out(statement: str) -> None:
    code = (
        f"import sys\nMODEL = ['predict', 'llama3_8b', '--engine', 'hf']\n{statement}\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
