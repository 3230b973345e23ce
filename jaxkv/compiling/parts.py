"""Functions compiled by Numba: entry points for Python, and the parts linked into them.

Compilation takes most of the first start on a machine. By default, Numba compiles every
called function to machine code that Python could call, and optimizes it again in each
caller. Here a called function is a *part*: an LLVM function that is linked into *entry
points*, the functions that Python calls. Only entry points become machine code. If
parts do not work with the installed version of Numba, its default is used.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from numba import types
from numba.core.caching import NullCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.registry import CPUDispatcher
from numba.core.typed_passes import NativeLowering

from jaxkv.compiling.code_cache import CodeCache

Function = TypeVar("Function", bound=Callable[..., Any])

_log = logging.getLogger(__name__)


def compiled(function: Function, *, nogil: bool = False) -> Function:
    """Compile a function at its first call, for the argument types of the call.

    Divisions and indices are not checked: callers must pass valid arguments. A call
    holds the GIL, so that no other thread sees a partial update of a state. `nogil`
    releases it, for long work over arrays that no other thread changes.
    """
    entry: Any = _Entry(function, nogil=nogil)
    return entry


def inlined(function: Function) -> Function:
    """Compile a small function that is inlined into its compiled callers."""
    entry: Any = _Entry(function, forceinline=True)
    return entry


class _Entry(CPUDispatcher):
    """A function callable from Python; compiled functions call its `_Part`."""

    def __init__(self, function: Any, **flags: bool) -> None:
        options = {"nopython": True, "error_model": "numpy", "no_cfunc_wrapper": True}
        options |= flags
        super().__init__(function, targetoptions=options, pipeline_class=_EntryCompiler)
        self._cache = CodeCache(self)
        self._part = _Part(
            function,
            targetoptions=options | {"no_cpython_wrapper": True},
            pipeline_class=_PartCompiler,
        )

    @property
    def _numba_type_(self) -> Any:
        return types.Dispatcher(self._part if _has_parts() else self)

    def compile(self, sig: Any) -> Any:
        # Compiling leaves little garbage, and collecting it would take 10% more time.
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            return super().compile(sig)
        finally:
            if is_collecting:
                gc.enable()


class _Part(CPUDispatcher):
    """A function callable from compiled functions only."""

    def add_overload(self, cres: Any) -> None:
        self.overloads[tuple(cres.signature.args)] = cres

    def get_call_template(self, args: Any, kws: Any) -> Any:
        # Otherwise each literal number would compile the function again.
        return super().get_call_template(tuple(map(types.unliteral, args)), kws)


class _EntryCompiler(CompilerBase):
    """Numba's compiler with the lowering pass replaced."""

    def __init__(self, typing_context: Any, *args: Any) -> None:
        super().__init__(_CachingContext(typing_context), *args)

    @property
    def _lowering(self) -> Any:
        return _EntryLowering if _has_parts() else NativeLowering

    def define_pipelines(self) -> list[Any]:
        manager = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes = PassManager("jaxkv")
        for kind, text in manager.passes:
            passes.add_pass(self._lowering if kind is NativeLowering else kind, text)
        passes.finalize()
        return [passes]


class _PartCompiler(_EntryCompiler):
    @property
    def _lowering(self) -> Any:
        return _PartLowering


class _CachingContext:
    """A typing context that caches the overload of each call.

    Numba's context tries some ten candidates for every addition.
    """

    _resolved: ClassVar[dict[Any, Any]] = {}

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def resolve_function_type(self, func: Any, args: Any, kws: Any) -> Any:
        call = func, tuple(args), tuple(sorted(kws.items()))
        resolved = self._resolved.get(call)
        if resolved is None:
            resolved = self._context.resolve_function_type(func, args, kws)
            if resolved is not None:
                self._resolved[call] = resolved
        return resolved


class _EntryLibrary(JITCodeLibrary):
    """The LLVM module of an entry point and its parts, optimized once."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)


class _PartLibrary(JITCodeLibrary):
    """The LLVM module of a part, which is only linked into others."""

    def _optimize_final_module(self) -> None:
        """Skip: entry points optimize the parts linked into them."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _EntryLowering(NativeLowering):
    _name = "jaxkv_entry_lowering"

    def run_pass(self, state: Any) -> bool:
        name = state.func_id.func_qualname
        state.library = _EntryLibrary(state.targetctx.codegen(), name)
        state.library.enable_object_caching()
        return bool(super().run_pass(state))


@register_pass(mutates_CFG=True, analysis_only=False)
class _PartLowering(NativeLowering):
    _name = "jaxkv_part_lowering"

    def run_pass(self, state: Any) -> bool:
        name = state.func_id.func_qualname
        state.library = _PartLibrary(state.targetctx.codegen(), name)
        state.flags.no_compile = True
        super().run_pass(state)
        state.library.finalize()
        lowered, key = state["cr"], object()
        # A caller finds the library to link by this key.
        state.targetctx.insert_user_function(key, lowered.fndesc, [state.library])
        state["cr"] = lowered._replace(cfunc=key)
        return True


_parts_work: bool | None = None


def _has_parts() -> bool:
    """Return whether parts work with this version of Numba, by trying them once."""
    global _parts_work
    if _parts_work is None:
        _parts_work = True  # Needed while the trial below compiles.
        part = _Entry(lambda number: number + 1)
        entry = _Entry(lambda number: part(number))
        part._cache = entry._cache = NullCache()
        try:
            _parts_work = entry(1) == 2
        except Exception as error:  # Other versions may raise anything.
            _log.debug("parts do not work with this version of Numba: %s", error)
            _parts_work = False
    return _parts_work


def entry_point(function: Any, *arguments: Any) -> Callable[..., Any]:
    """Return a compiled function's code for the types of sample arguments.

    A call takes 0.5 us less, because it does not check types: arguments must have the
    same types as the samples, and arrays the same layout.
    """
    signature = tuple(map(function.typeof_pyval, arguments))
    function.compile(signature)  # Or reads the code from disk.
    code: Callable[..., Any] = function.overloads[signature].entry_point
    return code


class EntryPoints:
    """The entry points of a module for one state, each created at its first use.

    `samples` has sample arguments for each function, by its name.
    """

    def __init__(self, module: Any, samples: Mapping[str, tuple[Any, ...]]) -> None:
        self._module = module
        self._samples = samples

    def __getattr__(self, name: str) -> Callable[..., Any]:
        code = entry_point(getattr(self._module, name), *self._samples[name])
        setattr(self, name, code)  # The next access skips `__getattr__`.
        return code
