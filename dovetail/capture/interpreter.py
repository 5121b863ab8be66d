"""The symbolic interpreter: a frame's bytecode run on the trace's objects.

    Activation(trace, function, slots).run() -> the returned value

One method per normalised instruction; its docstring starts with the stack effect. The stack and the
slots hold real Python objects (tensors are Fakes), so most of Python's meaning comes from Python.
User exceptions travel as `Raised` and are unwound by the code's own exception table.
"""
from __future__ import annotations

import builtins
import operator
import sys
from collections.abc import Callable, MutableMapping
from functools import partial
from itertools import islice
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, Final

from dovetail.capture import attributes, operations
from dovetail.capture import trace as traces
from dovetail.capture.attributes import MISSING, delete_attr, find_in_mro, load_attr, store_attr, store_global
from dovetail.capture.checks import assume, expected
from dovetail.capture.decode import decode
from dovetail.capture.origins import read_list, wrap
from dovetail.capture.resume import growing_slots, is_resumed
from dovetail.capture.text import format_value, is_late, late, native
from dovetail.capture.trace import NULL, PLAIN, Outside, Raised, Trace, Unread
from dovetail.capture.versions import MAKE_FUNCTION_FLAGS, NULL_FIRST, SEND_KEEPS_RECEIVER, prep_reraise_star
from dovetail.errors import Break, ResumedLoop, UnsupportedGenerator, UnsupportedOpcode
from dovetail.fake.calls import GLOBALS_OF
from dovetail.fake.tensor import Fake
from dovetail.ir.guard import Is, Lacks, TypeIs
from dovetail.ir.source import Attr, Cell, DictAttr, Item, Source, cell_of

RETURN: Final = "return"
YIELD: Final = "yield"


class Stop(Exception):
    """The instruction before which this capture ends has been reached."""


def push(value: Any) -> Callable[[Activation, Any], None]:
    """(-- value)"""
    return lambda self, arg: self.stack.append(value)


def result_of(count: int, function: Callable[..., Any]) -> Callable[[Activation, Any], None]:
    """(operands -- result)"""
    return lambda self, arg: self.stack.append(function(self.trace, *self.pop(count)))


def effect_of(count: int, function: Callable[..., Any]) -> Callable[[Activation, Any], None]:
    """(operands --), of what gives None"""
    return lambda self, arg: function(self.trace, *self.pop(count))


def pushed(read: Callable[[Activation, Any], Any]) -> Callable[[Activation, Any], None]:
    """(-- value), and whatever `read` takes."""
    return lambda self, arg: self.stack.append(read(self, arg))


def built(make: Callable[[list[Any]], Any]) -> Callable[[Activation, int], None]:
    """(items -- container)"""
    return lambda self, arg: self.stack.append(make(self.pop(arg)))


def added(method: str, convert: Callable[[Trace, Any], Any]) -> Callable[[Activation, int], None]:
    """(value --): into a container deeper in the stack."""

    def run(self: Activation, arg: int) -> None:
        value = convert(self.trace, self.stack.pop())
        native(getattr(self.stack[-arg], method), value)

    return run


def unpacked_mapping(trace: Trace, value: Any) -> Any:
    """What ** takes: nothing but a mapping will do."""
    if not isinstance(value, dict) and find_in_mro(type(value), "keys")[0] is MISSING:
        raise Raised(TypeError(f"'{type(value).__name__}' object is not a mapping"))
    return operations.as_mapping(trace, value)


def jump_if(
    holds: Callable[[Activation, Any], bool], keeps: bool = False
) -> Callable[[Activation, int], None]:
    """(value --); with `keeps`, a value that makes it jump stays."""

    def run(self: Activation, arg: int) -> None:
        is_taken = holds(self, self.stack[-1])
        if is_taken:
            self.next = arg
        if not (is_taken and keeps):
            self.stack.pop()

    return run


