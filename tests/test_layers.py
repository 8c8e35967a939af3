"""The rules of the house, read from the syntax tree: who may import whom, and what no file may hold."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import lightning.fabric
import lightning.pytorch

from moe_lightning import ExpertParallelStrategy

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "moe_lightning"

# Packages and modules of moe_lightning that each may import, besides itself and SHARED.
MAY_IMPORT = {
    "kernels": set[str](),
    "parallel": {"compat"},
    "dispatch": {"compat", "kernels", "parallel"},
    "balancing": {"dispatch"},
    "state": {"compat", "dispatch", "parallel"},
    "moe": {"compat", "dispatch", "kernels", "parallel", "state"},
    "models": {"compat", "kernels", "moe", "parallel", "state"},
    "data": {"dispatch", "moe", "compat"},
    "checkpoint": {"compat", "dispatch", "kernels", "parallel", "state"},
    "simulate": {"balancing", "checkpoint", "dispatch", "models", "moe", "parallel", "text_table"},
    "elastic": {"arguments", "parallel"},
    "strategies": {"balancing", "checkpoint", "compat", "data", "dispatch", "elastic", "kernels", "moe", "parallel"},
    "arguments": {"__version__"},
    "plots": {"balancing"},
    "compat": set[str](),
    "arrays": set[str](),
    "text_table": set[str](),
    "errors": set[str](),
    "config": set[str](),
    "cores": set[str](),
    "registry": set[str](),
    "user_errors": set[str](),
    "files": set[str](),
    "hub": set[str](),
}
MAY_IMPORT["strategies"].add("state")
MAY_IMPORT["doctor"] = {*MAY_IMPORT["strategies"], "strategies"}
MAY_IMPORT["callbacks"] = {*MAY_IMPORT}
MAY_IMPORT["cli"] = {*MAY_IMPORT, "__version__"}
MAY_IMPORT |= {"conf": set(), "__init__": set(MAY_IMPORT)}
SHARED = {"arrays", "cores", "errors", "config", "registry", "user_errors", "files", "hub"}
MAY_COMMUNICATE = {"parallel", "dispatch", "elastic", "strategies", "compat"}
WITHOUT_LIGHTNING = {"kernels", "state", "parallel", "dispatch", "balancing", "moe", "checkpoint", *SHARED}
PLANNING = (
    *("arrays", "parallel/mesh", "dispatch/placement", "dispatch/quota"),
    *("balancing/cluster", "balancing/cost_model", "balancing/forecast", "balancing/migration"),
    *("balancing/packing", "balancing/repair", "balancing/replica_placement", "balancing/rules"),
    *("balancing/shadow_search", "checkpoint/selection", "checkpoint/schedule", "checkpoint/sharding"),
    *("checkpoint/protection", "checkpoint/recovery_plan", "doctor/comparison", "state/layout"),
)
"""Modules that plan: integers and tables in, integers and tables out."""
UNSAFE_CALLS = {
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "joblib.load",
    "dill.load",
    "dill.loads",
    "eval",
    "exec",
}
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
SAFE_OPTION = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}


def source_files(*, rooms: set[str] | None = None, but: set[str] | None = None) -> Iterator[tuple[Path, str]]:
    """(file, room) of the package, its kernels and its configurations."""
    for folder in (PACKAGE, ROOT / "kernels", ROOT / "conf"):
        for path in sorted(folder.rglob("*.py")):
            room = path.relative_to(PACKAGE).parts[0].removesuffix(".py") if folder == PACKAGE else folder.name
            if (rooms is None or room in rooms) and room not in (but or ()):
                yield path, room


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, which is parsed and walked once for all rules."""
    return tuple(ast.walk(tree(path)))


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain; "" where it does not begin with a name."""
    if isinstance(node, ast.Attribute):
        return f"{head}.{node.attr}" if (head := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


@cache
def names_used(path: Path) -> list[tuple[int, str]]:
    """Line and dotted name of every import and every attribute chain of a file."""
    return list(_names_used(path))


def _names_used(path: Path) -> Iterator[tuple[int, str]]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, dotted(node)


def lines_for_types(path: Path) -> set[int]:
    """Return the lines of what a file imports for type checkers alone."""
    blocks = [node for node in nodes_of(path) if isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING"]
    return {statement.lineno for block in blocks for statement in block.body}


def is_under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_the_state_knows_what_reading_and_writing_weights_takes() -> None:
    """Whoever calls one of these alone forgets what another sharding, or another router, needs."""
    known = ("parts.reshard", ".router.find_twins", ".state.find_twins")
    found = [
        f"{path}:{line}: call TrainState.before_reading or after_writing instead of {name}"
        for path, _ in source_files(rooms={"strategies", "callbacks", "doctor"})
        for line, name in names_used(path)
        if f".{name}".endswith(known) and path.name != "train_state.py"
    ]
    assert found == []


def test_every_room_has_its_rule() -> None:
    assert {room for _, room in source_files()} == set(MAY_IMPORT)


def test_rooms_import_only_what_lies_below() -> None:
    wrong = [
        f"{path}:{line}: {room} may not use {name}"
        for path, room in source_files(rooms=set(MAY_IMPORT))
        for line, name in names_used(path)
        if name.startswith("moe_lightning.") and name.split(".")[1] not in MAY_IMPORT[room] | SHARED | {room}
    ]
    assert not wrong


def test_files_of_the_strategy_do_not_know_each_other_in_circles() -> None:
    """A part may name the class of its whole, which type checkers alone import."""
    files = {path for path, _ in source_files(rooms={"strategies"}) if path.name != "__init__.py"}
    known = {}
    for path in files:
        used = [name for line, name in names_used(path) if line not in lines_for_types(path)]
        known[path.stem] = {name.split(".")[2] for name in used if is_strategy(name)}
    while known:
        free = {name for name, others in known.items() if not others & known.keys()}
        assert free, f"a circle among {sorted(known)}"
        known = {name: others for name, others in known.items() if name not in free}


def is_strategy(name: str) -> bool:
    return is_under(name, "moe_lightning.strategies") and name.count(".") > 1


def test_only_the_rooms_for_it_communicate() -> None:
    wrong = [
        f"{path}:{line}: {room} may not use {name}"
        for path, room in source_files(but=MAY_COMMUNICATE)
        if path.name != "gpu_check_worker.py"  # it checks communicators themselves
        for line, name in names_used(path)
        if is_under(name, "torch.distributed")
        and not (room == "checkpoint" and is_under(name, "torch.distributed.checkpoint"))
        and not (
            room == "state" and is_under(name, "torch.distributed.tensor.DTensor")
        )  # a tensor, of which it is part
    ]
    assert not wrong


def test_lower_rooms_do_without_lightning() -> None:
    wrong = [
        f"{path}:{line}: {room} may not use {name}"
        for path, room in source_files(rooms=WITHOUT_LIGHTNING)
        for line, name in names_used(path)
        if is_under(name, "lightning", "pytorch_lightning", "lightning_fabric")
    ]
    assert not wrong


def test_launchers_start_without_lightning() -> None:
    """Importing it takes seconds, and only the ranks that they start need it."""
    starts = [PACKAGE / f"{name}.py" for name in ("cli/train", "cli/worker", "cli/composition", "elastic/launcher")]
    for start in starts:
        for path, name in imported_in_turn(start):
            assert not is_under(name, "lightning"), f"{start}: {path} imports {name}"


def imported_in_turn(start: Path) -> Iterator[tuple[Path, str]]:
    """What importing a file imports, by itself and by files of the package."""
    waiting, seen = [start], {start}
    while waiting:
        path = waiting.pop()
        for name in imported_at_once(path):
            yield path, name
            inside = PACKAGE.parent.joinpath(*name.split("."))
            files = (inside.with_suffix(".py"), inside.parent.with_suffix(".py"), inside / "__init__.py")
            found = {f for f in files if f.is_relative_to(PACKAGE) and f.is_file()} - seen
            seen |= found
            waiting += found


def imported_at_once(path: Path) -> Iterator[str]:
    """What importing a file imports: not what functions import, nor what only type checkers see."""
    for node in tree(path).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_compatibility_code_imports_nothing_of_ours_but_errors() -> None:
    for path, _ in source_files(rooms={"compat"}):
        for line, name in names_used(path):
            is_ours = is_under(name, "moe_lightning") and not is_under(name, "moe_lightning.errors")
            assert not is_ours, f"{path}:{line}: {name}"


def test_only_the_command_line_knows_hydra() -> None:
    wrong = [
        f"{path}:{line}: {room} may not use {name}"
        for path, room in source_files(but={"cli", "compat"})
        for line, name in names_used(path)
        if is_under(name, "hydra", "omegaconf")
    ]
    assert not wrong


def test_planning_does_no_input_or_output() -> None:
    for path in (PACKAGE / f"{name}.py" for name in PLANNING):
        for line, name in names_used(path):
            assert not is_under(name, "os", "pathlib", "io", "socket", "subprocess", "time"), f"{path}:{line}: {name}"
        for node in nodes_of(path):
            if isinstance(node, ast.Call):
                assert dotted(node.func) not in ("open", "print", "input"), f"{path}:{node.lineno}"


def test_planning_needs_neither_ranks_nor_lightning() -> None:
    """A simulator or another framework can import it."""
    for start in (PACKAGE / f"{name}.py" for name in PLANNING):
        for path, name in imported_in_turn(start):
            assert not is_under(name, "torch.distributed", "lightning"), f"{start}: {path} imports {name}"


def test_nothing_is_left_undone() -> None:
    words = ("TODO", "FIXME", "XXX")
    for path, _ in source_files():
        text = path.read_text()
        if not any(word in text for word in words):
            continue
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                left = [word for word in words if word in token.string]
                assert not left, f"{path}:{token.start[0]}: {left}"


def test_no_error_is_swallowed() -> None:
    for path, _ in source_files():
        for node in nodes_of(path):
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{path}:{node.lineno}: bare except"
                assert not any(isinstance(s, ast.Pass) for s in node.body), f"{path}:{node.lineno}: except: pass"


def test_nothing_is_unpickled_unverified() -> None:
    for path, _ in source_files():
        # fit(..., weights_only=False) is the user's own word for a file, and ends in this function alone.
        trusted = [n for n in nodes_of(path) if isinstance(n, ast.FunctionDef) and n.name == "load_trusted"]
        assert not trusted or path == PACKAGE / "checkpoint" / "files.py"
        allowed = {id(call) for function in trusted for call in ast.walk(function)}
        for node in nodes_of(path):
            if not isinstance(node, ast.Call) or id(node) in allowed:
                continue
            name, where = dotted(node.func), f"{path}:{node.lineno}"
            assert name not in UNSAFE_CALLS, f"{where}: {name}"
            if name.replace("numpy.", "np.") in SAFE_OPTION:
                key, value = SAFE_OPTION[name.replace("numpy.", "np.")]
                options = {k.arg: k.value for k in node.keywords}
                found = options.get(key)
                assert isinstance(found, ast.Constant), f"{where}: {name} without {key}={value}"
                assert found.value is value, f"{where}: {name} without {key}={value}"


def calls_of(names: set[str], path: Path) -> set[str]:
    """The functions of a file that call one of these."""
    text = path.read_text()
    if not any(name in text for name in names):
        return set()
    functions = [node for node in nodes_of(path) if isinstance(node, ast.FunctionDef)]
    return {
        function.name
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in names
    }


def test_no_object_travels_as_a_pickle() -> None:
    """Nor by Lightning, which sends objects by the strategy's broadcast alone: ours has its own."""
    for path, _ in source_files():
        assert not calls_of(OBJECT_COLLECTIVES, path), f"{path}: objects travel by parallel.collectives"
    assert ExpertParallelStrategy.broadcast.__module__ == "moe_lightning.strategies.expert_parallel"
    for package in (lightning.pytorch, lightning.fabric):
        folder = Path(package.__path__[0])
        for path in sorted(folder.rglob("*.py")):
            by_strategy = path.parent.name == "strategies"
            by_collective = path.name == "torch_collective.py"  # of Fabric, for its users
            callers = calls_of(OBJECT_COLLECTIVES, path)
            assert callers <= ({"broadcast"} if by_strategy else OBJECT_COLLECTIVES if by_collective else set()), path


