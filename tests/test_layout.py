"""Rules that span packages: imports run one way, broad handlers stay at the edges, names say
what is inside, and the README names every package."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Which other packages a package may import. Those of one line at the bottom never import each other.
MAY_IMPORT = {
    "contract": set(),
    "python_backends": {"contract"},
    "build": {"contract", "python_backends"},
    "clients": {"contract"},
    "server": {"contract", "clients"},
    "cluster": {"contract", "clients"},  # only the simulator imports it
    "chaos": {"contract", "clients", "server"},  # and nobody imports it
    "gateway": {"contract", "clients", "python_backends"},  # the chat template, for /tokenize
    # Measures from outside through clients/, parts of the backends by themselves, and a tritonserver that server/ does
    # not supervise.
    "benchmarks": {"contract", "clients", "python_backends", "server"},
    # Asks any OpenAI endpoint; the benchmarks start one for it.
    "evals": {"contract", "clients", "benchmarks"},
    # Runs the gateway's and the scaling law's own code, and tells what came of it as the benchmarks do.
    "simulator": {"contract", "clients", "gateway", "cluster", "benchmarks"},
}

# Where everything that may go wrong becomes a well-formed answer or a line in the log, so that a thread, a batch or a
# stream goes on. Elsewhere a handler names what it expects, or raises on.
OUTER_EDGES = (
    "python_backends/*/model.py",
    "python_backends/*/link.py",
    "python_backends/*/response_senders.py",
    "python_backends/*/ticker.py",
    "python_backends/detokenizer/request_id_streams.py",
    "gateway/api/openai_http.py",
    "gateway/hooks/hook.py",
    "gateway/hooks/runner.py",
    "cluster/ray/policy.py",
    "gateway/samples/recorder.py",  # an operator's function for redaction
    "gateway/cache/coalescing.py",  # a task that many readers wait for
)

# The packages of build/, each of which may import those before it. Its commands (`python -m build.engine`) stand above
# them, and no package imports a command.
BUILD_ORDER = ("demo_model", "base", "model", "recipe", "quantise", "quality", "package")

TEXTBOOK = ROOT / "benchmarks" / "textbook"  # models of another server, written as tutorials do
SOURCES = sorted(
    path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py") if TEXTBOOK not in path.parents
)


def package_of(path):
    return path.relative_to(ROOT).parts[0]


@cache
def parsed(path):
    return ast.parse(path.read_text("utf-8"))


@cache
def nodes_of(path):
    """The statements and handlers of a file, at any depth; to walk through all expressions would take seconds."""
    return tuple(_statements(parsed(path)))


def _statements(node):
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            yield child
            yield from _statements(child)


def name_of(path):
    """The name a module is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in SOURCES}


@cache
def imports(path, *, only_at_import=False):
    """Modules that a file imports, by name; ``from a import b`` counts as a.b where that is a module."""
    return tuple(_imports(_top_level(parsed(path)) if only_at_import else nodes_of(path)))


