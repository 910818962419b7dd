"""Malloc: environment variables that keep the heap of a rank on CPUs from growing.

glibc caches a few small chunks of each size per thread (the tcache) and never merges a cached chunk with the free
memory next to it. Tensors are aligned to 64 bytes, so the chunk of a tensor leaves a few spare bytes in front, which
stay in the tcache when the tensor is freed. The hole is then too small for the same tensor in the next step, and the
heap grows by another one (`docs/measured-notes.md`, "Freed memory"). The tcache can be turned off only before a process
starts.

Law: a malloc setting of the user is never changed.
"""

from collections.abc import Mapping

TUNABLES_VARIABLE, NO_TCACHE = "GLIBC_TUNABLES", "glibc.malloc.tcache_count=0"


def malloc_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to the environment of a process on CPUs."""
    return {} if is_user_configured(environ) else {TUNABLES_VARIABLE: NO_TCACHE}


def is_user_configured(environ: Mapping[str, str]) -> bool:
    """Whether the user, rather than Fourfold, has set how memory is allocated."""
    given = environ.get(TUNABLES_VARIABLE, NO_TCACHE)
    return given != NO_TCACHE or any(name.startswith("MALLOC_") for name in environ)