WRITTEN_BY_STRATEGIES = {
    "here.forward": "a block of the user's model, whose call is answered by the stage that has it",
    "rank_zero_only.rank": "Lightning's",
    "trainer.num_sanity_val_steps": "Lightning's",
    "trainer.should_stop": "Lightning's",
    "saver.save_on_exception": "Lightning's",
    "precision.scaler": "Lightning's",
    "self.stream.part": "the position in the samples, which only the steps set",
    "self.stream.parts": "as above",
    "self.stream.is_dummy_batch": "as above",
}
"""Attributes of other objects that strategies set, with the reason."""


def test_strategies_set_no_other_attributes_of_other_objects() -> None:
    own = {"grad", "data", "__traceback__", "__cause__"}  # of tensors and exceptions
    found = set()
    for path in (PACKAGE / "strategies").glob("*.py"):
        for node in nodes_of(path):
            is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr not in own
            if is_set and ast.unparse(node.value) not in ("self", "cls"):
                found.add(ast.unparse(node))
    assert found == set(WRITTEN_BY_STRATEGIES)


LARGE_CLASSES = {
    "ExpertParallelStrategy": 18,
    "PartialExpertsCheckpoint": 17,
}
"""Classes with more attributes than 14, and the most that each may have."""


def test_classes_have_few_attributes() -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            own = {
                each.attr
                for each in (ast.walk(node) if isinstance(node, ast.ClassDef) else ())
                if isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Store)
                and isinstance(each.value, ast.Name)
                and each.value.id == "self"
            }
            if len(own) > LARGE_CLASSES.get(getattr(node, "name", ""), 14):
                found[f"{path.name}: {ast.unparse(node).partition(':')[0]}"] = sorted(own)
    assert not found, "find the attributes that change together, and give them a class"
