"""How each CPython version spells bytecode, as data.

    opname, raw argument -> [(normalised op, argument), ...]

    3.12 LOAD_ATTR 7           [("LOAD_METHOD", name 3)]
    3.13 LOAD_FAST_LOAD_FAST   [("LOAD_FAST", a), ("LOAD_FAST", b)]
    3.12 RETURN_CONST 2        [("LOAD_CONST", 2), ("RETURN_VALUE", 0)]

The interpreter knows the normalised set only. A raw argument is turned into what the op works on
(a name, a constant, an operator) by ARGUMENTS; jumps become instruction indices in decode.py.
"""
from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from opcode import opmap
from types import CodeType, FunctionType
from typing import Final, TypeAlias

Split: TypeAlias = "Callable[[int], list[tuple[str, int]]]"

_NAMES: Final = "add and floordiv lshift matmul mul mod or pow rshift sub truediv xor".split()
BINARY: Final = [getattr(operator, f"__{way}{name}__") for way in ("", "i") for name in _NAMES]

COMPARE: Final = (operator.lt, operator.le, operator.eq, operator.ne, operator.gt, operator.ge)

INTRINSIC_1: Final = {3: "STOPITERATION_ERROR", 5: "UNARY_POSITIVE", 6: "LIST_TO_TUPLE"}


def one(op: str) -> Split:
    return lambda arg: [(op, arg)]


def low_bit(plain: str, marked: str) -> Split:
    """The lowest bit of the argument chooses between two ops; the rest is the argument."""
    return lambda arg: [(marked if arg & 1 else plain, arg >> 1)]


def pair(first: str, second: str) -> Split:
    """Two arguments of four bits each."""
    return lambda arg: [(first, arg >> 4), (second, arg & 15)]


BOTH: Final[dict[str, Split]] = {
    **dict.fromkeys(("RESUME", "NOP", "CACHE", "PRECALL", "COPY_FREE_VARS", "EXTENDED_ARG"), lambda arg: []),
    "LOAD_GLOBAL": low_bit("LOAD_GLOBAL", "LOAD_GLOBAL_CALL"),
    **dict.fromkeys(("JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_FORWARD"), one("JUMP")),
    "GET_YIELD_FROM_ITER": one("GET_ITER"),
}

PY311: Final[dict[str, Split]] = {
    **BOTH,
    **{
        f"POP_JUMP_{way}_IF_{what}": one(f"POP_JUMP_IF_{what}")
        for way in ("FORWARD", "BACKWARD")
        for what in ("TRUE", "FALSE", "NONE", "NOT_NONE")
    },
}

PY312: Final[dict[str, Split]] = {
    **BOTH,
    "LOAD_ATTR": low_bit("LOAD_ATTR", "LOAD_METHOD"),
    "LOAD_SUPER_ATTR": lambda arg: [("LOAD_SUPER_METHOD" if arg & 1 else "LOAD_SUPER_ATTR", arg >> 2)],
    "RETURN_CONST": lambda arg: [("LOAD_CONST", arg), ("RETURN_VALUE", 0)],
    "COMPARE_OP": lambda arg: [("COMPARE_OP", arg >> 4)],
    "CALL_INTRINSIC_1": lambda arg: [(INTRINSIC_1.get(arg, "UNSUPPORTED_INTRINSIC"), 0)],
    "CALL_INTRINSIC_2": lambda arg: [("PREP_RERAISE_STAR" if arg == 1 else "UNSUPPORTED_INTRINSIC", 0)],
    "LOAD_FAST_CHECK": one("LOAD_FAST"),
    "YIELD_VALUE": lambda arg: [("YIELD_VALUE", 0)],
    "LOAD_FROM_DICT_OR_DEREF": lambda arg: [("POP_TOP", 0), ("LOAD_CLASSDEREF", arg)],
}

PY313: Final[dict[str, Split]] = {
    **PY312,
    "COMPARE_OP": lambda arg: [("COMPARE_OP_BOOL" if arg & 16 else "COMPARE_OP", arg >> 5)],
    "LOAD_FAST_LOAD_FAST": pair("LOAD_FAST", "LOAD_FAST"),
    "STORE_FAST_LOAD_FAST": pair("STORE_FAST", "LOAD_FAST"),
    "STORE_FAST_STORE_FAST": pair("STORE_FAST", "STORE_FAST"),
    "END_FOR": one("POP_TOP"),
    "CONVERT_VALUE": one("FORMAT_VALUE"),
    "FORMAT_SIMPLE": lambda arg: [("FORMAT_VALUE", 0)],
    "FORMAT_WITH_SPEC": lambda arg: [("FORMAT_VALUE", 4)],
}

TABLE: Final = {(3, 11): PY311, (3, 12): PY312, (3, 13): PY313}[sys.version_info[:2]]

FOR_ITER_SKIPS: Final = {(3, 11): 0, (3, 12): 1, (3, 13): 2}[sys.version_info[:2]]
"""Instructions after the target of an exhausted FOR_ITER that only clean up what it already popped."""

NULL_FIRST: Final = sys.version_info < (3, 13)
"""Whether the NULL of a call lies below the callable or above it."""

MAKE_FUNCTION_FLAGS: Final = sys.version_info < (3, 13)

SEND_KEEPS_RECEIVER: Final = sys.version_info >= (3, 12)

_ADD: Final = bytes((opmap["BINARY_OP"], 0, opmap["CACHE"], 0))
_STAR: Final = ("PREP_RERAISE_STAR", 0) if sys.version_info < (3, 12) else ("CALL_INTRINSIC_2", 1)
_TWO: Final = (lambda error, raised: error + raised).__code__
prep_reraise_star: Final = FunctionType(
    _TWO.replace(co_code=_TWO.co_code.replace(_ADD, bytes((opmap[_STAR[0]], _STAR[1], opmap["NOP"], 0)))), {}
)
"""The instruction itself, as a function."""

ARGUMENTS: Final[dict[str, Callable[[CodeType, int], object]]] = {
    **dict.fromkeys((
        "LOAD_GLOBAL", "LOAD_GLOBAL_CALL", "LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR",
        "LOAD_NAME", "STORE_NAME", "DELETE_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME",
        "IMPORT_FROM", "LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD", "LOAD_FROM_DICT_OR_GLOBALS",
    ), lambda code, arg: code.co_names[arg]),
    **dict.fromkeys(("LOAD_CONST", "KW_NAMES"), lambda code, arg: code.co_consts[arg]),
    "BINARY_OP": lambda code, arg: BINARY[arg],
    **dict.fromkeys(("COMPARE_OP", "COMPARE_OP_BOOL"), lambda code, arg: COMPARE[arg]),
}  # fmt: skip
