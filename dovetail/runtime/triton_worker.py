"""Compile Triton texts, in a process of its own or in this one.

    compile_text(request) -> {"name", "shared", "cubin"} | {"error"}

Run as a program it answers one request after another, from standard input to standard output, each a
pickle. It needs Triton and nothing of Dovetail or torch, so it starts in a moment. This
is the only file that imports Triton.
"""
from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import pickle
import sys
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import triton
from triton._C.libtriton import passes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HEAD: Final = "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n\n"
ALIGNED: Final = [["tt.divisibility", 16]]
MANY_LOADS: Final = 64
"""With more of them a thread has an element (along one axis), and accesses are not widened: Triton's pass
for that looks, for each, at all that is connected with it, in nine tenths of the time of long kernels."""
IS_ALONE: Final = __name__ == "__main__" and hasattr(passes.ttgpuir, "add_coalesce")
"""In a process of its own, where nobody else's kernels are compiled meanwhile."""


def compile_text(request: dict[str, Any]) -> dict[str, Any]:
    """`request`: text, prelude, symbol, signature, unaligned, constants, warps, stages, fuses, capability,
    folder."""
    try:
        made = build(request)
        return {"name": made.metadata.name, "shared": made.metadata.shared, "cubin": made.asm["cubin"]}
    except Exception as error:  # whatever it is, the one who asked has to be told
        shown = "".join(traceback.format_exception_only(error)).strip()
        return {"error": f"{shown}\n{error.__cause__ or ''}"}


def build(request: dict[str, Any]) -> Any:
    """Triton's compiled kernel."""
    module = import_text(request["symbol"], HEAD + request["text"], request["folder"])
    module.dv = import_text("prelude", request["prelude"], request["folder"])  # type: ignore[attr-defined]
    function = getattr(module, request["symbol"])
    names, kinds = function.arg_names, request["signature"]
    constants = request["constants"]
    signature = dict(zip(names, kinds)) | dict.fromkeys(constants, "constexpr")
    pointers = [i for i, kind in enumerate(kinds) if kind.startswith("*")]
    attrs = {(i,): ALIGNED for i in pointers if i not in request["unaligned"]}
    places = {(names.index(name),): value for name, value in constants.items()}
    options = {
        "num_warps": request["warps"],
        "num_stages": request["stages"],
        "enable_fp_fusion": request["fuses"],
        "debug": "dv.wrap(" in request["text"],  # its assertions are kept
        "sanitize_overflow": False,
    }
    source = ASTSource(fn=function, signature=signature, constexprs=places, attrs=attrs)
    is_long = request["text"].count("tl.load(") > MANY_LOADS and not {*constants} - {"XBLOCK"}
    target = GPUTarget("cuda", request["capability"], 32)
    if not (is_long and IS_ALONE):
        return triton.compile(source, target=target, options=options)
    widen, passes.ttgpuir.add_coalesce = passes.ttgpuir.add_coalesce, lambda manager: None
    try:
        return triton.compile(source, target=target, options=options)
    finally:
        passes.ttgpuir.add_coalesce = widen


@cache
def import_text(name: str, text: str, folder: str) -> ModuleType:
    """Triton reads a kernel's source from its file, so there is one for each; people may read it too."""
    path = Path(folder) / f"{name[:60]}_{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(text)
        os.replace(partial, path)
    spec = importlib.util.spec_from_file_location(f"dovetail_triton_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- as a program --------------------------------------------------------------------------------------


def leave_out_gluon() -> None:
    """Triton's compiler imports its second language, for two names of it, which takes as long as the whole
    of Triton; our kernels are not written in it."""
    gluon = ModuleType("triton.experimental.gluon")
    gluon.language = ModuleType("triton.experimental.gluon.language")  # type: ignore[attr-defined]
    gluon.language.__getattr__ = lambda name: object()
    sys.modules[gluon.__name__] = gluon
    try:
        importlib.import_module("triton.compiler.code_generator")
    except (ImportError, AttributeError):  # it uses more of it than we know of
        del sys.modules[gluon.__name__]


def main() -> None:
    leave_out_gluon()
    answers, requests = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    os.dup2(2, 1)  # what compilers print must not get between the answers
    # Triton would hash all of its library, which takes longer than a kernel; our store knows its version.
    triton.runtime.cache.triton_key = lambda: triton.__version__
    with suppress(EOFError):  # whoever asked is done
        while True:
            pickle.dump(compile_text(pickle.load(requests)), answers)
            answers.flush()


if __name__ == "__main__":
    main()
