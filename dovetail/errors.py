"""Every error and every reason, one class each: a stable code, a fixed message, a hint, the user's line.

    raise DataDependentBranch(loc, name="mask")      B03 branch depends on the value of tensor mask
                                                     hint: use torch.where ...

Three families: `DovetailError` reaches the user; `Break` ends a graph during capture and becomes a
graph break (or, with fullgraph=True, the error of class GraphBreakError); `Reason` records a
decision not to do something (fuse, cache, use a CUDA graph) and only shows in reports.
"""
from __future__ import annotations

import linecache
import signal
from traceback import walk_tb
from typing import ClassVar

from dovetail.util.loc import Loc
from dovetail.util.noun import Noun


class DovetailError(Exception):
    """Base of what users see. Subclasses set code, message (a format string) and hint."""

    code: ClassVar[str] = "E00"
    message: ClassVar[str] = "{detail}"
    hint: ClassVar[str] = ""

    def __init__(self, loc: Loc | None = None, **fields: object) -> None:
        self.loc, self.fields = loc, fields
        super().__init__(self.text)

    @property
    def text(self) -> str:
        return self.message.format(**self.fields)

    def __str__(self) -> str:
        hint, where = self.hint.format(**self.fields), ""
        if self.loc is not None:
            code = linecache.getline(self.loc.file, self.loc.line).strip()
            where = f"\n  at {self.loc.file}:{self.loc.line} in {self.loc.function}\n    {code}".rstrip()
        return f"[{self.code}] {self.text}{where}" + (f"\n  hint: {hint}" if hint else "")


class InternalWarning(UserWarning):
    """Compiled code is not used where it was asked for; eager runs instead."""


class UnknownMode(DovetailError, ValueError):
    code, message = "E01", "unknown mode {mode!r}; known modes are {known}"


class UnknownOption(DovetailError, ValueError):
    code, message = "E02", "unknown option {name!r}; did you mean {close}?"


class BadOption(DovetailError, TypeError):
    code, message = "E03", "option {name!r} takes {wanted}, got {value!r}"


class BadArgument(DovetailError, TypeError):
    code = "E04"


class UnknownBackend(DovetailError, ValueError):
    code, message = "E05", "unknown backend {backend!r}; known backends are {known}, or pass a callable"


class GraphBreakError(DovetailError):
    """fullgraph=True met a break."""

    code, message = "E06", "fullgraph=True, but the program breaks the graph: {reason}"
    hint = "{fix}"


class RecompileError(DovetailError):
    """Stance fail_on_recompile met a recompile."""

    code, message = "E07", "recompiling {function}, which the current stance forbids: {reason}"


class VerifyError(DovetailError):
    """An IR is malformed: a bug in Dovetail."""

    code, message = "E08", "after stage {stage}: {detail}"


class CompilerMissing(DovetailError):
    code, message = "E09", "no C++ compiler found ({tried})"
    hint = "install g++ or clang, or `pip install ziglang`"


class BuildFailed(DovetailError):
    code, message = "E10", "the C++ compiler rejected generated code:\n{output}"


class UnknownStance(DovetailError, ValueError):
    code, message = "E13", "unknown stance {stance!r}; known stances are {known}"


# -- graph breaks ----------------------------------------------------------------------------------


class Break(DovetailError):
    """Capture cannot go on past an instruction. Raised inside capture, never seen by users as such."""

    code = "B00"

    @property
    def step(self) -> int:
        """The instruction, counted from the frame's start, to break at instead; for most breaks none."""
        return int(str(self.fields.get("step", -1)))


class UnsupportedOpcode(Break):
    code, message = "B01", "instruction {opcode} is not captured"


class UnknownCall(Break):
    code, message = "B02", "call to {function}, which capture does not know"
    hint = "move it out of the compiled function, or mark it with dovetail.allow_in_graph if it is pure"


class DataDependentBranch(Break):
    code, message = "B03", "branch depends on the value of a tensor"
    hint = "use torch.where, or torch.cond"


class AssumedBranch(DataDependentBranch):
    """It was assumed not to raise, which turned out not to do."""


class DataDependentValue(Break):
    code, message = "B04", "{function} needs the value of a tensor"
    hint = "keep the value in a tensor, or compute it outside the compiled function"


