"""The result of capturing one frame.

    Capture = graph of torch calls + its inputs' Sources + Guards + the text of the entry

The entry is ordinary Python text, so that a person can read what replaced the frame:

    def entry(self, x):
        y, = graph_0(self.__dict__['_parameters']['weight'], x)
        self.calls = 4
        print(y)                         # the break: B01 call to print, model.py:12
        return resume_12(self, y)
"""
from __future__ import annotations

from dovetail.ir.guard import Guard
from dovetail.ir.source import Source
from dovetail.util.loc import Loc
from dovetail.util.noun import Noun


class GraphInput(Noun, eq=False):
    """One placeholder of the captured graph: where it is read at run time, and the value seen now
    (a real tensor, or an int or float for a symbolic number). `symbolic` is the same with symbols for
    sizes (a Fake, a SymInt, a SymFloat), where some are symbolic."""

    name: str
    source: Source
    example: object
    symbolic: object = None

    @property
    def traced(self) -> object:
        """What a compiler should trace with."""
        return self.example if self.symbolic is None else self.symbolic


class BreakPoint(Noun):
    """Why and where capture stopped."""

    code: str
    text: str
    hint: str
    loc: Loc


class Capture(Noun, eq=False):
    """`graph` is a torch.fx.GraphModule, or None when the frame computed no tensors.

    `text` defines `entry(...)`: one positional parameter per argument slot of the frame (arguments,
    keyword-only arguments, *args, **kwargs in the order of co_varnames), then one per free variable
    (the cell itself, named cell_<name>). `namespace` holds every name the text needs, except
    `graph_name`, which compile.py binds to what the backend returned. Shape symbols: `symbols` maps
    each symbol's name to where it is read; `shapes` (a sym.Shapes) has what is assumed about them, and
    becomes guards when everything that may assume more has run (capture.all_guards). `fetched`, unless
    empty, are the sources of all graph inputs: the guards pass their values after the cells, and an
    entry called without them loads them itself."""

    name: str
    graph: object | None
    inputs: tuple[GraphInput, ...]
    guards: tuple[Guard, ...]
    text: str
    namespace: dict[str, object]
    graph_name: str
    breaks: tuple[BreakPoint, ...] = ()
    symbols: tuple[tuple[str, Source], ...] = ()
    loc: Loc | None = None
    shapes: object = None
    fetched: tuple[Source, ...] = ()