class Activation:
    """One running frame of the interpreter."""

    __slots__ = ("trace", "code", "function", "globals", "stack", "slots", "at", "next", "result", "handled",
                 "kw_names", "steps", "stop", "names")  # fmt: skip

    names: dict[str, Any]
    """What the body of a class has defined."""

    def __init__(self, trace: Trace, function: FunctionType, slots: list[Any], stop: int = -1) -> None:
        """`stop`: after how many instructions it ends, unless that is negative."""
        code = decode(function.__code__)
        self.trace, self.code, self.function, self.steps, self.stop = trace, code, function, 0, stop
        self.globals: dict[str, Any] = function.__globals__
        closure = list(function.__closure__ or ())
        empty = len(code.slot_names) - len(slots) - len(closure)
        self.slots: list[Any] = [*slots, *([NULL] * empty), *closure]
        self.stack: list[Any] = []
        self.at = self.next = 0
        self.result: Any = None
        self.handled: BaseException | None = None
        self.kw_names: tuple[str, ...] = ()
        trace.catches |= bool(code.regions)  # with, except, finally
        if not code.bound:
            code.bound = [METHODS.get(op) or partial(unsupported, op) for op in code.ops]
            GLOBALS_OF[code.code.co_filename] = self.globals

    # -- running

    def run(self, thrown: BaseException | None = None) -> str:
        """To the next return or yield; what is thrown is raised first, at the current instruction."""
        places = self.trace.places
        places.append(self)
        try:
            while True:
                try:
                    if thrown is not None:
                        error, thrown = thrown, None
                        self.give_context(error)
                        raise Raised(error)
                    return self._loop()
                except Break as stop:
                    stop.loc = stop.loc or self.trace.loc()
                    raise
                except Raised as raised:
                    if (self.code.ops[self.at], self.code.args[self.at]) not in RAISED_AGAIN:
                        if self.trace.traceback_of(raised.value) is None:
                            self.give_context(raised.value)  # which the program may change afterwards
                        self.trace.note_raised(raised.value, self)
                    if not self.unwind(raised.value):
                        raise
        finally:
            places.pop()

    def _loop(self) -> str:
        methods, args, trace = self.code.bound, self.code.args, self.trace
        while True:
            at = self.at
            if self.steps == self.stop:
                raise Stop
            self.steps += 1
            self.next = at + 1
            done = methods[at](self, args[at])  # type: ignore[operator]
            if done is RETURN:
                self.slots = [NULL] * len(self.slots)  # generators that a frame lets go of end with it
            if trace.postponed is not None:
                raise trace.postponed
            if done is not None:
                return done  # type: ignore[no-any-return]
            self.at = self.next
            if self.at <= at:
                trace.go_round()

    def unwind(self, error: BaseException) -> bool:
        """Go to the code that handles the exception; False when it leaves the frame."""
        region = self.code.region(self.at)
        if region is None:
            return False
        self.give_up(self.stack[region.depth :])
        del self.stack[region.depth :]
        if region.lasti:
            self.stack.append(traces.LastInstruction(self.at))
        self.stack.append(error)
        self.at = region.target
        return True

    def give_context(self, error: BaseException) -> None:
        handled = traces.topmost_handled(self.trace)
        if error.__context__ is None and handled is not None and handled is not error:
            set_context(error, handled)

    def throw(self, error: BaseException) -> str:
        """Raise at the current instruction (of a suspended generator), then run on. A generator that waits in
        a `yield from` hands the exception to the inner one first."""
        if self.at >= 2 and self.code.ops[self.at - 2 : self.at] == ["SEND", "YIELD_VALUE"]:
            try:
                is_kept, self.result = throw_into(self.stack[-1], error)
            except StopIteration as stop:
                self.end_send(stop.value)
                self.at = self.code.args[self.at - 2]  # type: ignore[assignment]
                return self.run()
            except traces.NOT_THROWN:
                raise
            except BaseException as inner:
                is_kept, error = False, inner
            if is_kept:
                return YIELD
        return self.run(error)

    def pop(self, count: int) -> list[Any]:
        if not count:
            return []
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    # -- stack

    def POP_TOP(self, arg: Any) -> None:
        """(value --)"""
        self.give_up(self.stack[-1:])
        self.stack.pop()

    def give_up(self, values: list[Any]) -> None:
        """A generator that lives outside ends here if nobody else holds it: only Python can tell."""
        if any(type(value) is Outside and value.is_generator_at_work for value in values):
            detail = "a generator is given up in the middle of its work"
            raise UnsupportedGenerator(self.trace.loc(), detail=detail)

    PUSH_NULL, COPY = push(NULL), pushed(lambda self, arg: self.stack[-arg])

    def SWAP(self, arg: int) -> None:
        stack = self.stack
        stack[-1], stack[-arg] = stack[-arg], stack[-1]

    LOAD_CONST = lambda self, arg: self.stack.append(arg)

    # -- locals, cells, globals

    def refuse_unbound(self, slot: int) -> None:
        where = f"local variable '{self.code.slot_names[slot]}' where it is not associated with a value"
        raise Raised(UnboundLocalError(f"cannot access {where}"))

    def LOAD_FAST(self, arg: int) -> None:
        value = self.slots[arg]
        if value is NULL:
            self.refuse_unbound(arg)
        if type(value) is Unread:
            value = self.slots[arg] = self.look_at(value, arg)
        self.stack.append(value)

    def look_at(self, value: Unread, slot: int) -> Any:
        """A list in a local variable: read now, unless all that follows is appending to it."""
        if self.trace.is_appending or slot in growing_slots(self.code.code):
            if value.shadow is None:
                self.trace.guard(value.source, TypeIs(list))
                return value
        return read_list(self.trace, value)

    def LOAD_FAST_AND_CLEAR(self, arg: int) -> None:
        self.stack.append(self.slots[arg])
        self.slots[arg] = NULL

    def STORE_FAST(self, arg: int) -> None:
        if type(self.slots[arg]) is Outside:
            self.give_up(self.slots[arg : arg + 1])
        self.slots[arg] = self.stack.pop()

    def DELETE_FAST(self, arg: int) -> None:
        value = self.slots[arg]
        if value is NULL:
            self.refuse_unbound(arg)
        if type(value) is Outside and not any(entry is value for entry in self.stack):
            self.give_up([value])
        self.slots[arg] = NULL

    def MAKE_CELL(self, arg: int) -> None:
        value = self.slots[arg]
        if type(value) is Unread:
            value = read_list(self.trace, value)
        cell = CellType() if value is NULL else CellType(value)
        self.trace.made_cells[id(cell)] = cell
        self.slots[arg] = cell

    LOAD_CLOSURE = pushed(lambda self, arg: self.slots[arg])
    LOAD_DEREF = pushed(lambda self, arg: self.read_cell(self.slots[arg], arg))

    def cell_source(self, slot: int) -> Source:
        """Where the contents of a cell that existed before the frame are read."""
        own = self.trace.source_of(self.slots[slot])
        if own is not None:
            return Attr(own, "cell_contents")
        position = slot - (len(self.slots) - len(self.code.code.co_freevars))
        if self is self.trace.places[0]:
            return Cell(position, self.code.slot_names[slot])
        source = self.trace.source_of(self.function)
        return cell_of(source or self.trace.const(self.function, self.function.__name__), position)

    def read_cell(self, cell: CellType, slot: int) -> Any:
        trace = self.trace
        try:
            if id(cell) in trace.made_cells:
                return cell.cell_contents
            pending = trace.writes.get((id(cell), ""))
            if pending is not None:
                return pending.value
            found = trace.reads.get((id(cell), ""), MISSING)
            if found is MISSING:
                found = wrap(trace, cell.cell_contents, self.cell_source(slot))
                trace.remember((id(cell), ""), found)
                trace.keep.append(cell)
            return found
        except ValueError:
            name = self.code.slot_names[slot]
            text = f"cannot access free variable '{name}' where it is not associated with a value"
            raise Raised(NameError(f"{text} in enclosing scope")) from None

    def STORE_DEREF(self, arg: int) -> None:
        cell, value = self.slots[arg], self.stack.pop()
        if id(cell) in self.trace.made_cells:
            cell.cell_contents = value
            return
        self.trace.writes[(id(cell), "")] = traces.Write(cell, self.cell_source(arg).text, value, "source")

    def DELETE_DEREF(self, arg: int) -> None:
        cell = self.slots[arg]
        if id(cell) not in self.trace.made_cells:
            raise UnsupportedOpcode(self.trace.loc(), opcode="del of a closure variable")
        del cell.cell_contents

    def global_source(self, name: str) -> Source:
        return Item(self.trace.const(self.globals, "globals"), name)

    def load_global(self, name: str) -> Any:
        trace, where = self.trace, self.globals
        key = (id(where), name)
        if key in trace.writes:
            return trace.writes[key].value
        if key in trace.reads:
            return trace.reads[key]
        value = where.get(name, MISSING)
        stable = traces.is_library_file(self.code.code.co_filename)
        if value is MISSING:
            value = vars(builtins).get(name, MISSING)
            if not stable:
                trace.guard(trace.const(where, "globals"), Lacks(name))
                known = trace.const(vars(builtins), "builtins")
                trace.guard(*(known, Lacks(name)) if value is MISSING else (Item(known, name), Is(value)))
            if value is MISSING:
                raise Raised(NameError(f"name '{name}' is not defined", name=name))
        elif not (stable and (type(value) in PLAIN or isinstance(value, type))):
            value = wrap(trace, value, self.global_source(name), stable)
        return trace.remember(key, value)

    LOAD_GLOBAL = pushed(load_global)

    LOAD_NAME = pushed(lambda self, arg: self.names[arg] if arg in self.names else self.load_global(arg))
    LOAD_LOCALS = pushed(lambda self, arg: self.names)

    STORE_NAME = lambda self, arg: native(self.names.__setitem__, arg, self.stack.pop())

    def DELETE_NAME(self, arg: str) -> None:
        if arg not in self.names:
            raise Raised(NameError(f"name '{arg}' is not defined"))
        native(self.names.__delitem__, arg)

    def SETUP_ANNOTATIONS(self, arg: Any) -> None:
        self.names.setdefault("__annotations__", {})

    LOAD_CLASSDEREF = pushed(lambda self, arg: self.names[name] if (
        name := self.code.slot_names[arg]) in self.names else self.read_cell(self.slots[arg], arg))

    def push_callable(self, value: Any) -> None:
        """(-- NULL, callable), in the version's order."""
        self.stack.extend((NULL, value) if NULL_FIRST else (value, NULL))

    LOAD_GLOBAL_CALL = lambda self, arg: self.push_callable(self.load_global(arg))
    LOAD_METHOD = lambda self, arg: self.push_callable(load_attr(self.trace, self.stack.pop(), arg))

    def STORE_GLOBAL(self, arg: str) -> None:
        store_global(self.trace, self.globals, arg, self.stack.pop(), self.global_source(arg))

    def IMPORT_NAME(self, arg: str) -> None:
        names, level = self.stack.pop(), self.stack.pop()
        module: Any = native(__import__, arg, self.globals, None, names, level)
        name = getattr(module, "__name__", arg)
        where = Item(DictAttr(self.trace.const(sys, "sys"), "modules"), name)
        if not isinstance(module, ModuleType):  # what a program put there instead
            module = wrap(self.trace, module, where)
        elif not attributes.is_stable_module(module) and sys.modules.get(name) is module:
            self.trace.guard(where, Is(module))
        self.stack.append(module)

    def IMPORT_FROM(self, arg: str) -> None:
        module = self.stack[-1]
        try:
            value = load_attr(self.trace, module, arg)
        except Raised as raised:
            value = sys.modules.get(f"{module.__name__}.{arg}")
            if value is None:
                raise Raised(ImportError(f"cannot import name {arg!r} from {module.__name__!r}")) from raised
        self.stack.append(value)

    # -- attributes and items

    def LOAD_ATTR(self, arg: str) -> None:
        self.stack[-1] = load_attr(self.trace, self.stack[-1], arg)

    def load_super(self, name: str) -> Any:
        found, klass, owner = self.pop(3)
        if found is not super:
            raise UnsupportedOpcode(self.trace.loc(), opcode="super() of the program's own")
        return load_attr(self.trace, attributes.make_super(self.trace, klass, owner), name)

    LOAD_SUPER_ATTR = pushed(load_super)
    LOAD_SUPER_METHOD = lambda self, arg: self.push_callable(self.load_super(arg))
    STORE_ATTR = lambda self, arg: store_attr(self.trace, self.stack.pop(), arg, self.stack.pop())
    DELETE_ATTR = lambda self, arg: delete_attr(self.trace, self.stack.pop(), arg)
    BINARY_SUBSCR, DELETE_SUBSCR = result_of(2, operations.get_item), effect_of(2, operations.delete_item)
    BINARY_SLICE = result_of(3, lambda trace, owner, *ends: operations.get_item(trace, owner, slice(*ends)))
    STORE_SUBSCR = effect_of(3, lambda trace, value, x, key: operations.set_item(trace, x, key, value))
    STORE_SLICE = effect_of(4, lambda trace, value, x, *at: operations.set_item(trace, x, slice(*at), value))

    # -- operators

    def BINARY_OP(self, arg: Callable[[Any, Any], Any]) -> None:
        right = self.stack.pop()
        if self.trace.copies and self.code.ops[self.at + 1 : self.at + 4] == AUGMENTED:
            arg = operations.written_back(self.trace, arg, self.stack[-1])
        self.stack[-1] = operations.binary(self.trace, arg, self.stack[-1], right)

    COMPARE_OP = pushed(lambda self, arg: operations.compare(self.trace, arg, *self.pop(2)))
    COMPARE_OP_BOOL = pushed(
        lambda self, arg: self.truth(operations.compare(self.trace, arg, *self.pop(2)), self.at + 1)
    )
    IS_OP = pushed(lambda self, arg: operations.is_same(self.trace, *self.pop(2)) != bool(arg))
    CONTAINS_OP = pushed(
        lambda self, arg: operations.contains(self.trace, self.stack.pop(), self.stack.pop()) != bool(arg)
    )
    UNARY_NEGATIVE = result_of(1, lambda trace, value: operations.unary(trace, operator.neg, value))
    UNARY_POSITIVE = result_of(1, lambda trace, value: operations.unary(trace, operator.pos, value))
    UNARY_INVERT = result_of(1, lambda trace, value: operations.unary(trace, operator.invert, value))
    UNARY_NOT = result_of(1, lambda trace, value: not operations.truth(trace, value))
    TO_BOOL = pushed(lambda self, arg: self.truth(self.stack.pop(), self.at + 1))

    def truth(self, value: Any, jump: int) -> bool:
        """bool(value), which the instruction `jump` asks for."""
        if isinstance(value, Fake) and (wanted := expected(self.code, jump)) is not None:
            return assume(self.trace, value, wanted)
        return operations.truth(self.trace, value)

    # -- jumps

    def JUMP(self, arg: int) -> None:
        self.next = arg

    POP_JUMP_IF_TRUE = jump_if(lambda self, value: self.truth(value, self.at))
    POP_JUMP_IF_FALSE = jump_if(lambda self, value: not self.truth(value, self.at))
    POP_JUMP_IF_NONE = jump_if(lambda self, value: value is None)
    POP_JUMP_IF_NOT_NONE = jump_if(lambda self, value: value is not None)
    JUMP_IF_TRUE_OR_POP = jump_if(lambda self, value: operations.truth(self.trace, value), keeps=True)
    JUMP_IF_FALSE_OR_POP = jump_if(lambda self, value: not operations.truth(self.trace, value), keeps=True)

    GET_ITER = result_of(1, operations.iterate)

    def FOR_ITER(self, arg: int) -> None:
        """(iter -- iter, next) or, exhausted, (iter --) and jump."""
        kind, is_older = type(self.stack[-1]), id(self.stack[-1]) in self.trace.origins
        is_left = kind is Outside or is_resumed(self.trace.frame.code)
        if is_older and (is_left or attributes.python_method(kind, "__next__") is None):
            raise ResumedLoop(self.trace.loc())
        value = native(next, self.stack[-1], MISSING)
        if value is not MISSING:
            self.stack.append(value)
            return
        self.stack.pop()
        if self.stack and type(self.stack[-1]) is Unread:  # a comprehension has ended
            self.stack[-1] = read_list(self.trace, self.stack[-1])
        self.next = arg

    END_FOR = effect_of(2, lambda trace, *ended: None)

    # -- building

    BUILD_TUPLE, BUILD_LIST, BUILD_SLICE = built(tuple), built(list), built(lambda items: slice(*items))
    BUILD_SET = built(lambda items: native(set, [operations.as_hashable(item) for item in items]))

    def BUILD_MAP(self, arg: int) -> None:
        items = self.pop(2 * arg)
        keys = [operations.as_hashable(key) for key in items[::2]]
        self.stack.append(native(dict, zip(keys, items[1::2])))

    BUILD_CONST_KEY_MAP = pushed(lambda self, arg: dict(zip(self.stack.pop(), self.pop(arg))))

    def BUILD_STRING(self, arg: int) -> None:
        parts = self.pop(arg)
        self.stack.append(late(self.trace, str.join, ["", parts]) if is_late(parts) else "".join(parts))

    LIST_APPEND = lambda self, arg: self.stack[-arg - 1].append(self.stack.pop())

    def MAP_ADD(self, arg: int) -> None:
        key, value = self.pop(2)
        native(self.stack[-arg].__setitem__, operations.as_hashable(key), value)

    SET_ADD = added("add", lambda trace, value: operations.as_hashable(value))
    LIST_EXTEND, SET_UPDATE = added("extend", operations.iterate), added("update", operations.iterate)
    DICT_UPDATE = added("update", unpacked_mapping)

    def DICT_MERGE(self, arg: int) -> None:
        value = unpacked_mapping(self.trace, self.stack.pop())
        into = self.stack[-arg]
        if twice := [key for key in value if key in into]:
            fn = self.stack[-arg - (2 if NULL_FIRST else 3)]
            named = f"{fn.__module__}.{fn.__qualname__}()" if hasattr(fn, "__qualname__") else str(fn)
            text = f"{named.removeprefix('builtins.')} got multiple values for keyword argument '{twice[0]}'"
            raise Raised(TypeError(text))
        native(into.update, value)

    LIST_TO_TUPLE = result_of(1, lambda trace, items: tuple(items))

    def unpacked(self, most: int | None, least: int, wanted: str) -> list[Any]:
        items: list[Any] = native(list, islice(operations.iterate(self.trace, self.stack.pop()), most))
        if len(items) == most:
            raise Raised(ValueError(f"too many values to unpack (expected {wanted})"))
        if len(items) < least:
            raise Raised(ValueError(f"not enough values to unpack (expected {wanted}, got {len(items)})"))
        return items

    UNPACK_SEQUENCE = lambda self, arg: self.stack.extend(reversed(self.unpacked(arg + 1, arg, str(arg))))

    def UNPACK_EX(self, arg: int) -> None:
        before, after = arg & 255, arg >> 8
        items = self.unpacked(None, before + after, f"at least {before + after}")
        end = len(items) - after
        self.stack.extend(reversed([*items[:before], items[before:end], *items[end:]]))

    GET_LEN = pushed(lambda self, arg: operations.length(self.trace, self.stack[-1]))

    def FORMAT_VALUE(self, arg: int) -> None:
        spec = self.stack.pop() if arg & 4 else ""
        self.stack[-1] = self.trace.call(format_value, [self.stack[-1], arg & 3, spec], {})

    # -- functions and calls

    def MAKE_FUNCTION(self, arg: int) -> None:
        code: CodeType = self.stack.pop()
        cells = tuple([CellType() for _ in code.co_freevars])
        made = FunctionType(code, self.globals, code.co_name, None, cells)
        self.trace.made[id(made)] = made
        for bit in FUNCTION_FIELDS if MAKE_FUNCTION_FLAGS else ():  # or else SET_FUNCTION_ATTRIBUTE follows
            if arg & bit:
                made = self.set_function_field(made, bit, self.stack.pop())
        self.stack.append(made)

    def set_function_field(self, function: FunctionType, bit: int, value: Any) -> FunctionType:
        name = FUNCTION_FIELDS[bit]
        if name == "__annotations__" and isinstance(value, tuple):
            value = dict(zip(value[::2], value[1::2]))
        if name == "__closure__":
            name, defaults = function.__name__, function.__defaults__
            made = FunctionType(function.__code__, self.globals, name, defaults, value)
            made.__kwdefaults__, made.__annotations__ = function.__kwdefaults__, function.__annotations__
            self.trace.made[id(made)] = made
            return made
        setattr(function, name, value)
        return function

    def SET_FUNCTION_ATTRIBUTE(self, arg: int) -> None:
        """(value, function -- function)"""
        function, value = self.stack.pop(), self.stack.pop()
        self.stack.append(self.set_function_field(function, arg, value))

    def KW_NAMES(self, arg: tuple[str, ...]) -> None:
        self.kw_names = arg

    def call(self, count: int, names: tuple[str, ...]) -> None:
        args = [read_list(self.trace, arg) if type(arg) is Unread else arg for arg in self.pop(count)]
        first_named = count - len(names)
        self.apply(args[:first_named], dict(zip(names, args[first_named:])))

    def apply(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """(callable, NULL -- result), (NULL, callable -- result) or (function, owner -- result)"""
        second, first = self.stack.pop(), self.stack.pop()
        given = args if first is NULL or second is NULL else [second, *args]
        self.stack.append(self.trace.call(second if first is NULL else first, given, kwargs))

    def CALL(self, arg: int) -> None:
        names, self.kw_names = self.kw_names, ()
        self.call(arg, names)

    CALL_KW = lambda self, arg: self.call(arg, self.stack.pop())

    def CALL_FUNCTION_EX(self, arg: int) -> None:
        kwargs = unpacked_mapping(self.trace, self.stack.pop()) if arg & 1 else {}
        args = native(list, operations.iterate(self.trace, self.stack.pop()))
        self.apply(args, dict(kwargs))

    def RETURN_VALUE(self, arg: Any) -> str:
        self.result = self.stack.pop()
        return RETURN

    # -- generators

    RETURN_GENERATOR = push(None)  # the generator exists already; a POP_TOP drops the value sent first

    def YIELD_VALUE(self, arg: Any) -> str:
        self.result = self.stack.pop()
        self.at = self.next
        return YIELD

    def SEND(self, arg: int) -> None:
        """(receiver, value -- receiver, yielded), at the end (-- returned) and jump."""
        value = self.stack.pop()
        receiver = self.stack[-1]
        try:
            step, given = (next, receiver) if value is None else (native(getattr, receiver, "send"), value)
            self.stack.append(native(step, given))
        except Raised as raised:
            if not isinstance(raised.value, StopIteration):
                raise
            self.end_send(raised.value.value)
            self.next = arg

    def end_send(self, value: Any) -> None:
        if not SEND_KEEPS_RECEIVER:
            self.stack.pop()
        self.stack.append(value)

    END_SEND = result_of(2, lambda trace, receiver, value: value)

    def CLEANUP_THROW(self, arg: Any) -> None:
        """(receiver, sent, error -- None, value): the inner generator returned when one was thrown into it"""
        error = self.pop(3)[2]
        if not isinstance(error, StopIteration):
            raise Raised(error)
        self.stack.extend((None, error.value))

    def STOPITERATION_ERROR(self, arg: Any) -> None:
        """A StopIteration that leaves a generator becomes a RuntimeError."""
        if isinstance(self.stack[-1], StopIteration):
            made = RuntimeError("generator raised StopIteration")
            made.__cause__ = made.__context__ = self.stack[-1]
            self.stack[-1] = made

    # -- exceptions

    LOAD_BUILD_CLASS, LOAD_ASSERTION_ERROR = push(builtins.__build_class__), push(AssertionError)

    def RAISE_VARARGS(self, arg: int) -> None:
        handled = traces.topmost_handled(self.trace)
        if arg == 0:
            if handled is None:
                raise UnsupportedOpcode(self.trace.loc(), opcode="a bare raise of what a caller handles")
            raise Raised(handled)
        cause: Any = self.stack.pop() if arg == 2 else MISSING
        error = self.stack.pop()
        if isinstance(error, type):
            error = self.trace.call(error, [], {})
        if not isinstance(error, BaseException):
            raise Raised(TypeError("exceptions must derive from BaseException"))
        if cause is not MISSING:
            made = self.trace.call(cause, [], {}) if isinstance(cause, type) else cause
            native(setattr, error, "__cause__", made)
        if handled is not None and handled is not error:
            set_context(error, handled)
        raise Raised(error)

    def PUSH_EXC_INFO(self, arg: Any) -> None:
        """(error -- previous, error)"""
        error = self.stack.pop()
        self.stack.extend((traces.Handling(self.handled, error), error))
        self.handled = error

    CHECK_EXC_MATCH = pushed(
        lambda self, arg: native(isinstance, self.stack[-2], check_kinds(self.stack.pop())))

    def CHECK_EG_MATCH(self, arg: Any) -> None:
        """(error, kinds -- rest, match): the part that an except* clause takes is what it handles"""
        error, kinds = self.pop(2)
        if any(issubclass(kind, BaseExceptionGroup) for kind in check_kinds(kinds)):
            raise Raised(TypeError(NO_GROUPS))
        match, rest = None, error
        if isinstance(error, kinds):
            is_group, rest = isinstance(error, BaseExceptionGroup), None
            match = error if is_group else BaseExceptionGroup("", (error,))
        elif isinstance(error, BaseExceptionGroup):
            self.refuse_outside(error)
            match, rest = native(error.split, kinds)
        self.stack.extend((rest, match))
        if match is not None:
            entry = [x for x in self.stack if type(x) is traces.Handling and not x.is_over][-1]
            entry.error = self.handled = match

    def PREP_RERAISE_STAR(self, arg: Any) -> None:
        """(error, raised -- result): of what is left and what clauses raised, None or the one to raise; parts
        of the group as it was are one group again"""
        error, found = self.pop(2)
        self.refuse_outside(error, *found)
        self.stack.append(native(prep_reraise_star, error, found))

    def refuse_outside(self, *errors: BaseException | None) -> None:
        """Where an exception of before was raised, or one that Python code makes of a part, Python knows."""
        for group in (group for error in errors for group in groups_in(error)):
            is_own = any(hasattr(getattr(group, name), "__code__") for name in ("split", "derive"))
            if is_own or self.trace.source_of(group) is not None:
                raise UnsupportedOpcode(self.trace.loc(), opcode="except* with a group of before")

    def POP_EXCEPT(self, arg: Any) -> None:
        over = self.stack.pop()
        self.handled, over.is_over = over.previous, True

    def RERAISE(self, arg: Any) -> None:
        raise Raised(self.stack.pop())

    # -- with

    def BEFORE_WITH(self, arg: Any) -> None:
        """(context -- exit, entered)"""
        context, trace = self.stack.pop(), self.trace
        for name, missed in (("__enter__", ""), ("__exit__", " (missed __exit__ method)")):
            if find_in_mro(kind := context.__class__, name)[0] is MISSING:
                text = f"'{kind.__name__}' object does not support the context manager protocol{missed}"
                raise Raised(TypeError(text))
        self.stack.append(load_attr(trace, context, "__exit__"))
        self.stack.append(trace.call(load_attr(trace, context, "__enter__"), [], {}))

    def WITH_EXCEPT_START(self, arg: Any) -> None:
        """(exit, last, previous, error -- ..., suppress)"""
        error = self.stack[-1]
        lines = load_attr(self.trace, error, "__traceback__")
        self.stack.append(self.trace.call(self.stack[-4], [type(error), error, lines], {}))

    # -- match

    MATCH_MAPPING = pushed(lambda self, arg: bool(type(self.stack[-1]).__flags__ & 1 << 6))  # Py_TPFLAGS_...
    MATCH_SEQUENCE = pushed(lambda self, arg: bool(type(self.stack[-1]).__flags__ & 1 << 5))

    def MATCH_KEYS(self, arg: Any) -> None:
        keys, subject = self.stack[-1], self.stack[-2]
        has_all = all(operations.contains(self.trace, subject, key) for key in keys)
        get = operations.get_item
        self.stack.append(tuple(get(self.trace, subject, key) for key in keys) if has_all else None)

    def match_class(self, count: int) -> Any:
        subject, klass, names = self.pop(3)
        if not self.trace.call(isinstance, [subject, klass], {}):
            return None
        if count == 1 and klass in MATCHES_ITSELF:
            return (subject,)
        positional = load_attr(self.trace, klass, "__match_args__")[:count] if count else ()
        found: list[Any] = []
        for name in (*positional, *names):
            found.append(self.trace.call(getattr, [subject, name, NULL], {}))
            if found[-1] is NULL:
                return None
        return tuple(found)

    MATCH_CLASS = pushed(match_class)


RAISED_AGAIN: Final = frozenset({("RERAISE", 0), ("RERAISE", 1), ("RAISE_VARARGS", 0)})
"""Instructions that leave an exception's context and lines as they are."""
AUGMENTED: Final = ["SWAP", "SWAP", "STORE_SUBSCR"]
"""What follows the operator in `x[i] += 1`: the item is written back."""
NO_ERRORS: Final = "catching classes that do not inherit from BaseException is not allowed"
NO_GROUPS: Final = "catching ExceptionGroup with except* is not allowed. Use except instead."
FUNCTION_FIELDS: Final = {8: "__closure__", 4: "__annotations__", 2: "__kwdefaults__", 1: "__defaults__"}
MATCHES_ITSELF: Final = (bool, bytearray, bytes, dict, float, frozenset, int, list, set, str, tuple)


def set_context(error: BaseException, handled: BaseException) -> None:
    """What Python does when an exception is raised while another is handled: no cycle may arise."""
    link, seen = handled, {id(handled)}
    while (before := link.__context__) is not None and id(before) not in seen:
        if before is error:
            link.__context__ = None
            break
        link = before
        seen.add(id(link))
    error.__context__ = handled


def check_kinds(kinds: Any) -> tuple[Any, ...]:
    """What an `except` clause names: nothing but classes of exceptions will do."""
    known = kinds if isinstance(kinds, tuple) else (kinds,)
    if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in known):
        raise Raised(TypeError(NO_ERRORS))
    return known