class DataDependentSize(DataDependentValue):
    code, message = "B25", "the size of what {function} gives depends on the values of a tensor"
    hint = "use torch.where or a product with the mask, which keep the size, or do it outside"


class DataDependentNumber(Break):
    code, message = "B21", "{function} needs the value of a number that changes from call to call"
    hint = "keep it in a tensor, or let Python use it before the function is called"


class UserBreak(Break):
    code, message = "B05", "graph_break() was called"


class DisabledCall(Break):
    code, message = "B06", "call to {function}, which is not to be compiled"


class OutputCall(Break):
    code, message = "B07", "call to {function}, which writes output"
    hint = "this break is cheap; move the call out of the compiled function to have one graph"


class UnsupportedValue(Break):
    code, message = "B08", "value of type {type} is not captured: {detail}"


class UnsupportedGenerator(Break):
    code = "B09"


class UnfinishedGenerator(UnsupportedGenerator):
    """A generator that the frame made is needed outside of the graph while it is still at work."""

    code, message = "B14", "a generator in the middle of its work ({name})"


class FailedFake(Break):
    code, message = "B10", "{function} cannot run on tensors without data: {detail}"
    hint = "use functions of dense tensors (torch.stack([a, b]) for torch.tensor([a, b])), or do it outside"


class SkippedFrame(Break):
    """The whole frame runs in eager; its callees are still compiled."""

    code = "B11"


class UnknownStores(Break):
    """A Triton kernel of the user's whose writes cannot be told from its source."""

    code, message = "B17", "it is not known what the Triton kernel {kernel} writes to: {detail}"
    hint = "wrap the launch in torch.library.custom_op, whose mutates_args says it"


class BackwardCall(Break):
    code, message = "B18", "call to {function}, which differentiates what ran before"
    hint = "this break is needed; the parts before and after it are compiled"


class ChosenArm(Break):
    code, message = "B19", "{name} runs functions as the values of tensors decide"
    hint = "this break lets them be compiled; with fullgraph=True they are one op, which runs them in eager"


class UnsupportedMutation(Break):
    """A write that the functional graph cannot express; the graph runs in eager."""

    code = "B20"


class GradientsSwitchedOn(Break):
    code, message = "B22", "gradients are switched on in a part of the program that began without them"
    hint = "have them on when the compiled function is called, and use torch.no_grad() for the parts without"


class LongLoop(Break):
    code, message = "B23", "a loop in Python goes on for more than {rounds} rounds or {calls} calls of torch"
    hint = "compute on whole tensors, or keep the loop out of the compiled function"


class FrameRaises(SkippedFrame):
    """The program itself raises in this call: eager raises it, with its own traceback."""

    code = "B13"


class ImportUnderWay(FrameRaises):
    """A module is being imported: its code runs once, and in eager."""

    code, message = "B16", "an import is under way"


class ShapelessParameter(FrameRaises):
    """Eager gives it its shape in this call; the next is compiled."""

    code, message = "B24", "the parameter {name} of a lazy module has no shape yet"


class NoTensors(SkippedFrame):
    """The frame touches no tensor: Python runs it best. Not reported, and no error under fullgraph."""

    code, message = "B15", "no tensors in {name}"


class ResumedLoop(Break):
    """A loop in which the graph already broke steps its iterator in Python, once per round. Follows from
    another break, so it is not reported as one of its own."""

    code, message = "B12", "the next round of a loop that was resumed"


# -- reasons ---------------------------------------------------------------------------------------


class Reason(Noun):
    """Why a decision went against an optimisation. Build with the functions named after the decision."""

    code: str
    text: str

    def __str__(self) -> str:
        return f"{self.code} {self.text}"


# -- exceptions of the user's ----------------------------------------------------------------------


def is_from_signal(error: BaseException) -> bool:
    """Whether one of the functions it came through is a signal handler (that of signal.alarm, say), which
    raised while the compiler happened to run: then it is no failure, and the call is left with it."""
    if (trail := error.__traceback__) is None or trail.tb_next is None:
        return False
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    calls = [vars(type(handler)).get("__call__") for handler in handlers]
    codes = {getattr(function, "__code__", None) for function in (*handlers, *calls)}
    return any(frame.f_code in codes for frame, _ in walk_tb(trail))
