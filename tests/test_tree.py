"""The tree itself: who may import whom, and what only one place may do.

Layers, lowest first; an import goes down or stays level, and never comes back to where it started.
A new module has to be given its place in `LAYERS`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pddrt"

LAYERS = {
    "ground": ["types", "errors", "alarm", "env", "simloop", "trace", "units"],
    "pure": [
        "document",
        "fields",
        "sections",
        "kv",
        "sched",
        "policy",
        "messages",
        "protocol",
        "frames",
        "link_fields",
        "netem.jitter",
        "netem.queues",
        "netem.link",
        "netem.losses",
        "netem.tcp_link",
        "netem.tcp_stream",
        "netem.tcp_stream",
        "netem.trace_files",
        "netem.profiles",
        "netem.fidelity",
        "netem.segments",
        "netem.tcp_scoreboard",
        "netem.tcp",
        "netem.tcp_control",
        "netem.tcp_bbr",
        "netem.bottleneck",
        "netem.predict",
        "netem.impairments",
        "netem.traces",
        "workload",
        "workload_fields",
        "prompts",
        "hitrate",
        "traces",
        "metrics",
        "summary",
        "distribution",
        "foresight",
        "seam",
        "report.attempts",
        "report.timeline",
        "report.stretches",
        "report.reasons",
        "dashboard.facts",
        "dashboard.parts",
        "dashboard.state",
        "report.slowness",
        "report.suffering",
        "expression",
        "grammar",
        "inspection.moment",
        "inspection.crossing",
        "inspection.hindsight",
        "inspection.counterfactual",
        "inspection.rebuild",
        "report.export",
        "report.svg",
        "comparing.axes",
        "comparing.intervals",
        "comparing.pairing",
        "comparing.contrast",
        "comparing.assertions",
        "trials",
        "plugins",
        "invariants",
        "ledger",
        "faults",
        "chips",
        "profiles",
        "economics",
    ],
    "machines": ["engine", "netem"],
    "roles": ["roles"],
    "compose": [
        "netem.proxy_file",
        "handoffs",
        "links",
        "scenario",
        "pipelines",
        "run",
        "hosting",
        "comparing.grid",
        "comparing.columns",
        "comparing.repeats",
        "sweeping.table",
        "sweeping.worker",
        "sweeping.cells",
        "sweeping.crew",
        "verify",
        "calibrate",
        "bench",
        "deployment",
        "injector",
        "drift",
        "stalls",
        "recording",
        "inspection.regret",
        "inspection.recorded",
        "index",
        "records",
        "reference",
        "cluster",
    ],
    "surface": [
        "cli",
        "show",
        "live",
        "arguments",
        "api",
        "results",
        "serve",
        "dashboard",
        "sweeping",
        "comparing",
        "inspection",
        "report",
        "commands",
    ],
}
RANK = {name: rank for rank, names in enumerate(LAYERS.values()) for name in names}
SURFACE = len(LAYERS) - 1

NETS = {
    f"netem.{name}"
    for name in ("tcpnet", "proxy", "relay", "wire", "throughput", "measure", "kernel")
}
"""Who touches sockets."""

ONLY_IN = {
    ("torch", "transformers", "accelerate"): {
        "engine.torch",
        "engine.attention",
        "engine.reference",
        "engine.models",
    },
    ("tokenizers",): {"engine.models", "engine.outline"},
    ("rich", "typer"): set(LAYERS["surface"]),
    ("socket", "socketserver", "ssl"): NETS,
}
"""Libraries, and the modules (with all below them) that may import them, anywhere in their text."""

CLOCKS = {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"}
DETERMINISTIC_NUMPY = {"PCG64", "Philox", "Generator", "SeedSequence"}


@cache
def tree() -> dict[str, ast.Module]:
    """Every module's dotted name below `pddrt` ("" for the package itself), and its syntax."""
    modules = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        modules[name.removesuffix("__init__").rstrip(".")] = ast.parse(path.read_text(), str(path))
    return modules


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """As ast.walk, without what is there for the type checker only."""
    yield node
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        children: list[ast.AST] = list(node.orelse)
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from walk(child)


def imports(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Full names of what a module imports, lazily or at once, with the line."""
    for node in walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def ours(name: str) -> str | None:
    """The module below `pddrt` that an imported name lies in; None for other people's names."""
    parts = name.split(".")
    if parts[0] != "pddrt":
        return None
    for length in range(len(parts), 1, -1):
        if (found := ".".join(parts[1:length])) in tree():
            return found
    return ""


def within(module: str, places: set[str] | dict[str, int]) -> str | None:
    """The longest of `places` that `module` is, or lies in."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (place := ".".join(parts[:length])) in places:
            return place
    return None


def calls(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Dotted names that a module calls or mentions as attributes, with the line."""
    for node in walk(module):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node), node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, node.lineno


