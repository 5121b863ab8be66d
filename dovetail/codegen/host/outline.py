"""Steps of a host program that repeat become functions: the layers of a model are compiled once here too.

    p_a = ...;  TRY("aten.mm.default", mm_out(view1, p_a))          step_0(python, inputs, view1, p_a, 7)
    p_b = ...;  TRY("aten.mm.default", mm_out(view2, p_b))    ->    step_0(python, inputs, view2, p_b, 9)

Two steps are one function if their texts differ only in names of variables, in messages and in positions.
A variable that other steps use too is passed to the function; what one step alone uses is declared there.
Where a sequence of steps comes again and again (a layer), the whole of it is one step.
"""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Final, TypeAlias

FEWEST: Final = 3
"""Equal steps that are worth a function."""
CANDIDATES: Final = 4
"""Lengths of a layer to try: the most frequent distances between equal steps."""

_ATOM: Final = re.compile(
    r'(?a)([A-Za-z_]\w*|"(?:[^"\\]|\\.)*"|(?=\d)'
    r"(?:(?<=\w \+ )|(?<=inputs\[)|(?<=python, inputs, )|(?<=call_with\(python, ))\d+)"
)
NOTE: Final = "    // "
_LITERAL: Final = frozenset('"0123456789')
_DECLARATION: Final = re.compile(r"(?P<type>(?:const )?\w+\**) (?P<name>\w+)(?P<rest>;|\{| =|\[|\()")
_HOLE: Final = re.compile("\x01([^\x02]*)\x02")
_RETURNED: Final = re.compile(r"^\w+\** (\x01\w+&[^\x02]*\x02)(?:; *|(\{)(.*)\};| = )", re.MULTILINE)


Step: TypeAlias = "tuple[str, tuple[str, ...]]"
"""The text of a step with holes, each marked by its number and how it is passed, and what was in them."""