def _imports(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"imports are absolute, unlike {ast.unparse(node)}"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


def _top_level(node):
    """Statements that run when the module is imported: not those in functions, nor those for type
    checkers or for a run as a script."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and re.search("TYPE_CHECKING|__main__", ast.dump(child.test)):
            continue
        yield child
        yield from _top_level(child)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_between_packages_run_one_way(package):
    for path in (ROOT / package).rglob("*.py"):
        others = {name.split(".")[0] for name in imports(path)} & (MAY_IMPORT.keys() | {"tests"}) - {package}
        assert others <= MAY_IMPORT[package], f"{path.relative_to(ROOT)} imports {sorted(others - MAY_IMPORT[package])}"


def test_the_packages_of_build_form_a_chain():
    may_import = {name: set(BUILD_ORDER[: place + 1]) for place, name in enumerate(BUILD_ORDER)}
    may_import |= {"lint": {"lint", "base"}, "demo_model": {"demo_model"}}
    packages = {path.parent.name for path in (ROOT / "build").glob("*/__init__.py")}
    assert packages == may_import.keys()
    for package, allowed in may_import.items():
        for path in (ROOT / "build" / package).rglob("*.py"):
            names = {name.split(".")[1] for name in imports(path) if name.startswith("build.")}
            assert names <= allowed, f"{path.relative_to(ROOT)} imports {sorted(names - allowed)}"


def test_no_module_imports_itself_in_a_circle():
    graph = {
        name: sorted({found for found in imports(path, only_at_import=True) if found in MODULES} - {name})
        for name, path in MODULES.items()
    }
    done, trail = set(), []

    def visit(name):
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name in done:
            return
        trail.append(name)
        for other in graph[name]:
            visit(other)
        trail.pop()
        done.add(name)

    for name in graph:
        visit(name)


# The gateway's packages and modules from the lowest layer to the highest. One may import its own and lower layers.
GATEWAY_LAYERS = (
    ("config", "database", "request_key", "watchdog"),
    ("usage",),
    ("admission",),
    ("identity",),
    ("models",),
    ("prompts", "request_context"),
    ("routing", "served_models"),
    ("telemetry", "samples"),
    ("continuation", "live_generations", "releases"),
    ("generation",),
    ("choices", "encoding"),
    ("hooks",),
    ("service",),
    ("cache", "tools"),
    ("api",),
    ("batch",),
    ("openapi", "banner"),
    ("app",),
    ("prompt_commands", "release_commands", "sample_commands", "signals", "usage_commands", "worker_metrics"),
    ("key_commands",),
    ("command_line", "workers"),
    ("__main__",),
)


def test_imports_inside_the_gateway_point_down():
    layer_of = {name: layer for layer, names in enumerate(GATEWAY_LAYERS) for name in names}
    for name, path in MODULES.items():
        package, _, inner = name.partition(".")
        if package != "gateway" or not inner:
            continue
        own = inner.split(".")[0]
        for found in imports(path):
            other = found.removeprefix("gateway.").split(".")[0]
            if not found.startswith("gateway.") or other == own:
                continue
            assert layer_of[other] < layer_of[own], f"{name} imports {found}, which is not in a lower layer"


# build/engine.py imports its stages when they are run: torch is large, and most recipes do not need it.
@pytest.mark.parametrize("package", sorted(MAY_IMPORT.keys() - {"build"}))
def test_no_import_of_our_own_hides_behind_type_checking(package):
    for path in (ROOT / package).rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.ImportFrom):
                        assert inner.module.split(".")[0] not in MAY_IMPORT, f"{path.relative_to(ROOT)}: {inner.module}"


def test_only_one_module_knows_tritons_python_api():
    knowing = {str(path.relative_to(ROOT)) for path in SOURCES if "triton_python_backend_utils" in set(imports(path))}
    assert knowing == {"python_backends/triton_io.py"}


def test_the_contract_needs_nothing_but_numpy_and_the_standard_library():
    for path in (ROOT / "contract").rglob("*.py"):
        if path.name in ("environment.py", "toml_table.py"):  # nothing inside the stubs reads settings through them
            continue
        foreign = {name.split(".")[0] for name in imports(path)} - sys.stdlib_module_names - {"contract", "numpy"}
        assert not foreign, f"{path.name} imports {sorted(foreign)}"


def _broad_handlers(path):
    """(line, whether it raises on, whether a comment on its line or the log says why) of each handler that catches
    everything."""
    lines = path.read_text("utf-8").splitlines()
    for node in nodes_of(path):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = ast.dump(node.type) if node.type else "Exception"
        if re.search(r"\b(Base)?Exception\b", caught):
            raises = isinstance(node.body[-1], ast.Raise)
            logs = ".exception(" in lines[node.body[0].lineno - 1]
            yield node.lineno, raises, logs or "  # " in lines[node.lineno - 1]


def test_what_catches_everything_stands_at_an_outer_edge_and_says_why():
    for path in SOURCES:
        for line, raises, says_why in _broad_handlers(path):
            place = f"{path.relative_to(ROOT)}:{line}"
            at_an_edge = any(path.relative_to(ROOT).match(edge) for edge in OUTER_EDGES)
            assert raises or at_an_edge, f"{place}: name the exceptions, or raise on"
            assert raises or says_why, f"{place}: say why in a comment"


def test_every_outer_edge_is_one():
    for edge in OUTER_EDGES:
        assert any(not raises for path in ROOT.glob(edge) for _, raises, _ in _broad_handlers(path)), edge


@pytest.mark.parametrize("word", ["util", "utils", "common", "helper", "helpers", "manager", "misc", "v2"])
def test_no_file_is_named_for_what_is_left_over(word):
    for path in [*SOURCES, *(ROOT / "tests").rglob("*.py")]:
        if path.name == "triton_python_backend_utils.py":  # Triton's own name for its module
            continue
        words = {word for part in path.relative_to(ROOT).with_suffix("").parts for word in part.lower().split("_")}
        assert word not in words, path.relative_to(ROOT)


def test_source_files_are_small_enough_to_read():
    sizes = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in SOURCES}
    assert max(sizes.values()) <= 700, max(sizes, key=sizes.get)
    assert sorted(sizes.values())[len(sizes) // 2] <= 262  # the median of the codebases we learn from, at most


def test_every_package_says_what_it_is_for():
    for package in MAY_IMPORT:
        if (ROOT / package / "__init__.py").exists():
            assert ast.get_docstring(parsed(ROOT / package / "__init__.py")), package


def test_the_readmes_map_is_the_territory():
    rows = re.findall(r"^\| \[(\w+)/\]\((\w+)/\) \|", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert rows and all(name == target for name, target in rows)
    named = {name for name, _ in rows}
    for name in named:
        assert (ROOT / name).is_dir(), f"README names {name}/, which is not there"
    packages = {
        "contract",
        "build",
        "model_repository",
        "python_backends",
        "server",
        "clients",
        "benchmarks",
        "tests",
        "docs",
    }
    assert packages <= named, f"README does not name {sorted(packages - named)}"


def test_the_readmes_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / "README.md").read_text("utf-8")):
        assert (ROOT / target).exists(), target


def test_the_readmes_verbs_are_the_makefiles():
    verbs = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    text = (ROOT / "README.md").read_text("utf-8")
    code = [*re.findall(r"```\w*\n(.*?)```", text, re.DOTALL), *re.findall(r"`([^`\n]+)`", text)]
    named = {verb for piece in code for verb in re.findall(r"^make ([a-z][a-z-]*)", piece, re.MULTILINE)}
    assert named and named <= verbs, f"the Makefile has no {sorted(named - verbs)}"


def test_every_module_with_code_has_a_test_file_of_its_name():
    without = set()
    for path in SOURCES:
        has_code = any(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in nodes_of(path))
        source = path.relative_to(ROOT)
        mirrored = ROOT / "tests" / source.parent / f"test_{source.name}"
        if has_code and not source.name.startswith("__") and not mirrored.exists():
            without.add(str(source))
    assert not without


def test_pytest_does_not_skip_the_tests_of_build():
    settings = (ROOT / "pyproject.toml").read_text("utf-8")
    [skipped] = re.findall(r"^norecursedirs = (.*)$", settings, re.MULTILINE)
    assert "build" not in skipped and list((ROOT / "tests" / "build").glob("test_*.py"))
