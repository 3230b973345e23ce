"""Functions compiled by Numba: entry points for Python, and the parts linked into them.

Compiling takes up most of the first start on a machine. For every function that another
one calls, Numba alone would make whole machine code, callable from Python, and optimize
it again wherever it is called. Here a called function is a part: an LLVM function that
is linked into the entry points, which alone become machine code. If parts do not work
with the installed version of Numba, it compiles everything its own way.
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
    """Compile a function when it is first called, for the types it is called with.

    Neither divisions nor indices are checked: callers pass valid arguments. The
    interpreter's lock is held, so that no other thread sees a state half changed.
    `nogil` releases it, for long work over arrays that nothing changes meanwhile.
    """
    entry: Any = _Entry(function, nogil=nogil)
    return entry


def inlined(function: Function) -> Function:
    """Copy a small function into its callers, where a call would cost more."""
    entry: Any = _Entry(function, forceinline=True)
    return entry


class _Entry(CPUDispatcher):
    """A function as Python calls it; compiled functions call it as a `_Part`."""

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
        # A compiler leaves little garbage, and collecting it takes 10% longer.
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            return super().compile(sig)
        finally:
            if is_collecting:
                gc.enable()


class _Part(CPUDispatcher):
    """A function as other compiled functions call it; Python cannot."""

    def add_overload(self, cres: Any) -> None:
        self.overloads[tuple(cres.signature.args)] = cres

    def get_call_template(self, args: Any, kws: Any) -> Any:
        # Without this, each literal number would compile the function again.
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

    Numba's own context tries some ten candidates again for every addition.
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
    """The LLVM module of a function and its parts, which is optimized once."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)


class _PartLibrary(JITCodeLibrary):
    """The LLVM module of a part, which is linked into others and never run alone."""

    def _optimize_final_module(self) -> None:
        """Skip: the entry points optimize the parts that are linked into them."""

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
        # A caller finds the library to link by the key.
        state.targetctx.insert_user_function(key, lowered.fndesc, [state.library])
        state["cr"] = lowered._replace(cfunc=key)
        return True


_parts_work: bool | None = None


def _has_parts() -> bool:
    """Return whether parts work with this version of Numba, by trying them once."""
    global _parts_work
    if _parts_work is None:
        _parts_work = True  # For the trial below.
        part = _Entry(lambda number: number + 1)
        entry = _Entry(lambda number: part(number))
        part._cache = entry._cache = NullCache()
        try:
            _parts_work = entry(1) == 2
        except Exception as error:  # Another version may raise anything.
            _log.debug("Numba compiles everything its own way: %s", error)
            _parts_work = False
    return _parts_work


def entry_point(function: Any, *arguments: Any) -> Callable[..., Any]:
    """Return a compiled function's code for arguments of the given arguments' types.

    A call takes 0.5 us less, as nothing looks at types any more: the arguments must
    have the same types, and arrays the same layout.
    """
    signature = tuple(map(function.typeof_pyval, arguments))
    function.compile(signature)  # Or reads the code from disk.
    code: Callable[..., Any] = function.overloads[signature].entry_point
    return code


class EntryPoints:
    """The entry points of a module for one state, each made when it is first used.

    `samples` has arguments of the right types for each function, by its name.
    """

    def __init__(self, module: Any, samples: Mapping[str, tuple[Any, ...]]) -> None:
        self._module = module
        self._samples = samples

    def __getattr__(self, name: str) -> Callable[..., Any]:
        code = entry_point(getattr(self._module, name), *self._samples[name])
        setattr(self, name, code)  # The next access does not come here.
        return code
