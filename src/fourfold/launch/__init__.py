"""Floor 6: starts ranks, restarts them, finds the one that hangs. The package is `ff.launch` too: it can be called."""

import sys
from types import ModuleType
from typing import Any


class _Launch(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Python sets the attribute `launch` of `fourfold` to this package, whoever imports it first.
        from fourfold.launch.notebook import launch

        return launch(*args, **kwargs)


sys.modules[__name__].__class__ = _Launch
