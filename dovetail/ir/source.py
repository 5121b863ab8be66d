"""Where a value of the user's program comes from: a path from the frame.

    self.layers[0].weight   Item(Attr(Arg("self"), "layers"), 0) ...

A Source can do two things: print the Python text that reloads it (`text`), and be the path of a
guard. Both the generated entry and the native guard tree are built from it. As a string it is what the
user would write: self.layers[0].weight, where the text is
self.__dict__['_modules']['layers'].__dict__['_modules']['0'].__dict__['_parameters']['weight'].
"""
from __future__ import annotations

import re
from typing import ClassVar, Final, TypeAlias

from dovetail.util.noun import Noun, field

AS_WRITTEN: Final = (
    (re.compile(r"\.__dict__\['_(?:modules|parameters|buffers)'\]\['(\d+)'\]"), r"[\1]"),
    (re.compile(r"\.__dict__(?:\['_(?:modules|parameters|buffers)'\])?\['([^\W\d]\w*)'\]"), r".\1"),
    (re.compile(r"\buser_globals\['(\w+)'\]|\bcell_(\w+)\.cell_contents"), r"\1\2"),
)
"""How generated code reads something, and how a person does."""

Key: TypeAlias = "str | int | float | bool | bytes | None | tuple[Key, ...]"


class Source(Noun):
    """Base of all paths. `base` is the path this one steps from, None for a root."""

    form: ClassVar[str] = ""
    """The text, with {0} for the path itself."""

    @property
    def base(self) -> Source | None:
        return None

    @property
    def text(self) -> str:
        return self.form.format(self)

    def __str__(self) -> str:
        shown = self.text
        for pattern, written in AS_WRITTEN:
            shown = pattern.sub(written, shown)
        return shown


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


class Global(Source):
    """A name in the globals of the frame; `user_globals` in the generated entry."""

    name: str
    form = "user_globals[{0.name!r}]"


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

    @property
    def text(self) -> str:
        owner = self.of.text
        return f"{owner}.{self.name}" if self.name.isidentifier() else f"getattr({owner}, {self.name!r})"


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
    form = "{0.of.text}.__dict__[{0.name!r}]"


class Item(Step):
    """of[key] of a list, tuple or dict; `builtin` names the class to ask where a subclass has its own []."""

    key: Key
    builtin: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        if self.builtin:
            return f"{self.builtin}.__getitem__({self.of.text}, {self.key!r})"
        return f"{self.of.text}[{self.key!r}]"


class KeyItem(Step):
    """of[key] of a dict whose key is an object that the entry holds on to under `name`."""

    name: str
    key: object = field(compare=False)
    form = "{0.of.text}[{0.name}]"


class DictKey(Step):
    """The position-th key of a dict (for keys that are no constants)."""

    position: int
    form = "list({0.of.text})[{0.position}]"


class Applied(Step):
    """What a function gives for the object: the tensor that shares an array's memory, what a weak reference
    refers to. `name` is what the entry calls the function."""

    name: str
    function: object = field(compare=False)

    @property
    def text(self) -> str:
        return f"{self.name}({self.of.text})"


class ClosureOf(Step):
    """The contents of a function's closure cell."""

    position: int
    form = "{0.of.text}.__closure__[{0.position}].cell_contents"


class Size(Step):
    """of.size(dim) of a tensor, as an integer: where a shape symbol is read."""

    dim: int
    form = "{0.of.text}.size({0.dim})"


class Stride(Step):
    dim: int
    form = "{0.of.text}.stride({0.dim})"


def root_of(source: Source) -> Source:
    while source.base is not None:
        source = source.base
    return source