def uses(module: str) -> Iterator[tuple[str, int]]:
    """Everything a module imports or mentions, as dotted names."""
    yield from imports(tree()[module])
    yield from calls(tree()[module])


def none_of(wrong: list[str]) -> None:
    assert not wrong, "\n".join(["", *wrong])


def test_every_module_has_a_layer() -> None:
    none_of([name for name in tree() if name and within(name, RANK) is None])


def rank(module: str) -> int:
    """Its layer; the lowest for the package itself, which everyone imports."""
    return RANK.get(within(module, RANK) or "", 0)


def test_imports_go_down() -> None:
    none_of(
        [
            f"{name}:{line} imports {target}, which lies above it"
            for name, module in tree().items()
            for imported, line in imports(module)
            if (target := ours(imported)) is not None and rank(target) > rank(name)
        ]
    )


def test_imports_make_no_circle() -> None:
    graph = {
        name: {t for i, _ in imports(module) if (t := ours(i)) not in (None, "", name)}
        for name, module in tree().items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize(
    ("libraries", "places"), ONLY_IN.items(), ids=[names[0] for names in ONLY_IN]
)
def test_a_library_stays_in_its_place(libraries: tuple[str, ...], places: set[str]) -> None:
    none_of(
        [
            f"{name}:{line} imports {imported}"
            for name, module in tree().items()
            for imported, line in imports(module)
            if imported.split(".")[0] in libraries and within(name, places) is None
        ]
    )


def test_pure_modules_do_not_wait() -> None:
    pure = list(LAYERS).index("pure")
    none_of(
        [
            f"{name}:{line} imports {imported}"
            for name, module in tree().items()
            for imported, line in imports(module)
            if rank(name) == pure and imported.split(".")[0] in ("asyncio", "threading", "uvloop")
        ]
    )


def test_only_env_reads_the_wall_clock() -> None:
    banned = {f"time.{clock}" for clock in CLOCKS}
    banned |= {"datetime.datetime.now", "datetime.now", "datetime.datetime.utcnow"}
    none_of(
        [
            f"{name}:{line} uses {used}"
            for name in tree()
            if name != "env" and rank(name) != SURFACE
            for used, line in uses(name)
            if used in banned
        ]
    )


def test_only_the_nets_open_connections() -> None:
    openers = ("open_connection", "start_server", "create_connection", "create_server")
    none_of(
        [
            f"{name}:{line} uses {used}"
            for name in tree()
            if within(name, {*NETS, "simloop", *LAYERS["surface"]}) is None
            for used, line in uses(name)
            if used.split(".")[-1] in openers
        ]
    )


def test_randomness_comes_from_named_streams() -> None:
    wrong = []
    for name in tree():
        for used, line in uses(name):
            parts = used.split(".")
            if parts[0] == "random" and len(parts) == 2 and parts[1] != "Random":
                wrong.append(f"{name}:{line} uses {used}, which every caller shares")
            numpys = parts[:2] in (["np", "random"], ["numpy", "random"]) and len(parts) == 3
            if numpys and parts[2] not in DETERMINISTIC_NUMPY:
                wrong.append(f"{name}:{line} uses {used}, which is not keyed")
            if parts[0] in ("secrets", "uuid"):
                wrong.append(f"{name}:{line} uses {used}, which no seed repeats")
    none_of(wrong)


def test_nothing_depends_on_hash() -> None:
    """It differs from process to process. The loop's own tasks hash by number, which it may use."""
    none_of(
        [
            f"{name}:{line} calls hash()"
            for name in tree()
            if name != "simloop"
            for used, line in calls(tree()[name])
            if used == "hash"
        ]
    )


def test_no_file_is_too_long_to_read() -> None:
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in files}
    none_of([f"{file}: {length} lines" for file, length in lengths.items() if length > 1000])


HEAVY = {"torch", "transformers", "pydantic", "aiohttp", "huggingface_hub", "numpy"}


@pytest.mark.skipif(not (PACKAGE / "cli.py").is_file(), reason="there is no command line yet")
@pytest.mark.parametrize(
    "code",
    [
        "import pddrt.cli",
        "import pddrt.cli; sys.argv[1:] = ['--help']; pddrt.cli.main()",
    ],
    ids=["import", "help"],
)
def test_help_loads_nothing_heavy(code: str) -> None:
    report = "atexit.register(lambda: print(*sorted(set(sys.modules) & heavy), file=sys.stderr))"
    done = subprocess.run(
        [sys.executable, "-c", f"import atexit, sys; heavy = {HEAVY!r}; {report}; {code}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == ""
    assert "--help" not in code or "Usage" in done.stdout
