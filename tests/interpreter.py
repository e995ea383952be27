"""Triton's interpreter without work that it repeats; the kernels' code runs as before."""

from __future__ import annotations

import dataclasses
from typing import Any


def stop_repeating() -> None:
    """Let a kernel replace the functions of Triton's language once, and look for no overflow that nobody hears of.

    The interpreter looks through the whole language again at each function that a kernel calls, though all of it is
    replaced by then; and it works out whether sums of integers overflow, but says so only when it debugs. Together
    they are half of its time.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if not hasattr(interpreter, "_LangPatchScope") or hasattr(interpreter._patch_lang, "replaced"):
        return
    patch, language = interpreter._patch_lang, interpreter.tl
    replaced: set[int] = set()  # modules, until the kernel ends

    def patch_once(fn: Any) -> Any:
        named = {id(value) for value in fn.__globals__.values() if value is language or value is language.core}
        if named <= replaced:
            return interpreter._LangPatchScope()  # nothing to put back
        scope, is_kernel = patch(fn), not replaced
        replaced.update(named)
        if is_kernel:
            restore = scope.restore
            scope.restore = lambda: (restore(), replaced.clear())
        return scope

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    patch_once.replaced = replaced  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_once
