"""Triton's interpreter without what it does over and over: it patches the language anew at every call of one jit function by
another, and checks every integer sum for overflow. The results are the same, a good deal sooner.

Imported before anything imports triton, in a process of its own: the interpreter is chosen for good at triton's import.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from dataclasses import replace

from triton.runtime import interpreter

_patched: set[int] = set()  # modules whose language is patched: such patches, unlike a kernel's own, are never taken back


def _call(function, *args, **kwargs):
    module = id(function.fn.__globals__)
    if module not in _patched:
        _patched.add(module)
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)


interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
interpreter.InterpretedFunction.__call__ = _call
