"""Compile Triton texts, in a process of its own (see triton_process.py) or in this one.

    compile_text(request) -> {"name", "shared", "cubin"} | {"error"}

It needs Triton and nothing of Dovetail or torch. This is the only file that imports Triton.
"""
from __future__ import annotations

import hashlib
import importlib.util
import os
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import triton
from triton._C.libtriton import llvm, passes
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

HEAD: Final = "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n\n"
ALIGNED: Final = [["tt.divisibility", 16]]
MANY_LOADS: Final = 64
"""With more of them a thread has an element (along one axis), and accesses are not widened: Triton's pass
for that looks, for each, at all that is connected with it, in nine tenths of the time of long kernels."""


def compile_text(request: dict[str, Any], is_alone: bool = False) -> dict[str, Any]:
    """`request`: text, prelude, symbol, signature, unaligned, constants, warps, stages, fuses, capability,
    folder. `is_alone`: in a process where nobody else's kernels are compiled meanwhile."""
    try:
        made = build(request, is_alone)
        return {"name": made.metadata.name, "shared": made.metadata.shared, "cubin": made.asm["cubin"]}
    except Exception as error:  # whatever it is, the one who asked has to be told
        shown = "".join(traceback.format_exception_only(error)).strip()
        return {"error": f"{shown}\n{error.__cause__ or ''}"}


def build(request: dict[str, Any], is_alone: bool = False) -> Any:
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
    if not (is_long and is_alone and hasattr(passes.ttgpuir, "add_coalesce")):
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


def hurry() -> None:
    """Leave out what takes Triton longer than a small kernel does. For a process of our own."""
    # It would hash all of its library and ask the assembler for its version; our store knows Triton's.
    triton.runtime.cache.triton_key = nvidia.get_ptxas_version = lambda *arch: triton.__version__
    link = llvm.link_extern_libs  # a library of functions is read whole, be any of them called or not
    llvm.link_extern_libs = lambda module, paths: "@__nv_" in str(module) and link(module, paths)
