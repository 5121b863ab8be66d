"""Which parameters a Triton kernel writes to, read off its source.

    @triton.jit
    def add(x, y, o, n, BLOCK: tl.constexpr):              find_written(add.fn) -> {"o"}
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(o + i, tl.load(x + i) + tl.load(y + i))

A variable may point into whatever the parameters it was computed from point into; what is loaded from
memory points nowhere. Every function that may store (a store, an atomic, one that is not known) writes
to all its arguments may point into. So the answer may name too many parameters, never too few.
"""
from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import Any, Final

from dovetail.errors import UnknownStores
from dovetail.util.noun import Noun, field

Names = frozenset[str]
NOTHING: Final[Names] = frozenset()

STORING: Final = ("store", "atomic", "scatter", "inline_asm", "async_", "experimental_", "dot_scaled_store")
"""Functions and methods of Triton's language whose names start so write to memory, or may."""
LOADING: Final = ("load", "gather", "experimental_descriptor_load", "dot", "arange", "zeros", "full",
                  "program_id", "num_programs")  # fmt: skip
"""What these return is a value, not an address."""
METHODS: Final = frozenset(
    """to cast load gather sum max min argmax argmin reshape view trans permute broadcast_to expand_dims item
    advance split join cumsum cumprod sort flip reduce exp exp2 log log2 sqrt rsqrt sin cos abs cdiv sigmoid
    softmax ravel xor_sum logical_and logical_or histogram associative_scan handle append""".split()
)
"""Methods of tiles, pointers and descriptors that write nothing."""


class Summary(Noun):
    """What calling a function does with its parameters."""

    parameters: tuple[str, ...]
    written: Names
    returned: Names
    """The result may point into what these point into."""


_summaries: dict[FunctionType, Summary] = {}


def find_written(kernel: FunctionType) -> Names:
    """Names of the parameters through which the kernel may write."""
    return _summarise(kernel).written


def _summarise(function: FunctionType) -> Summary:
    found = _summaries.get(function)
    if found is None:
        names = tuple(inspect.signature(function).parameters)
        # While it is being read, a function that calls itself counts as writing everywhere.
        _summaries[function] = Summary(names, frozenset(names), frozenset(names))
        try:
            found = _summaries[function] = _Reading(function, names).read()
        except BaseException:
            del _summaries[function]
            raise
    return found


def _definition(function: FunctionType) -> ast.FunctionDef:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        return next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    except (OSError, TypeError, SyntaxError, StopIteration) as error:
        raise UnknownStores(kernel=function.__qualname__, detail="its source is not at hand") from error


class _Reading(Noun, frozen=False):
    """One function's body, read again and again until nothing new is learned."""

    function: FunctionType
    names: tuple[str, ...]
    origins: dict[str, Names] = field(default_factory=dict)
    """variable -> parameters it may point into"""
    written: Names = NOTHING
    returned: Names = NOTHING

    def read(self) -> Summary:
        definition = _definition(self.function)  # type: ignore[arg-type]
        self.origins = {name: frozenset((name,)) for name in self.names}
        for node in ast.walk(definition):
            if isinstance(node, (ast.Name, ast.Attribute)) and _last(node) == "pointer_type":
                detail = "it makes pointers out of numbers"
                raise UnknownStores(kernel=self.function.__qualname__, detail=detail)
        before: object = None
        while before != (now := (dict(self.origins), self.written, self.returned)):
            before = now
            for node in ast.walk(definition):
                if node is not definition:
                    self.learn(node)
        return Summary(self.names, self.written, self.returned)

    def learn(self, node: ast.AST) -> None:
        """In whatever order things run: what holds at one place is taken to hold everywhere."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self.assign(target, self.value(node.value))
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            self.assign(node.target, self.value(node.value))
        elif isinstance(node, (ast.For, ast.comprehension)):
            self.assign(node.target, self.value(node.iter))
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self.assign(node.optional_vars, self.value(node.context_expr))
        elif isinstance(node, ast.Return) and node.value is not None:
            self.returned |= self.value(node.value)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            self.written |= frozenset(self.names)
        elif isinstance(node, ast.Call):
            self.call(node)

    def assign(self, target: ast.AST, value: Names) -> None:
        """Everything named in the target may now hold the value as well."""
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self.origins[node.id] = self.origins.get(node.id, NOTHING) | value

    # -- expressions

    def value(self, node: ast.AST) -> Names:
        """The parameters that the expression's value may point into."""
        if isinstance(node, ast.Name):
            return self.origins.get(node.id, NOTHING)
        if isinstance(node, ast.Call):
            return self.call(node)
        return NOTHING.union(*(self.value(child) for child in ast.iter_child_nodes(node)))

    def call(self, node: ast.Call) -> Names:
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        values = [self.value(arg) for arg in given]
        every = NOTHING.union(*values)
        callee = self.resolve(node.func)
        if callee is _UNKNOWN:
            return self.method(node, every)
        for other in (callee, *(self.resolve(arg) for arg in given)):
            inner = getattr(other, "fn", None)
            if isinstance(inner, FunctionType) and not _is_language(inner):
                return self.inlined(node, inner if other is callee else None, values, every)
        name = str(getattr(callee, "__name__", ""))
        if not (_is_language(callee) or getattr(builtins, name, None) is callee) or name.startswith(STORING):
            self.written |= every
        return NOTHING if _is_language(callee) and name.startswith(LOADING) else every

    def method(self, node: ast.Call, every: Names) -> Names:
        """A call of something that only the compiler knows: a method of a value, most often."""
        name = _last(node.func)
        owner = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else self.value(node.func)
        if name not in METHODS:
            self.written |= owner | every
        return NOTHING if name.startswith(LOADING) else owner | every

    def inlined(
        self, node: ast.Call, function: FunctionType | None, values: list[Names], every: Names
    ) -> Names:
        """A call of another kernel function; None where one is handed to a function of the language."""
        keywords = [keyword.arg for keyword in node.keywords]
        is_plain = None not in keywords and not any(isinstance(arg, ast.Starred) for arg in node.args)
        if function is None or not is_plain:
            self.written |= every
            return every
        summary = _summarise(function)
        bound = dict(zip([*summary.parameters[: len(node.args)], *keywords], values))
        self.written |= NOTHING.union(*(bound.get(name, NOTHING) for name in summary.written))
        return NOTHING.union(*(bound.get(name, NOTHING) for name in summary.returned))

    def resolve(self, node: ast.AST) -> Any:
        """The object that a name or a dotted name stands for outside of the function."""
        if isinstance(node, ast.Attribute):
            owner = self.resolve(node.value)
            return _UNKNOWN if owner is _UNKNOWN else getattr(owner, node.attr, _UNKNOWN)
        if not isinstance(node, ast.Name) or node.id in self.origins:
            return _UNKNOWN
        for scope in _scopes(self.function):  # type: ignore[arg-type]
            if node.id in scope:
                return scope[node.id]
        return _UNKNOWN


_UNKNOWN: Final = object()


def _scopes(function: FunctionType) -> Iterator[dict[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    yield {name: cell.cell_contents for name, cell in cells}
    yield function.__globals__
    yield vars(builtins)


def _is_language(value: Any) -> bool:
    """Part of Triton's own language: its functions, its classes and what they are written in."""
    module = getattr(value, "__module__", None) or getattr(getattr(value, "fn", None), "__module__", None)
    return isinstance(module, str) and module.startswith("triton.language")


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