def outline(
    before: Sequence[str], steps: Sequence[Sequence[str]], after: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The functions, and the lines of all steps with calls of them. `before` and `after` stay as they are."""
    homes: dict[str, int] = {}
    types: dict[str, str] = {}
    for k, lines in enumerate((before, *steps)):
        for match in filter(None, map(_DECLARATION.match, lines)):
            homes[match["name"]] = k - 1
            types[match["name"]] = match["type"] + ("[]" if match["rest"] == "[" else "")
    code = [[x.split(NOTE, 1)[0] for x in lines if not x.startswith("// ")] for lines in (*steps, after)]
    pieces = [_ATOM.split("\n".join(lines)) for lines in code]
    called = [[x for x in split[1::2] if x not in types and x[0] not in _LITERAL] for split in pieces[:-1]]
    layers = _layers(list(map(tuple, called)))
    if len(layers) < len(steps):
        owner = {k: n for n, layer in enumerate(layers) for k in layer}
        homes = {name: owner.get(k, -1) for name, k in homes.items()}
        steps = [[line for k in layer for line in steps[k]] for layer in layers]
        joined = [[piece for k in layer for piece in ("\n", *pieces[k])][1:] for layer in layers]
        pieces = [*joined, pieces[-1]]
    uses = Counter(chain.from_iterable([{*split[1::2]} for split in pieces]))
    made = [_step(split, k, homes, types, uses) for k, split in enumerate(pieces[:-1])]
    places: dict[str, list[int]] = {}
    for k, (text, _) in enumerate(made):
        places.setdefault(text, []).append(k)
    functions: list[str] = []
    body = list(steps)
    for text, found in places.items():
        if not text or len(found) < FEWEST:
            continue
        columns = list(zip(*(made[k][1] for k in found)))
        same = [column[0] if len(set(column)) == 1 and column[0] not in types else "" for column in columns]
        name, takes = f"step_{found[0]}", _parameters(text, same)
        functions += _function(name, text, same, takes)
        for k in found:
            passed = [(made[k][1][number], kind) for number, kind in takes]
            body[k] = _call(name, passed, [hole for hole, _ in passed if homes.get(hole) == k], steps[k])
    return functions, [line for lines in body for line in lines]


def _layers(texts: Sequence[tuple[str, ...]], depth: int = 8) -> list[range]:
    """The steps in order, those of one layer together: of the longest stretch that repeats itself, and then
    of what comes before and after it."""
    last: dict[tuple[str, ...], int] = {}
    distances: Counter[int] = Counter()
    for k, text in enumerate(texts):
        distances[k - last.get(text, k)] += 1
        last[text] = k
    best = range(0)
    for period in sorted(distances.keys() - {0, 1}, key=distances.__getitem__)[-CANDIDATES:]:
        start = 0
        for k in range(len(texts) - period + 1):
            if k + period == len(texts) or not texts[k] or texts[k] != texts[k + period]:
                count = (k - start) // period + 1
                if count >= FEWEST and count * period > len(best) * best.step:
                    best = range(start, start + count * period, period)
                start = k + 1
    if not best or not depth:
        return [range(k, k + 1) for k in range(len(texts))]
    end = best.start + len(best) * best.step
    before, after = _layers(texts[: best.start], depth - 1), _layers(texts[end:], depth - 1)
    layers = [range(k, k + best.step) for k in best]
    return [*before, *layers, *(range(r.start + end, r.stop + end) for r in after)]


def _step(
    pieces: list[str], k: int, homes: dict[str, int], types: dict[str, str], uses: Counter[str]
) -> Step:
    """`pieces` are the step's text, every second one an atom. The result has no text where something is
    used that cannot be passed to a function."""
    marks: dict[str, str] = {}
    atoms = pieces[1::2]
    for atom in dict.fromkeys(atoms):
        number, kind = len(marks), types.get(atom, "")
        if kind and homes[atom] == k:
            passed = "" if uses[atom] == 1 else f"& {kind}"
        elif kind:
            passed = f"& {kind}" if kind in ("Tensor", "Temporaries") else f" {kind}"
        elif atom[0] == '"' or atom.isdigit():
            passed = " const char*" if atom[0] == '"' else " int64_t"
        else:
            continue
        if passed.endswith("[]") or passed.startswith("& const"):
            return "", ()
        marks[atom] = f"\x01{number}{passed}\x02"
    filled = list(pieces)
    filled[1::2] = map(marks.get, atoms, atoms)
    return "".join(filled), tuple(marks)


def _parameters(text: str, same: list[str]) -> list[tuple[int, str]]:
    """Number and type of each hole that is passed; a & after the type of what is written to."""
    found: dict[int, str] = {}
    for mark in _HOLE.findall(text):
        number, _, kind = mark.partition(" ")
        if kind and not same[int(number.rstrip("&"))]:
            found[int(number.rstrip("&"))] = kind + ("&" if number.endswith("&") else "")
    return sorted(found.items())


def _function(name: str, text: str, same: list[str], parameters: list[tuple[int, str]]) -> list[str]:
    takes = "".join(f", {kind} v{number}" for number, kind in parameters)
    text = _RETURNED.sub(_assigned, text)

    def fill(match: re.Match[str]) -> str:
        number = int(re.match(r"\d+", match[1])[0])  # type: ignore[index]
        return same[number] or f"v{number}"

    lines = _HOLE.sub(fill, text).split("\n")
    head = f"static int32_t {name}(Python* python, void** inputs{takes}) {{"
    return [head, *("    " + line for line in lines if line), "    return 0;", "}"]


def _assigned(declaration: re.Match[str]) -> str:
    """Of a variable that the caller declares."""
    if declaration[2]:
        return f"{declaration[1]}.handle = {declaration[3]};"
    return f"{declaration[1]} = " if declaration[0].endswith("= ") else ""


def _call(name: str, passed: list[tuple[str, str]], made: list[str], lines: Sequence[str]) -> list[str]:
    """What the function makes for others is declared here; comments stay."""
    out = " ".join(f"{kind.rstrip('&')} {hole};" for hole, kind in passed if hole in made)
    notes = [line for line in lines if line.startswith("//")]
    rest = "".join([line[line.index(NOTE) :] for line in lines if NOTE in line and line[0] != "/"])
    takes = "".join(f", {hole}" for hole, _ in passed)
    call = f"if ({name}(python, inputs{takes})) return 1;{rest}"
    return [*notes, *([out] if out else []), call]