def groups_in(error: BaseException | None) -> list[Any]:
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return [error, *(group for part in parts for group in groups_in(part))] if parts else []


def throw_into(receiver: Any, error: BaseException) -> tuple[bool, Any]:
    """Raise in the iterator of a `yield from`, if it can be: whether it went on, and with what."""
    if isinstance(error, GeneratorExit):
        if hasattr(receiver, "close"):
            receiver.close()
        return False, None
    return (True, receiver.throw(error)) if hasattr(receiver, "throw") else (False, None)


class GlobalsView(MutableMapping[str, Any]):
    """globals() of an interpreted frame: reads are guarded, writes wait."""

    def __init__(self, frame: Activation) -> None:
        self.frame, self.real = frame, frame.globals

    def __getitem__(self, name: str) -> Any:
        pending = self.frame.trace.writes.get((id(self.real), name))
        if pending is None and name not in self.real:
            self.frame.trace.guard(self.frame.trace.const(self.real, "globals"), Lacks(name))
            raise KeyError(name)
        return self.frame.load_global(name)

    def __setitem__(self, name: str, value: Any) -> None:
        store_global(self.frame.trace, self.real, name, value, self.frame.global_source(name))

    def __delitem__(self, name: str) -> None:
        raise UnsupportedOpcode(self.frame.trace.loc(), opcode="del globals()[...]")

    __iter__: Any = lambda self: iter(self.real)
    __len__: Any = lambda self: len(self.real)


def unsupported(op: str, self: Activation, arg: Any) -> None:
    raise UnsupportedOpcode(self.trace.loc(), opcode=op)


METHODS: Final[dict[str, Callable[[Activation, Any], Any]]] = {
    name: method for name, method in vars(Activation).items() if name.isupper()
}
