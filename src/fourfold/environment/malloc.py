"""Heap: how the C library of a rank on CPUs treats freed memory.

glibc keeps a few small chunks of each size for each thread (its tcache), and what it keeps so is never joined to the
hole beside it. Tensors are aligned to 64 bytes: of the chunk that is cut for one, a few bytes are left over in front,
and lie in the tcache when the tensor goes. The hole is then too small for the same tensor in the next step, and the
heap grows by another (`docs/measured.md`, "Freed memory"). The tcache can be turned off only before a process starts.

Law: where the environment has a setting of the user's own, it is left alone.
"""

from collections.abc import Mapping

TUNABLES_VARIABLE, NO_TCACHE = "GLIBC_TUNABLES", "glibc.malloc.tcache_count=0"


def malloc_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of a process on CPUs."""
    return {} if is_user_configured(environ) else {TUNABLES_VARIABLE: NO_TCACHE}


def is_user_configured(environ: Mapping[str, str]) -> bool:
    """Whether the environment says how memory is to be allocated, and not by our word."""
    given = environ.get(TUNABLES_VARIABLE, NO_TCACHE)
    return given != NO_TCACHE or any(name.startswith("MALLOC_") for name in environ)
