"""Where a value of the user's program comes from: a path from the frame.

    self.layers[0].weight   Item(Attr(Arg("self"), "layers"), 0) ...

A Source can do two things: print the Python text that reloads it (`text`), and be the path of a
guard. Both the generated entry and the native guard tree are built from it. As a string it is what the
user would write: self.layers[0].weight, where the text is
self.__dict__['_modules']['layers'].__dict__['_modules']['0'].__dict__['_parameters']['weight'].
"""
from __future__ import annotations

from typing import ClassVar, Final, TypeAlias

from dovetail.util.noun import Noun, field

USER_GLOBALS: Final = "user_globals"
"""What the entry calls the globals of the frame."""
Key: TypeAlias = "str | int | float | bool | bytes | None | tuple[Key, ...]"


class Source(Noun):
    """Base of all paths. `base` is the path this one steps from, None for a root."""

    form: ClassVar[str] = ""
    """The text, with {0} for the path itself and {1} for the one that it steps from."""

    @property
    def base(self) -> Source | None:
        return None

    def over(self, base: object) -> str:
        return self.form.format(self, base)

    @property
    def text(self) -> str:
        return self.over(self.base and self.base.text)

    def __str__(self) -> str:
        return self.over(self.base) if self.base else getattr(self, "name", "") or self.text


class Arg(Source):
    """An argument slot of the frame, by position among the code's locals."""

    index: int
    name: str
    form = "{0.name}"


class Cell(Source):
    """The contents of a closure cell of the frame's function, by position in co_freevars."""

    index: int
    name: str
    form = "cell_{0.name}.cell_contents"


class Const(Source):
    """An object that the entry holds on to itself (a module found in sys.modules, a class...). Two are
    equal when their names are: a name stands for one object within a capture."""

    name: str
    value: object = field(compare=False)
    form = "{0.name}"


class Step(Source):
    """One step from `of`."""

    of: Source

    @property
    def base(self) -> Source | None:
        return self.of


class Attr(Step):
    """of.name, by the full attribute protocol."""

    name: str

    def over(self, base: object) -> str:
        return f"{base}.{self.name}" if self.name.isidentifier() else f"getattr({base}, {self.name!r})"


class Computed(Source):
    """A float that the entry computes from symbols before it calls the graph; `value` is a torch.SymFloat,
    and `leaves` are the symbols' sources and what they are now."""

    shown: str
    value: object = field(compare=False)
    leaves: tuple[tuple[Source, object], ...] = field(compare=False)
    form = "{0.shown}"


class DictAttr(Step):
    """of.__dict__[name]: an instance attribute, read without descriptors."""

    name: str
    form = "{1}.__dict__[{0.name!r}]"

    def __str__(self) -> str:
        return f"{self.of}.{self.name}" if self.name.isidentifier() else self.over(self.of)


class Item(Step):
    """of[key] of a list, tuple or dict; `builtin` names the class to ask where a subclass has its own []."""

    key: Key
    builtin: str = field(default="", compare=False)

    def over(self, base: object) -> str:
        key = repr(self.key)
        return f"{self.builtin}.__getitem__({base}, {key})" if self.builtin else f"{base}[{key}]"

    def __str__(self) -> str:
        of, key = self.of, self.key
        if type(of) is Const and of.name == USER_GLOBALS:
            return str(key)
        if type(of) is DictAttr and type(key) is str and of.name in ("_modules", "_parameters", "_buffers"):
            if key.isdecimal() or key.isidentifier():
                return f"{of.of}[{key}]" if key.isdecimal() else f"{of.of}.{key}"
        return self.over(of)


class KeyItem(Step):
    """of[key] of a dict whose key is an object that the entry holds on to under `name`."""

    name: str
    key: object = field(compare=False)
    form = "{1}[{0.name}]"


class DictKey(Step):
    """The position-th key of a dict (for keys that are no constants)."""

    position: int
    form = "list({1})[{0.position}]"


class Applied(Step):
    """What a function gives for the object: the tensor that shares an array's memory, what a weak reference
    refers to. `name` is what the entry calls the function."""

    name: str
    function: object = field(compare=False)
    form = "{0.name}({1})"


class Size(Step):
    """of.size(dim) of a tensor, as an integer: where a shape symbol is read."""

    dim: int
    form = "{1}.size({0.dim})"


class Stride(Step):
    dim: int
    form = "{1}.stride({0.dim})"


def cell_of(function: Source, position: int) -> Source:
    """The contents of a function's closure cell."""
    return Attr(Item(Attr(function, "__closure__"), position), "cell_contents")


def root_of(source: Source) -> Source:
    while source.base is not None:
        source = source.base
    return source
