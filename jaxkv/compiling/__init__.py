"""Compiled functions on the host, which update states in place.

A state is a frozen dataclass of arrays, or of other such dataclasses: the class that
the pure functions of `jaxkv.policies` work on. Here its arrays are NumPy's, and a
compiled function writes to them.

`parts` compiles functions, `states` passes a state to them, `intrinsics` has short
functions that Numba would compile slowly, and `code_cache` keeps machine code on disk.
"""

from jaxkv.compiling.code_cache import CodeCache as CodeCache
from jaxkv.compiling.code_cache import digest_of as digest_of
from jaxkv.compiling.intrinsics import copy_items as copy_items
from jaxkv.compiling.intrinsics import copy_row as copy_row
from jaxkv.compiling.intrinsics import count_bits as count_bits
from jaxkv.compiling.intrinsics import empty as empty
from jaxkv.compiling.intrinsics import equal_words as equal_words
from jaxkv.compiling.intrinsics import filled as filled
from jaxkv.compiling.intrinsics import greater as greater
from jaxkv.compiling.intrinsics import highest_bit as highest_bit
from jaxkv.compiling.intrinsics import lesser as lesser
from jaxkv.compiling.intrinsics import lowest_bit as lowest_bit
from jaxkv.compiling.intrinsics import prefetch as prefetch
from jaxkv.compiling.intrinsics import same_row as same_row
from jaxkv.compiling.parts import EntryPoints as EntryPoints
from jaxkv.compiling.parts import compiled as compiled
from jaxkv.compiling.parts import entry_point as entry_point
from jaxkv.compiling.parts import inlined as inlined
from jaxkv.compiling.states import Bound as Bound
from jaxkv.compiling.states import add_functions as add_functions
from jaxkv.compiling.states import copy_to_numpy as copy_to_numpy
from jaxkv.compiling.states import functions_of as functions_of
